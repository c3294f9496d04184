"""``bootseer fs mount``: mounts of a striped store."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bootseer.cli._fs import Unit, Url, Width, size_value
from bootseer.cli._shared import AsJson, answer


def mount(
    url: Url,
    target: Annotated[Path, typer.Argument(help="Folder to mount on; made when missing")],
    prefetch: Annotated[
        list[str] | None,
        typer.Option(help="File or folder to pull into the node cache; `.`: all; `@latest`: newest checkpoint"),
    ] = None,
    commit: Annotated[bool, typer.Option("--commit", help="Refuse a folder that is no complete checkpoint")] = False,
    writable: Annotated[bool, typer.Option("--rw", help="For writing, too: files appear whole when closed")] = False,
    width: Width = 4,
    unit: Unit = 1 << 20,
    spool: Annotated[
        int,
        typer.Option(parser=size_value, metavar="SIZE", help="With --rw: most bytes of unfinished files on this node"),
    ] = 4 << 30,
    as_json: AsJson = False,
) -> None:
    """Mount a folder of the store, read-only or with --rw, in the background. `bootseer unmount` ends it.

    Example: bootseer fs mount hdfs://namenode:8020/run /mnt/run --prefetch @latest
    """
    from bootseer.fsmount.client import start
    from bootseer.kernel import background

    background.lend()
    wanted = ["" if item == "." else item for item in prefetch or ()]
    started = start(url, target, prefetch=wanted, commit=commit, writable=writable, width=width, unit=unit, spool=spool)
    line = f"mounted {started.url} on {started.mountpoint} (server {started.pid})"
    answer(started.status(), as_json, line)
