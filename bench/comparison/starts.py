"""One start of the comparison's job on one node, with the servers of its data centre."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from bootseer.demo import starts
from bootseer.demo.programs import BOOTSEER
from bootseer.demo.starts import Measured
from bootseer.launch.job import CheckpointTable, EnvTable, ImageTable, Job, JobTable, MountTable
from support.netns import Node

JOB_ENV = "/opt/job-env"
CHECKPOINT = "/checkpoint"


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


def job_file(
    site: Site, *, local_env: Path | None = None, local_checkpoint: Path | None = None, plain: bool = False
) -> Job:
    """The demo's job. With ``local_env`` and ``local_checkpoint`` nothing is left to load but the image; ``plain``: its
    checkpoint is in plain files."""
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
        image=ImageTable(ref=site.ref),
        env=None
        if mounts
        else EnvTable(
            command=["sh", "/job/setup.sh"],
            targets=[JOB_ENV],
            key_files=["/job/setup.sh", "/job/requirements.txt"],
            key_env=["INDEX_URL"],
        ),
        checkpoint=None if mounts else CheckpointTable(url=site.plain if plain else site.striped, path=CHECKPOINT),
        mounts=mounts,
    )


def run(
    site: Site, node: Node, variant: str, job: Job, work: Path, *, without: str = "", program: Sequence[str] = BOOTSEER
) -> Measured:
    """Start ``job`` on ``node`` and wait for its end, as `bootseer.demo.starts.run` does."""
    environ = {
        "BOOTSEER_STORE": site.store,
        "BENCH_HDFS_CLIENT": site.hdfs_client,
        "BENCH_CONTAINERD": site.containerd,
    }
    return starts.run(
        variant,
        job,
        work,
        environ=environ,
        received=node.bytes_received,
        without=without,
        node=node.name,
        prefix=node.argv([]),
        program=program,
    )
