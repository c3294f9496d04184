"""zstd frames of blocks."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import zstandard

from bootseer.chunks import hashing
from bootseer.errors import DataError

_PIECE = 1 << 20


class _Codec(threading.local):
    """zstd contexts are not shared between threads; making one per block costs more than compressing it."""

    def __init__(self) -> None:
        self.writers: dict[int, zstandard.ZstdCompressor] = {}
        self.reader = zstandard.ZstdDecompressor()


_codec = _Codec()


def compress(data: hashing.Buffer, level: int) -> bytes:
    writer = _codec.writers.get(level)
    if writer is None:
        # No zstd checksum: every block is checked against its BLAKE3 anyway.
        writer = _codec.writers[level] = zstandard.ZstdCompressor(
            level=level, write_checksum=False, write_content_size=True
        )
    return writer.compress(data)


def decompress(frame: hashing.Buffer, length: int) -> bytes:
    """Exactly ``length`` bytes out of one zstd frame, or `DataError`. The frame's own size field is checked first: zstd
    would allocate what it says."""
    try:
        if zstandard.frame_content_size(frame) != length:
            raise DataError("bad zstd frame: wrong content size")
        data = _codec.reader.decompress(frame, max_output_size=length)
    except zstandard.ZstdError as exc:
        raise DataError(f"bad zstd frame: {exc}") from None
    if len(data) != length:
        raise DataError("bad zstd frame: wrong content size")
    return data


def unpack(frame: bytes, length: int) -> Iterator[bytes]:
    """As `decompress`, piece by piece: memory does not depend on ``length``."""
    done = 0
    try:
        if zstandard.frame_content_size(frame) != length:
            raise DataError("bad zstd frame: wrong content size")
        for piece in zstandard.ZstdDecompressor().read_to_iter(frame, write_size=_PIECE):
            done += len(piece)
            if done > length:
                break
            yield piece
    except zstandard.ZstdError as exc:
        raise DataError(f"bad zstd frame: {exc}") from None
    if done != length:
        raise DataError("bad zstd frame: wrong content size")
