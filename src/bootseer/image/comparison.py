"""Comparison of a converted image with its source: each name, with all that a reader can see of it.

The layers are applied once more, by the rules of `oci.layers`, to a tree that keeps a hash of each content; the
converted tree is read back from the store. So it finds what was damaged or lost in writing, storing and sharing
blocks, not another reading of the rules."""

from __future__ import annotations

import itertools
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
from blake3 import blake3

from bootseer import oci
from bootseer.blocks.without_mount import OpenTree, look
from bootseer.chunks import hashing
from bootseer.erofs import Buffer, Hole, Inode, Node, Tree
from bootseer.erofs.tree import show
from bootseer.errors import DataError
from bootseer.image.conversion import work_folder
from bootseer.image.record import ImageRecord
from bootseer.objects import open_store
from bootseer.oci.image import past_mirrors
from bootseer.oci.layers import LayeredTree
from bootseer.oci.pipeline import Layers, Progress

_UNIT = 1 << 16
_PIECE = 4 << 20
_SHOWN = 5


def check(
    ref: oci.Reference | str,
    record: ImageRecord,
    store_url: str,
    *,
    work_dir: Path,
    cache_dir: Path,
    plain_http: bool | None = None,
    progress: Progress | None = None,
) -> int:
    """How many names the image ``ref`` has; all are in the converted tree of ``record`` as they are in its layers, and
    no others. Downloads the layers and reads all of the tree. Raises `DataError` that says what differs, and whatever
    keeps both from being read."""
    parsed = oci.Reference.parse(ref) if isinstance(ref, str) else ref
    exact = msgspec.structs.replace(parsed, digest=record.image)  # a tag may have moved
    with oci.open_image(exact, platform=record.platform, plain_http=plain_http, spool=work_dir) as image:

        def applied() -> _Hashed:
            hashed = _Hashed()
            tree = LayeredTree(hashed)
            with work_folder(work_dir) as work, Layers(image, work, progress=progress) as layers:
                for index in range(len(image.layers)):
                    layers.apply(index, tree.apply, "check")
            return hashed

        wanted = past_mirrors(image.source, applied)
    names = dict(_names(wanted.root))
    count = len(names)
    with look(open_store(store_url), record.tree, cache_dir) as tree:
        found = list(itertools.islice(_differences(names, wanted, tree), _SHOWN + 1))
    if found:
        more = " and more" if len(found) > _SHOWN else ""
        raise DataError(
            f"{ref} was converted to another tree: {'; '.join(found[:_SHOWN])}{more}",
            hint="convert the image with --repair",
        )
    return count


class _Hashed(Tree):
    """A tree with a hash of each content."""

    def __init__(self) -> None:
        super().__init__()
        self.contents: dict[Node, bytes] = {}

    def _store(self, node: Node, chunks: Iterable[Buffer | Hole], extents: int | None) -> None:
        self.contents[node] = _digest(chunks)


def _names(root: Node) -> Iterator[tuple[bytes, Node]]:
    stack = [(b"", root)]
    while stack:
        path, node = stack.pop()
        yield path, node
        stack += [(path + b"/" + name if path else name, child) for name, child in (node.children or {}).items()]


def _differences(names: dict[bytes, Node], wanted: _Hashed, tree: OpenTree) -> Iterator[str]:
    """What differs, in words. Takes from ``names`` what the converted tree has, too."""
    inodes: dict[Node, int] = {}
    nodes: dict[int, Node] = {}
    files: list[tuple[int, bytes, Inode, Node]] = []
    for path, inode in tree.reader.walk():
        node = names.pop(path, None)
        if node is None:
            yield f"{show(path)} is not in its layers"
            continue
        first = node not in inodes
        if inodes.setdefault(node, inode.nid) != inode.nid or nodes.setdefault(inode.nid, node) is not node:
            yield f"{show(path)} is linked to others"
        elif different := _attribute(node, inode, tree):
            yield f"{show(path)} has another {different}"
        elif inode.is_file and first:
            at = next((extent.data_offset for extent in tree.reader.extents(inode)), 0)
            files.append((at, path, inode, node))
    yield from (f"{show(path)} is missing" for path in names)
    for _, path, inode, node in sorted(files, key=lambda one: one[0]):  # as they are stored
        if _digest(_pieces(tree, inode)) != wanted.contents[node]:
            yield f"{show(path)} has other bytes"


def _attribute(node: Node, inode: Inode, tree: OpenTree) -> str:
    """The first one that differs, or nothing."""
    has_size = inode.is_file or inode.is_symlink
    size = len(node.target) if inode.is_symlink else node.size
    for name, is_so in (
        ("type", stat.S_IFMT(node.mode) == stat.S_IFMT(inode.mode)),
        ("mode", node.mode == inode.mode),
        ("owner", (node.uid, node.gid) == (inode.uid, inode.gid)),
        ("time", node.mtime_ns == inode.mtime_ns),
        ("size", not has_size or size == inode.size),
        ("device", not (stat.S_ISCHR(inode.mode) or stat.S_ISBLK(inode.mode)) or node.rdev == inode.rdev),
    ):
        if not is_so:
            return name
    if inode.is_symlink and tree.reader.readlink(inode) != node.target:
        return "target"
    return "" if tree.reader.xattrs(inode) == dict(node.xattrs) else "attribute"


def _pieces(tree: OpenTree, inode: Inode) -> Iterator[Buffer | Hole]:
    """The content of a converted file."""
    at = 0
    places = [(extent.file_offset, extent.length) for extent in tree.reader.extents(inode)]
    places += [(offset, len(data)) for offset, data in tree.reader.inline(inode)]
    for start, length in sorted(places):
        if start > at:
            yield Hole(start - at)
        for offset in range(start, start + length, _PIECE):
            yield tree.reader.read(inode, offset, min(_PIECE, start + length - offset))
        at = start + length
    if inode.size > at:
        yield Hole(inode.size - at)


def _digest(pieces: Iterable[Buffer | Hole]) -> bytes:
    """Of a content: a hash of what of it is not zero, and where, so that a hole costs nothing on either side."""
    state, unit, at = hashing.hasher(), bytearray(), 0
    for piece in pieces:
        # Of a hole, what ends the unit before it and begins the one behind it.
        skipped = max(0, piece.length - 2 * _UNIT) // _UNIT if isinstance(piece, Hole) else 0
        data = memoryview(bytes(piece.length - skipped * _UNIT) if isinstance(piece, Hole) else piece)
        while data:
            took = min(len(data), _UNIT - len(unit))
            unit += data[:took]
            data = data[took:]
            if len(unit) == _UNIT:
                _add(state, unit, at)
                at += 1 + skipped
                unit, skipped = bytearray(), 0
    _add(state, unit, at)
    return state.digest()


def _add(state: blake3, unit: bytearray, at: int) -> None:
    if stripped := unit.rstrip(b"\0"):
        state.update(at.to_bytes(8, "little") + len(stripped).to_bytes(8, "little") + stripped)
