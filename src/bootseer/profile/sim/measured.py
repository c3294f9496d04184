"""Ways to start, from what the benchmarks measured: ``measured.json``, which ``python -m bench.page`` makes of reports.
What a report does not split is split by one rule: what a stage of a node alone takes beyond its bytes at the rate of
the link is work. What then is left of that start comes behind the last byte (`calibrated`)."""

from __future__ import annotations

from importlib import resources
from statistics import median

import msgspec

from bootseer.profile.sim.model import Site, Source, Stage, Way, simulate
from bootseer.wiretypes import json_as

_MBIT = 1e6 / 8
_ROUNDS = 4
LAST = "init"
_SOURCES: dict[str, Source] = {"image": "registry", "env": "index", LAST: "file"}
"""Where ordinary tools read from."""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Medians over ``runs`` starts on ``nodes`` nodes: seconds until the last one is ready; of each stage on the
    median node; bytes that one node got for each stage; processor seconds of one node, 0 where nobody counted them, and
    of these those in each stage, where the node was alone."""

    nodes: int
    runs: int
    rate_mbit: float
    seconds: float
    stages: dict[str, float]
    store: str = "hdfs"
    size: dict[str, int] = {}
    cpu_seconds: float = 0.0
    stage_cpu: dict[str, float] = {}
    spread: list[float] = []
    """Seconds of each node by those of the median one."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A job that was measured, by way (``local``, ``ordinary``, ``again``) and size, the fewest nodes first. ``pace``:
    processor seconds by byte of image and environment where `Measured` has none; ``turn``: `Way.turn`; ``upkeep``,
    ``repeats``: of `Site`, from the starts on one node and on most."""

    about: str
    reports: list[str]
    datanodes: int
    cores: int
    turn: float
    pace: float = 0.0
    upkeep: float = 0.0
    repeats: float = 0.0
    starts: dict[str, list[Measured]]


def jobs() -> dict[str, Job]:
    """What ships with the package."""
    return json_as(resources.files("bootseer.profile.sim").joinpath("measured.json").read_bytes(), dict[str, Job])


def site_of(job: Job, one: Measured) -> Site:
    """Where ``one`` was measured: all nodes on one machine, with one cache of the registry."""
    rate = one.rate_mbit
    return Site(
        node_mbit=rate, registry_mbit=rate, index_mbit=rate, datanode_mbit=rate, datanodes=job.datanodes,
        shared_cores=job.cores, upkeep=job.upkeep, repeats=job.repeats,
        rack=one.nodes if one.store == "mirror" else 0, rack_mbit=rate,
    )  # fmt: skip


def ways(job: Job) -> dict[str, Way]:
    """``local``, ``bootseer``; ``ordinary`` and ``bootseer`` without each technique, as measured on one node."""
    alone = {way: starts[0] for way, starts in job.starts.items()}
    own = alone["local"].cpu_seconds or alone["local"].stages[LAST]
    lazy = _lazy(job, alone["again"])
    lazy = calibrated(lazy, site_of(job, alone["again"]), alone["again"].seconds, own)
    image, env, init = lazy.stages
    local = Way(name="local", before=_before(alone["local"]), stages=(Stage(name=LAST, seconds=own),))
    if "ordinary" not in alone:
        return {"local": local, "bootseer": lazy}
    plain = calibrated(_plain(alone["ordinary"]), site_of(job, alone["ordinary"]), alone["ordinary"].seconds)
    found = [
        local,
        plain,
        lazy,
        replace(lazy, name="without images", stages=(plain.stages[0], env, init), turn=0.0),
        replace(lazy, name="without environments", stages=(image, plain.stages[1], init)),
        replace(
            lazy, name="without checkpoints", beside=0.0,
            stages=(image, env, replace(plain.stages[2], seconds=max(own, init.seconds))),
        ),
    ]  # fmt: skip
    return {way.name: way for way in found}


def from_registry(way: Way) -> Way:
    """Image and environment come from the registry and not from HDFS."""
    moved = tuple(replace(one, source="registry") if one.source == "hot" else one for one in way.stages)
    return replace(way, name=f"{way.name}, registry", stages=moved)


def calibrated(way: Way, site: Site, seconds: float, own: float = 0.0) -> Way:
    """The way with so much work at its end that one node takes ``seconds``. Of the job's ``own`` work the rest goes
    beside the bytes."""
    for _ in range(_ROUNDS):
        *first, last = way.stages
        missing = seconds - simulate(way, site, 1).ready[0]
        after = max(0.0, last.seconds + missing)
        way = replace(way, stages=(*first, replace(last, seconds=after)), beside=max(0.0, own - after))
    return way


def _plain(one: Measured) -> Way:
    """Stage after stage: the bytes, then the work."""
    rate = one.rate_mbit * _MBIT
    stages = [
        Stage(name=name, source=_SOURCES[name], size=one.size.get(name, 0),
              seconds=max(0.0, seconds - one.size.get(name, 0) / rate))
        for name, seconds in one.stages.items()
    ]  # fmt: skip
    return Way(name="ordinary", before=_before(one), stages=_paced(stages, one, 0.0))


def _lazy(job: Job, one: Measured) -> Way:
    """Image and environment are there before their bytes."""
    stages = [
        Stage(name=name, source="hot", size=one.size.get(name, 0), seconds=one.stages[name],
              cpu=one.stage_cpu.get(name), later=True)
        for name in ("image", "env")
    ]  # fmt: skip
    last = Stage(name=LAST, source="stripes", size=one.size.get(LAST, 0))
    beside = job.starts["local"][0].cpu_seconds + job.upkeep * one.seconds
    paced = _paced([*stages, last], one, beside, job.pace)
    return Way(name="bootseer", before=_before(one), turn=job.turn, stages=paced)


def _before(one: Measured) -> float:
    return max(0.0, one.seconds - sum(one.stages.values()))


def _paced(stages: list[Stage], one: Measured, beside: float, pace: float = 0.0) -> tuple[Stage, ...]:
    """With the processor time that is in no stage's work, nor ``beside`` all of them, spread over the bytes. What was
    counted in a stage has the work on bytes in it that came meanwhile, behind an earlier stage: that is taken out."""
    came = {stage.name: one.rate_mbit * _MBIT * stage.seconds for stage in stages[1:] if stage.cpu is not None}
    if one.cpu_seconds and (size := sum(stage.size for stage in stages) - sum(came.values())) > 0:
        work = beside + _before(one) + sum(stage.seconds if stage.cpu is None else stage.cpu for stage in stages)
        pace = max(0.0, one.cpu_seconds - work) / size
    return tuple(
        replace(
            stage,
            pace=pace if stage.source != "stripes" or one.cpu_seconds else stage.pace,
            cpu=None if stage.cpu is None else max(0.0, stage.cpu - came.get(stage.name, 0.0) * pace),
        )
        for stage in stages
    )


def spread_of(job: Job) -> list[float]:
    """How much longer a node takes than the median one of its start: all nodes of all starts with everything local."""
    found = [ratio for one in job.starts["local"] for ratio in one.spread]
    return [ratio / median(found) for ratio in found] if found else [1.0]


replace = msgspec.structs.replace
