"""What the verbs of ``bootseer fs`` share: URLs and sizes as options."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from bootseer.cli._shared import Bars, understood
from bootseer.errors import NotFoundError
from bootseer.units import count_text, parse_size, size_text

if TYPE_CHECKING:
    from bootseer.stripefs import FileStat, StripeFS

size_value = understood(parse_size)

Url = Annotated[str, typer.Argument(metavar="URL", help="A path, file://PATH, hdfs://HOST:PORT/PATH or an fsspec URL")]
Width = Annotated[int, typer.Option(help="Stripe width: storage files per file, 1 to 256")]
Unit = Annotated[int, typer.Option(parser=size_value, metavar="SIZE", help="Stripe unit, 4K to 64M", show_default="1M")]


def place(url: str) -> tuple[StripeFS, str]:
    """As `bootseer.stripefs.place`."""
    from bootseer import stripefs

    return stripefs.place(url)


def place_both(first: str, second: str) -> tuple[StripeFS, str, StripeFS, str]:
    """As `place` for two URLs; when they are of one storage both paths are of one store, from its root."""
    from bootseer.stripefs import locate, open_fs

    one, other = locate(first), locate(second)
    if one.root == other.root:
        fs = open_fs(one._replace(path="/").url)
        return fs, one.path.lstrip("/"), fs, other.path.lstrip("/")
    return *place(first), *place(second)


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
