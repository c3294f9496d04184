"""``bootseer image ls``, ``inspect`` and ``extract``: converted images without a mount."""

from __future__ import annotations

import json
import os
import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bootseer.cli._shared import (
    AsJson,
    Bars,
    JobName,
    PlainHttp,
    Platform,
    RequireSignature,
    Stored,
    StoreUrl,
    VerifyKey,
    answer,
    open_shared,
    print_json,
    settings,
    write_out,
)
from bootseer.errors import BootseerError, NotFoundError, doing
from bootseer.folders import settled
from bootseer.units import one_line

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bootseer.blocks.without_mount import OpenTree
    from bootseer.erofs import Inode, Reader

_PIECE = 4 << 20
_KINDS = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "folder",
    stat.S_IFLNK: "symlink",
    stat.S_IFCHR: "char",
    stat.S_IFBLK: "block",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
}


def ls(
    ref: Stored,
    path: Annotated[str, typer.Argument(metavar="[PATH]", help="File or folder in the image")] = "/",
    recursive: Annotated[bool, typer.Option("--recursive", "-R", help="Everything below PATH too")] = False,
    platform: Platform = "",
    store: StoreUrl = "",
    plain_http: PlainHttp = None,
    as_json: AsJson = False,
) -> None:
    """List the files of a converted image without mounting it. `bootseer store ls` lists images."""
    with opened(ref, store, plain_http, platform) as tree:
        reader = tree.reader
        where, top = _find(reader, path)
        rows = _rows(reader, where, top, recursive)
        if as_json:
            print_json([_entry(reader, name, inode) for name, inode in rows])
            return
        for name, inode in rows:
            typer.echo(_line(reader, name, inode))


def inspect(
    ref: Stored, platform: Platform = "", store: StoreUrl = "", plain_http: PlainHttp = None, as_json: AsJson = False
) -> None:
    """Show what the store knows of a converted image: digests, sizes, start command."""
    import msgspec

    from bootseer import image

    record = image.only(ref, open_shared(store), platform=platform, plain_http=plain_http, config=settings(store))
    fields = msgspec.to_builtins(record)
    answer(record, as_json, *(f"{name:>12}: {_value(value)}" for name, value in fields.items()))


def extract(
    ref: Stored,
    target: Annotated[Path | None, typer.Argument(metavar="[DIR]", help="Empty or new folder")] = None,
    file: Annotated[str, typer.Option("--file", metavar="PATH", help="Only this file; links are followed")] = "",
    output: Annotated[Path, typer.Option("--output", "-o", help="With --file: where to; - is stdout")] = Path("-"),
    platform: Platform = "",
    job: JobName = "",
    store: StoreUrl = "",
    verify_key: VerifyKey = "",
    require_signature: RequireSignature = False,
    plain_http: PlainHttp = None,
) -> None:
    """Write all files of a converted image into DIR, for hosts where nothing may be mounted.

    Files that earlier starts (of --job) touched come first, and a file is there only when it is whole. All belongs
    to who extracts, also to root: owners, set-uid bits, capabilities and device nodes are not kept. With --file one
    file is written, and only its own blocks are fetched.

    Example: bootseer image extract REF --file /etc/os-release
    """
    from bootseer import image
    from bootseer.blocks.extract.tree import extract as bring
    from bootseer.blocks.profiles.library import ProfileKey, owner_of
    from bootseer.blocks.without_mount import look

    config = settings(store, verify_key, require_signature)
    if bool(file) is (target is not None):
        raise typer.BadParameter("name a DIR for all files, or one with --file")
    shared = open_shared(store)
    record = image.only(ref, shared, platform=platform, plain_http=plain_http, config=config)
    if target is None:
        with look(shared, record.tree, Path(config.cache_dir)) as tree:
            write_out(_content(tree.reader, ref, file), output)
        return
    if os.geteuid() == 0:  # where nobody else changes names while it writes
        target = settled(target / "any").parent
        with doing(f"extract into {target}"):
            target.mkdir(parents=True, exist_ok=True)
        settled(target / "any")  # nobody was quicker to make it
    began = time.monotonic()
    with Bars(quiet=False) as bars:
        bring(
            shared,
            record.tree,
            target,
            profile=ProfileKey(job or "default", owner_of(os.getuid())),
            progress=lambda done, total: bars.update("extract", done, total),
        )
    typer.echo(f"extracted {ref} into {target} in {time.monotonic() - began:.1f} s")


