"""The part of bench/checkpoint on this machine alone: a mount whose file is in the node cache, and another FUSE server.

All serve the same bytes, which the page cache has, from a file of this disk; what the kernel keeps of a mount is
dropped before each run. So what is measured is the way from the page cache through a server to the reader.
"""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path

from msgspec import structs

from bench.checkpoint import mounts, state
from bench.common.report import Report, Run
from bench.stripes.client import Task
from bench.stripes.runner import LocalRunner
from bootseer.errors import BootseerError
from bootseer.stripefs import open_fs

PEER = "pyfuse3"
SMALL = 10_000
"""Tensors of the part ``small``."""


def run(work: Path, report: Report, content: Path, *, rounds: int) -> None:
    store = work / "store"
    store.mkdir()
    with open(content, "rb") as data, open_fs(str(store)).create("file", striped=True) as out:
        while piece := data.read(16 << 20):
            out.write(piece)
    runner = LocalRunner(report, "local", content)
    with contextlib.ExitStack() as stack:
        files = {"ext4": content}
        try:
            files[PEER] = stack.enter_context(mounts.peer(PEER, str(content), work / PEER))
        except BootseerError as exc:
            report.runs.append(Run(variant=f"local:{PEER}", n=1, failed=f"could not run: {exc}"))
        ours = stack.enter_context(mounts.ours(str(store), work / "ours", options=["--prefetch", "."]))
        files["mount"] = ours / "file"
        tasks = {
            name: Task(way="local" if name == "ext4" else "mounted", url="", path=str(path), size=runner.size)
            for name, path in files.items()
        }
        for task in tasks.values():
            runner.client(task)  # brings what is behind the mounts into the page cache
        for n in range(rounds):
            for name in (tasks, reversed(tasks))[n % 2]:
                runner.record(name, functools.partial(runner.client, tasks[name]))


def small_tensors(work: Path, report: Report, *, rounds: int) -> None:
    """Saves and loads of `SMALL` tensors, by torch to a local file and by `bootseer.torch` to a folder store."""
    made, store = state.make_small(work / "tensors.pt", SMALL), work / "small"
    store.mkdir()
    runner = LocalRunner(report, "local", made.path, program="bench.checkpoint.client", expected=made.digest)
    ours = Task(way="torch", url=str(store), path="ours.pt", size=runner.size)
    theirs = Task(way="torch-file", url="", path=f"{store}/theirs.pt", size=runner.size)
    for n in range(rounds):
        for what, source in (("save", str(made.path)), ("load", "")):
            for name, task in ((f"{what}-small", ours), (f"{what}-small-torch", theirs))[:: -1 if n % 2 else 1]:
                runner.record(name, functools.partial(runner.client, structs.replace(task, source=source)))
