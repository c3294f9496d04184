"""``bootseer fs explain``: how a file would be read, and why."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from bootseer.cli._fs import CARE, binary_text, place, progress
from bootseer.cli._shared import AsJson, print_json, print_table
from bootseer.units import one_line, size_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bootseer.stripefs import StripeFS
    from bootseer.stripefs.explain import Explanation

_PIECE = 16 << 20


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel=CARE)(explain)


def explain(
    url: Annotated[str | None, typer.Argument(metavar="URL", help="A file of the store", show_default=False)] = None,
    read: Annotated[
        bool, typer.Option("--read", help="Read the file first: then rates and latencies are known")
    ] = False,
    last: Annotated[
        bool, typer.Option("--last", help="Say what the last load of a checkpoint on this node moved")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Say how a file would be read now, and why: the way to it, its blocks and replicas, who would give how much.

    With --last and no URL: what the last load of a checkpoint on this node needed, and where its bytes came from.
    """
    from bootseer.stripefs.explain import explain as explained

    if last is (url is not None) or (last and read):
        raise typer.BadParameter("name a file, or use --last alone")
    if url is None:
        _last(as_json)
        return

    fs, path = place(url)
    if read:
        _read(fs, path, as_json)
    found = explained(fs, path)
    if as_json:
        print_json(found)
        return
    shape = f"{found.width} stripes, unit {binary_text(found.unit)}" if found.width else "plain"
    typer.echo(f"{one_line(url)}: {size_text(found.size)}, {shape}")
    typer.echo(f"access: {found.access}, {found.reason}")
    print_table(
        "", ["stripe", "block", "size", "replicas", "planned"], _blocks(found), left=["replicas", "planned", "block"]
    )
    if found.nodes:
        rows = [
            [
                node.address,
                node.state if node.state != "open" else f"left alone for {node.open_seconds:.1f} s",
                f"{node.rate / (1 << 20):.0f}" if node.rate else "",
                f"{1000 * node.latency:.1f}" if node.served else "",
                str(node.failures),
                size_text(node.served),
            ]
            for node in found.nodes
        ]
        columns = ["DataNode", "breaker", "MiB/s", "latency ms", "failures", "served"]
        print_table("", columns, rows, left=["DataNode", "breaker"])
    if found.access == "direct":
        again = f"a read of 1 MiB is tried at another replica too after {1000 * found.hedge_seconds:.0f} ms"
        typer.echo(f"hedging: {again}, at most {size_text(found.hedge_bytes)} in all now")
    if found.seconds is not None:
        typer.echo(f"the whole file would take about {found.seconds:.1f} s")


def _last(as_json: bool) -> None:
    from bootseer import config
    from bootseer.errors import NotFoundError
    from bootseer.stripefs import loads

    found = loads.last(config.load().state_dir)
    if not found:
        raise NotFoundError("no load of a checkpoint is known on this node", hint="mount one, or use bootseer.torch")
    if as_json:
        print_json(found)
        return
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found[0].began))
    typer.echo(f"{one_line(found[0].url)}, loaded {began} by {len(found)} process{'es' if len(found) > 1 else ''}")
    rows = [
        [
            one.how if one.rank is None else f"{one.how}, rank {one.rank}",
            *map(size_text, (one.needed, one.fetched, one.cached, one.received, one.repeated)),
            f"{one.waited:.1f}",
            f"{one.hedges_won} of {one.hedged}",
            "" if one.plain_seconds is None else f"{one.plain_seconds:.1f}",
        ]
        for one in found
    ]
    columns = ["load", "needed", "store", "cache", "ranks", "repeated", "waited s", "hedges won", "plain client s"]
    print_table("", columns, rows, left=["load"])
    nodes: dict[str, list[loads.NodeLoad]] = {}
    for one in found:
        for node in one.nodes:
            nodes.setdefault(node.address, []).append(node)
    if nodes:
        rates = {key: [node.rate for node in some if node.rate] for key, some in nodes.items()}
        shown = [
            [
                key,
                size_text(sum(node.bytes for node in some)),
                f"{sum(rates[key]) / (1 << 20):.0f}" if rates[key] else "",
            ]
            for key, some in sorted(nodes.items())
        ]
        print_table("", ["DataNode", "gave", "MiB/s"], shown, left=["DataNode"])


def _blocks(found: Explanation) -> Iterator[list[str]]:
    for stripe in found.stripes:
        index = str(stripe.index) if found.width else ""
        if not stripe.blocks:
            yield [index, "", size_text(stripe.size), stripe.problem or f"{stripe.access}: {one_line(stripe.path)}", ""]
        for block in stripe.blocks:
            replicas = [f"{it} ({block.bad[it]})" if it in block.bad else it for it in block.replicas]
            planned = [f"{it}: {size_text(share)}" for it, share in block.planned.items() if share]
            yield [index, str(block.id), size_text(block.length), ", ".join(replicas), ", ".join(planned)]


def _read(fs: StripeFS, path: str, quiet: bool) -> None:
    with fs.open(path) as file, progress(path, quiet) as report:
        buffer = memoryview(bytearray(min(_PIECE, file.size)))
        for offset in range(0, file.size, _PIECE):
            piece = buffer[: min(_PIECE, file.size - offset)]
            file.readinto(offset, piece)
            report(offset + len(piece), file.size)
