"""What the verbs of ``bootseer fs`` share: URLs and sizes as options."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from bootseer.cli._shared import Bars, count_text, understood
from bootseer.errors import ConfigError, NotFoundError
from bootseer.units import parse_size, size_text

if TYPE_CHECKING:
    from bootseer.stripefs import FileStat, StripeFS

size_value = understood(parse_size)

Url = Annotated[str, typer.Argument(metavar="URL", help="A path, file://PATH, hdfs://HOST:PORT/PATH or an fsspec URL")]
Width = Annotated[int, typer.Option(help="Stripe width: storage files per file, 1 to 256")]
Unit = Annotated[int, typer.Option(parser=size_value, metavar="SIZE", help="Stripe unit, 4K to 64M", show_default="1M")]


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

    from bootseer.backends.interface import clean
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
    if not url or "\0" in url:
        raise ConfigError("an empty URL names no store", hint="name a folder or hdfs://host:port/path")
    try:
        _ = urlsplit(url).port if url.startswith("hdfs://") else None
    except ValueError:
        raise ConfigError(f"{url!r} has no port number", hint="write hdfs://host:port/path") from None


def inside(fs: StripeFS, path: str, url: str, name: str) -> str:
    """``path``, or ``name`` in it when ``url`` means a folder: with a slash at its end, or because it is one."""
    if url.endswith("/"):
        return f"{path}/{name}".lstrip("/")
    try:
        return f"{path}/{name}".lstrip("/") if fs.stat(path).is_dir else path
    except NotFoundError:
        return path


@contextlib.contextmanager
def progress(what: str, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr, for terminals."""
    with Bars(quiet=quiet) as bars:
        yield functools.partial(bars.update, what)


def row(stat: FileStat) -> dict[str, object]:
    import msgspec

    found = msgspec.to_builtins(stat)
    del found["permissions"]  # in numbers of this node: not what the store says
    return {**found, "striped": stat.striped}


def files_text(files: int, size: int) -> str:
    return f"{count_text(files, 'file', 'files')}, {size_text(size)}"


def binary_text(count: int) -> str:
    for shift, name in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if count >= 1 << shift:
            value = count / (1 << shift)
            return f"{value:.0f} {name}" if value == int(value) else f"{value:.1f} {name}"
    return f"{count} B"
