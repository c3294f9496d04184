"""What a file system tree consists of while it is in memory: inodes with their metadata, never their contents."""

from __future__ import annotations

import stat
from array import array
from collections.abc import Mapping
from typing import NamedTuple

from bootseer.erofs.xattr import checked
from bootseer.errors import DataError

_FILE_TYPES = {
    stat.S_IFREG: 1,
    stat.S_IFDIR: 2,
    stat.S_IFCHR: 3,
    stat.S_IFBLK: 4,
    stat.S_IFIFO: 5,
    stat.S_IFSOCK: 6,
    stat.S_IFLNK: 7,
}
MAX_ID = (1 << 32) - 2  # the next one means "leave it" to chown(2)
_NO_XATTRS: Mapping[bytes, bytes] = {}


class Attrs(NamedTuple):
    """Metadata of an inode. ``mode``: permission bits alone (07777); the method that adds it says the type.
    ``mtime_ns`` counts from 1970, negative before; ``xattrs`` have full names (``b"user.key"``)."""

    mode: int
    uid: int = 0
    gid: int = 0
    mtime_ns: int = 0
    xattrs: Mapping[bytes, bytes] = _NO_XATTRS


class Node:
    """An inode of a tree. Hard links are several names of one `Node`. Only who writes the tree changes it."""

    __slots__ = (
        "children",
        "chunk_bits",
        "chunks",
        "gid",
        "links",
        "mode",
        "mtime_ns",
        "nid",
        "rdev",
        "size",
        "start",
        "target",
        "uid",
        "xattrs",
    )

    def __init__(self, kind: int, attrs: Attrs) -> None:
        self.set_attrs(kind, attrs)
        self.children: dict[bytes, Node] | None = {} if kind == stat.S_IFDIR else None
        """Names of a directory; None for others."""
        self.target = b""
        """Of a symbolic link."""
        self.rdev = 0
        self.size = 0
        """Of a regular file."""
        self.start = -1
        """Byte in the data device where a file's content starts; -1 where it has none (empty, or one hole)."""
        self.chunks: array[int] | None = None
        """Block of each chunk (`format.HOLE`: none) of a file with holes and content; else None: it is contiguous."""
        self.chunk_bits = 0
        self.nid = -1
        self.links = 0

    def set_attrs(self, kind: int, attrs: Attrs) -> None:
        """Take over ``attrs``; `DataError` for what no inode can hold."""
        mode, uid, gid, mtime_ns, xattrs = attrs
        if not (0 <= uid <= MAX_ID and 0 <= gid <= MAX_ID):
            raise DataError(f"owner {uid}:{gid} is out of range")
        if not -(1 << 63) <= mtime_ns // 1_000_000_000 < 1 << 63:
            raise DataError(f"time {mtime_ns} ns is out of range")
        self.mode = kind | (mode & 0o7777)
        self.uid = uid
        self.gid = gid
        self.mtime_ns = mtime_ns
        self.xattrs = checked(xattrs) if xattrs else ()
        """Sorted by name."""

    @property
    def kind(self) -> int:
        """The type as in ``stat.S_IFMT(mode)``."""
        return self.mode & 0o170000

    @property
    def file_type(self) -> int:
        """The type as in directory entries."""
        return _FILE_TYPES[self.mode & 0o170000]
