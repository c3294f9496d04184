"""The part of bench/checkpoint on this machine alone: a mount whose file is in the node cache, and other FUSE servers.

All serve the same bytes, which the page cache has, from a file of this disk; what the kernel keeps of a mount is
dropped before each run. So what is measured is the way from the page cache through a server to the reader.
"""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path

from bench.checkpoint import mounts
from bench.stripes.client import Task
from bench.stripes.runner import LocalRunner
from bootseer.demo.report import Report, Run
from bootseer.errors import BootseerError
from bootseer.stripefs import open_fs

PEERS = ("pyfuse3", "mfusepy")


def run(work: Path, report: Report, content: Path, *, rounds: int) -> None:
    store = work / "store"
    store.mkdir()
    with open(content, "rb") as data, open_fs(str(store)).create("file", striped=True) as out:
        while piece := data.read(16 << 20):
            out.write(piece)
    runner = LocalRunner(report, "local", content)
    with contextlib.ExitStack() as stack:
        files = {"ext4": content}
        for kind in PEERS:
            try:
                files[kind] = stack.enter_context(mounts.peer(kind, str(content), work / kind))
            except BootseerError as exc:
                report.runs.append(Run(variant=f"local:{kind}", n=1, failed=f"could not run: {exc}"))
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
