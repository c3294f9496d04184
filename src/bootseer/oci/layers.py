"""Layer rules without a file system: tar members applied to an `erofs.Tree`, for images and for plain folders alike.

The rules are those of the OCI image-spec 1.1 ("Applying changesets") and of docs/internals/image.md ("Rules where
layers leave room"). Layers come from outside: every path is resolved inside the root, as ``openat2`` with
``RESOLVE_IN_ROOT`` would (tests/node/test_erofs_layers.py compares the two)."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterator

from bootseer.erofs import Attrs, Buffer, Hole, Node, Tree, xattr
from bootseer.erofs.tree import show
from bootseer.errors import DataError
from bootseer.oci import tar

_log = logging.getLogger(__name__)
_WHITEOUT, _OPAQUE, _AUFS = b".wh.", b".wh..wh..opq", b".wh..wh."
_ESTARGZ = (b"stargz.index.json", b".prefetch.landmark", b".no.prefetch.landmark")
"""What eStargz puts into the root of a layer for those who read it lazily, and no image brings itself."""
_OVERLAY = (b"trusted.overlay.", b"user.overlay.")
"""Overlayfs takes these for its own: they hide files, or say that their content is elsewhere."""
_OF_HOST = (b"security.selinux", b"security.ima", b"security.evm", b"system.nfs4_acl")
"""What the machine that built the image thinks of its files; another one has its own labels and keys."""
_MAX_LINKS = 40
"""Symbolic links followed in one path, as in the kernel."""
_MAX_PATH = 4095
"""PATH_MAX without its NUL: nobody could open what lies deeper, and work per member stays bounded."""
_IMPLIED = Attrs(0o755)
_TYPES = {tar.CHAR: stat.S_IFCHR, tar.BLOCKDEV: stat.S_IFBLK, tar.FIFO: stat.S_IFIFO}


class _Folder:
    """A directory, where it lies, and how long its path is (without links). Paths themselves are not kept: one for
    every folder on the way to a member of depth 2,040 is 4 MB."""

    __slots__ = ("above", "length", "name", "node")

    def __init__(self, node: Node, above: _Folder | None = None, name: bytes = b"") -> None:
        self.node = node
        self.above = above
        self.name = name
        self.length = 0 if above is None else above.reach(name)

    def reach(self, name: bytes) -> int:
        """Length of the path of a member; `DataError` when nobody could open it."""
        length = self.length + len(name) + (self.length > 0)
        if length > _MAX_PATH:
            raise DataError(f"a path of {length} bytes, more than {_MAX_PATH}, that ends with {show(name[-80:])}")
        return length

    def child(self, name: bytes) -> Node | None:
        assert self.node.children is not None
        return self.node.children.get(name)

    def within(self, node: Node) -> bool:
        """Whether this is ``node`` or lies below it."""
        here: _Folder | None = self
        while here is not None and here.node is not node:
            here = here.above
        return here is not None


class _Missing(Exception):
    """A part of a path is not there."""


class LayeredTree:
    """Applies layers, bottom first, to a tree. Contents stream to where the tree keeps them, also those that a later
    layer hides (see `Writer.dead_ranges`). Not safe for use by several threads."""

    def __init__(self, tree: Tree) -> None:
        self.members = 0
        """Members applied so far."""
        self._tree = tree
        self._fresh: dict[Node, set[bytes]] = {}
        """Of a directory, the names that this layer has members at or below."""
        self._parent: _Folder | None = None
        self._parent_name = b""
        self._left_out: set[bytes] = set()

    def apply(self, chunks: Iterator[bytes]) -> None:
        """Apply one layer, a tar stream, and read it to its end; call `Writer.begin_layer` first where layers should
        share blocks. Raises `DataError` for a malformed or hostile layer, or one that no EROFS image can hold; the tree
        is useless then."""
        self._fresh = {}
        self._parent = None
        reader = tar.ChunkReader(chunks)
        for entry in tar.entries(reader):
            self.members += 1
            parts = _parts(entry.name)
            if not parts:
                if entry.kind != tar.DIRECTORY:
                    raise DataError("the root is not a directory")
                self._tree.add_dir(b"", self._attrs(entry))
                continue
            name = parts[-1]
            parent = self._open_parent(parts[:-1])
            if len(parts) == 1 and name in _ESTARGZ:
                reader.skip(entry.size)
            elif name.startswith(_WHITEOUT):
                self._whiteout(parent, name)
                reader.skip(entry.size)
            else:
                self._member(reader, entry, parent, name)

    def _member(self, reader: tar.ChunkReader, entry: tar.Entry, parent: _Folder, name: bytes) -> None:
        parent.reach(name)
        self._mark(parent, name)
        kind, at = entry.kind, parent.node
        if kind == tar.HARDLINK:
            self._hardlink(entry, parent, name)
            return
        attrs = self._attrs(entry)
        if kind == tar.DIRECTORY:
            self._tree.add_dir(name, attrs, at=at)
            return
        if kind == tar.REGULAR:
            self._clear(parent, name)
            extents = None if entry.extents is None else len(entry.extents)
            content = _content(reader, entry)
            self._tree.add_file(name, attrs, entry.file_size, content, extents=extents, at=at)
            return
        self._clear(parent, name)
        if kind == tar.SYMLINK:
            self._tree.add_symlink(name, attrs, entry.link, at=at)
        else:
            self._tree.add_device(name, attrs, _TYPES[kind], _device(entry), at=at)

    def _attrs(self, entry: tar.Entry) -> Attrs:
        xattrs = entry.xattrs
        if xattrs:
            # Linux has user attributes on files and directories only
            users = entry.kind in (tar.REGULAR, tar.DIRECTORY)
            others = _OVERLAY if users else (b"user.", *_OVERLAY)
            fit = {
                key for key in xattrs if xattr.representable(key) and not (key.startswith(others) or key in _OF_HOST)
            }
            for key in xattrs.keys() - fit - self._left_out:
                self._left_out.add(key)
                _log.warning(
                    "attribute %s left out, which an image does not bring there: %s", show(key), show(entry.name)
                )
            xattrs = {key: value for key, value in xattrs.items() if key in fit}
        return Attrs(entry.mode, entry.uid, entry.gid, entry.mtime_ns, xattrs)

    def _hardlink(self, entry: tar.Entry, parent: _Folder, name: bytes) -> None:
        target = _parts(entry.link)
        if not target:
            raise DataError(f"hard link {show(entry.name)} to the root")
        try:
            folder = self._resolve(target[:-1])
        except _Missing:
            raise DataError(f"hard link {show(entry.name)} to missing {show(entry.link)}") from None
        node = folder.child(target[-1])
        if node is None:
            raise DataError(f"hard link {show(entry.name)} to missing {show(entry.link)}")
        if folder.node is parent.node and name == target[-1]:
            return
        if node.children is not None:
            raise DataError(f"hard link {show(entry.name)} to directory {show(entry.link)}")
        there = parent.child(name)
        if there is not None and folder.within(there):
            raise DataError(f"hard link {show(entry.name)} in place of a directory that holds {show(entry.link)}")
        self._clear(parent, name)
        self._tree.add_hardlink(name, node, at=parent.node)

    def _whiteout(self, parent: _Folder, name: bytes) -> None:
        if name == _OPAQUE:
            for child in list(parent.node.children or ()):
                self._remove_lower(parent, child)
        elif not name.startswith(_AUFS):
            victim = name.removeprefix(_WHITEOUT)
            if victim in (b"", b".", b".."):
                raise DataError(f"bad whiteout {show(name)}")
            self._remove_lower(parent, victim)

    def _remove_lower(self, parent: _Folder, name: bytes) -> None:
        """Remove ``name`` as far as lower layers made it: a layer's whiteouts never hide its own members."""
        stack = [(parent.node, name)]
        while stack:
            folder, name = stack.pop()
            node = (folder.children or {}).get(name)
            if name not in self._fresh.get(folder, ()):
                self._tree.remove(name, at=folder)
            elif node is not None and node.children is not None:
                stack += [(node, child) for child in node.children]

    def _clear(self, parent: _Folder, name: bytes) -> None:
        """Remove a directory at ``name``: what is to come there replaces anything else."""
        node = parent.child(name)
        if node is not None and node.children is not None:
            self._tree.remove(name, at=parent.node)

    def _mark(self, folder: _Folder, name: bytes) -> None:
        while name not in (names := self._fresh.setdefault(folder.node, set())):
            names.add(name)
            if folder.above is None:
                return
            folder, name = folder.above, folder.name

    def _open_parent(self, parts: list[bytes]) -> _Folder:
        """The folder ``parts``, made if missing; remembered, as members of one folder come in a row."""
        wanted = b"/".join(parts)
        if self._parent is not None and wanted == self._parent_name:
            return self._parent
        self._parent = None
        folder = self._resolve(parts, make=True)
        self._parent, self._parent_name = folder, wanted
        return folder

    def _resolve(self, parts: list[bytes], *, make: bool = False) -> _Folder:
        """The folder that ``parts`` leads to, links followed inside the root; with ``make``, missing ones are made.
        `_Missing` when a part is not there, `DataError` when one is no directory, links go in circles, or one that
        dangles would have to be made."""
        here = _Folder(self._tree.root)
        followed = 0
        for part in parts:
            ahead, in_link = [part], False
            while ahead:
                name = ahead.pop()
                if name in (b"", b"."):
                    continue
                if name == b"..":
                    here = here.above or here
                    continue
                node = here.child(name)
                if node is None:
                    if not make:
                        raise _Missing
                    if in_link:
                        raise DataError(f"{show(b'/'.join(parts))} leads through a dangling link")
                    here.reach(name)
                    node = self._tree.add_dir(name, _IMPLIED, at=here.node)
                if node.children is not None:
                    here = _Folder(node, here, name)
                    continue
                if node.kind != stat.S_IFLNK:
                    raise DataError(f"{show(b'/'.join(parts))} leads through {show(name)}, which is no directory")
                followed += 1
                if followed > _MAX_LINKS:
                    raise DataError(f"{show(b'/'.join(parts))} leads through more than {_MAX_LINKS} symbolic links")
                if node.target.startswith(b"/"):
                    while here.above is not None:
                        here = here.above
                ahead += node.target.split(b"/")[::-1]
                in_link = True
        return here


def _device(entry: tar.Entry) -> int:
    if entry.kind == tar.FIFO:
        return 0
    if not (0 <= entry.major < 1 << 12 and 0 <= entry.minor < 1 << 20):
        raise DataError(f"device {show(entry.name)} with number {entry.major}:{entry.minor}")
    return os.makedev(entry.major, entry.minor)


def _content(reader: tar.ChunkReader, entry: tar.Entry) -> Iterator[Buffer | Hole]:
    if entry.extents is None:
        yield from reader.pieces(entry.size)
        return
    at = 0
    for offset, length in entry.extents:
        if offset > at:
            yield Hole(offset - at)
        yield from reader.pieces(length)
        at = offset + length
    if entry.file_size > at:
        yield Hole(entry.file_size - at)


def _parts(name: bytes) -> list[bytes]:
    """The components of a member's name, taken from the root; `DataError` for ``..`` and NUL."""
    if len(name) > 2 * _MAX_PATH:
        raise DataError(f"member with a name of {len(name)} bytes: {show(name[:80])}...")
    parts = [part for part in name.split(b"/") if part not in (b"", b".")]
    if b".." in parts or b"\0" in name:
        raise DataError(f"member whose name leads out of the root: {show(name)}")
    return parts
