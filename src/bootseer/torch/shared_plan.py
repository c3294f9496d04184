"""Which rank reads which chunks for the others: needs of ranks, their encoding, and the plan. Pure functions: every
rank computes the same plan from the same needs. A chunk is the smallest unit, since its CRC covers all of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import msgspec

from bootseer.errors import DataError
from bootseer.wiretypes import known

_MOST = 1 << 20
"""Buckets of one plan: 32 TiB of those that are usual."""
Runs = tuple[tuple[int, int], ...]
"""Consecutive chunks, as (first, count); ascending, apart from each other."""


class FileId(NamedTuple):
    """A content: what `ChunkFile.identity` names, and how it is cut."""

    identity: str
    unit: int
    size: int


Needs = Mapping[FileId, Runs]
"""What one rank needs."""


class Span(NamedTuple):
    """So many ``chunks`` from ``first`` on of one file, which all of ``ranks`` (a bit each) need."""

    file: FileId
    first: int
    chunks: int
    ranks: int

    @property
    def start(self) -> int:
        return self.first * self.file.unit

    @property
    def size(self) -> int:
        return min(self.start + self.chunks * self.file.unit, self.file.size) - self.start

    def cut(self, size: int) -> list[Span]:
        """It, in order, in spans of at most ``size`` bytes (but whole chunks)."""
        step, end = max(1, size // self.file.unit), self.first + self.chunks
        return [self._replace(first=at, chunks=min(step, end - at)) for at in range(self.first, end, step)]


class Plan(NamedTuple):
    """By rank: ``owned``: the buckets that it reads and sends, in order; ``own``: what only it needs."""

    owned: Sequence[Sequence[Sequence[Span]]]
    own: Sequence[Sequence[Span]]


def encode(needs: Needs) -> bytes:
    """Equal needs have equal encodings."""
    return msgspec.msgpack.encode(sorted(needs.items()))


def plan(needs: Sequence[bytes], bucket: int) -> Plan:
    """The plan for the encoded ``needs`` of each rank. What several need is cut into at most ``bucket`` bytes (but
    whole chunks), and each piece goes to the rank among them that has the fewest bytes to read so far, counting first
    what only it needs. Raises `DataError` for what is not understood, or absurd."""
    same: dict[bytes, int] = {}
    for rank, one in enumerate(needs):
        same[one] = same.get(one, 0) | 1 << rank
    changes: dict[FileId, dict[int, int]] = {}
    for one, ranks in same.items():
        for file, runs in _decode(one):
            of_file = changes.setdefault(file, {})
            for first, count in runs:
                for chunk in (first, first + count):
                    of_file[chunk] = of_file.get(chunk, 0) ^ ranks
    own: list[list[Span]] = [[] for _ in needs]
    owned: list[list[Span]] = [[] for _ in needs]
    load = [0 for _ in needs]
    shared: list[Span] = []
    pieces = 0
    for file in sorted(changes):
        for span in _spans(file, changes[file]):
            if span.ranks.bit_count() > 1:
                pieces += -(-span.chunks // max(1, bucket // file.unit))
                if pieces > _MOST:
                    raise DataError(f"the ranks need more than {_MOST} buckets")
                shared += span.cut(bucket)
            else:
                own[span.ranks.bit_length() - 1].append(span)
                load[span.ranks.bit_length() - 1] += span.size
    for piece in shared:
        owner = min(_numbers(piece.ranks), key=load.__getitem__)
        owned[owner].append(piece)
        load[owner] += piece.size
    return Plan([batches(pieces, bucket) for pieces in owned], own)


def _decode(needs: bytes) -> list[tuple[FileId, Runs]]:
    try:
        found = msgspec.msgpack.decode(needs, type=known(list[tuple[FileId, Runs]]))
    except (msgspec.MsgspecError, RecursionError) as exc:
        raise DataError(f"what a rank needs is not understood: {exc}") from None
    for file, runs in found:
        end = 0
        for first, count in runs if file.unit > 0 else ((-1, 0),):
            if first < end or count < 1 or first + count > -(-file.size // file.unit):
                raise DataError("what a rank needs is not in its file")
            end = first + count
    return found


def _spans(file: FileId, changes: Mapping[int, int]) -> list[Span]:
    """The chunks that anybody needs, cut where the set of those who need them changes."""
    found, at, now = list[Span](), 0, 0
    for chunk, change in sorted(changes.items()):
        if now and chunk > at:
            found.append(Span(file, at, chunk - at, now))
        at, now = chunk, now ^ change
    return found


def batches(spans: Sequence[Span], size: int) -> list[list[Span]]:
    """``spans`` in order, as many together as ``size`` bytes allow (but whole chunks)."""
    found: list[list[Span]] = []
    left = 0
    for piece in (piece for span in spans for piece in span.cut(size)):
        if not found or piece.size > left:
            found.append([])
            left = size
        found[-1].append(piece)
        left -= piece.size
    return found


@lru_cache
def _numbers(ranks: int) -> list[int]:
    return [rank for rank in range(ranks.bit_length()) if ranks >> rank & 1]
