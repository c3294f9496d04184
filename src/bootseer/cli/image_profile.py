"""``bootseer image profile``: what earlier starts of an image touched, how profiles differ, what a prefetch was for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bootseer.cli import _profile_text as text
from bootseer.cli._shared import (
    AsJson,
    Group,
    Limit,
    PlainHttp,
    Ref,
    StoreUrl,
    count_text,
    open_shared,
    print_json,
    print_table,
    share_text,
)
from bootseer.cli.image_look import opened
from bootseer.errors import DataError, NotFoundError, doing
from bootseer.units import one_line, size_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bootseer.blocks.formats.trace import Trace
    from bootseer.blocks.offline import OpenTree
    from bootseer.blocks.profiles.compare import Side
    from bootseer.blocks.profiles.explain import Recorded
    from bootseer.blocks.serving.protocol import TreeStatus

app = typer.Typer(cls=Group, no_args_is_help=True, help="What earlier starts of an image touched")

Job = Annotated[str, typer.Option("--job", metavar="NAME", help="Only starts of this job (default: all)")]
TraceName = Annotated[str, typer.Option("--trace", metavar="DIGEST", help="This start (default: the newest)")]
Selector = Annotated[str, typer.Argument(metavar="REF[#JOB|#TRACE]", help="All starts of REF, a job's, or one")]


@app.command()
def show(
    ref: Ref,
    job: Job = "",
    trace: TraceName = "",
    files: Annotated[bool, typer.Option("--files", help="Only the files that it touched")] = False,
    folders: Annotated[bool, typer.Option("--folders", help="Only the folders")] = False,
    processes: Annotated[bool, typer.Option("--processes", help="Only the processes that touched something")] = False,
    limit: Limit = 15,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.svg", help="Draw bytes over time, of all starts")] = None,
    store: StoreUrl = "",
    plain_http: PlainHttp = None,
    as_json: AsJson = False,
) -> None:
    """List the recorded starts of an image, and what one of them touched."""
    from bootseer.blocks.profiles import explain

    with opened(ref, store, plain_http) as tree:
        starts = explain.choose(_recorded(tree, store), job) if job else _recorded(tree, store)
        if not starts:
            if as_json:
                print_json({"traces": [], "chosen": None, "start": None})
            else:
                typer.echo(f"no start of {ref} has been recorded yet")
            return
        chosen = explain.choose(starts, trace)[-1] if trace else _newest(starts)
        index = tree.reader.owner_index()
        found = explain.usage(chosen.trace, index)
        if plot is not None:
            _draw(plot, starts)
    if as_json:
        print_json({"traces": [text.row_of(one) for one in starts], "chosen": chosen.digest, "start": found})
        return
    every = not (files or folders or processes)
    if every:
        text.print_starts(starts)
        text.print_summary(chosen, found)
    if every or folders:
        text.print_folders(found, limit)
    if every or files:
        text.print_files(found, limit)
    if every or processes:
        text.print_processes(found, limit)


@app.command()
def diff(
    a: Selector,
    b: Selector,
    limit: Limit = 15,
    store: StoreUrl = "",
    plain_http: PlainHttp = None,
    as_json: AsJson = False,
) -> None:
    """Compare what two jobs, two starts or two images touch, by file.

    REF#JOB means the starts of a job, REF#TRACE one start by the first digits of its digest (`profile show` prints
    them), REF all starts of an image.
    """
    from bootseer.blocks.profiles.compare import compare

    found = compare(_side(a, store, plain_http), _side(b, store, plain_http))
    if as_json:
        print_json(found)
        return
    typer.echo(f"only A   {size_text(found.only_a):>9}   {a}")
    typer.echo(f"only B   {size_text(found.only_b):>9}   {b}")
    typer.echo(f"both     {size_text(found.both):>9}{'' if found.same_tree else '   by path: the images differ'}")
    typer.echo(f"the same {size_text(found.shared_blocks):>9}   in whole blocks of equal content")
    if found.order is not None:
        typer.echo(f"order    {found.order:>9.2f}   1: files come in the same order, 0: in no like order, -1: reversed")
    rows = [
        (size_text(one.only_a), size_text(one.only_b), size_text(one.both), one.path)
        for one in text.first(found.files, limit)
        if one.only_a or one.only_b
    ]
    if rows:
        print_table("what differs", ("only A", "only B", "both", "file"), rows, left=("file",))


@app.command()
def explain(
    ref: Ref,
    job: Job = "",
    trace: TraceName = "",
    last_run: Annotated[
        Path | None, typer.Option(metavar="STATUS.json", help="What image status --json said at the end of the run")
    ] = None,
    limit: Limit = 15,
    store: StoreUrl = "",
    plain_http: PlainHttp = None,
    as_json: AsJson = False,
) -> None:
    """Say what the prefetch of a recorded start was good for: waste and misses, by file, worst first.

    --job chooses the start; what it was prefetched by are earlier starts of its job, of any job while that had none.
    Waste was prefetched and not touched; a miss was touched and not prefetched.
    """
    from bootseer.blocks.profiles import explain
    from bootseer.blocks.profiles.explain import explain as judge

    status = _read_status(last_run) if last_run is not None else None
    with opened(ref, store, plain_http) as tree:
        starts = _recorded(tree, store)
        # The job chooses the start that is judged; it was prefetched by starts of other jobs while its own had none.
        of_job = explain.choose(starts, job)
        if not of_job:
            raise NotFoundError(f"no start of {ref} has been recorded yet", hint="run it once with image run --job")
        chosen = explain.choose(of_job, trace)[-1] if trace else _newest(of_job)
        before = _before(chosen, starts)
        found = judge(chosen.trace, before, tree.map, tree.reader.owner_index())
    if as_json:
        print_json({"run": text.row_of(chosen), "explanation": found, "measured": status})
        return
    typer.echo(f"start of {text.when(chosen)}, job {one_line(chosen.job)}, trace {chosen.digest[:12]}")
    if not found.runs:
        typer.echo("nothing was recorded before it, so nothing was prefetched")
    else:
        earlier = count_text(found.runs, "earlier start", "earlier starts")
        typer.echo(f"prefetched  {text.both(found.hot, found.hot_stored)}, by {earlier}")
        typer.echo(f"  wasted    {text.both(found.waste, found.waste_stored)}, {share_text(found.waste_share)} of it")
    typer.echo(f"touched     {size_text(found.touched)} in whole blocks")
    typer.echo(f"  missed    {text.both(found.misses, found.misses_stored)}, {share_text(found.misses_share)} of it")
    for process in found.left_out:
        typer.echo(f"left out    process {one_line(process.comm) or process.pid}: it read over a quarter of the data")
    if status is not None:
        moved = f"demand {size_text(status.bytes_demand)}, hot {size_text(status.bytes_hot)}"
        typer.echo(f"measured    moved by {moved}, background {size_text(status.bytes_background)}")
        typer.echo(f"            {status.slow_faults} slow faults, {status.stall_seconds:.2f} s of waiting")
    text.print_shares("prefetched in vain", found.wasted_files, limit)
    text.print_shares("touched but not prefetched", found.missed_files, limit)


def _recorded(tree: OpenTree, store: str) -> list[Recorded]:
    from bootseer.blocks.profiles import explain

    return explain.recorded(open_shared(store), tree.digest, tree.map.size)


def _newest(starts: Sequence[Recorded]) -> Recorded:
    """The newest whole one, or the newest."""
    return next((one for one in reversed(starts) if one.trace.complete), starts[-1])


def _before(run: Recorded, starts: Sequence[Recorded]) -> list[Trace]:
    """What ``run`` was prefetched by: earlier starts of its own job, of any job while that had none."""
    earlier = list(starts)[: list(starts).index(run)]
    return [one.trace for one in earlier if one.job == run.job] or [one.trace for one in earlier]


def _side(selector: str, store: str, plain_http: bool | None) -> Side:
    from bootseer.blocks.profiles import explain
    from bootseer.blocks.profiles.compare import Side

    ref, _, what = selector.partition("#")
    with opened(ref, store, plain_http) as tree:
        starts = explain.choose(_recorded(tree, store), what)
        if not starts:
            raise NotFoundError(f"no start of {ref} has been recorded yet", hint="run it once with image run --job")
        return Side([one.trace for one in starts], tree.reader.owner_index(), tree.map)


def _read_status(path: Path) -> TreeStatus:
    import msgspec

    from bootseer.blocks.serving.protocol import TreeStatus

    with doing(f"read {path}"):
        text = path.read_bytes()
    try:
        raw = msgspec.json.decode(text)
        return msgspec.convert(raw.get("status", raw), TreeStatus)
    except (msgspec.MsgspecError, AttributeError, UnicodeDecodeError):
        raise DataError(f"{path} is not what bootseer image status DIR --json prints") from None


def _draw(path: Path, starts: Sequence[Recorded]) -> None:
    from bootseer.blocks.profiles import explain
    from bootseer.cli._plot import svg

    newest = list(starts)[-8:]
    series = [(f"{one.job} {text.when(one)} {one.digest[:8]}", explain.timeline(one.trace)) for one in newest]
    with doing(f"write {path}"):
        path.write_text(svg(series), encoding="utf-8")
