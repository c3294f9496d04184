"""Pack: cut a data file in blocks, compress them on all cores, write one stored blob, and return its block map."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec
import zstandard

from bootseer.blocks import _hash
from bootseer.blocks.blockmap import DEFAULT_BLOCK, BlockMap, frame_bound
from bootseer.errors import DataError, from_os_error

Progress = Callable[[int, int], None]
"""Called now and then from the calling thread with (bytes done, bytes in all)."""

_AHEAD = 4
"""Blocks in work per thread: bounds memory to about ``2 * 4 * threads * block_size``."""


class Packed(msgspec.Struct, frozen=True):
    """What `pack` wrote: the map, and the BLAKE3 hex digest of the stored blob."""

    map: BlockMap
    digest: str


class _Codec(threading.local):
    """zstd contexts are not shared between threads; making one per block costs more than compressing it."""

    def __init__(self) -> None:
        self.writers: dict[int, zstandard.ZstdCompressor] = {}
        self.reader = zstandard.ZstdDecompressor()


_codec = _Codec()


def compress(data: _hash.Buffer, level: int) -> bytes:
    writer = _codec.writers.get(level)
    if writer is None:
        # No zstd checksum: every block is checked against its BLAKE3 anyway.
        writer = _codec.writers[level] = zstandard.ZstdCompressor(
            level=level, write_checksum=False, write_content_size=True
        )
    return writer.compress(data)


def decompress(frame: _hash.Buffer, length: int) -> bytes:
    """Exactly ``length`` bytes out of one zstd frame, or `DataError`.

    The frame's own size field is checked first: it comes from outside and zstd would allocate what it says.
    """
    try:
        if zstandard.frame_content_size(frame) != length:
            raise DataError("bad zstd frame: wrong content size")
        data = _codec.reader.decompress(frame, max_output_size=length)
    except zstandard.ZstdError as exc:
        raise DataError(f"bad zstd frame: {exc}") from None
    if len(data) != length:
        raise DataError("bad zstd frame: wrong content size")
    return data


def pack(
    data: Path,
    blob: Path,
    *,
    block_size: int = DEFAULT_BLOCK,
    level: int = 3,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Packed:
    """Write the stored form of ``data`` to ``blob`` (a new file). The same input gives the same bytes.

    Raises `FullError` and kin for I/O errors, `DataError` when ``data`` changes while it is read.
    """
    workers = threads or os.cpu_count() or 1
    hashes: list[bytes] = []
    offsets: list[int] = []
    lengths: list[int] = []
    stored = 0
    state = _hash.hasher()
    zeros = bytes(block_size)
    try:
        with open(data, "rb") as src, open(blob, "xb") as out, ThreadPoolExecutor(workers) as pool:
            size = os.fstat(src.fileno()).st_size

            def one(offset: int) -> tuple[bytes, bytes]:
                want = min(block_size, size - offset)
                block = os.pread(src.fileno(), want, offset)
                if len(block) != want:
                    raise DataError(f"{data} became shorter while it was packed")
                frame = b"" if block == zeros[:want] else compress(block, level)
                return _hash.digest(block), frame

            queue: deque[Future[tuple[bytes, bytes]]] = deque()
            starts = iter(range(0, size, block_size))
            try:
                for offset in starts:
                    queue.append(pool.submit(one, offset))
                    if len(queue) == _AHEAD * workers:
                        break
                while queue:
                    digest, frame = queue.popleft().result()
                    if (offset := next(starts, -1)) >= 0:
                        queue.append(pool.submit(one, offset))
                    assert len(frame) <= frame_bound(block_size)
                    hashes.append(digest)
                    offsets.append(stored if frame else 0)
                    lengths.append(len(frame))
                    out.write(frame)
                    state.update(frame)
                    stored += len(frame)
                    if progress is not None and len(hashes) % 16 == 0:
                        progress(min(len(hashes) * block_size, size), size)
            finally:
                for future in queue:
                    future.cancel()
            if progress is not None:
                progress(size, size)
    except OSError as exc:
        raise from_os_error(exc, f"pack {data} into {blob}") from exc
    return Packed(BlockMap(block_size, size, stored, hashes, offsets, lengths), state.hexdigest())
