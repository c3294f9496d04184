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
    ranks: int

    @property
    def size(self) -> int:
        return self.file.bytes_of(self.first, self.chunks)


class Plan(NamedTuple):
    """``owned``: by rank, the buckets that it reads and sends, in order; ``own``: what only it needs."""

    owned: Mapping[int, Sequence[Sequence[Span]]]
    own: Mapping[int, Sequence[Span]]

    def between(self, owner: int, needer: int) -> list[list[Span]]:
        """What ``owner`` sends to ``needer``, by bucket of the owner. A bucket may be empty, but not the last."""
        found = [[span for span in bucket if span.ranks >> needer & 1] for bucket in self.owned[owner]]
        while found and not found[-1]:
            found.pop()
        return found


def encode(needs: Needs) -> bytes:
    """Equal needs have equal encodings. Numbers of runs are distances: small, however large the file is."""
    body = []
    for file, runs in sorted(needs.items()):
        distances, at = list[int](), 0
        for first, count in runs:
            distances += (first - at, count)
            at = first + count
        body.append((file, distances))
    return msgspec.msgpack.encode(body)


def decode(data: bytes) -> Needs:
    """Raises `msgspec.DecodeError`."""
    needs = dict[FileId, Runs]()
    for file, distances in msgspec.msgpack.decode(data, type=list[tuple[FileId, list[int]]]):
        runs, at = list[tuple[int, int]](), 0
        for distance, count in zip(distances[::2], distances[1::2], strict=True):
            runs.append((at + distance, count))
            at += distance + count
        needs[file] = tuple(runs)
    return needs


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
        for piece in _cut(span, bucket):
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


def _cut(span: Span, bucket: int) -> list[Span]:
    step = max(1, bucket // span.file.unit)
    end = span.first + span.chunks
    return [span._replace(first=at, chunks=min(step, end - at)) for at in range(span.first, end, step)]


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


def alone(needs: Needs, request: int) -> list[list[Span]]:
    """``needs`` in requests of at most ``request`` bytes (but whole chunks)."""
    spans = [Span(file, first, count, 1) for file, runs in sorted(needs.items()) for first, count in runs]
    return requests(spans, request)


def requests(spans: Sequence[Span], request: int) -> list[list[Span]]:
    """``spans`` in requests of at most ``request`` bytes (but whole chunks)."""
    return _in_buckets([piece for span in spans for piece in _cut(span, request)], request)


def _bits(mask: int) -> list[int]:
    return [rank for rank in range(mask.bit_length()) if mask >> rank & 1]