def _content(reader: Reader, ref: str, path: str) -> Iterator[bytes]:
    _, inode = reader.resolve(os.fsencode(path))
    if not inode.is_file:
        raise BootseerError(f"cannot print {path} of {ref}: it is no file but a {_KINDS[stat.S_IFMT(inode.mode)]}")
    for offset in range(0, inode.size, _PIECE):
        yield reader.read(inode, offset, _PIECE)


def opened(ref: str, store: str, plain_http: bool | None, platform: str = "") -> OpenTree:
    """The tree of a converted image, to be closed. Raises `NotFoundError`, `UnavailableError`, `DataError`."""
    from bootseer import image
    from bootseer.blocks.without_mount import look

    config = settings(store)
    shared = open_shared(store)
    record = image.only(ref, shared, platform=platform, plain_http=plain_http, config=config)
    return look(shared, record.tree, Path(config.cache_dir))


def _find(reader: Reader, path: str) -> tuple[bytes, Inode]:
    """What ``path`` names: a link itself, unless it ends with a slash, but links on the way are followed."""
    raw = os.fsencode(path)
    folder, _, name = raw.rstrip(b"/").rpartition(b"/")
    if raw.endswith(b"/") or name in (b"", b".", b".."):
        return reader.resolve(raw)
    where, inode = reader.resolve(folder)
    full = where + b"/" + name if where else name
    if not inode.is_dir:
        raise NotFoundError(f"the image has no {path}")
    return full, reader.stat(full)


def _rows(reader: Reader, where: bytes, top: Inode, recursive: bool) -> Iterator[tuple[bytes, Inode]]:
    if not top.is_dir:
        yield where, top
    elif recursive:
        yield from (row for row in reader.walk(where) if row[0] != where)
    else:
        for entry in reader.entries(top):
            yield (where + b"/" + entry.name if where else entry.name), reader.inode(entry.nid)


def _value(value: object) -> str:
    return one_line(value if isinstance(value, str) else json.dumps(value))


def _text(path: bytes) -> str:
    return one_line(path.decode(errors="backslashreplace"))


def _line(reader: Reader, path: bytes, inode: Inode) -> str:
    if stat.S_ISCHR(inode.mode) or stat.S_ISBLK(inode.mode):
        size = f"{os.major(inode.rdev)}, {os.minor(inode.rdev)}"
    else:
        size = str(inode.size)
    owner = f"{inode.uid}:{inode.gid}"
    try:
        when = time.strftime("%Y-%m-%d %H:%M", time.gmtime(inode.mtime_ns // 1_000_000_000))
    except (OverflowError, OSError, ValueError):
        when = f"{inode.mtime_ns // 1_000_000_000:>16}"
    arrow = f" -> {_text(reader.readlink(inode))}" if inode.is_symlink else ""
    return f"{stat.filemode(inode.mode)} {inode.nlink:>3} {owner:<11} {size:>12} {when} /{_text(path)}{arrow}"


def _entry(reader: Reader, path: bytes, inode: Inode) -> dict[str, object]:
    row: dict[str, object] = {
        "path": "/" + path.decode(errors="backslashreplace"),
        "kind": _KINDS[stat.S_IFMT(inode.mode)],
        "mode": f"{stat.S_IMODE(inode.mode):04o}",
        "uid": inode.uid,
        "gid": inode.gid,
        "size": inode.size,
        "mtime_ns": inode.mtime_ns,
        "links": inode.nlink,
        "inode": inode.nid,
    }
    if inode.is_symlink:
        row["target"] = reader.readlink(inode).decode(errors="backslashreplace")
    if stat.S_ISCHR(inode.mode) or stat.S_ISBLK(inode.mode):
        row["device"] = [os.major(inode.rdev), os.minor(inode.rdev)]
    if xattrs := reader.xattrs(inode):
        row["xattrs"] = {name.decode(errors="backslashreplace"): value.hex() for name, value in xattrs.items()}
    return row
