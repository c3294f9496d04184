"""Decompression of layers as streams, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO, cast

import zstandard
from isal import igzip_lib, isal_zlib

from bootseer.errors import DataError

_CHUNK = 1 << 20
_ERRORS = (cast(type[Exception], isal_zlib.error), zstandard.ZstdError, EOFError)


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
    whole = _prepend(head, chunks)
    try:
        if head[:2] == b"\x1f\x8b":
            yield from _gunzip(whole, what)
        elif head[:4] == b"\x28\xb5\x2f\xfd":
            yield from _unzstd(whole, what)
        else:
            yield from whole
    except _ERRORS as exc:
        raise DataError(f"{what} is corrupt: {exc}") from None


def _prepend(head: bytes, chunks: Iterator[bytes]) -> Iterator[bytes]:
    if head:
        yield head
    yield from chunks


def _gunzip(chunks: Iterator[bytes], what: str) -> Iterator[bytes]:
    machine = None
    data = b""
    for chunk in chunks:
        data = chunk
        while data:
            if machine is None:
                if not data.strip(b"\0"):
                    data = b""
                    continue
                machine = igzip_lib.IgzipDecompressor(flag=igzip_lib.DECOMP_GZIP)
            plain = machine.decompress(data, _CHUNK)
            if plain:
                yield plain
            while not machine.eof and not machine.needs_input:
                if plain := machine.decompress(b"", _CHUNK):
                    yield plain
            data = b""
            if machine.eof:
                data, machine = machine.unused_data, None
    if machine is not None:
        raise DataError(f"{what} is truncated: its gzip stream has no end")


def _unzstd(chunks: Iterator[bytes], what: str) -> Iterator[bytes]:
    source = cast(BinaryIO, ChunkFile(chunks))
    with zstandard.ZstdDecompressor().stream_reader(source, read_across_frames=True) as reader:
        while plain := reader.read(_CHUNK):
            yield plain


class ChunkFile:
    """The ``read`` side of a file over an iterator of chunks."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._rest = b""

    def read(self, size: int = -1) -> bytes:
        """Up to ``size`` bytes (all when negative); empty at the end."""
        if size < 0:
            data, self._rest = self._rest + b"".join(self._chunks), b""
            return data
        if not self._rest:
            self._rest = next(self._chunks, b"")
        data, self._rest = self._rest[:size], self._rest[size:]
        return data
