"""``bootseer image touched``: what earlier starts of an image read of it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from bootseer.cli._shared import (
    AsJson,
    Limit,
    PlainHttp,
    Ref,
    StoreUrl,
    open_shared,
    print_json,
    print_table,
    share_text,
)
from bootseer.cli.image_look import opened
from bootseer.errors import NotFoundError
from bootseer.units import count_text, size_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bootseer.blocks.profiles.usage import FolderUse, Recorded, Side, Usage
    from bootseer.blocks.without_mount import OpenTree

_Row = TypeVar("_Row")


def touched(
    ref: Ref,
    job: Annotated[str, typer.Option("--job", metavar="NAME", help="Only starts of this job (default: all)")] = "",
    trace: Annotated[
        str, typer.Option("--trace", metavar="DIGEST", help="This start (default: the newest); its first digits do")
    ] = "",
    against: Annotated[
        str,
        typer.Option("--against", metavar="REF[#JOB|#TRACE]", help="Say how these starts differ: all, a job's, or one"),
    ] = "",
    limit: Limit = 15,
    store: StoreUrl = "",
    plain_http: PlainHttp = None,
    as_json: AsJson = False,
) -> None:
    """List the recorded starts of an image, and the files and folders that one of them touched.

    With --against: by file, what only those starts touch and what only these do. Two images are compared by path.

    Example: bootseer image touched registry:5000/team/torch:2.6 --job bert --against registry:5000/team/torch:2.6#llm
    """
    from bootseer.blocks.profiles import usage

    with opened(ref, store, plain_http) as tree:
        starts = usage.choose(_recorded(tree, store), trace or job)
        if against:
            chosen = [one for one in starts if one.trace.complete] or starts
            _compare(_side(ref, chosen, tree), against, (store, plain_http), limit, as_json)
            return
        rows = [_row(one) for one in starts]
        if not starts:
            if as_json:
                print_json({"traces": [], "chosen": None, "start": None})
            else:
                typer.echo(f"no start of {ref} has been recorded yet")
            return
        chosen_one = next((one for one in reversed(starts) if one.trace.complete), starts[-1])
        found = usage.usage(chosen_one.trace, tree.reader.owner_index())
    if as_json:
        print_json({"traces": rows, "chosen": chosen_one.digest, "start": found})
        return
    _print_starts(starts)
    share = share_text(found.touched / found.data_size) if found.data_size else "all"
    files = count_text(len(found.files), "file", "files")
    typer.echo(f"start {chosen_one.digest[:12]} touched {size_text(found.touched)} in {files}, ")
    typer.echo(f"{share} of {size_text(found.data_size)}, over {found.seconds:.1f} s")
    _print_use(found, limit)


def _recorded(tree: OpenTree, store: str) -> list[Recorded]:
    from bootseer.blocks.profiles import usage

    return usage.recorded(open_shared(store), tree.digest, tree.map.size)


def _side(ref: str, starts: Sequence[Recorded], tree: OpenTree) -> Side:
    from bootseer.blocks.profiles.usage import Side

    if not starts:
        raise NotFoundError(f"no start of {ref} has been recorded yet", hint="run it once with image run --job")
    return Side([one.trace for one in starts], tree.reader.owner_index(), tree.map)


def _compare(one: Side, against: str, place: tuple[str, bool | None], limit: int, as_json: bool) -> None:
    from bootseer.blocks.profiles import usage

    ref, _, what = against.partition("#")
    with opened(ref, *place) as tree:
        other = _side(ref, usage.choose(_recorded(tree, place[0]), what), tree)
    found = usage.compare(one, other)
    if as_json:
        print_json(found)
        return
    typer.echo(f"only here   {size_text(found.only_here):>9}")
    typer.echo(f"only there  {size_text(found.only_there):>9}   {against}")
    typer.echo(f"both        {size_text(found.both):>9}{'' if found.same_tree else '   by path: the images differ'}")
    typer.echo(f"the same    {size_text(found.shared_blocks):>9}   in whole blocks of equal content")
    rows = [
        (size_text(one.only_here), size_text(one.only_there), size_text(one.both), one.path)
        for one in _first(found.files, limit)
        if one.only_here or one.only_there
    ]
    if rows:
        print_table("what differs", ("only here", "only there", "both", "file"), rows, left=("file",))


def _row(one: Recorded) -> dict[str, object]:
    from bootseer.blocks.formats.trace import UNIT

    trace = one.trace
    return {
        "job": one.job,
        "digest": one.digest,
        "key": one.key,
        "began": trace.began,
        "complete": trace.complete,
        "predicted_from": trace.source,
        "touches": len(trace.touches),
        "bytes": sum(touch.count for touch in trace.touches) * UNIT,
        "seconds": max((touch.ms for touch in trace.touches), default=0) / 1000,
    }


def _print_starts(starts: Sequence[Recorded]) -> None:
    rows = []
    for one in starts:
        row = _row(one)
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(min(one.trace.began, 1 << 40)))
        size, seconds = size_text(int(str(row["bytes"]))), f"{row['seconds']:.1f} s"
        predicted = f"predicted from tree {one.trace.source[:12]}" if one.trace.source else "incomplete"
        state = "" if one.trace.complete else predicted
        rows.append((one.digest[:12], one.job, began, size, str(row["touches"]), seconds, state))
    columns = ("trace", "job", "began", "touched", "touches", "within", "")
    print_table("recorded starts", columns, rows, left=("trace", "job", "began", ""))


def _print_use(found: Usage, limit: int) -> None:
    whole = max(1, found.touched)
    folders = [
        (size_text(one.touched), share_text(one.touched / whole), str(one.files), one.path)
        for one in _first(_telling(found.folders), limit)
    ]
    print_table("folders, with all below", ("touched", "share", "files", "folder"), folders, left=("folder",))
    files = [
        (
            size_text(one.touched),
            share_text(one.touched / whole),
            share_text(one.touched / max(1, one.size)),
            f"{one.seconds:.2f} s",
            one.path,
        )
        for one in _first(found.files, limit)
    ]
    print_table("files", ("touched", "share", "of the file", "first", "file"), files, left=("file",))


def _telling(folders: Sequence[FolderUse]) -> Sequence[FolderUse]:
    """Without those whose bytes are nearly all in one folder in them."""
    inner: dict[str, int] = {}
    for one in folders:
        if one.path != "/":
            parent = one.path.rpartition("/")[0] or "/"
            inner[parent] = max(inner.get(parent, 0), one.touched)
    return [one for one in folders if inner.get(one.path, 0) < 0.95 * one.touched]


def _first(rows: Sequence[_Row], limit: int) -> Sequence[_Row]:
    """The first ``limit``, or all for 0."""
    return rows[:limit] if limit else rows
