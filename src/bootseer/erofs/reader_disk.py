"""What lies where in the metadata of an EROFS image: superblock, inodes, directory blocks and extended attributes; only
uncompressed layouts. Source: the kernel's ``fs/erofs/erofs_fs.h`` (Linux 6.12) and ``docs/internals/erofs.md``. Every
function takes the metadata as a `memoryview` and raises `DataError` for what no writer would have written, also where
the kernel would look away; positions are checked before they are used."""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterator
from typing import NamedTuple

import crc32c

from bootseer.erofs import format as fmt
from bootseer.errors import DataError

# Zero padding and compression settings say something about compressed files only, which are refused one by one.
_KNOWN_FEATURES = 0x1 | 0x2 | 0x4 | 0x8
_PREFIXES = {5: b"lustre.", **{number: prefix for prefix, number in fmt.XATTR_PREFIXES}}
_KINDS = {stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK, stat.S_IFCHR, stat.S_IFBLK, stat.S_IFIFO, stat.S_IFSOCK}


class Device(NamedTuple):
    """An extra device: ``blocks`` (0: not said) and where it begins in the common block addresses (0: nowhere)."""

    blocks: int
    mapped: int


class Super(NamedTuple):
    """What the reader needs of the superblock; positions and sizes in bytes."""

    bits: int
    """log2 of the block size."""
    root: int
    inodes_at: int
    xattrs_at: int
    build_ns: int
    """The mtime of compact inodes."""
    devices: tuple[Device, ...]


class Inode(NamedTuple):
    """One inode. ``rdev`` is as `os.makedev` has it; ``mtime_ns`` counts from 1970 and may be negative. The fields from
    ``layout`` on are the reader's own."""

    nid: int
    mode: int
    uid: int
    gid: int
    size: int
    mtime_ns: int
    nlink: int
    rdev: int
    layout: int
    address: int
    """First block, or the chunk format."""
    xattrs_at: int
    xattrs_size: int
    tail_at: int
    """Where inline data or chunk indexes begin (before alignment)."""

    @property
    def is_dir(self) -> bool:
        return stat.S_ISDIR(self.mode)

    @property
    def is_file(self) -> bool:
        return stat.S_ISREG(self.mode)

    @property
    def is_symlink(self) -> bool:
        return stat.S_ISLNK(self.mode)


class Entry(NamedTuple):
    """One name in a directory."""

    name: bytes
    nid: int


def part(meta: memoryview, at: int, length: int, what: str) -> memoryview:
    """``length`` bytes of the metadata, all of them there."""
    if at < 0 or length < 0 or at + length > len(meta):
        raise DataError(f"bad EROFS image: {what} lies outside of it")
    return meta[at : at + length]


def parse_super(meta: memoryview) -> Super:
    fields = fmt.SUPER.unpack(part(meta, fmt.SUPER_OFFSET, fmt.SUPER.size, "the superblock"))
    magic, checksum, compat, bits, _, root, _, built, built_nsec, _, meta_block, xattr_block = fields[:12]
    incompat, _, extra, slot_at, dir_bits = fields[14:19]
    if magic != fmt.MAGIC:
        raise DataError("bad EROFS image: no superblock")
    if not 9 <= bits <= 16:
        raise DataError(f"bad EROFS image: blocks of 2^{bits} bytes")
    if compat & fmt.COMPAT_CHECKSUM:
        rest = (1 << bits) - fmt.SUPER_OFFSET if 1 << bits > fmt.SUPER_OFFSET else 1 << bits
        block = bytearray(part(meta, fmt.SUPER_OFFSET, rest, "the superblock"))
        block[4:8] = bytes(4)
        if crc32c.crc32c(block) ^ 0xFFFFFFFF != checksum:
            raise DataError("bad EROFS image: the checksum of its superblock differs")
    if dir_bits:
        raise DataError(f"EROFS image with directories of 2^{dir_bits} blocks")
    if incompat & ~_KNOWN_FEATURES:
        raise DataError(f"EROFS image with features not known here ({incompat:#x})", hint="is it compressed?")
    if built_nsec >= 1_000_000_000:
        raise DataError("bad EROFS image: its time is none")
    slots = part(meta, slot_at * fmt.DEVICE.size, extra * fmt.DEVICE.size, "the device table")
    devices = tuple(Device(blocks, mapped) for _, blocks, mapped in fmt.DEVICE.iter_unpack(slots))
    return Super(bits, root, meta_block << bits, xattr_block << bits, built * 1_000_000_000 + built_nsec, devices)


