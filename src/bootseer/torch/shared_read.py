"""Read once per job: ranks that need the same bytes read each of them from the store once and send them to each other.

A collective of the ranks of a group; docs/internals/shared-read.md has its steps. Bytes land straight in the caller's
memory where a request covers a piece of them. Nothing writes there after the call has returned: all connections are
broken and its threads have ended then.

Concurrency: one thread calls. Beside it: some that read a bucket each and send it, and one for each rank from which
something is received."""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import msgspec

from bootseer import faults
from bootseer.errors import DataError, UnavailableError
from bootseer.torch import shared_plan
from bootseer.torch.destination import Destination, Place, Request
from bootseer.torch.peers import Peers, Wait, meet
from bootseer.torch.shared_plan import Plan, Span

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_log = logging.getLogger(__name__)

BUCKET = 32 << 20
"""Bytes that an owner reads before it begins to send them."""
PIECE = 4 << 20
"""Most bytes of one message: what is not received straight in the caller's memory is held beside it."""
DEADLINE = 30.0
"""Seconds that a rank waits for all others to call, and then for each bucket of each owner: as slow as a read of one
from the store may be that does not count as hanging."""
READS = 3
"""Buckets that are read, or being sent, at once: the end of one does not leave DataNodes idle."""
AHEAD = 4
"""Pieces of one owner for which memory waits at once."""
_REQUEST = 256 << 20
"""Most bytes of one request for what only this rank reads: nobody waits for a part of it."""


class SharedReadReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank did, in bytes. ``needed``: asked for; ``read``: from the store, whole chunks, ``cached``: from the
    node cache; ``received``: from other ranks, ``sent``: to them; ``read_again``: of those read, from either, what
    another rank should have sent and did not.

    ``ranks``: how many shared; 1 with ``alone``, which says why, when this rank read by itself. ``late``: the ranks
    that did not send all they should. ``seconds``: of the whole call; ``waited``: of them, for the other ranks to call.
    """

    needed: int
    read: int
    cached: int = 0
    received: int = 0
    sent: int = 0
    read_again: int = 0
    ranks: int = 1
    late: tuple[int, ...] = ()
    alone: str = ""
    seconds: float = 0.0
    waited: float = 0.0

    @property
    def counts(self) -> dict[str, int | float]:
        """By the names of `bootseer.stripefs.local.Load.moved`, without what the files count themselves."""
        return {
            "needed": self.needed,
            "received": self.received,
            "repeated": self.read_again,
            "waited": self.seconds,
        }


def read_shared(
    requests: Sequence[Request],
    group: ProcessGroup | None,
    *,
    bucket: int = BUCKET,
    deadline: float = DEADLINE,
) -> SharedReadReport:
    """Fill the memory of each (file, offset, memory) of ``requests``; memory is not to overlap.

    Every rank of ``group`` calls this, each time, with whatever it needs, which may be nothing; with None this process
    reads by itself. It does so, too, when it cannot meet the others within ``deadline`` seconds. Ranks that need the
    same bytes must have opened the same version of a file; others do not share. Raises what `ChunkFile.readinto` does,
    for this rank alone; then the memory holds rubbish."""
    began = time.monotonic()
    destination = Destination(requests)
    before, needs = destination.read_so_far, shared_plan.encode(destination.needs())
    peers, alone = None, "no group"
    if group is not None:
        try:
            peers, alone = meet(group, needs, deadline), ""
            planned = shared_plan.plan(peers.needs, bucket)
        except (UnavailableError, DataError) as exc:
            alone = str(exc)
            _log.warning("this rank reads by itself: %s", alone)
            if peers is not None:
                peers.close()
            peers = None
    waited = time.monotonic() - began
    counts, late = Counter[str](), list[int]()
    if peers is None:
        with ThreadPoolExecutor(READS, "bootseer-shared") as readers:
            own = shared_plan.batches(shared_plan.plan([needs], bucket).own[0], _REQUEST)
            deque(readers.map(destination.read_alone, own), 0)
    else:
        try:
            _Exchange(destination, peers, planned, counts, late).run()
        finally:
            peers.close()
    read, cached = (now - then for now, then in zip(destination.read_so_far, before, strict=True))
    report = SharedReadReport(
        needed=destination.size,
        read=read,
        cached=cached,
        received=counts["received"],
        sent=counts["sent"],
        read_again=counts["read_again"],
        ranks=len(peers.ranks) if peers else 1,
        late=tuple(sorted(late)),
        alone=alone,
        seconds=round(time.monotonic() - began, 3),
        waited=round(waited, 3),
    )
    _log.log(
        logging.INFO if group is not None else logging.DEBUG,
        "read %d bytes in %.1f s with %d ranks: %d from the store (%d of them again), %d received, %d sent%s",
        report.needed, report.seconds, report.ranks, report.read, report.read_again, report.received, report.sent,
        f"; alone: {alone}" if alone else "",
    )  # fmt: skip
    return report


class _Exchange:
    """One read with ``peers``. ``counts``: bytes, see `SharedReadReport`; ``late``: ranks that did not send all."""

    def __init__(self, to: Destination, peers: Peers, planned: Plan, counts: Counter[str], late: list[int]) -> None:
        self._to, self._peers, self._counts, self._late = to, peers, counts, late
        self._plan = planned
        self._others = [number for number in range(len(peers.ranks)) if number != peers.me]
        self._gone = set[int]()
        faults.point("stripefs.shared.planned")

    def run(self) -> None:
        """Read what is this rank's to read, then what the others did not send. Raises the first error of the store."""
        me, peers, counts = self._peers.me, self._peers, self._counts
        with (
            ThreadPoolExecutor(READS, "bootseer-shared") as readers,
            ThreadPoolExecutor(len(self._others), "bootseer-receive") as receivers,
        ):

            def read(spans: Sequence[Span]) -> list[Future[None]]:
                return [readers.submit(self._to.read_alone, each) for each in shared_plan.batches(spans, _REQUEST)]

            try:
                shares = [readers.submit(self._share, bucket) for bucket in _numbered(self._plan.owned[me])]
                reads = read(self._plan.own[me])
                receiving = [receivers.submit(self._receive, owner) for owner in self._others]
                missing = [span for each in receiving for span in each.result()]
                for share in shares:
                    counts["sent"] += share.result()
                peers.finish()
                reads += read(missing)
                counts["read_again"] = sum(span.size for span in missing)
                for each in reads:
                    each.result()
            except BaseException:
                peers.close()
                readers.shutdown(wait=False, cancel_futures=True)
                raise
        owned = [[span for bucket in buckets for span in bucket] for buckets in self._plan.owned]
        needed = sum(span.size for owner in self._others for span in owned[owner] if span.ranks >> me & 1)
        counts["received"] = needed - counts["read_again"]

    def _share(self, bucket: Sequence[tuple[int, Span]]) -> int:
        """Read the pieces of a bucket and send them to all who need them. How many bytes were sent."""
        try:
            places = self._to.read([piece for _, piece in bucket])
            faults.point("stripefs.shared.read")
        except BaseException:
            self._peers.close()  # nobody waits for what this rank cannot read
            raise
        sending = [
            (other, place.piece.size, self._peers.send(place.data, other, tag))
            for (tag, piece), place in zip(bucket, places, strict=True)
            for other in self._others
            if piece.ranks >> other & 1
        ]
        sent = 0
        for other, size, wait in sending:
            try:
                wait()
                sent += size
            except UnavailableError as exc:
                if other not in self._gone:
                    _log.warning("rank %d does not take what is sent to it: %s", self._peers.ranks[other], exc)
                self._gone.add(other)
        faults.point("stripefs.shared.sent")
        return sent

    def _receive(self, owner: int) -> list[Span]:
        """Receive what ``owner`` reads for this rank. What it did not send, or what is damaged."""
        left = deque(awaited(self._plan.owned[owner], self._peers.me))
        waiting: deque[tuple[Place, Wait]] = deque()
        missing: list[Span] = []
        why = "damaged on the way"
        try:
            while left or waiting:
                while left and len(waiting) < AHEAD:
                    tag, piece, buckets = left.popleft()
                    place = self._to.place(piece)
                    waiting.append((place, self._peers.receive(place.data, owner, tag, buckets=buckets)))
                waiting[0][1]()
                missing += self._to.received(waiting.popleft()[0])
                faults.point("stripefs.shared.received")
        except UnavailableError as exc:
            why = str(exc)
            missing += [place.piece for place, _ in waiting] + [piece for _, piece, _ in left]
        if missing:
            rank = self._peers.ranks[owner]
            self._late.append(rank)
            _log.warning(
                "rank %d did not send %d bytes (%s): reading them from the store",
                rank, sum(span.size for span in missing), why,
            )  # fmt: skip
        return missing


def awaited(buckets: Sequence[Sequence[Span]], me: int) -> list[tuple[int, Span, int]]:
    """The pieces of an owner's ``buckets`` that ``me`` needs: (tag, piece, how many buckets the owner reads for it from
    the one of the piece before it on, at least 1)."""
    found, before = list[tuple[int, Span, int]](), -1
    for number, bucket in enumerate(_numbered(buckets)):
        for tag, piece in bucket:
            if piece.ranks >> me & 1:
                found.append((tag, piece, max(1, number - before)))
                before = number
    return found


def _numbered(buckets: Sequence[Sequence[Span]]) -> list[list[tuple[int, Span]]]:
    """The pieces of each bucket of an owner; their numbers are the tags of what it sends."""
    numbers = itertools.count()
    return [[(next(numbers), piece) for span in bucket for piece in span.cut(PIECE)] for bucket in buckets]
