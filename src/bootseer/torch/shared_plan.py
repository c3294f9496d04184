"""Which rank reads which chunks for the others: needs of ranks, their encoding, and the plan. Pure functions.

Every rank computes the same plan from the same needs. A chunk is the smallest unit, since its CRC covers all of it.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

Runs = tuple[tuple[int, int], ...]
"""Consecutive chunks, as (first, count); ascending, apart from each other."""


class FileId(NamedTuple):
    """A content: what `ChunkFile.identity` names, and how it is cut."""

    identity: str
    unit: int
    size: int

    def bytes_of(self, first: int, count: int) -> int:
        return min((first + count) * self.unit, self.size) - first * self.unit


Needs = Mapping[FileId, Runs]
"""What one rank needs."""


class Span(NamedTuple):
    """So many ``chunks`` from ``first`` on of one file, which all of ``ranks`` (a bit each) need."""

    file: FileId
    first: int
    chunks: int
    ranks: int = 0

    @property
    def start(self) -> int:
        return self.first * self.file.unit

    @property
    def size(self) -> int:
        return self.file.bytes_of(self.first, self.chunks)

    def cut(self, size: int) -> list[Span]:
        """It, in order, in spans of at most ``size`` bytes (but whole chunks)."""
        step, end = max(1, size // self.file.unit), self.first + self.chunks
        return [self._replace(first=at, chunks=min(step, end - at)) for at in range(self.first, end, step)]


class Plan(NamedTuple):
    """``owned``: by rank, the buckets that it reads and sends, in order; ``own``: what only it needs."""

    owned: Mapping[int, Sequence[Sequence[Span]]]
    own: Mapping[int, Sequence[Span]]


def encode(needs: Needs) -> bytes:
    """Equal needs have equal encodings."""
    return msgspec.msgpack.encode(sorted(needs.items()))


def decode(data: bytes) -> Needs:
    """Raises `msgspec.DecodeError`."""
    return dict(msgspec.msgpack.decode(data, type=list[tuple[FileId, Runs]]))


def plan(needs: Sequence[tuple[int, Needs]], bucket: int) -> Plan:
    """The plan for ``needs``: (ranks that all need just this, as bits; what), each rank in one of them.

    What several ranks need is cut into at most ``bucket`` bytes (but whole chunks), and each piece goes to the rank
    among them that has the fewest bytes to read so far, counting first what only it needs.
    """
    spans = [span for file in sorted({file for _, one in needs for file in one}) for span in _spans(file, needs)]
    every = 0
    for ranks, _ in needs:
        every |= ranks
    load = dict.fromkeys(_bits(every), 0)
    own: dict[int, list[Span]] = {rank: [] for rank in load}
    owned: dict[int, list[Span]] = {rank: [] for rank in load}
    for span in spans:
        if span.ranks.bit_count() == 1:
            rank = span.ranks.bit_length() - 1
            own[rank].append(span)
            load[rank] += span.size
    heaps: dict[int, list[tuple[int, int]]] = {}
    for span in spans:
        if span.ranks.bit_count() == 1:
            continue
        heap = heaps.get(span.ranks)
        if heap is None:
            heap = heaps[span.ranks] = [(load[rank], rank) for rank in _bits(span.ranks)]
            heapq.heapify(heap)
        for piece in span.cut(bucket):
            while heap[0][0] < load[heap[0][1]]:  # it was given something of other ranks' meanwhile
                heapq.heapreplace(heap, (load[heap[0][1]], heap[0][1]))
            owner = heap[0][1]
            owned[owner].append(piece)
            load[owner] += piece.size
            heapq.heapreplace(heap, (load[owner], owner))
    return Plan({rank: _in_buckets(found, bucket) for rank, found in owned.items()}, own)


def _spans(file: FileId, needs: Sequence[tuple[int, Needs]]) -> list[Span]:
    """The chunks of ``file`` that anybody needs, cut where the set of those who need them changes."""
    changes: dict[int, int] = {}
    for ranks, one in needs:
        for first, count in one.get(file, ()):
            changes[first] = changes.get(first, 0) ^ ranks
            changes[first + count] = changes.get(first + count, 0) ^ ranks
    found, at, now = list[Span](), 0, 0
    for chunk, change in sorted(changes.items()):
        if now and chunk > at:
            found.append(Span(file, at, chunk - at, now))
        at, now = chunk, now ^ change
    return found


def _in_buckets(spans: Sequence[Span], bucket: int) -> list[list[Span]]:
    """``spans`` in order, as many together as ``bucket`` bytes allow, at least one."""
    found: list[list[Span]] = []
    size = 0
    for span in spans:
        if not found or size + span.size > bucket:
            found.append([])
            size = 0
        found[-1].append(span)
        size += span.size
    return found


def requests(spans: Sequence[Span], request: int) -> list[list[Span]]:
    """``spans`` in requests of at most ``request`` bytes (but whole chunks)."""
    return _in_buckets([piece for span in spans for piece in span.cut(request)], request)


def _bits(mask: int) -> list[int]:
    return [rank for rank in range(mask.bit_length()) if mask >> rank & 1]
