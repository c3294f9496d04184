"""What ``bootseer profile growth --sim`` takes from the reports: ``src/bootseer/profile/sim/measured.json``, and how
well its model foretells the other runs of the cluster, a part of its page."""

from __future__ import annotations

import io
import re
import statistics
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from types import MappingProxyType

import msgspec
from rich.console import Console

from bench.cluster.site import DATANODES
from bench.common.report import Report, Run
from bench.page.reports import good
from bootseer.launch.turn import TURN_SECONDS
from bootseer.profile.sim.measured import Job, Measured, from_registry, site_of, spread_of, ways
from bootseer.profile.sim.measured import jobs as jobs_as_shipped
from bootseer.profile.sim.model import Site, simulate
from bootseer.profile.sim.sweep import ASSUMED, DEFAULT, render, sweep

TABLE = "src/bootseer/profile/sim/measured.json"
PAGE = "docs/howto/simulate.md"
_BETWEEN = re.compile(r"(?<=<!-- model -->\n).*?(?=<!-- end of model -->)", re.DOTALL)
_SHOWN = re.compile(r"(?<=<!-- sizes -->\n).*?(?=<!-- end of sizes -->)", re.DOTALL)
_HEAD = """
| nodes | Mbit/s | from | part | measured, s | model, s | off | within 10 % |
|---|---|---|---|---|---|---|---|
"""
STAGES = ("image", "env", "init")
WITHIN = 0.1
SHOWN = (64, 512, 10_000)
"""Sizes of the page's example, whose table has the largest one."""


def jobs(reports: dict[str, Report]) -> dict[str, Job]:
    """The jobs that the model knows."""
    return {
        "light": (light := _light(reports["cluster-known"])),
        "sizes": _sizes(light, reports["cluster-size"], reports["cluster"]),
        "torch": _torch(reports["demo"], reports["image"]),
    }


def table(reports: dict[str, Report]) -> str:
    """The file."""
    return msgspec.json.format(msgspec.json.encode(jobs(reports)), indent=1).decode() + "\n"


def _light(known: Report) -> Job:
    alone, many, local, pulled, cached = (
        good(known, name) for name in ("alone:again", "cold:again", "cold:local", "registry:again", "mirror:again")
    )
    nodes = len(many[0].details["nodes"])
    one, hot = _middle(alone, _ready), _middle(alone, lambda run: run.details["hot_bytes"])
    checkpoint = _middle(pulled, lambda run: run.bytes["datanodes"] / nodes)
    size = {"image": hot, "env": one - hot - checkpoint, "init": checkpoint}
    again = [
        _of_cluster(alone, known, size), _of_cluster(many, known),
        _of_cluster(pulled, known, store="registry"), _of_cluster(cached, known, store="mirror"),
    ]  # fmt: skip
    return Job(
        about="a light job with numpy, sympy and OpenCV and a checkpoint of 32 MiB",
        reports=["cluster-known"], datanodes=DATANODES, cores=int(known.machine["cores"]), turn=TURN_SECONDS,
        **_of_many(alone, many), starts={"local": [_of_cluster(local, known)], "again": again},
    )  # fmt: skip


def _sizes(light: Job, sizes: Report, wide: Report) -> Job:
    """The same job on more and more nodes, and on those of ``wide`` with faster links. The model is made from its start
    on one node."""
    alone, *others = (good(sizes, name) for name in dict.fromkeys(run.variant for run in sizes.runs))
    one, hot, checkpoint = (
        statistics.median(run.details[name] for run in alone)
        for name in ("node_bytes", "hot_bytes", "checkpoint_bytes")
    )
    size = {"image": hot, "env": one - hot - checkpoint, "init": checkpoint}
    again = [_of_cluster(alone, sizes, size), *(_of_cluster(runs, sizes) for runs in others)]
    again.append(_of_cluster(good(wide, "cold:again"), wide))
    return msgspec.structs.replace(
        light, reports=["cluster-size", "cluster"], **_of_many(alone, others[-1]),
        starts={"local": [_of_cluster(good(wide, "cold:local"), wide)], "again": again},
    )  # fmt: skip


def _of_many(alone: Sequence[Run], many: Sequence[Run]) -> dict[str, float]:
    """What many nodes use and ask for beyond what one does: processor seconds of a node for each second of its start
    that is longer, and bytes."""

    def of_one(runs: Sequence[Run], of: Callable[[Run], float]) -> float:
        return _middle(runs, lambda run: of(run) / len(run.details["nodes"]))

    used = [of_one(runs, lambda run: run.details["cpu_seconds"]) for runs in (alone, many)]
    took = [_middle(runs, lambda run: statistics.median(run.details["nodes"])) for runs in (alone, many)]
    sent = of_one(many, lambda run: run.bytes["datanodes"]) / _middle(alone, _ready)
    return {"upkeep": round(max(0.0, used[1] - used[0]) / (took[1] - took[0]), 4), "repeats": round(sent - 1, 3)}


def _ready(run: Run) -> float:
    return float(run.details["node_bytes"])


def _middle(runs: Sequence[Run], of: Callable[[Run], float]) -> float:
    return round(statistics.median(map(of, runs)), 3)


def _usual(run: Run) -> Mapping[str, float]:
    """Stages of the median node; of older reports each on the node that was slowest in it."""
    found: Mapping[str, float] = run.details.get("median_stages", run.stages)
    return found


