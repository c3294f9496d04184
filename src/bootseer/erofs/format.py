"""The on-disk format of EROFS as the writer uses it (docs/internals/erofs.md; the kernel's ``fs/erofs/erofs_fs.h``).
All numbers are little-endian; blocks are 4 KiB."""

from __future__ import annotations

import struct

BLOCK = 4096
SLOT = 32
"""Unit of inode numbers: inode ``nid`` lies at byte ``nid * 32`` of the image."""

SUPER_OFFSET = 1024
MAGIC = 0xE0F5E1E2
SUPER = struct.Struct("<IIIBBHQqIIII16s16sIHHHBBIQB23x")
"""magic, checksum, feature_compat, block bits, extension slots, root nid, inodes, epoch, epoch ns, blocks, meta block,
xattr block, uuid, volume name, feature_incompat, compression, extra devices, device slot offset, directory block bits,
xattr prefixes, their start, packed nid, xattr filter."""

DEVICE = struct.Struct("<64sII56x")
"""tag, blocks, mapped address. A slot is 128 bytes; the superblock counts their place in these."""

COMPAT_CHECKSUM, COMPAT_MTIME = 1, 2
INCOMPAT_CHUNKS, INCOMPAT_DEVICES = 4, 8

COMPACT = struct.Struct("<HHHHIIIIHHI")
"""format, xattr count, mode, links, size, 0, union, ino, uid, gid, 0."""
EXTENDED = struct.Struct("<HHHHQIIIIqII16x")
"""format, xattr count, mode, 0, size, union, ino, uid, gid, mtime, mtime ns, links."""
PLAIN, INLINE, CHUNKED = 0, 2, 4
"""Data layouts: blocks, blocks with the tail behind the inode, chunk indexes."""

CHUNK_INDEXES = 0x20
MAX_CHUNK_BITS = 31
CHUNK = struct.Struct("<HHI")
"""0, device, block."""
HOLE = 0xFFFFFFFF

DIRENT = struct.Struct("<QHBB")
"""nid, offset of the name in the block, file type, 0."""
MAX_NAME = 255
MAX_TARGET = 4095
"""Longest target of a symbolic link that Linux reads (PATH_MAX with its NUL)."""

XATTR_HEADER = struct.Struct("<IB7x")
"""name filter, number of shared attributes."""
XATTR_ENTRY = struct.Struct("<BBH")
"""length of the name behind its prefix, prefix, size of the value."""
XATTR_PREFIXES = (
    (b"user.", 1),
    (b"system.posix_acl_access", 2),
    (b"system.posix_acl_default", 3),
    (b"trusted.", 4),
    (b"security.", 6),
)
