"""A streaming reader of tar headers: ustar, GNU and PAX as layers use them, from chunks of bytes, without seeking.

The standard library's ``tarfile`` gives times as floats (nanoseconds are lost), re-reads through 10 KiB buffers in
stream mode and hides PAX extended attributes behind text; this reader keeps names and attributes as bytes.
Formats: POSIX.1-2008 pax, and the GNU tar manual's appendix on sparse members."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from bootseer.errors import DataError

BLOCK = 512
MAX_EXTENDED = 16 << 20
"""Larger PAX or GNU long-name records and maps of sparse files are refused: they would be held in memory."""
_MAX_EXTENTS = 1 << 20  # 4 GiB with a hole after every 4 KiB; an extent takes some 130 bytes of memory

REGULAR, HARDLINK, SYMLINK, CHAR, BLOCKDEV, DIRECTORY, FIFO = b"0", b"1", b"2", b"3", b"4", b"5", b"6"
_NO_DATA = (HARDLINK, SYMLINK, CHAR, BLOCKDEV, DIRECTORY, FIFO)
_XATTR = b"SCHILY.xattr."
_MAX_SIZE = (1 << 63) - 1  # off_t


class Entry(NamedTuple):
    """One member. ``size`` counts the bytes in the archive; ``extents`` (sparse only) map them to file offsets."""

    name: bytes
    kind: bytes
    mode: int
    uid: int
    gid: int
    size: int
    mtime_ns: int
    link: bytes
    major: int
    minor: int
    xattrs: dict[bytes, bytes]
    extents: list[tuple[int, int]] | None
    file_size: int


class ChunkReader:
    """Exact reads over an iterator of byte chunks. A stream that ends early raises `DataError`."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._view = memoryview(b"")
        self.offset = 0

    def _more(self) -> bool:
        for chunk in self._chunks:
            if chunk:
                self._view = memoryview(chunk)
                return True
        return False

    def pieces(self, count: int) -> Iterator[memoryview]:
        """The next ``count`` bytes in pieces as they come, without copying."""
        while count:
            if not self._view and not self._more():
                raise DataError(f"the tar stream ends inside a member, {count} bytes missing")
            piece = self._view[:count]
            self._view = self._view[len(piece) :]
            self.offset += len(piece)
            count -= len(piece)
            yield piece

    def exact(self, count: int) -> bytes:
        """The next ``count`` bytes."""
        if len(self._view) >= count:
            piece = self._view[:count]
            self._view = self._view[count:]
            self.offset += count
            return bytes(piece)
        return b"".join(self.pieces(count))

    def skip(self, count: int) -> None:
        if count <= len(self._view):
            self._view = self._view[count:]
            self.offset += count
            return
        for _ in self.pieces(count):
            pass

    def at_end(self) -> bool:
        return not self._view and not self._more()

    def drain(self) -> bool:
        """Read to the end of the stream, so that its digest covers every byte; whether one of them is not zero."""
        found = False
        while not self.at_end():
            found = found or bool(bytes(self._view).strip(b"\0"))
            self.offset += len(self._view)
            self._view = memoryview(b"")
        return found


def entries(reader: ChunkReader) -> Iterator[Entry]:
    """The members in order. The caller must consume exactly ``entry.size`` bytes of `reader` before the next one;
    padding is skipped here. Raises `DataError` for anything malformed."""
    try:
        yield from _entries(reader)
    except KeyError as exc:
        raise DataError(f"malformed tar header near byte {reader.offset}: no record {exc}") from None
    except (ValueError, OverflowError) as exc:
        raise DataError(f"malformed tar header near byte {reader.offset}: {exc}") from None