def _of_cluster(
    runs: Sequence[Run], report: Report, size: Mapping[str, float] = MappingProxyType({}), store: str = "hdfs"
) -> Measured:
    nodes = len(runs[0].details["nodes"])
    ratios = [one / statistics.median(run.details["nodes"]) for run in runs for one in run.details["nodes"]]
    return Measured(
        nodes=nodes, runs=len(runs), rate_mbit=float(report.argv[report.argv.index("--rate") + 1]), store=store,
        seconds=_middle(runs, lambda run: run.seconds or 0.0),
        stages={name: round(statistics.median(_usual(run)[name] for run in runs), 3) for name in STAGES},
        size={name: int(count) for name, count in size.items()},
        cpu_seconds=_middle(runs, lambda run: run.details["cpu_seconds"] / nodes),
        stage_cpu={
            name: statistics.median(run.details["stage_cpu"][name] for run in runs)
            for name in runs[0].details.get("stage_cpu", {})
        },
        spread=sorted(round(ratio, 3) for ratio in ratios),
    )  # fmt: skip


def _torch(demo: Report, image: Report) -> Job:
    first, again, plain = (good(demo, name)[0] for name in ("first", "again", "ordinary"))
    rate = round(plain.bytes["link_until_first_step"] / plain.details["bound_seconds"] / 1e6) * 8.0
    checkpoint = again.details["checkpoint"]["prefetch_total"]
    wheels = first.bytes["link_until_first_step"] - first.details["image"]["bytes_demand"] - checkpoint
    hot = again.details["image"]["bytes_hot"] + again.details["image"]["bytes_demand"]
    rest = again.bytes["link_until_first_step"] - hot - checkpoint
    layers = plain.bytes["link_until_first_step"] - wheels - checkpoint
    size = {
        "local": {},
        "ordinary": {"image": layers, "env": wheels, "init": checkpoint},
        "again": {"image": hot, "env": rest, "init": checkpoint},
    }
    starts = {}
    for way, given in size.items():
        runs = good(demo, way)
        stages = {name: statistics.median(run.stages.get(name, 0.0) for run in runs) for name in STAGES}
        seconds = [run.seconds or 0.0 for run in runs]
        middle = statistics.median(seconds)
        spread = sorted(round(one / middle, 3) for one in seconds)
        one = Measured(
            nodes=1, runs=len(runs), rate_mbit=rate, seconds=middle, stages=stages, size=given, spread=spread
        )
        starts[way] = [one]
    used = {
        name: statistics.median(run.details["cpu_seconds"] for run in good(image, name)) for name in ("hot", "local")
    }
    pace = (used["hot"] - used["local"]) / good(image, "hot")[0].details["bytes_hot"]
    about = "a job with torch and transformers and a checkpoint of 0.5 GB, as measured on one node"
    return Job(about=about, reports=["demo", "image"], datanodes=4, cores=int(demo.machine["cores"]), turn=TURN_SECONDS,
               pace=float(f"{pace:.3g}"), starts=starts)  # fmt: skip


def compared(job: Job) -> list[tuple[Measured, str, float, float]]:
    """Every start that was measured: its last node (``start``) and its stages, in seconds, and by the model."""
    known = ways(job)
    found: list[tuple[Measured, str, float, float]] = []
    for one in job.starts["again"]:
        way = known["bootseer"] if one.store == "hdfs" else from_registry(known["bootseer"])
        made = simulate(way, site_of(job, one), one.nodes)
        pairs = {"start": (one.seconds, max(made.ready))}
        pairs |= {stage: (seconds, statistics.median(made.stages[stage])) for stage, seconds in one.stages.items()}
        found += [(one, part, measured, model) for part, (measured, model) in pairs.items()]
    return found


def shown(text: str) -> str:
    """The page with the table of its example anew, by the file as it is."""
    job = jobs_as_shipped()[DEFAULT]
    found = sweep(ways(job).values(), Site(), SHOWN, about="", spread=spread_of(job))
    out = io.StringIO()
    Console(file=out, width=1000).print(render(found))
    told = re.findall(f"^ nodes  way .*|^{SHOWN[-1]:,}  .*|^replicas .*|^a cache .*", out.getvalue(), re.MULTILINE)
    lines = "\n".join(line.rstrip() for line in told)
    return _SHOWN.sub(lambda _: f"```text\n{lines}\n```\n", text)


def page(text: str, reports: dict[str, Report]) -> str:
    """The page with its tables anew."""
    assumed = "\n".join(f"- {line}" for line in ASSUMED)
    known = jobs(reports)
    newest = {_place(one) for one in known["sizes"].starts["again"]}
    shown = "\n".join([*rows(known["sizes"], set()), *rows(known["light"], newest)])
    return _BETWEEN.sub(lambda _: f"{assumed}\n\n## Beside what was measured\n{_HEAD}{shown}\n", text)


def _place(one: Measured) -> tuple[int, float, str]:
    return one.nodes, one.rate_mbit, one.store


def rows(job: Job, known: Container[tuple[int, float, str]]) -> Iterator[str]:
    """Of the page's table, but for starts that are ``known``."""
    for one, stage, measured, model in compared(job):
        if _place(one) in known:
            continue
        off = model / measured - 1
        told = "yes" if abs(off) <= WITHIN else "**no**"
        where = f"| {one.nodes} | {one.rate_mbit:g} | {one.store} | {stage}"
        yield f"{where} | {measured:.2f} | {model:.2f} | {100 * off:+.0f} % | {told} |"
