"""A file system tree in memory that grows by paths: `Tree`. Its subclasses say where contents go."""

from __future__ import annotations

import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Iterable

from bootseer.erofs import format as fmt
from bootseer.erofs.data import Buffer, Hole
from bootseer.erofs.node import Attrs, Node
from bootseer.errors import DataError

_ROOT = Attrs(0o755)


class Tree(ABC):
    """Inodes and their names, as an EROFS image can hold them; about 0.5 KiB of memory an inode. Not safe for use by
    several threads.

    Paths are bytes relative to the root (``b"usr/bin/env"``; slashes at either end do not matter, ``b""`` is the root)
    and are taken literally: no symbolic link is followed, ``.`` and ``..`` are refused. The parent must be there. A
    name that is taken is replaced, except that `add_dir` keeps the members of a directory, and that nothing replaces a
    directory (`remove` it first). `DataError` for whatever an image cannot hold: a name over 255 bytes, a missing
    parent, a size that is wrong. After such an error the tree is as before and adding may go on. ``at``, a folder of
    this tree, stands for the root in one call: what is far down need not be walked to."""

    def __init__(self) -> None:
        self.root = Node(stat.S_IFDIR, _ROOT)
        """The tree; for reading only."""

    @abstractmethod
    def _store(self, node: Node, chunks: Iterable[Buffer | Hole], extents: int | None) -> None:
        """Take the content of a new file of ``node.size`` bytes."""

    def add_dir(self, path: bytes, attrs: Attrs, *, at: Node | None = None) -> Node:
        """Make a directory, or give one that is there other attributes. The root is there at first (0755, 0:0)."""
        if not path.strip(b"/"):
            (at or self.root).set_attrs(stat.S_IFDIR, attrs)
            return at or self.root
        children, name = self._place(path, at)
        node = children.get(name)
        if node is not None and node.children is not None:
            node.set_attrs(stat.S_IFDIR, attrs)
            return node
        node = children[name] = Node(stat.S_IFDIR, attrs)
        return node

    def add_file(
        self,
        path: bytes,
        attrs: Attrs,
        size: int,
        chunks: Iterable[Buffer | Hole],
        *,
        extents: int | None = None,
        at: Node | None = None,
    ) -> Node:
        """Make a regular file of ``size`` bytes; its content is written as it comes. Buffers are handed on without
        copying and must not change afterwards. ``Hole(length)`` stands for zeros. ``extents``: the number of pieces
        between holes, of a file from outside: what such files cost is bounded then (`DataError`) by the content of all
        files so far."""
        children, name = self._place(path, at, replace=True)
        node = Node(stat.S_IFREG, attrs)
        node.size = size
        self._store(node, chunks, extents)
        children[name] = node
        return node

    def add_symlink(self, path: bytes, attrs: Attrs, target: bytes, *, at: Node | None = None) -> Node:
        """Make a symbolic link; its mode is 0777 whatever ``attrs`` says, as Linux has it."""
        children, name = self._place(path, at, replace=True)
        if not 0 < len(target) <= fmt.MAX_TARGET or b"\0" in target:
            raise DataError(f"symbolic link {show(path)} with a target of {len(target)} bytes")
        node = Node(stat.S_IFLNK, attrs._replace(mode=0o777))
        node.target = target
        children[name] = node
        return node

    def add_device(self, path: bytes, attrs: Attrs, kind: int, rdev: int = 0, *, at: Node | None = None) -> Node:
        """Make a device node, fifo or socket: ``kind`` is ``stat.S_IFCHR``, ``S_IFBLK``, ``S_IFIFO`` or ``S_IFSOCK``;
        ``rdev`` as of `os.makedev`, with up to 12 bits of major and 20 of minor number."""
        children, name = self._place(path, at, replace=True)
        node = Node(kind, attrs)
        if kind in (stat.S_IFCHR, stat.S_IFBLK):
            major, minor = os.major(rdev), os.minor(rdev)
            if major >= 1 << 12 or minor >= 1 << 20:
                raise DataError(f"device {show(path)} with number {major}:{minor}")
            node.rdev = rdev
        children[name] = node
        return node

    def add_hardlink(self, path: bytes, existing: bytes | Node, *, at: Node | None = None) -> Node:
        """Give what is at ``existing`` (no directory; its path from the root, or itself) one more name."""
        node = self.lookup(existing) if isinstance(existing, bytes) else existing
        if node is None:
            raise DataError(f"hard link {show(path)} to missing {existing!r}")
        if node.children is not None:
            raise DataError(f"hard link {show(path)} to a directory")
        children, name = self._place(path, at, replace=True)
        children[name] = node
        return node

    def remove(self, path: bytes, *, at: Node | None = None) -> None:
        """Remove a name, and all below it; other hard links stay. Nothing happens when it is not there."""
        parts = _parts(path)
        if not parts:
            raise DataError("the root cannot be removed")
        node = self._walk(parts[:-1], at)
        if node is not None and node.children is not None:
            node.children.pop(parts[-1], None)

    def lookup(self, path: bytes) -> Node | None:
        """What is at ``path``; None if nothing is."""
        return self._walk(_parts(path))

    def _place(self, path: bytes, at: Node | None, *, replace: bool = False) -> tuple[dict[bytes, Node], bytes]:
        """The members of the parent and the name in it, which is fit for a new entry."""
        parts = _parts(path)
        if not parts:
            raise DataError("the root is a directory")
        parent = self._walk(parts[:-1], at)
        if parent is None or parent.children is None:
            raise DataError(f"{show(b'/'.join(parts[:-1]))} is no directory but has members")
        name = parts[-1]
        if len(name) > fmt.MAX_NAME:
            raise DataError(f"name of {len(name)} bytes, more than {fmt.MAX_NAME}: {show(path)}")
        if replace:
            there = parent.children.get(name)
            if there is not None and there.children is not None:
                raise DataError(f"{show(path)} is a directory")
        return parent.children, name

    def _walk(self, parts: list[bytes], at: Node | None = None) -> Node | None:
        node: Node | None = at or self.root
        for part in parts:
            if node is None or node.children is None:
                return None
            node = node.children.get(part)
        return node


def _parts(path: bytes) -> list[bytes]:
    parts = path.strip(b"/").split(b"/")
    if parts == [b""]:
        return []
    if b"" in parts or b"." in parts or b".." in parts or b"\0" in path:
        raise DataError(f"{show(path)} is not a plain path")
    return parts


def show(name: bytes) -> str:
    """A name of any bytes for a message."""
    return repr(os.fsdecode(name))