def _entries(reader: ChunkReader) -> Iterator[Entry]:
    pax: dict[bytes, bytes] = {}
    sparse_pairs: list[bytes] = []
    long_name = long_link = None
    empty = True
    while not reader.at_end():
        head = reader.exact(BLOCK)
        if not any(head):
            # As Go's archive/tar: the end is two such blocks, or one and nothing more. GNU tar warns and ends
            # here, but what follows may be members that other readers see.
            if not reader.at_end() and any(reader.exact(BLOCK)):
                raise ValueError("a lone block of zeros, and more behind it")
            break
        _verify_checksum(head)
        kind = head[156:157]
        size = _number(head[124:136])
        if kind in b"xXgLK":
            if not 0 <= size <= MAX_EXTENDED:
                raise ValueError(f"extended header of {size} bytes")
            body = reader.exact(size)
            reader.skip(-size % BLOCK)
            if kind in b"xX":
                pax, sparse_pairs = _parse_pax(body)
            elif kind == b"L":
                long_name = body.rstrip(b"\0")
            elif kind == b"K":
                long_link = body.rstrip(b"\0")
            continue
        entry = _entry(reader, head, kind, size, pax, sparse_pairs, long_name, long_link)
        before, empty = reader.offset, False
        yield entry
        if reader.offset - before != entry.size:
            raise ValueError("a member's data was not consumed")
        reader.skip(-entry.size % BLOCK)
        pax, sparse_pairs, long_name, long_link = {}, [], None, None
    if reader.drain() and empty:  # a tar may have anything behind its end, but file systems begin with zeros, too
        raise ValueError("it has no member, and more than zeros behind its end")


def _entry(
    reader: ChunkReader,
    head: bytes,
    kind: bytes,
    size: int,
    pax: dict[bytes, bytes],
    sparse_pairs: list[bytes],
    long_name: bytes | None,
    long_link: bytes | None,
) -> Entry:
    name = _text(head[0:100])
    if head[257:263] == b"ustar\0" and head[345]:
        name = _text(head[345:500]) + b"/" + name
    if kind in (b"\0", b"7", b"S"):
        is_dir = kind == b"\0" and name.endswith(b"/")
        sparse_header = kind == b"S"
        kind = DIRECTORY if is_dir else REGULAR
    else:
        sparse_header = False
    if kind != REGULAR and kind not in _NO_DATA:
        raise ValueError(f"unknown member type {kind!r}")
    size = int(pax[b"size"]) if b"size" in pax else size
    uid = int(pax[b"uid"]) if b"uid" in pax else _number(head[108:116])
    gid = int(pax[b"gid"]) if b"gid" in pax else _number(head[116:124])
    if size < 0:
        raise ValueError(f"size {size}")
    extents: list[tuple[int, int]] | None = None
    file_size = size
    if kind in _NO_DATA:
        size = file_size = 0
    elif sparse_header:
        extents, file_size = _old_gnu_sparse(reader, head)
    elif b"GNU.sparse.major" in pax:
        file_size = int(pax[b"GNU.sparse.realsize"])
        extents, used = _sparse_1_0(reader, size)
        size -= used
    elif b"GNU.sparse.map" in pax or sparse_pairs:
        extents = _extents(sparse_pairs or pax[b"GNU.sparse.map"].split(b","))
        file_size = int(pax[b"GNU.sparse.size"])
    if extents is not None:
        _check_extents(extents, size, file_size)
    mtime = pax.get(b"mtime")
    return Entry(
        name=pax.get(b"GNU.sparse.name") or pax.get(b"path") or long_name or name,
        kind=kind,
        mode=_number(head[100:108]) & 0o7777,
        uid=uid,
        gid=gid,
        size=size,
        mtime_ns=_nanoseconds(mtime) if mtime else _number(head[136:148]) * 1_000_000_000,
        link=pax.get(b"linkpath") or long_link or _text(head[157:257]),
        major=_number(head[329:337]),
        minor=_number(head[337:345]),
        xattrs={k.removeprefix(_XATTR): v for k, v in pax.items() if k.startswith(_XATTR)} if pax else {},
        extents=extents,
        file_size=file_size,
    )


def _verify_checksum(head: bytes) -> None:
    want, own = _number(head[148:156]), head[148:156]
    if sum(head) - sum(own) + 256 == want:
        return
    if sum(b - 256 if b > 127 else b for b in head[:148] + head[156:]) + 256 != want:
        raise ValueError("bad header checksum")


def _text(field: bytes) -> bytes:
    return field.split(b"\0", 1)[0]


