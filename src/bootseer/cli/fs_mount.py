"""``bootseer fs mount|status|unmount``: mounts of a striped store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bootseer.cli._fs import MOUNTS, Url
from bootseer.cli._shared import AsJson, print_json

if TYPE_CHECKING:
    from bootseer.stripefs import FsMount

Target = Annotated[Path, typer.Argument(help="Mount point")]


def register(app: typer.Typer) -> None:
    for verb in (mount, status, unmount):
        app.command(rich_help_panel=MOUNTS)(verb)


def mount(
    url: Url,
    target: Annotated[Path, typer.Argument(help="Folder to mount on; made when missing")],
    prefetch: Annotated[
        list[str] | None,
        typer.Option(help="File or folder to pull into the node cache; `.`: all; `@latest`: newest checkpoint"),
    ] = None,
    commit: Annotated[bool, typer.Option("--commit", help="Refuse a folder that is no complete checkpoint")] = False,
    as_json: AsJson = False,
) -> None:
    """Mount a folder of the store, read-only, in the background."""
    from bootseer.stripefs.mount.client import start

    wanted = ["" if item == "." else item for item in prefetch or ()]
    started = start(url, target, prefetch=wanted, commit=commit)
    if as_json:
        print_json(started.status())
    else:
        typer.echo(f"{started.url} is mounted on {started.mountpoint} (server {started.pid})")


def status(target: Target, as_json: AsJson = False) -> None:
    """Show what a mount has moved."""
    import msgspec

    found = _find(target).status()
    if as_json:
        print_json(found)
        return
    for key, value in msgspec.to_builtins(found).items():
        typer.echo(f"{key:>15}: {value}")


def unmount(target: Target, as_json: AsJson = False) -> None:
    """End a mount."""
    _find(target).unmount()
    if as_json:
        print_json({"mountpoint": str(target), "mounted": False})


def _find(target: Path) -> FsMount:
    from bootseer.errors import NotFoundError
    from bootseer.stripefs.mount.client import find

    if (found := find(target)) is None:
        raise NotFoundError(f"{target} is no mount of a striped store")
    return found
