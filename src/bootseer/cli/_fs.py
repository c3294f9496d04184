"""What the verbs of ``bootseer fs`` share: URLs, sizes and ages as options, progress bars, JSON."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from bootseer.cli._image import print_json, size_text

if TYPE_CHECKING:
    from bootseer.stripefs import FileStat, StripeFS

FILES, CHECKPOINTS, CARE, MOUNTS = "Files", "Checkpoints", "Care and measurement", "Mounts"
"""Panels of the help."""

_SIZE = re.compile(r"(\d+)\s*([KMG]?)(i?B)?", re.IGNORECASE)
_AGE = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd]?)")
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def parse_size(text: str | int) -> int:
    """``4096``, ``256K``, ``1MiB``, ``2G``: bytes, in powers of 1024."""
    found = _SIZE.fullmatch(str(text).strip())
    if found is None:
        raise typer.BadParameter(f"{text!r} is no size: write 4096, 256K, 1M or 2G")
    return int(found[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[found[2].upper()]


def parse_age(text: str | float) -> float:
    """``0``, ``90s``, ``30m``, ``12h``, ``7d``: seconds."""
    found = _AGE.fullmatch(str(text).strip())
    if found is None:
        raise typer.BadParameter(f"{text!r} is no age: write 0, 90s, 30m, 12h or 7d")
    return float(found[1]) * _SECONDS[found[2]]


Url = Annotated[str, typer.Argument(metavar="URL", help="A path, file://PATH, hdfs://HOST:PORT/PATH or an fsspec URL")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout")]
Width = Annotated[int, typer.Option(help="Stripe width: storage files per file, 1 to 256")]
Unit = Annotated[int, typer.Option(parser=parse_size, metavar="SIZE", help="Stripe unit, 4K to 64M", show_default="1M")]


def place(url: str) -> tuple[StripeFS, str]:
    """The store of the folder above ``url``, and the path in it; for the root of a storage the store itself."""
    from bootseer.stripefs import open_fs, split_url

    _check(url)
    scheme, _, rest = url.rpartition("://")
    if not rest.strip("/") if scheme in ("", "file") else not rest.strip("/").partition("/")[2]:
        return open_fs(url), ""
    base, name = split_url(url)
    return open_fs(base), name


def place_both(first: str, second: str) -> tuple[StripeFS, str, StripeFS, str]:
    """As `place` for two URLs; when they are of one storage both paths are of one store, from its root."""
    import os

    from bootseer.storage.interface import clean
    from bootseer.stripefs import open_fs

    roots, paths = [], []
    for url in (first, second):
        _check(url)
        scheme, sep, rest = url.rpartition("://")
        if scheme in ("", "file"):
            roots.append("/")
            paths.append(clean(os.path.abspath(rest)))
        else:
            host, _, path = rest.partition("/")
            roots.append(f"{scheme}{sep}{host}")
            paths.append(clean(path))
    if roots[0] == roots[1]:
        fs = open_fs(roots[0])
        return fs, paths[0], fs, paths[1]
    return *place(first), *place(second)


def _check(url: str) -> None:
    from bootseer.errors import ConfigError

    if not url or "\0" in url:
        raise ConfigError("an empty URL names no store", hint="name a folder or hdfs://host:port/path")
    try:
        _ = urlsplit(url).port if url.startswith("hdfs://") else None
    except ValueError:
        raise ConfigError(f"{url!r} has no port number", hint="write hdfs://host:port/path") from None


def inside(fs: StripeFS, path: str, url: str, name: str) -> str:
    """``path``, or ``name`` in it when ``url`` means a folder: with a slash at its end, or because it is one."""
    from bootseer.errors import NotFoundError

    if url.endswith("/"):
        return f"{path}/{name}".lstrip("/")
    try:
        return f"{path}/{name}".lstrip("/") if fs.stat(path).is_dir else path
    except NotFoundError:
        return path


@contextlib.contextmanager
def progress(what: str, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr, for terminals."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextlib.contextmanager
def progress_of_files(quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar that names the file it is about."""
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda name, done, total: bar.update(task, description=escape(name), completed=done, total=total)


def row(stat: FileStat) -> dict[str, object]:
    import msgspec

    return {**msgspec.to_builtins(stat), "striped": stat.striped}


def binary_text(count: int) -> str:
    for shift, name in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if count >= 1 << shift:
            value = count / (1 << shift)
            return f"{value:.0f} {name}" if value == int(value) else f"{value:.1f} {name}"
    return f"{count} B"


def age_text(seconds: float) -> str:
    """Two significant parts at most: ``42 s``, ``3 h``, ``5 d``."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def warn(text: str) -> None:
    sys.stderr.write(f"bootseer: {text}\n")


__all__ = [
    "CARE",
    "CHECKPOINTS",
    "FILES",
    "MOUNTS",
    "Json",
    "Unit",
    "Url",
    "Width",
    "age_text",
    "binary_text",
    "inside",
    "parse_age",
    "parse_size",
    "place",
    "place_both",
    "print_json",
    "progress",
    "progress_of_files",
    "row",
    "size_text",
    "warn",
]
