"""Wire format of the FUSE protocol 7.31 and later (``linux/fuse.h``): constants and packed structures, no behaviour."""

from __future__ import annotations

import struct

MAJOR, MINOR_WANTED, MINOR_MIN = 7, 40, 31

LOOKUP, FORGET, GETATTR = 1, 2, 3
SETATTR, SYMLINK, MKNOD, MKDIR, UNLINK, RMDIR, RENAME, LINK = 4, 6, 8, 9, 10, 11, 12, 13
WRITE, FSYNC, FLUSH, FSYNCDIR, CREATE, RENAME2 = 16, 20, 25, 30, 35, 45
OPEN, READ, STATFS, RELEASE = 14, 15, 17, 18
INIT, OPENDIR, READDIR, RELEASEDIR = 26, 27, 28, 29
INTERRUPT, DESTROY, BATCH_FORGET, READDIRPLUS = 36, 38, 42, 44

FOPEN_DIRECT_IO, FOPEN_KEEP_CACHE, FOPEN_NOFLUSH = 1 << 0, 1 << 1, 1 << 5
FOPEN_PASSTHROUGH = 1 << 7

INIT_FLAGS = {
    "async_read": 1 << 0,
    "readdirplus": 1 << 13,
    "readdirplus_auto": 1 << 14,
    "async_dio": 1 << 15,
    "parallel_dirops": 1 << 18,
    "max_pages": 1 << 22,
    "explicit_inval_data": 1 << 25,
    "has_resend": 1 << 39,
}
"""INIT flags this server asks for; the kernel grants those it offers. Those above bit 31 travel in ``flags2``."""
PASSTHROUGH = 1 << 37
"""INIT flag, asked for where `Options.passthrough` is set."""
REQUEST_TIMEOUT = 1 << 42
"""INIT flag, asked for where `Options.request_timeout` is set (7.43)."""
INIT_EXT = 1 << 30
"""Set in ``flags`` by a side that has a ``flags2`` (7.36)."""
WRITE_FLAGS = {"atomic_o_trunc": 1 << 3, "big_writes": 1 << 5, "handle_killpriv_v2": 1 << 28}
"""Asked for too, for a file system that is written to. The last one: no file has set-uid bits or capabilities, so the
kernel need not ask for them before each write."""

NOTIFY_INVAL_INODE, NOTIFY_RESEND = 2, 7
INVAL_INODE_OUT = struct.Struct("=Qqq")  # nodeid, offset and length of the pages

IN_HEADER = struct.Struct("=IIQQIIIHH")  # len opcode unique nodeid uid gid pid total_extlen padding
OUT_HEADER = struct.Struct("=IiQ")  # len error unique
INIT_IN = struct.Struct("=IIII")  # major minor max_readahead flags
INIT_IN_FLAGS2 = struct.Struct("=I")  # follows it since 7.36
INIT_OUT = struct.Struct("=IIIIHHIIHHIIH22x")  # ... max_pages map_alignment flags2 max_stack_depth request_timeout
READ_IN = struct.Struct("=QQI")  # fh offset size; read_flags lock_owner flags follow
OPEN_IN = struct.Struct("=II")
OPEN_OUT = struct.Struct("=QII")  # fh open_flags backing_id
RELEASE_IN = struct.Struct("=QIIQ")
FORGET_IN = struct.Struct("=Q")
BATCH_FORGET_IN = struct.Struct("=II")
FORGET_ONE = struct.Struct("=QQ")
INTERRUPT_IN = struct.Struct("=Q")
CREATE_IN = struct.Struct("=IIII")  # flags mode umask open_flags; the name follows
WRITE_IN = struct.Struct("=QQIIQII")  # fh offset size write_flags lock_owner flags padding; the bytes follow
WRITE_OUT = struct.Struct("=II")  # size padding
FH_IN = struct.Struct("=Q")  # of a FLUSH and an FSYNC; flags and a lock owner follow
MKDIR_IN = struct.Struct("=II")  # mode umask; the name follows
LINK_IN = struct.Struct("=Q")  # the node of the file; the name follows
RENAME_IN = struct.Struct("=Q")  # newdir; both names follow
RENAME2_IN = struct.Struct("=QII")  # newdir flags padding; both names follow
SETATTR_IN = struct.Struct("=IIQQQqqqIIIIIIII")
"""valid padding fh size lock_owner atime mtime ctime their nsec mode unused uid gid unused"""
FATTR_MODE, FATTR_UID, FATTR_GID, FATTR_SIZE, FATTR_MTIME, FATTR_FH = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 5, 1 << 6
FATTR_MTIME_NOW = 1 << 8
RENAME_NOREPLACE = 1 << 0
ATTR = struct.Struct("=QQQQQQIIIIIIIIII")  # 88 bytes
ENTRY_OUT = struct.Struct("=QQQQII")  # nodeid generation entry_valid attr_valid their nsec; ATTR follows
NO_ENTRY = bytes(ENTRY_OUT.size + ATTR.size)
"""Of a READDIRPLUS: nothing is told but the name. With a validity, of a LOOKUP: there is no such name."""
ATTR_OUT = struct.Struct("=QII")  # attr_valid, its nsec, dummy; ATTR follows
DIRENT = struct.Struct("=QQII")  # ino off namelen type; the name follows, padded to 8 bytes
STATFS_OUT = struct.Struct("=QQQQQIIII6I")

MAX_READ = 1 << 20
"""Largest read request, and the most bytes of one write request."""
READ_BUFFER = 64 << 10
"""Bytes for one request of a read-only file system, to which no WRITE comes; the kernel wants 8 KiB at least."""
WRITE_BUFFER = MAX_READ + 4096
"""Bytes for one request of a file system that is written to."""


def seconds(value: float) -> tuple[int, int]:
    """A timeout as whole seconds and nanoseconds."""
    whole = int(value)
    return whole, int((value - whole) * 1e9)


def dirent(node: int, offset: int, kind: int, name: bytes) -> bytes:
    """One directory entry; ``offset`` is the cookie of the entry after it, ``kind`` the file type bits of its mode."""
    return DIRENT.pack(node, offset, len(name), kind >> 12) + name + bytes(-len(name) % 8)
