"""Decompression of layers as streams, in bounded memory."""

from __future__ import annotations

import gzip
import io
import itertools
from collections.abc import Iterator
from typing import BinaryIO, cast

import zstandard
from isal import igzip, isal_zlib

from bootseer.errors import DataError

_GZIP = b"\x1f\x8b"
_ZSTD = (b"\x28\xb5\x2f\xfd", *(bytes([0x50 + kind]) + b"\x2a\x4d\x18" for kind in range(16)))
"""Frames with data, and those that are skipped, which pzstd and others put first."""
_OTHERS = {b"\xfd7zXZ": "xz", b"BZh": "bzip2", b"\x04\x22\x4d\x18": "lz4"}
COMPRESSED = (_GZIP, *_ZSTD, *_OTHERS)
"""How what is compressed begins, also by what `inflate` refuses by its name."""
FREE, TIMES = 32 << 30, 200
"""What is compressed may have so many bytes, and beyond them so many times its compressed size: layers have 2 to 10
times, and some a large file of zeros; gzip can have 1,030 times, zstd more than 10,000."""
_CHUNK = 1 << 20
_ERRORS = (cast(type[Exception], isal_zlib.error), gzip.BadGzipFile, zstandard.ZstdError)


def inflate(chunks: Iterator[bytes], what: str) -> Iterator[bytes]:
    """Decompress gzip (any number of members), zstd frames or plain tar, told apart by their first bytes, to chunks of
    at most 1 MiB. Raises `DataError` naming ``what``, also when it expands to more than `FREE` and `TIMES` allow. A
    truncated zstd stream just ends (python-zstandard's reader does not tell): the diff id is what notices it."""
    came, made = [0], 0
    for plain in _inflate(_counted(chunks, came), what):
        made += len(plain)
        if made > max(FREE, TIMES * came[0]):
            raise DataError(f"{what} is a bomb: {came[0]} bytes of it unpack to more than {made}")
        yield plain


def _counted(chunks: Iterator[bytes], came: list[int]) -> Iterator[bytes]:
    for chunk in chunks:
        came[0] += len(chunk)
        yield chunk


def _inflate(chunks: Iterator[bytes], what: str) -> Iterator[bytes]:
    head = b""
    for chunk in chunks:
        head += chunk
        if len(head) >= 5:
            break
    whole = itertools.chain([head], chunks)
    try:
        if head.startswith(_GZIP):
            yield from _pieces(cast(BinaryIO, igzip.IGzipFile(fileobj=JoinedChunks(whole), mode="rb")))
        elif head.startswith(_ZSTD):
            source = cast(BinaryIO, JoinedChunks(whole))
            reader = zstandard.ZstdDecompressor().stream_reader(source, read_across_frames=True)
            yield from _pieces(cast(BinaryIO, reader))
        elif kind := next((kind for magic, kind in _OTHERS.items() if head.startswith(magic)), ""):
            raise DataError(f"{what} is compressed by {kind}", hint="compress it by gzip or zstd, or not at all")
        else:
            yield from whole
    except EOFError:
        raise DataError(f"{what} is truncated: its gzip stream has no end") from None
    except _ERRORS as exc:
        if "too much memory" in str(exc):
            hint = "compress it without --long, or with --long=27"
            raise DataError(f"{what} wants more than 128 MiB of memory from who decompresses it", hint=hint) from None
        behind = "Not a gzipped file" in str(exc)  # its own first bytes say that it is one
        raise DataError(f"{what} is corrupt: {'bytes behind the gzip stream' if behind else exc}") from None


def _pieces(reader: BinaryIO) -> Iterator[bytes]:
    with reader:
        while plain := reader.read(_CHUNK):
            yield plain


class JoinedChunks(io.RawIOBase):
    """An iterator of chunks as a file to read."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = filter(None, chunks)  # an empty one would be the end
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        if not self._rest:
            self._rest = memoryview(next(self._chunks, b""))
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count
