"""``bootseer fs``: files and checkpoints of a striped store.

URLs: a path, ``file://PATH`` or ``hdfs://HOST:PORT/PATH``.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from bootseer.stripefs import FileStat, FsMount, StripeFS

app = typer.Typer(no_args_is_help=True, help="Striped files and checkpoints in a folder or on HDFS")

Url = Annotated[str, typer.Argument(metavar="URL", help="A path, file://PATH or hdfs://HOST:PORT/PATH")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout")]


def _place(url: str) -> tuple[StripeFS, str]:
    from bootseer.stripefs import open_fs, split_url

    if "://" in url and not url.split("://", 1)[1].strip("/").partition("/")[2]:
        return open_fs(url), ""  # the root of an HDFS has no folder above it
    base, name = split_url(url)
    return open_fs(base), name


@contextlib.contextmanager
def _progress(what: str, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr, for terminals."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _print_json(value: object) -> None:
    import msgspec

    json.dump(msgspec.to_builtins(value), sys.stdout, indent=1)
    sys.stdout.write("\n")


def _row(stat: FileStat) -> dict[str, object]:
    import msgspec

    return {**msgspec.to_builtins(stat), "striped": stat.striped}


@app.command()
def put(
    local: Annotated[Path, typer.Argument(help="A file, or a folder to copy with all its files")],
    url: Url,
    width: Annotated[int, typer.Option(help="Stripe width: storage files per file")] = 4,
    unit: Annotated[int, typer.Option(help="Stripe unit in bytes, a multiple of 4096")] = 1 << 20,
    commit: Annotated[bool, typer.Option("--commit", help="Publish the folder as a checkpoint at the end")] = False,
    as_json: Json = False,
) -> None:
    """Store a file (or every file of a folder) at URL; each appears whole or not at all."""
    from bootseer.errors import ConfigError

    fs, path = _place(url)
    if commit:
        if not local.is_dir():
            raise ConfigError("--commit publishes a folder, and this is a file", hint="leave --commit away")
        fs.refuse_committed(path)
    files = sorted(file for file in local.rglob("*") if file.is_file()) if local.is_dir() else [local]
    stored = []
    for file in files:
        target = "/".join(filter(None, (path, *file.relative_to(local).parts)))
        with _progress(file.name, as_json) as progress:
            written = fs.put(file, target, width=width, unit=unit, progress=progress)
        stored.append({"path": target, "size": written.size, "digest": written.digest, "striped": bool(written.uuid)})
    if commit:
        fs.commit(path)
    if as_json:
        _print_json({"url": url, "files": stored, "committed": commit})


@app.command()
def get(
    url: Url,
    local: Annotated[Path, typer.Argument(help="File to write; or folder, when URL is a folder")],
    as_json: Json = False,
) -> None:
    """Copy a file (or folder) from the store, every byte checked; a file appears whole or not at all."""
    from bootseer.stripefs.commit import NAME as COMMIT

    fs, path = _place(url)
    folder = fs.stat(path).is_dir
    copied = []
    for name in fs.files(path):
        if folder and name.rpartition("/")[2] == COMMIT:
            continue  # it speaks of the stored form, which the copy has not
        target = local / name.removeprefix(path).strip("/") if folder else local / name if local.is_dir() else local
        target.parent.mkdir(parents=True, exist_ok=True)
        with _progress(name, as_json) as progress:
            copied.append({"path": str(target), "size": fs.get(name, target, progress=progress)})
    if as_json:
        _print_json({"url": url, "files": copied})


@app.command()
def ls(url: Url, as_json: Json = False) -> None:
    """List a folder. Sizes are those of the contents."""
    fs, path = _place(url)
    found = fs.ls(path)
    if as_json:
        _print_json([_row(stat) for stat in found])
        return
    for stat in found:
        kind = "folder" if stat.is_dir else f"{stat.width} x {stat.unit}" if stat.striped else "plain"
        typer.echo(f"{stat.size:>15} {kind:>14}  {stat.path.rpartition('/')[2]}{'/' if stat.is_dir else ''}")


@app.command()
def stat(url: Url, as_json: Json = False) -> None:
    """Show what is known of a file, or whether a folder is a complete checkpoint."""
    from bootseer.errors import DataError

    fs, path = _place(url)
    row = _row(fs.stat(path))
    if row["is_dir"]:
        try:
            found = fs.checkpoint(path)
            row |= {"checkpoint": "complete", "files": len(found.files), "size": found.size}
        except DataError as exc:
            row["checkpoint"] = exc.message
    if as_json:
        _print_json(row)
        return
    for key, value in row.items():
        if value not in ("", 0):
            typer.echo(f"{key:>11}: {value}")


@app.command()
def verify(url: Url, as_json: Json = False) -> None:
    """Read everything at or below URL and check every chunk, digest and COMMIT."""
    fs, path = _place(url)
    with _progress("verify", as_json) as progress:
        found = fs.verify(path, progress=progress)
    total = sum(stat.size for stat in found)
    if as_json:
        _print_json({"url": url, "files": len(found), "bytes": total, "ok": True})
    else:
        typer.echo(f"{len(found)} files, {total} bytes: all right")


@app.command()
def commit(url: Url, as_json: Json = False) -> None:
    """Publish the folder at URL as a complete checkpoint. The first commit wins."""
    fs, path = _place(url)
    made = fs.commit(path)
    if as_json:
        _print_json(made)
    else:
        typer.echo(f"{url}: {len(made.files)} files, {made.size} bytes committed")


@app.command()
def latest(url: Url, as_json: Json = False) -> None:
    """Print the URL of the newest complete checkpoint in the folder URL."""
    fs, path = _place(url)
    found = fs.latest(path)
    full = f"{fs.url.rstrip('/')}/{found}"
    if as_json:
        _print_json({"path": found, "url": full})
    else:
        typer.echo(full)


@app.command()
def mount(
    url: Url,
    target: Annotated[Path, typer.Argument(help="Folder to mount on; made when missing")],
    prefetch: Annotated[
        list[str] | None,
        typer.Option(help="File or folder to pull into the node cache; `.`: all; `@latest`: newest checkpoint"),
    ] = None,
    commit: Annotated[bool, typer.Option("--commit", help="Refuse a folder that is no complete checkpoint")] = False,
    as_json: Json = False,
) -> None:
    """Mount a folder of the store, read-only, in the background."""
    from bootseer.stripefs.mount import start

    wanted = ["" if item == "." else item for item in prefetch or ()]
    started = start(url, target, prefetch=wanted, commit=commit)
    if as_json:
        _print_json(started.status())
    else:
        typer.echo(f"{url} is mounted on {started.mountpoint} (server {started.pid})")


@app.command()
def status(target: Annotated[Path, typer.Argument(help="Mount point")], as_json: Json = False) -> None:
    """Show what a mount has moved."""
    import msgspec

    found = _find(target).status()
    if as_json:
        _print_json(found)
        return
    for key, value in msgspec.to_builtins(found).items():
        typer.echo(f"{key:>15}: {value}")


@app.command()
def unmount(target: Annotated[Path, typer.Argument(help="Mount point")]) -> None:
    """End a mount."""
    _find(target).unmount()


def _find(target: Path) -> FsMount:
    from bootseer.errors import NotFoundError
    from bootseer.stripefs.mount import find

    if (found := find(target)) is None:
        raise NotFoundError(f"{target} is no mount of a striped store")
    return found
