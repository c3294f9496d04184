"""`Reader`: an EROFS image without a mount, in pure Python: names, attributes, contents, and what lies where. Of
uncompressed images of one or two devices, those of `bootseer.erofs.Writer` and of ``mkfs.erofs`` (1.5): contents flat,
inline or in chunks; compact and extended inodes; inline and shared extended attributes."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from mmap import mmap

from bootseer.erofs import format as fmt
from bootseer.erofs.extents import Extent, ExtentIndex
from bootseer.erofs.reader_disk import (
    Entry,
    Inode,
    parse_directory,
    parse_inode,
    parse_super,
    parse_xattrs,
    part,
)
from bootseer.errors import DataError, NotFoundError

_MAX_LINK = 4096
_MAX_PATH = 1 << 16
_MAX_LINKS = 40
_META, _DATA, _HOLE = 0, 1, -1
_INDEX, _BLOCK = fmt.CHUNK, struct.Struct("<I")


class Reader:
    """The image whose metadata is ``meta`` and whose data ``read_data(offset, length)`` gives (of ``data_size`` bytes,
    when that is known). It may be used from several threads when ``read_data`` may.

    Paths are bytes from the root, with or without slashes at either end; the root is ``b""``. Anything that cannot be
    right raises `DataError`, and work is bounded by the size of ``meta``: a directory seen twice, or more names than
    ``meta`` has room for, end a walk. The checksum of the superblock is checked, nothing else has one: whoever wants
    to know that the bytes are the right ones verifies ``meta`` and what ``read_data`` gives."""

    def __init__(
        self,
        meta: bytes | bytearray | memoryview | mmap,
        read_data: Callable[[int, int], bytes] | None = None,
        *,
        data_size: int | None = None,
    ) -> None:
        self._meta = memoryview(meta)
        self._super = parse_super(self._meta)
        self._read_data = read_data
        self._block = 1 << self._super.bits
        devices = self._super.devices
        if len(devices) > 1:
            raise DataError(f"EROFS image of {1 + len(devices)} devices", hint="two are supported")
        self._data_size = data_size
        self._mapped = range(0)
        if devices and devices[0].blocks:
            declared = devices[0].blocks << self._super.bits
            self._data_size = declared if data_size is None else min(declared, data_size)
            if devices[0].mapped:
                self._mapped = range(devices[0].mapped, devices[0].mapped + devices[0].blocks)

    @property
    def meta_size(self) -> int:
        """Bytes of metadata: bounds what can be in it."""
        return len(self._meta)

    @property
    def root(self) -> Inode:
        found = self.inode(self._super.root)
        if not found.is_dir:
            raise DataError("bad EROFS image: its root is no directory")
        return found

    def inode(self, nid: int) -> Inode:
        return parse_inode(self._meta, self._super, nid)

    def stat(self, path: bytes) -> Inode:
        """The inode at ``path``; no symbolic link is followed. Raises `NotFoundError`."""
        found = self.root
        for name in _parts(path):
            found = self._child(found, name, path)
        return found

    def resolve(self, path: bytes) -> tuple[bytes, Inode]:
        """``path`` with its symbolic links followed inside the image, the last one too, and what is there. Raises
        `NotFoundError` (also for a circle of links)."""
        todo, done, links = _parts(path)[::-1], [self.root], 0
        names: list[bytes] = []
        while todo:
            name = todo.pop()
            if name == b"..":
                if not done[-1].is_dir:
                    raise NotFoundError(f"the image has no {_text(path)}")
                del done[max(1, len(done) - 1) :], names[-1:]
                continue
            found = self._child(done[-1], name, path)
            if not found.is_symlink:
                done.append(found)
                names.append(name)
                continue
            links += 1
            target = self.readlink(found)
            if links > _MAX_LINKS or len(todo) > _MAX_PATH:
                raise NotFoundError(f"too many symbolic links in {_text(path)}")
            if target.startswith(b"/"):
                del done[1:], names[:]
            todo += _parts(target)[::-1]
        return b"/".join(names), done[-1]

    def _child(self, folder: Inode, name: bytes, path: bytes) -> Inode:
        if folder.is_dir:
            for entry in self.entries(folder):
                if entry.name == name:
                    return self.inode(entry.nid)
        raise NotFoundError(f"the image has no {_text(path)}")

    def entries(self, folder: Inode) -> list[Entry]:
        """What a directory holds, sorted, without ``.`` and ``..``."""
        if not folder.is_dir or folder.size > len(self._meta):
            raise DataError(f"bad EROFS image: {folder.nid} is no directory, or one of {folder.size} bytes")
        return list(parse_directory(self.read(folder, 0, folder.size), self._block, folder.nid))

    def walk(self, path: bytes = b"") -> Iterator[tuple[bytes, Inode]]:
        """``path`` and everything below it, parents first, names in byte order; hard links as often as they occur."""
        here = bytearray(b"/".join(_parts(path)))
        seen: set[int] = set()
        room = len(self._meta)
        letters = 64 * len(self._meta) + (16 << 20)
        # One path for all: those of what is still to come would be many times ``meta``.
        stack: list[tuple[int, Iterator[Entry]]] = []
        found = self.stat(path)
        while True:
            yield bytes(here), found
            if found.is_dir:
                room -= found.size
                if found.nid in seen or room < 0:
                    raise DataError(f"bad EROFS image: directory {_text(bytes(here))} is there twice")
                seen.add(found.nid)
                stack.append((len(here), iter(self.entries(found))))
            entry = None
            while stack and (entry := next(stack[-1][1], None)) is None:
                stack.pop()
            if entry is None:
                return
            del here[stack[-1][0] :]
            here += b"/" + entry.name if here else entry.name
            letters -= len(here)
            if len(here) > _MAX_PATH or letters < 0:
                raise DataError("bad EROFS image: its paths are absurdly long")
            found = self.inode(entry.nid)

    def readlink(self, inode: Inode) -> bytes:
        if not inode.is_symlink or not 0 < inode.size < _MAX_LINK:
            raise DataError(f"bad EROFS image: {inode.nid} is no symbolic link, or one of {inode.size} bytes")
        target = self.read(inode, 0, inode.size)
        if b"\0" in target:
            raise DataError(f"bad EROFS image: the target of symbolic link {inode.nid} is none")
        return target

    def xattrs(self, inode: Inode) -> dict[bytes, bytes]:
        """Extended attributes by their full names (``b"user.x"``)."""
        return parse_xattrs(self._meta, self._super, inode)

    def read(self, inode: Inode, offset: int, length: int) -> bytes:
        """Bytes of the file (or of what a directory or symbolic link is made of), fewer at its end. Takes memory of
        ``length`` bytes, also for a hole."""
        end = min(offset + length, inode.size)
        if offset >= end:
            return b""
        out = bytearray(end - offset)
        for at, device, address, size in self._pieces(inode, offset, end):
            if device == _META:
                out[at - offset : at - offset + size] = self._meta[address : address + size]
            elif device == _DATA:
                if self._read_data is None:
                    raise DataError(f"no data was given for inode {inode.nid}")
                data = self._read_data(address, size)
                if len(data) != size:
                    raise DataError(f"bad EROFS image: its data ends before {address + size}")
                out[at - offset : at - offset + size] = data
        return bytes(out)

    def extents(self, inode: Inode) -> Iterable[Extent]:
        """Where a file's bytes lie in the data, ascending; holes, and what lies in the metadata, are left out."""
        for at, device, address, size in self._pieces(inode, 0, inode.size):
            if device == _DATA:
                yield Extent(at, address, size)

    def inline(self, inode: Inode) -> Iterator[tuple[int, bytes]]:
        """The parts of a file that lie in the metadata, as (offset, bytes)."""
        for at, device, address, size in self._pieces(inode, 0, inode.size):
            if device == _META:
                yield at, bytes(self._meta[address : address + size])

    def table_size(self, inode: Inode) -> int:
        """Bytes of metadata that say where the contents of a file are: a measure of the work to find out."""
        if inode.layout != fmt.CHUNKED:
            return 0
        unit, _, count = self._chunk_form(inode)
        return unit * count

    def owner_index(self) -> ExtentIndex:
        """Which file each part of the data belongs to (by a file's first name, when it has several)."""

        def files() -> Iterator[tuple[bytes, Iterator[tuple[int, int]]]]:
            seen: set[int] = set()
            room = len(self._meta)
            for path, inode in self.walk():
                if inode.is_file and inode.nid not in seen:
                    seen.add(inode.nid)
                    room -= self.table_size(inode)
                    if room < 0:
                        raise DataError("bad EROFS image: its files share their chunk indexes")
                    yield path, ((data, size) for _, data, size in self.extents(inode))

        return ExtentIndex(files())

    def _pieces(self, inode: Inode, start: int, end: int) -> Iterator[tuple[int, int, int, int]]:
        """``start`` to ``end`` of the contents as (offset, device, address, length), ascending."""
        if inode.layout == fmt.CHUNKED:
            yield from self._chunk_pieces(inode, start, end)
            return
        body = inode.size
        if inode.layout == fmt.INLINE and inode.size:
            body = (inode.size - 1) // self._block * self._block
            if inode.tail_at % self._block + inode.size - body > self._block:
                raise DataError(f"bad EROFS image: the tail of inode {inode.nid} crosses a block")
        if start < body:
            yield self._piece(inode, start, 0, inode.address, start, min(end, body) - start)
        if end > body:
            at = max(start, body)
            part(self._meta, inode.tail_at + at - body, end - at, f"the tail of inode {inode.nid}")
            yield at, _META, inode.tail_at + at - body, end - at

    def _chunk_form(self, inode: Inode) -> tuple[int, int, int]:
        """Bytes per index, log2 of the chunk size, number of chunks."""
        if inode.address & ~0x3F:
            raise DataError(f"EROFS image with a chunk format not known here ({inode.address:#x})")
        bits = self._super.bits + (inode.address & 0x1F)
        return 8 if inode.address & 0x20 else 4, bits, -(-inode.size >> bits) if inode.size else 0

    def _chunk_pieces(self, inode: Inode, start: int, end: int) -> Iterator[tuple[int, int, int, int]]:
        unit, bits, count = self._chunk_form(inode)
        first = -(-inode.tail_at // unit) * unit
        table = part(self._meta, first, unit * count, f"the chunk index of inode {inode.nid}")
        low, high, mask = start >> bits, -(-end >> bits), len(self._super.devices)
        held: tuple[int, int, int, int] | None = None
        for number, raw in enumerate((_INDEX if unit == 8 else _BLOCK).iter_unpack(table[low * unit : high * unit])):
            device, block = (raw[1] & mask, raw[2]) if unit == 8 else (0, raw[0])
            at = max(start, low + number << bits)
            size = min(end, low + number + 1 << bits) - at
            if block == fmt.HOLE:
                mine = at, _HOLE, 0, size
            else:
                mine = self._piece(inode, at, device, block, at - (low + number << bits), size)
            if held is not None and held[1] == mine[1] and (held[1] == _HOLE or held[2] + held[3] == mine[2]):
                held = held[0], held[1], held[2], held[3] + size
                continue
            if held is not None:
                yield held
            held = mine
        if held is not None:
            yield held

    def _piece(self, inode: Inode, at: int, device: int, block: int, into: int, size: int) -> tuple[int, int, int, int]:
        """``size`` bytes that lie ``into`` bytes behind the start of ``block``."""
        if device == _META and block in self._mapped:
            device, block = _DATA, block - self._mapped.start
        address = (block << self._super.bits) + into
        if device == _META:
            part(self._meta, address, size, f"the contents of inode {inode.nid}")
        elif self._data_size is not None and address + size > self._data_size:
            raise DataError(f"bad EROFS image: the contents of inode {inode.nid} lie outside of its data")
        return at, device, address, size


def _parts(path: bytes) -> list[bytes]:
    return [name for name in path.split(b"/") if name not in (b"", b".")]


def _text(path: bytes) -> str:
    return "/" + path.decode(errors="backslashreplace").lstrip("/")
