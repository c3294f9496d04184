"""One start of a job on one node: its job file, the launcher as a process of its own, what it moved. The start is
measured from outside: from the moment ``bootseer run`` is spawned to the end of the first step in its events, with the
bytes that crossed the node's link, so every variant is held to the same clock."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from bootseer.demo.programs import BOOTSEER, WITH_US, finish
from bootseer.errors import BootseerError
from bootseer.launch.job import Job
from bootseer.launch.node import Start
from bootseer.launch.ready import ReadyWatch
from bootseer.profile import analysis
from bootseer.profile import events as event_files
from bootseer.profile.report import JobReport
from bootseer.wiretypes import json_as, loaded

_DEADLINE = 900.0
LOSS_TOLERANCE = 1e-3
"""Relative; a container's libraries may sum in another order than those of the run that wrote the checkpoint."""


class Measured(msgspec.Struct, kw_only=True):
    """One start, as seen from outside. ``bytes_ready``: over the link until the first step ended."""

    variant: str
    seconds: float
    bytes_ready: int
    bytes_total: int
    losses: dict[int, float]
    record: Start
    report: JobReport


def run(
    variant: str,
    job: Job,
    work: Path,
    *,
    environ: Mapping[str, str],
    received: Callable[[], int],
    without: str = "",
    node: str = "node",
    prefix: Sequence[str] = (),
    program: Sequence[str] = BOOTSEER,
) -> Measured:
    """Start ``job`` in the folder ``work`` and wait for its end. Raises `BootseerError` with the end of its log.
    ``received`` tells how many bytes have crossed the node's link. ``prefix`` begins the command line, and may put it
    into the node's network. ``environ``: more variables, such as the settings. ``program``: what is run as bootseer."""
    work.mkdir(parents=True, exist_ok=True)
    job_path, summary, log_path = work / f"{variant}.toml", work / f"{variant}.json", work / f"{variant}.log"
    job_path.write_text(to_toml(job))
    summary.unlink(missing_ok=True)
    name = f"{job.job.name}-{variant}"
    events = work / "events" / name / "attempt-0" / f"{node}.jsonl"
    events.unlink(missing_ok=True)
    environ = {
        **os.environ,
        "BOOTSEER_JOB": name,
        "BOOTSEER_NODE": node,
        "BOOTSEER_ATTEMPT": "0",
        "BOOTSEER_NODES": "1",
        "BOOTSEER_CACHE_DIR": str(work / f"cache-{variant}"),
        "BOOTSEER_STATE_DIR": str(work / f"state-{variant}"),
        **environ,
    }
    argv = [*program, "run", str(job_path), "--no-card", "--events",
            str(work / "events"), "--summary", str(summary), "--without", without]  # fmt: skip
    at_ready: list[tuple[float, int]] = []
    watch = ReadyWatch(events, lambda: at_ready.append((time.monotonic(), received())))
    before = received()
    with open(log_path, "wb") as out:
        began = time.monotonic()
        process = subprocess.Popen(
            [*WITH_US, *prefix, *argv],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
        watch.start()
        finish(process, _DEADLINE)
    code = process.returncode
    watch.stop()
    total = received() - before
    text = log_path.read_text(errors="replace")
    if code or not at_ready:
        tail = "\n".join(text.strip().splitlines()[-5:])
        raise BootseerError(f"the {variant} start ended with code {code} and without a first step: {tail}")
    return Measured(
        variant=variant,
        seconds=at_ready[0][0] - began,
        bytes_ready=at_ready[0][1] - before,
        bytes_total=total,
        losses=losses(text),
        record=json_as(summary.read_bytes(), Start),
        report=analysis.analyse(event_files.read([events])),
    )


def forget(variant: str, work: Path) -> None:
    """The node has nothing of an earlier start of ``variant`` in ``work``."""
    for kind in ("cache", "state"):
        shutil.rmtree(work / f"{kind}-{variant}", ignore_errors=True)


def to_toml(job: Job) -> str:
    """The job as a TOML job file (its values are such that their JSON forms are TOML as well)."""
    lines: list[str] = []
    for name, table in msgspec.to_builtins(job).items():
        for entry in table if isinstance(table, list) else [table] if table else []:
            lines.append(f"[[{name}]]" if isinstance(table, list) else f"[{name}]")
            for key, value in entry.items():
                if isinstance(value, dict):
                    inner = ", ".join(f"{k} = {msgspec.json.encode(v).decode()}" for k, v in value.items())
                    lines.append(f"{key} = {{ {inner} }}")
                else:
                    lines.append(f"{key} = {msgspec.json.encode(value).decode()}")
            lines.append("")
    return "\n".join(lines)


def losses(output: str) -> dict[int, float]:
    """The losses in a training log: one JSON object ``{"step": n, "loss": x}`` a line, other lines ignored."""
    found: dict[int, float] = {}
    for line in output.splitlines():
        if line.startswith('{"step"'):
            entry = loaded(json.loads, line)
            found[int(entry["step"])] = float(entry["loss"])
    return found


def same_losses(wanted: Mapping[int, float], found: Mapping[int, float]) -> bool:
    """Whether a start's losses are those of the run that wrote the checkpoint, step by step."""
    return (
        bool(wanted)
        and found.keys() == wanted.keys()
        and all(abs(found[step] - loss) <= LOSS_TOLERANCE * abs(loss) for step, loss in wanted.items())
    )


def read_all(folder: Path) -> None:
    """Bring every file below ``folder`` into the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb", buffering=0) as file:
                while file.read(4 << 20):
                    pass
