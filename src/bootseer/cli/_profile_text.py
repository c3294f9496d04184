"""What ``bootseer image profile`` prints of starts: tables and lines of text."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

import typer

from bootseer.cli._shared import count_text, print_table, share_text
from bootseer.units import size_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bootseer.blocks.profiles.explain import FileShare, Recorded, Usage

_Row = TypeVar("_Row")


def when(one: Recorded) -> str:
    """When the start began, in local time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(min(one.trace.began, 1 << 40)))


def row_of(one: Recorded) -> dict[str, object]:
    """What ``--json`` and the list of starts say of a start."""
    from bootseer.blocks.formats.trace import UNIT

    trace = one.trace
    return {
        "job": one.job,
        "digest": one.digest,
        "key": one.key,
        "began": trace.began,
        "complete": trace.complete,
        "touches": len(trace.touches),
        "bytes": sum(touch.count for touch in trace.touches) * UNIT,
        "seconds": max((touch.ms for touch in trace.touches), default=0) / 1000,
    }


def print_starts(starts: Sequence[Recorded]) -> None:
    rows = []
    for one in starts:
        row = row_of(one)
        state = "" if one.trace.complete else "incomplete"
        size, seconds = size_text(int(str(row["bytes"]))), f"{row['seconds']:.1f} s"
        rows.append((one.digest[:12], one.job, when(one), size, str(row["touches"]), seconds, state))
    columns = ("trace", "job", "began", "touched", "touches", "within", "")
    print_table("recorded starts", columns, rows, left=("trace", "job", "began", ""))


def print_summary(one: Recorded, found: Usage) -> None:
    from bootseer.cli._plot import sparkline

    share = share_text(found.touched / found.data_size) if found.data_size else "all"
    typer.echo(f"start {one.digest[:12]} touched {size_text(found.touched)}, {share} of {size_text(found.data_size)},")
    files = count_text(len(found.files), "file", "files")
    processes = count_text(len(found.processes), "process", "processes")
    typer.echo(f"in {files}, by {processes}, over {found.seconds:.1f} s:")
    typer.echo(f"  {sparkline(found.timeline)}")


def print_folders(found: Usage, limit: int) -> None:
    # A folder whose bytes are nearly all in one of its own folders says nothing that this one does not.
    inner: dict[str, int] = {}
    for one in found.folders:
        if one.path != "/":
            parent = one.path.rpartition("/")[0] or "/"
            inner[parent] = max(inner.get(parent, 0), one.touched)
    telling = [one for one in found.folders if inner.get(one.path, 0) < 0.95 * one.touched]
    rows = [
        (size_text(one.touched), share_text(one.touched / max(1, found.touched)), str(one.files), one.path)
        for one in first(telling, limit)
    ]
    print_table("folders, with all below", ("touched", "share", "files", "folder"), rows, left=("folder",))


def print_files(found: Usage, limit: int) -> None:
    rows = [
        (
            size_text(one.touched),
            share_text(one.touched / max(1, found.touched)),
            share_text(one.touched / max(1, one.size)),
            f"{one.seconds:.2f} s",
            one.path,
        )
        for one in first(found.files, limit)
    ]
    print_table("files", ("touched", "share", "of the file", "first", "file"), rows, left=("file",))


def print_processes(found: Usage, limit: int) -> None:
    rows = [
        (
            size_text(one.touched),
            str(one.files),
            f"{one.first:.2f} s",
            f"{one.last:.2f} s",
            str(one.pid),
            "" if one.rank is None else str(one.rank),
            one.comm or "?",
            one.cgroup,
        )
        for one in first(found.processes, limit)
    ]
    columns = ("touched", "files", "first", "last", "pid", "rank", "command", "cgroup")
    print_table("processes, by what each touched first", columns, rows, left=("command", "cgroup"))


def print_shares(title: str, rows: Sequence[FileShare], limit: int) -> None:
    if rows:
        cells = [(size_text(one.bytes), share_text(one.share), one.path) for one in first(rows, limit)]
        print_table(title, ("bytes", "share", "file"), cells, left=("file",))


def both(size: int, stored: int) -> str:
    return f"{size_text(size)} ({size_text(stored)} over the network)"


def first(rows: Sequence[_Row], limit: int) -> Sequence[_Row]:
    """The first ``limit``, or all for 0."""
    return rows[:limit] if limit else rows