def parse_inode(meta: memoryview, top: Super, nid: int) -> Inode:
    at = top.inodes_at + nid * fmt.SLOT
    what = f"inode {nid}"
    (form,) = struct.unpack("<H", part(meta, at, 2, what))
    if form & 1:
        raw = fmt.EXTENDED.unpack(part(meta, at, fmt.EXTENDED.size, what))
        _, icount, mode, _, size, address, _, uid, gid, seconds, nsec, nlink = raw
        if nsec >= 1_000_000_000:
            raise DataError(f"bad EROFS image: the time of {what} is none")
        mtime_ns, end = seconds * 1_000_000_000 + nsec, at + fmt.EXTENDED.size
    else:
        raw = fmt.COMPACT.unpack(part(meta, at, fmt.COMPACT.size, what))
        _, icount, mode, nlink, size, _, address, _, uid, gid, _ = raw
        mtime_ns, end = top.build_ns, at + fmt.COMPACT.size
    layout = form >> 1 & 7
    if form >> 4 or layout not in (fmt.PLAIN, fmt.INLINE, fmt.CHUNKED):
        raise DataError(f"EROFS image with a layout not known here ({form:#x}) of {what}", hint="is it compressed?")
    if stat.S_IFMT(mode) not in _KINDS:
        raise DataError(f"bad EROFS image: {what} is of no known kind")
    if size >> 63:
        raise DataError(f"bad EROFS image: {what} has {size} bytes")
    xattrs = 12 + 4 * (icount - 1) if icount else 0
    rdev = 0
    if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
        rdev = os.makedev(address >> 8 & 0xFFF, address & 0xFF | address >> 12 & 0xFFF00)
    return Inode(nid, mode, uid, gid, size, mtime_ns, nlink, rdev, layout, address, end, xattrs, end + xattrs)


def parse_directory(content: bytes, block_size: int, nid: int) -> Iterator[Entry]:
    """Names in ``content``, strictly ascending, without ``.`` and ``..``."""
    before = b""
    for start in range(0, len(content), block_size):
        block = content[start : start + block_size]
        if len(block) < fmt.DIRENT.size:
            raise DataError(f"bad EROFS image: directory {nid} ends too early")
        count, odd = divmod(fmt.DIRENT.unpack_from(block)[1], fmt.DIRENT.size)
        if odd or not count or count * fmt.DIRENT.size > len(block):
            raise DataError(f"bad EROFS image: directory {nid} has a broken block")
        entries = [fmt.DIRENT.unpack_from(block, index * fmt.DIRENT.size) for index in range(count)]
        for index, (child, at, _kind, _) in enumerate(entries):
            # The last name ends at its first zero byte or with the block.
            end = entries[index + 1][1] if index + 1 < count else len(block)
            name = block[at:end] if index + 1 < count else block[at:end].split(b"\0", 1)[0]
            if at < count * fmt.DIRENT.size or not name or len(name) > 255 or b"/" in name or b"\0" in name:
                raise DataError(f"bad EROFS image: directory {nid} has a name that is none")
            if name <= before:
                raise DataError(f"bad EROFS image: directory {nid} is not sorted")
            before = name
            if name not in (b".", b".."):
                yield Entry(name, child)


def parse_xattrs(meta: memoryview, top: Super, inode: Inode) -> dict[bytes, bytes]:
    if not inode.xattrs_size:
        return {}
    what = f"an extended attribute of inode {inode.nid}"
    area = part(meta, inode.xattrs_at, inode.xattrs_size, what)
    _, shared = fmt.XATTR_HEADER.unpack_from(area)
    at = fmt.XATTR_HEADER.size + 4 * shared
    found: dict[bytes, bytes] = {}
    for (number,) in struct.iter_unpack("<I", part(area, fmt.XATTR_HEADER.size, 4 * shared, what)):
        name, value, _ = _xattr(meta, top.xattrs_at + 4 * number, what)
        found[name] = value
    while at < len(area):
        # mkfs.erofs leaves no gap, but an entry of zeros may fill one.
        if len(area) - at >= 4 and not any(area[at : at + 4]):
            at += 4
            continue
        name, value, size = _xattr(area, at, what)
        found[name] = value
        at += size
    return found


def _xattr(area: memoryview, at: int, what: str) -> tuple[bytes, bytes, int]:
    name_size, index, value_size = fmt.XATTR_ENTRY.unpack(part(area, at, fmt.XATTR_ENTRY.size, what))
    body = part(area, at + fmt.XATTR_ENTRY.size, name_size + value_size, what)
    prefix = _PREFIXES.get(index)
    name = bytes(body[:name_size])
    if prefix is None or b"\0" in name or bool(name) != prefix.endswith(b"."):
        raise DataError(f"bad EROFS image: the name of {what} is none")
    return prefix + name, bytes(body[name_size:]), -(-(fmt.XATTR_ENTRY.size + name_size + value_size) // 4) * 4
