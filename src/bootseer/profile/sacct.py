"""What Slurm's accounting says of start-ups, as events: ``queue`` and ``alloc`` of each attempt of each job.

Reads ``sacct -D`` (all records of a job that was requeued), with ``--json``, which Slurm has since 21.08, or the table
of ``--parsable2``. An attempt is named as `bootseer run` names it: JOB_ID.RESTART.STEP_ID, of its first ``srun`` step.
Times are whole seconds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from typing import Any, NamedTuple

import msgspec

from bootseer.errors import ConfigError, DataError
from bootseer.profile import hostlist, imported
from bootseer.profile.events import AttrValue
from bootseer.wiretypes import json_as

_TEXT_LIMIT = 512
_HINT = "give what sacct -D --json prints, or sacct -D --parsable2 -o JobIDRaw,Submit,Eligible,Start,End,State,NodeList"
_NOTHING = ("", "0", "None", "Unknown", "(null)", "None assigned", "N/A", "4294967294", "4294967295")
"""What Slurm writes where there is nothing."""


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


class Accounts(NamedTuple):
    """``bad``: records that were not understood, each with where it stands and why."""

    attempts: list[Attempt]
    bad: list[str]


def read(text: bytes) -> Accounts:
    """The attempts in an output of ``sacct``. Raises `DataError` where it is none."""
    accounts = Accounts([], [])
    latest: _Seen = {}
    for where, record in _records(text) if text.lstrip()[:1] == b"{" else _rows(text):
        try:
            _take(record, latest, accounts.attempts)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, ConfigError) as exc:
            accounts.bad.append(f"{where}: {exc or type(exc).__name__}")
    if not accounts.attempts:
        why = f": {accounts.bad[0]}" if accounts.bad else ""
        raise DataError(f"no job in this output of sacct{why}", hint=_HINT)
    return accounts


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


def _take(record: dict[str, str], latest: _Seen, found: list[Attempt]) -> None:
    if not record:
        raise ValueError("it has not the fields of a record")
    job_id, _, step = record["JobIDRaw"].partition(".")
    if not job_id.isdecimal():
        raise ValueError(f"{record['JobIDRaw']!r} is no job")
    cluster = record.get("Cluster", "")
    before = latest.get((cluster, job_id, 0))
    if step:
        mine = before
        if mine is not None and not mine.step and step != "extern":
            mine.step_started = _seconds(record["Start"], mine.started)
            mine.step = number if (number := step.partition("+")[0]).isdecimal() else ""  # 0+1: of a het job
        return
    nodelist = record.get("NodeList", "")
    nodelist = "" if nodelist in _NOTHING else nodelist
    nodes = len(hostlist.expand(nodelist))
    submitted = _seconds(record["Submit"])
    started = _seconds(record["Start"], submitted) if nodes or "NodeList" not in record else 0
    ended = _seconds(record.get("End", ""), started or submitted)
    restarts = record.get("Restarts", "")
    attempt = Attempt(
        job_id=job_id,
        name=record.get("JobName", "") or job_id,
        submitted=submitted,
        started=started,
        ended=ended,
        state=record.get("State", ""),
        nodelist=nodelist,
        nodes=nodes,
        gpus=_gpus(record.get("AllocTRES", "")),
        restart=max(before.restart + 1 if before else 0, int(restarts) if restarts.isdecimal() else 0),
        eligible=_seconds(record.get("Eligible", ""), submitted),
        cluster=cluster,
        team=next((text for name in ("Account", "User") if (text := record.get(name, "")) not in _NOTHING), ""),
        latest=started,
        leader=het[0] if (het := record.get("JobID", "").partition("+"))[1] else job_id,
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


def _seconds(text: str, after: int = 0) -> int:
    """Seconds since 1970 (JSON, ``SLURM_TIME_FORMAT=%s``), or this machine's local time; 0 for what has not been yet.
    Of an hour that comes twice in autumn it is the first that is not before ``after``."""
    if text in _NOTHING:
        return 0
    if text.isdecimal():
        seconds = int(text)
    else:
        local = datetime.fromisoformat(text)
        seconds = int(local.timestamp())
        seconds = seconds if seconds >= after else int(local.replace(fold=1).timestamp())
    if not 0 <= seconds < 1 << 32:
        raise ValueError(f"{text!r} is no time")
    return seconds


def _gpus(tres: str) -> int:
    """All GPUs of ``billing=2,gres/gpu=16,gres/gpu:h100=16``; 0 where the site does not account for them."""
    held = dict(part.partition("=")[::2] for part in tres.split(",")) if tres not in _NOTHING else {}
    typed = [count for name, count in held.items() if name.startswith("gres/gpu:")]
    gpus = int(held["gres/gpu"]) if "gres/gpu" in held else sum(map(int, typed))
    if not 0 <= gpus < 1 << 24:
        raise ValueError(f"{gpus} GPUs are none")
    return gpus


def _rows(text: bytes) -> Iterator[tuple[str, dict[str, str]]]:
    """The records of a table."""
    lines = [line.removesuffix("\r") for line in text.decode("utf-8-sig", "replace").split("\n")]
    columns = lines[0].split("|")
    if missing := [name for name in ("JobIDRaw", "Submit", "Start") if name not in columns]:
        raise DataError(f"this is no output of sacct with the column {missing[0]}", hint=_HINT)
    name = columns.index("JobName") if "JobName" in columns else -1
    for number, line in enumerate(lines[1:], start=2):
        parts = line.split("|")
        more = len(parts) - len(columns)
        if name >= 0 and more > 0:  # Slurm lets a job's name have the separator in it
            parts[name : name + more + 1] = ["|".join(parts[name : name + more + 1])]
        if line and parts != columns:
            yield f"line {number}", dict(zip(columns, parts, strict=True)) if len(parts) == len(columns) else {}


def _records(text: bytes) -> Iterator[tuple[str, dict[str, str]]]:
    try:
        jobs = json_as(text, dict[str, Any]).get("jobs")
    except ValueError as exc:
        raise DataError(f"this is no output of sacct --json: {exc}", hint=_HINT) from None
    for number, job in enumerate(jobs if isinstance(jobs, list) else [], start=1):
        try:
            record = {
                "JobIDRaw": str(_plain(job["job_id"])),
                "JobID": f"{het}+" if (het := _plain((job.get("het") or {}).get("job_id"))) else "",
                "JobName": str(job.get("name") or ""),
                "Cluster": str(job.get("cluster") or ""),
                "Account": str(job.get("account") or ""),
                "User": str(job.get("user") or (job.get("association") or {}).get("user") or ""),
                "Restarts": str(_plain(job.get("restart_cnt"))),
                "Eligible": str(_plain(job["time"].get("eligible"))),
                "Submit": str(_plain(job["time"]["submission"])),
                "Start": str(_plain(job["time"]["start"])),
                "End": str(_plain(job["time"].get("end"))),
                "State": _state((job.get("state") or {}).get("current")),
                "NodeList": str(job.get("nodes") or ""),
                "AllocTRES": ",".join(_tres(one) for one in (job.get("tres") or {}).get("allocated") or ()),
            }
            if job.get("nodes") is None:
                del record["NodeList"]
            steps = list(job.get("steps") or ())
        except (KeyError, TypeError, AttributeError):
            record, steps = {}, []
        yield f"job {number}", record
        for step in steps:
            about = {}
            with suppress(KeyError, TypeError, AttributeError):
                step_id = _step(step["step"]["id"])
                about = {"JobIDRaw": f"{record['JobIDRaw']}.{step_id}", "Start": str(_plain(step["time"]["start"]))}
                about["Cluster"] = record["Cluster"]
            yield f"job {number}", about


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


def _tres(one: dict[str, Any]) -> str:
    kind, name, count = one["type"], one.get("name"), _plain(one.get("count"))
    return f"{kind}/{name}={count}" if name else f"{kind}={count}"
