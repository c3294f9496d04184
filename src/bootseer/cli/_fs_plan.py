"""``bootseer fs inspect --plan``: how a file would be read, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from bootseer.cli._fs import binary_text, progress
from bootseer.cli._shared import print_json, print_table
from bootseer.units import one_line, size_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bootseer.stripefs import StripeFS
    from bootseer.stripefs.explain import Explanation

_PIECE = 16 << 20


def print_plan(fs: StripeFS, path: str, url: str, *, read: bool, as_json: bool) -> None:
    """How a file would be read now, and why: the way to it, its blocks and replicas, who would give how much."""
    from bootseer.stripefs.explain import explain as explained

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
