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

COMPRESSED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd")
"""How gzip and zstd begin."""
_CHUNK = 1 << 20
_ERRORS = (cast(type[Exception], isal_zlib.error), gzip.BadGzipFile, zstandard.ZstdError)


def inflate(chunks: Iterator[bytes], what: str) -> Iterator[bytes]:
    """Decompress gzip (any number of members), zstd frames or plain tar, told apart by their first bytes.

    Output chunks are at most 1 MiB, whatever the input expands to. Raises `DataError` naming ``what``. A truncated zstd
    stream just ends (python-zstandard's reader does not tell): the diff id is what notices it.
    """
    head = b""
    for chunk in chunks:
        head += chunk
        if len(head) >= 4:
            break
    whole = itertools.chain([head], chunks)
    try:
        if head.startswith(COMPRESSED[0]):
            yield from _pieces(cast(BinaryIO, igzip.IGzipFile(fileobj=JoinedChunks(whole), mode="rb")))
        elif head.startswith(COMPRESSED[1]):
            source = cast(BinaryIO, JoinedChunks(whole))
            reader = zstandard.ZstdDecompressor().stream_reader(source, read_across_frames=True)
            yield from _pieces(cast(BinaryIO, reader))
        else:
            yield from whole
    except EOFError:
        raise DataError(f"{what} is truncated: its gzip stream has no end") from None
    except _ERRORS as exc:
        raise DataError(f"{what} is corrupt: {exc}") from None


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
