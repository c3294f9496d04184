"""Export: a snapshot as a tar file, for other tools: the layer of an image, or an archive. The same snapshot gives the
same bytes: in the order of its inventory, with the attributes that are there, in PAX format without compression."""

from __future__ import annotations

import posixpath
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Literal

from bootseer.blocks import tree
from bootseer.env import snapshots
from bootseer.env.inventory import Entry
from bootseer.env.manifest import SnapshotManifest
from bootseer.env.unpack import verify_stage
from bootseer.errors import UnsupportedError
from bootseer.objects import Store

Format = Literal["oci-layer", "tar"]
_WHITEOUT, _OPAQUE = ".wh.", ".wh..wh..opq"
_KINDS = {"d": tarfile.DIRTYPE, "o": tarfile.DIRTYPE, "f": tarfile.REGTYPE, "l": tarfile.SYMTYPE, "h": tarfile.LNKTYPE}


def export(store: Store, found: SnapshotManifest, form: Format, work: Path, output: BinaryIO) -> None:
    """Write the snapshot ``found`` to ``output``; all of it is verified in the empty folder ``work`` before. An
    ``oci-layer`` says what the command deleted, as layers do; a ``tar`` has what it made alone. Raises `DataError`, and
    `UnsupportedError` for a file that a layer cannot hold."""
    entries = snapshots.entries(store, found)
    if form == "oci-layer":
        for entry in entries:
            if posixpath.basename(entry.inner).startswith(_WHITEOUT):
                raise UnsupportedError(f"a layer cannot hold {entry.inner!r}: the name says that a file is deleted")
    tree.extract(store, found.tree, work / "tree", seen=False)
    verify_stage(work / "tree", entries)
    with tarfile.open(fileobj=output, mode="w|", format=tarfile.PAX_FORMAT, errors="surrogateescape") as archive:
        for entry in entries:
            for item in _items(entry, found.document.targets, form):
                if item.isreg() and item.size:
                    with open(work / "tree" / entry.path, "rb") as file:
                        archive.addfile(item, file)
                else:
                    archive.addfile(item)


def _items(entry: Entry, targets: Sequence[str], form: Format) -> Iterator[tarfile.TarInfo]:
    name = _name(entry.path, targets)
    if entry.kind == "w":
        if form == "oci-layer":
            folder, base = posixpath.split(name)
            yield _empty(posixpath.join(folder, _WHITEOUT + base), entry)
        return
    item = tarfile.TarInfo(name)
    item.type, item.mode, item.uid, item.gid = _KINDS[entry.kind], entry.mode, entry.uid, entry.gid
    item.pax_headers = {
        f"SCHILY.xattr.{key}": value.decode("utf-8", "surrogateescape") for key, value in sorted(entry.xattrs.items())
    }
    item.mtime, rest = divmod(entry.mtime_ns, 10**9)
    if rest:
        item.pax_headers["mtime"] = f"{item.mtime}.{rest:09}"
    if entry.kind == "f":
        item.size = entry.size
    elif entry.kind == "l":
        item.linkname = entry.data
    elif entry.kind == "h":
        item.linkname = _name(entry.data, targets)
    yield item
    if entry.kind == "o" and form == "oci-layer":
        yield _empty(posixpath.join(name, _OPAQUE), entry)


def _empty(name: str, entry: Entry) -> tarfile.TarInfo:
    item = tarfile.TarInfo(name)
    item.mode, item.mtime = 0o600, entry.mtime_ns // 10**9
    return item


def _name(path: str, targets: Sequence[str]) -> str:
    """The name in the archive of what the inventory calls ``path``."""
    number, _, inner = path.partition("/")
    return posixpath.join(targets[int(number)], inner).strip("/") or "."