def _number(field: bytes) -> int:
    if not (digits := field.rstrip(b"\0 ")):
        return 0
    try:
        return int(digits, 8)
    except ValueError:  # few are more than octal digits and their end
        pass
    if field[0] & 0x80:
        value = int.from_bytes(field, "big")
        return value - (1 << 8 * len(field)) if field[0] & 0x40 else value & ((1 << (8 * len(field) - 1)) - 1)
    text = field.split(b"\0", 1)[0].strip()
    return int(text, 8) if text else 0


def _nanoseconds(text: bytes) -> int:
    whole, _, fraction = text.partition(b".")
    ns = int((fraction + b"000000000")[:9]) if fraction else 0
    return int(whole or b"0") * 1_000_000_000 + (-ns if text.startswith(b"-") else ns)


def _parse_pax(body: bytes) -> tuple[dict[bytes, bytes], list[bytes]]:
    """The records of a PAX header, and the repeated offset/numbytes pairs of sparse format 0.0 in order."""
    records: dict[bytes, bytes] = {}
    pairs: list[bytes] = []
    at = 0
    while at < len(body) and body[at]:
        space = body.index(b" ", at, at + 20)
        length = int(body[at:space])
        record = body[space + 1 : at + length]
        if length <= space + 1 - at or at + length > len(body) or not record.endswith(b"\n"):
            raise ValueError("bad PAX record")
        key, sep, value = record[:-1].partition(b"=")
        if not sep:
            raise ValueError("PAX record without value")
        if key in (b"GNU.sparse.offset", b"GNU.sparse.numbytes"):
            pairs.append(value)
        elif value or key.startswith((_XATTR, b"GNU.")):
            records[key] = value
        else:
            records.pop(key, None)  # POSIX: as if it were not said
        at += length
    return records, pairs


def _extents(numbers: list[bytes]) -> list[tuple[int, int]]:
    """Offsets and lengths in turn as pairs, without empty ones (GNU tar marks the end of a file with one)."""
    if len(numbers) % 2 or len(numbers) > 2 * _MAX_EXTENTS:
        raise ValueError(f"sparse map of {len(numbers)} numbers")
    found: list[tuple[int, int]] = []
    for offset, text in zip(numbers[::2], numbers[1::2], strict=True):
        if length := int(text):
            found.append((int(offset), length))
    return found


def _old_gnu_sparse(reader: ChunkReader, head: bytes) -> tuple[list[tuple[int, int]], int]:
    extents: list[tuple[int, int]] = []
    fields, extended, file_size, used = head[386:482], head[482], _number(head[483:495]), 0
    while True:
        for i in range(0, len(fields) - 23, 24):
            if fields[i] and (length := _number(fields[i + 12 : i + 24])):
                extents.append((_number(fields[i : i + 12]), length))
        if not extended:
            return extents, file_size
        used += BLOCK
        if used > MAX_EXTENDED:
            raise ValueError(f"sparse map of more than {MAX_EXTENDED} bytes")
        block = reader.exact(BLOCK)
        fields, extended = block[:504], block[504]


def _sparse_1_0(reader: ChunkReader, size: int) -> tuple[list[tuple[int, int]], int]:
    """The map at the start of the data: decimal numbers by line, padded to a block. Returns it and the bytes used."""
    blocks: list[bytes] = []
    lines, wanted = 0, 1
    while lines < wanted:
        if (len(blocks) + 1) * BLOCK > min(size, MAX_EXTENDED):
            raise ValueError("sparse map longer than its member or than the limit")
        blocks.append(reader.exact(BLOCK))
        lines += blocks[-1].count(b"\n")
        if wanted == 1 and lines:
            count = int(b"".join(blocks).split(b"\n", 1)[0])
            if not 0 <= count <= _MAX_EXTENTS:
                raise ValueError(f"sparse map of {count} extents, more than {_MAX_EXTENTS}")
            wanted = 1 + 2 * count
    return _extents(b"".join(blocks).split(b"\n")[1:wanted]), len(blocks) * BLOCK


def _check_extents(extents: list[tuple[int, int]], size: int, file_size: int) -> None:
    at = 0
    for offset, length in extents:
        if offset < at or length < 0:
            raise ValueError("sparse extents out of order")
        at = offset + length
    if file_size > _MAX_SIZE or at > file_size or sum(length for _, length in extents) != size:
        raise ValueError("sparse map does not fit its member")
