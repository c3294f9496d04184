"""Buckets that this rank has read, on their way to the ranks that need them; and how they are sent.

For each bucket a mark, which those who need nothing of it get, too; then each chunk with a header. Chunks wait in the
caller's memory, and at most `SPARE` bytes of them elsewhere: while there are more, nothing is read.

Concurrency: one thread for each rank sends, the threads that read hand buckets over, one thread waits for the end.
"""

from __future__ import annotations

import logging
import socket
import struct
import threading
import time
from collections.abc import Callable

from crc32c import crc32c

from bootseer import faults
from bootseer.torch import peers
from bootseer.torch.destination import Chunk, Destination
from bootseer.torch.shared_plan import FileId, Span

_log = logging.getLogger(__name__)

SPARE = 256 << 20
"""Bytes beside the caller's memory that wait to be sent; while there are more, nothing is read."""
MARK = struct.Struct("<Q")
"""Number of the bucket."""
HEADER = struct.Struct("<QII")
"""Number of the chunk, CRC-32C of its bytes, and one of the file's identity and the fields before it."""


class Outbox:
    """Buckets of this rank on their way to those who need them. ``buckets``: by rank, its part of each bucket."""

    def __init__(self, to: Destination, buckets: dict[int, list[list[Span]]], deadline: float) -> None:
        self._to, self._buckets, self._deadline = to, buckets, deadline
        self._changed = threading.Condition()
        self._chunks: dict[int, dict[tuple[FileId, int], Chunk]] = {}
        self._next = dict.fromkeys(buckets, 0)  # by rank that has not got all yet: the bucket that it gets next
        self._connected: set[int] = set()
        self._until = time.monotonic() + deadline  # who has not connected by then does not
        self._spare = self._sent = 0
        self._ended = False

    def taker(self, index: int) -> Callable[[dict[tuple[FileId, int], Chunk]], None]:
        return lambda chunks: self._take(index, chunks)

    def _take(self, index: int, chunks: dict[tuple[FileId, int], Chunk]) -> None:
        """Bucket ``index`` was read. Returns when there is memory to read more."""
        faults.point("stripefs.shared.read")
        with self._changed:
            self._chunks[index] = chunks
            self._spare += _spare(chunks)
            self._free()
            # the bucket that is needed next is always taken, so that sending goes on
            self._wait(lambda: self._spare <= SPARE)

    def send(self, sock: socket.socket, rank: int) -> None:
        """Send ``rank`` its part of each bucket, as these are read. Raises `OSError`."""
        with self._changed:
            if rank not in self._next or rank in self._connected:
                return
            self._connected.add(rank)
        try:
            for index, spans in enumerate(self._buckets[rank]):
                with self._changed:
                    # ends: its reader takes it, or fails and gives up
                    self._changed.wait_for(lambda index=index: self._ended or index in self._chunks)  # type: ignore[misc]
                    if self._ended:
                        return
                    chunks = self._chunks[index]
                until = time.monotonic() + self._deadline
                peers.send(sock, [MARK.pack(index)], until)
                for span in spans:
                    for number in range(span.first, span.first + span.chunks):
                        self._send_chunk(sock, span.file, number, chunks[span.file, number], until)
                faults.point("stripefs.shared.sent")
                self._passed(rank, index + 1)
        except OSError as exc:
            _log.warning("rank %d does not take what is sent to it: %s", rank, exc.strerror or exc)
            raise
        finally:
            with self._changed:
                self._next.pop(rank, None)
                self._free()

    def _send_chunk(self, sock: socket.socket, file: FileId, number: int, chunk: Chunk, until: float) -> None:
        crc = self._to.expected_crc(file, number)
        if crc is None:
            crc = chunk.crc()
        peers.send(sock, [HEADER.pack(number, crc, header_check(file, number, crc)), *chunk.parts], until)
        with self._changed:
            self._sent += file.bytes_of(number, 1)

    def _passed(self, rank: int, index: int) -> None:
        with self._changed:
            self._next[rank] = index
            self._free()

    def _free(self) -> None:
        """Drop the buckets that all have got."""
        needed = min(self._next.values(), default=max(self._chunks, default=0) + 1)
        for index in [index for index in self._chunks if index < needed]:
            self._spare -= _spare(self._chunks.pop(index))
        self._changed.notify_all()

    def _wait(self, ready: Callable[[], bool]) -> None:
        """Wait until ``ready``, or nobody is left to send to; each of those has a deadline for each bucket."""
        while not ready() and self._next and not self._ended:
            absent = self._next.keys() - self._connected
            left = self._until - time.monotonic()
            if absent and left <= 0:
                for rank in absent:
                    _log.warning("rank %d did not fetch what was read for it", rank)
                    del self._next[rank]
                self._free()
                continue
            self._changed.wait(left if absent else None)

    def finish(self) -> int:
        """Wait until all have got everything or are late. Bytes sent."""
        with self._changed:
            self._wait(lambda: False)
            return self._sent

    def give_up(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()


def _spare(chunks: dict[tuple[FileId, int], Chunk]) -> int:
    return sum(chunk.spare for chunk in chunks.values())


def header_check(file: FileId, number: int, crc: int) -> int:
    found: int = crc32c(file.identity.encode() + HEADER.pack(number, crc, 0))
    return found
