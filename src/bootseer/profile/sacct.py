"""What Slurm's accounting says of start-ups, as events: ``queue`` and ``alloc`` of each attempt of each job.

Reads ``sacct -D --json``: all records of a job that was requeued. An attempt is named as `bootseer run` names it:
JOB_ID.RESTART.STEP_ID, of its first ``srun`` step. Times are whole seconds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import msgspec

from bootseer.errors import ConfigError, DataError
from bootseer.profile import hostlist, imported
from bootseer.profile.events import AttrValue
from bootseer.wiretypes import json_as

_TEXT_LIMIT = 512
_HINT = (
    "give what sacct -D --json prints: that needs Slurm 21.08 or newer with the plugin serializer/json, for which "
    "Slurm is built with json-c"
)
_NO_TIME = (0, 4294967294, 4294967295)
"""What Slurm writes for a time that has not been yet, or never is."""
_NO_NODES = ("", "None assigned", "(null)")


class Attempt(msgspec.Struct):
    """One record of a job: from its submission, or from when it was requeued. Times in s since 1970; 0: not yet."""

    job_id: str
    name: str
    submitted: int
    started: int
    ended: int
    state: str
    nodelist: str
    nodes: int
    """How many ``nodelist`` names: a short one may name many."""
    gpus: int
    """Of all nodes."""
    restart: int = 0
    step: str = ""
    step_started: int = 0
    """When the step began, or where there is none the batch script."""
    eligible: int = 0
    """When nothing but resources was missing: no job that it depends on, and no hold."""
    cluster: str = ""
    team: str = ""
    resized: bool = False
    """Whether it went on with other nodes."""
    latest: int = 0
    """When the last of its records began: they differ where it was resized."""
    leader: str = ""
    """The job of whose heterogeneous job it is a component, or itself."""


_RAN = ("COMPLETED", "TIMEOUT")
"""States of what has run."""
_Seen = dict[tuple[str, str, int], Attempt]
"""Cluster, job and submission -> its record, as no two have the same; with 0 the last one of the job."""


_ODD = (ValueError, TypeError, KeyError, AttributeError, OverflowError, ConfigError)


class Accounts(NamedTuple):
    """``bad``: records that were not understood, each with where it stands and why."""

    attempts: list[Attempt]
    bad: list[str]


def read(text: bytes) -> Accounts:
    """The attempts in an output of ``sacct --json``. Raises `DataError` where it is none."""
    try:
        jobs = json_as(text, dict[str, Any]).get("jobs")
    except ValueError as exc:
        why = f": {exc}" if text.strip() else ": it is empty"
        raise DataError(f"this is no output of sacct --json{why}", hint=_HINT) from None
    accounts = Accounts([], [])
    latest: _Seen = {}
    for number, job in enumerate(jobs if isinstance(jobs, list) else [], start=1):
        try:
            attempt, steps = _take(job, latest, accounts.attempts), list(job.get("steps") or ())
        except _ODD as exc:
            accounts.bad.append(f"job {number}: {_why(exc)}")
            continue
        for step in steps:
            try:
                _take_step(step, attempt)
            except _ODD as exc:
                accounts.bad.append(f"job {number}: {_why(exc)}")
    if not accounts.attempts:
        why = f": {accounts.bad[0]}" if accounts.bad else ""
        raise DataError(f"no job in this output of sacct{why}", hint=_HINT)
    return accounts


def _why(exc: Exception) -> str:
    missing = isinstance(exc, (KeyError, TypeError, AttributeError))
    return "it has not the fields of a record" if missing else str(exc)


def events(attempts: list[Attempt], job: str = "") -> Iterator[bytes]:
    """The lines of an events file; ``job`` replaces the names that Slurm has. An attempt's spans always have the same
    ids, so that a second import of it counts as a duplicate."""
    several = len({one.cluster for one in attempts}) > 1  # clusters count jobs by themselves
    components: defaultdict[tuple[str, str, int], list[Attempt]] = defaultdict(list)
    for one in attempts:
        components[one.cluster, one.leader, one.restart].append(one)
    wholes = {key: _whole(parts) for key, parts in components.items()}
    for one in attempts:
        first, nodes, listed = wholes[one.cluster, one.leader, one.restart]
        name = f"{one.leader}.{one.restart}" + (f".{first.step}" if first.step else "")
        name += f"@{one.cluster}" if several else ""
        identity = (job or first.name, name, 0)
        attrs: dict[str, AttrValue] = {"state": one.state[:_TEXT_LIMIT], "restart": one.restart}
        if one.team:
            attrs["team"] = one.team[:_TEXT_LIMIT]
        if one.submitted < one.eligible <= (one.started or one.eligible):
            attrs["held_seconds"] = one.eligible - one.submitted
        submitted, started, ended = (when * 10**9 for when in (one.submitted, one.started, one.ended))
        if one is first:
            yield from imported.lines("sacct", identity, "queue", "slurm", submitted, started or ended, attrs=attrs)
        if started:
            attrs |= {"nodes": nodes, "nodelist": listed}
            end = (one.step_started or first.step_started) * 10**9 or ended
            if end == ended and one.state.startswith(_RAN):  # nothing runs without a step: they were left out
                end = started
            ran = one.ended - one.started if not one.resized else 0  # else not with these nodes alone
            attrs |= {"run_seconds": ran} if ran > 0 else {}
            each, more = divmod(one.gpus, max(one.nodes, 1))  # Slurm says no more of them
            for number, node in enumerate(hostlist.expand(one.nodelist)):
                gpus = each + (number < more)
                yield from imported.lines("sacct", identity, "alloc", node, started, end, gpus=gpus, attrs=attrs)


def _whole(parts: list[Attempt]) -> tuple[Attempt, int, str]:
    """Of the components of a job: the first one, and how many and which nodes they have together."""
    first = next((part for part in parts if part.job_id == part.leader), parts[0])
    listed = ",".join(part.nodelist for part in parts if part.nodelist)
    return first, sum(part.nodes for part in parts), listed[:_TEXT_LIMIT]


def _take(job: dict[str, Any], latest: _Seen, found: list[Attempt]) -> Attempt:
    """The attempt that a record is of: a new one, or one that is known."""
    job_id, times = str(_plain(job["job_id"])), job["time"]
    if not job_id.isdecimal():
        raise ValueError(f"{job_id!r} is no job")
    cluster, nodelist = str(job.get("cluster") or ""), str(job.get("nodes") or "")
    before = latest.get((cluster, job_id, 0))
    nodelist = "" if nodelist in _NO_NODES else nodelist
    nodes = len(hostlist.expand(nodelist))
    submitted = _seconds(times["submission"])
    started = _seconds(times["start"]) if nodes or job.get("nodes") is None else 0
    ended = _seconds(times.get("end"))
    attempt = Attempt(
        job_id=job_id,
        name=str(job.get("name") or job_id),
        submitted=submitted,
        started=started,
        ended=ended,
        state=_state((job.get("state") or {}).get("current")),
        nodelist=nodelist,
        nodes=nodes,
        gpus=_gpus((job.get("tres") or {}).get("allocated") or ()),
        restart=max(before.restart + 1 if before else 0, int(_plain(job.get("restart_cnt")))),
        eligible=_seconds(times.get("eligible")),
        cluster=cluster,
        team=str(job.get("account") or job.get("user") or (job.get("association") or {}).get("user") or ""),
        latest=started,
        leader=str(_plain((job.get("het") or {}).get("job_id")) or job_id),
    )
    if not attempt.submitted:
        raise ValueError(f"job {job_id} has no time of submission")
    mine = latest.get((cluster, job_id, submitted))
    if mine is None and before is not None and before.state.startswith("RESIZING"):
        mine = before
    if mine is None:
        found.append(attempt)
        mine = attempt
    elif (started, ended) >= (mine.latest, mine.ended):  # it has gone on since, perhaps with other nodes
        if not mine.started:
            mine.started, mine.eligible, mine.nodelist, mine.nodes, mine.gpus = (
                started, attempt.eligible, nodelist, nodes, attempt.gpus,
            )  # fmt: skip
        mine.state, mine.ended, mine.latest, mine.resized = attempt.state, ended, started, mine.started != started
    latest[cluster, job_id, submitted] = latest[cluster, job_id, 0] = mine
    return mine


def _take_step(step: dict[str, Any], attempt: Attempt) -> None:
    """The first one of `srun` names the attempt, and until there is one the batch script says when it began."""
    name, started = _step(step["step"]["id"]), _seconds(step["time"]["start"])
    if not attempt.step and name != "extern":
        attempt.step_started = started
        attempt.step = number if (number := name.partition("+")[0]).isdecimal() else ""  # 0+1: of a het job


def _seconds(value: Any) -> int:
    """Seconds since 1970; 0 for what has not been yet."""
    seconds = int(_plain(value))
    if seconds in _NO_TIME:
        return 0
    if not 0 < seconds < 1 << 32:
        raise ValueError(f"{seconds} is no time")
    return seconds


def _gpus(allocated: Iterable[dict[str, Any]]) -> int:
    """All GPUs, which Slurm may name by type, too; 0 where the site does not account for them."""
    held = {str(one.get("name") or ""): int(_plain(one.get("count"))) for one in allocated if one["type"] == "gres"}
    gpus = held["gpu"] if "gpu" in held else sum(count for name, count in held.items() if name.startswith("gpu:"))
    if not 0 <= gpus < 1 << 24:
        raise ValueError(f"{gpus} GPUs are none")
    return gpus


def _plain(value: Any) -> Any:
    """A number as newer versions write it: ``{"set": true, "number": 1}``."""
    if isinstance(value, dict):
        return value.get("number", 0) if value.get("set") else 0
    return 0 if value is None else value


def _state(value: Any) -> str:
    """Newer versions list what an older one names alone: ``["PENDING", "RESIZING"]``."""
    several = [str(one) for one in value] if isinstance(value, list) else [str(value or "")]
    return next((one for one in several if one in ("RESIZING", "REQUEUED")), several[0] if several else "")


def _step(value: Any) -> str:
    """``batch``; newer versions: ``1.batch``, or an object."""
    return str(_plain(value["step_id"]) if isinstance(value, dict) else value).rpartition(".")[2]
