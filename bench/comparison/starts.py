"""One start of the demo's job on one node: its job file, the launcher as a process of its own, what it moved.

The start is measured from outside: from the moment ``bootseer run`` is spawned to the end of the first step in its
events, with the bytes that crossed the node's link, so every variant is held to the same clock.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import msgspec

from bootseer.errors import BootseerError
from bootseer.launch.job import CheckpointTable, EnvTable, ImageTable, Job, JobTable, MountTable
from bootseer.launch.node import Start
from bootseer.launch.ready import ReadyWatch
from bootseer.profile import analysis
from bootseer.profile import events as event_files
from bootseer.profile.report import JobReport
from comparison.ingredients import losses
from support.netns import Node
from support.service import BOOTSEER, WITH_US

JOB_ENV = "/opt/job-env"
CHECKPOINT = "/checkpoint"
_DEADLINE = 900.0
_STOP_DEADLINE = 60.0


class Site(msgspec.Struct, frozen=True, kw_only=True):
    """Where the demo's data centre is, as nodes see it."""

    ref: str
    index_url: str
    index_host: str
    store: str
    striped: str
    plain: str
    hdfs_client: str
    containerd: str


class Measured(msgspec.Struct, kw_only=True):
    """One start, as seen from outside. ``bytes_ready``: over the link until the first step ended."""

    variant: str
    seconds: float
    bytes_ready: int
    bytes_total: int
    losses: dict[int, float]
    record: Start
    report: JobReport


def job_file(site: Site, *, local_env: Path | None = None, local_checkpoint: Path | None = None) -> Job:
    """The demo's job. With ``local_env`` and ``local_checkpoint`` nothing is left to load but the image."""
    mounts = []
    if local_env and local_checkpoint:
        mounts = [MountTable(source=str(local_env), target=JOB_ENV)]
        mounts += [MountTable(source=str(local_checkpoint), target=CHECKPOINT)]
    return Job(
        job=JobTable(
            name="demo",
            command=["python3", "/job/train.py", "--resume", CHECKPOINT],
            gpus=8,
            env={"PYTHONPATH": JOB_ENV, "INDEX_URL": site.index_url, "INDEX_HOST": site.index_host},
            cwd="/job",
        ),
        image=ImageTable(ref=site.ref, containerd=site.containerd),
        env=None
        if mounts
        else EnvTable(
            command=["sh", "/job/setup.sh"],
            targets=[JOB_ENV],
            key_files=["/job/setup.sh", "/job/requirements.txt"],
            key_env=["INDEX_URL"],
        ),
        checkpoint=None if mounts else CheckpointTable(url=site.striped, ordinary_url=site.plain, path=CHECKPOINT),
        mounts=mounts,
    )


def run(
    site: Site, node: Node, variant: str, job: Job, work: Path, *, without: str = "", cache: Path | None = None
) -> Measured:
    """Start ``job`` on ``node`` and wait for its end. Raises `BootseerError` with the log's last line when it fails."""
    work.mkdir(parents=True, exist_ok=True)
    job_path, summary, log_path = work / f"{variant}.toml", work / f"{variant}.json", work / f"{variant}.log"
    job_path.write_text(to_toml(job))
    summary.unlink(missing_ok=True)
    events = work / "events" / f"demo-{variant}" / "attempt-0" / f"{node.name}.jsonl"
    events.unlink(missing_ok=True)
    environ = {
        **os.environ,
        "BOOTSEER_JOB": f"demo-{variant}",
        "BOOTSEER_NODE": node.name,
        "BOOTSEER_ATTEMPT": "0",
        "BOOTSEER_NODES": "1",
        "BOOTSEER_STORE": site.store,
        "BOOTSEER_CACHE_DIR": str(cache or work / f"cache-{variant}"),
        "BOOTSEER_STATE_DIR": str(work / f"state-{variant}"),
        "BOOTSEER_HDFS_CLIENT": site.hdfs_client,
    }
    argv = [*BOOTSEER, "run", str(job_path), "--no-card", "--events",
            str(work / "events"), "--summary", str(summary), "--without", without]  # fmt: skip
    at_ready: list[tuple[float, int]] = []
    watch = ReadyWatch(events, lambda: at_ready.append((time.monotonic(), node.bytes_received())))
    before = node.bytes_received()
    with open(log_path, "wb") as out:
        began = time.monotonic()
        process = subprocess.Popen(
            [*WITH_US, *node.argv(argv)],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
        watch.start()
        code = _wait(process)
    watch.stop()
    total = node.bytes_received() - before
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
        record=msgspec.json.decode(summary.read_bytes(), type=Start),
        report=analysis.analyse(event_files.read([events])),
    )


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Wait for the launcher; on Ctrl-C or past the deadline let it clean up after itself before it is killed."""
    try:
        return process.wait(_DEADLINE)
    except BaseException:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_DEADLINE)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        raise


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
