"""Read once per job: ranks that need the same bytes read each of them from the store once and send them to each other.

A collective of the ranks of a group; docs/internals/shared-read.md has its steps. Bytes land straight in the caller's
memory. Nothing writes there after the call has returned: all connections are closed and their threads have ended then.

Concurrency: one thread calls. Beside it: two threads that read, one for each rank that fetches something here, and one
for each rank from which something is fetched.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from bootseer import faults
from bootseer.errors import BootseerError
from bootseer.hdfs.dial import host_port
from bootseer.ranges import runs
from bootseer.torch import peers, shared_plan
from bootseer.torch.destination import Chunk, Destination, Request
from bootseer.torch.outbox import HEADER, MARK, Outbox, header_check
from bootseer.torch.peers import Door, Member, Rendezvous, Roll
from bootseer.torch.shared_plan import FileId, Plan, Span

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_log = logging.getLogger(__name__)

BUCKET = 32 << 20
"""Bytes that an owner reads before it begins to send them."""
DEADLINE = 30.0
"""Seconds that a rank waits for all others to call, and then for each bucket of each owner: as slow as a read from the
store may be that does not count as hanging."""
_READS = 2
"""Buckets that are read at once: the end of one does not leave DataNodes idle."""
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
        """As fields of a `bootseer.stripefs.loads.LoadReport`, without what the files count themselves."""
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
    for this rank alone; then the memory holds rubbish.
    """
    began = time.monotonic()
    destination = Destination(requests)
    before = destination.cached
    sharing = _Sharing(destination, deadline)
    try:
        alone = sharing.meet(group, bucket) if group is not None else "no group"
        waited = time.monotonic() - began
        sharing.work()
    finally:
        sharing.close()
    counts, cached = sharing.counts, destination.cached - before
    report = SharedReadReport(
        needed=destination.size,
        read=counts["read"] - cached,
        cached=cached,
        received=counts["received"],
        sent=counts["sent"],
        read_again=counts["read_again"],
        ranks=sharing.ranks,
        late=tuple(sorted(sharing.late)),
        alone=alone,
        seconds=round(time.monotonic() - began, 3),
        waited=round(waited, 3),
    )
    _log.info(
        "read %d bytes in %.1f s with %d ranks: %d from the store (%d of them again), %d received, %d sent%s",
        report.needed, report.seconds, report.ranks, report.read, report.read_again, report.received, report.sent,
        f"; alone: {alone}" if alone else "",
    )  # fmt: skip
    return report


_calls: weakref.WeakKeyDictionary[ProcessGroup, int] = weakref.WeakKeyDictionary()
"""How many reads each group has had; every rank counts the same, also one that is new in a group made anew."""


class _Missing(NamedTuple):
    """What ``owner`` did not send, and why."""

    owner: int
    chunks: list[tuple[FileId, int]]
    why: str


class _Sharing:
    """One shared read. ``counts``: bytes, see `SharedReadReport`."""

    def __init__(self, destination: Destination, deadline: float) -> None:
        self._to, self._deadline = destination, deadline
        self._rank, self.ranks = 0, 1
        self._members: dict[int, Member] = {}
        self._plan: Plan | None = None
        self._planned = threading.Event()
        self._token = b""
        self._door: Door | None = None
        self._outbox: Outbox | None = None
        self._rendezvous: Rendezvous | None = None
        self._receivers: dict[int, threading.Thread] = {}
        self._sockets: list[socket.socket] = []
        self._results: queue.SimpleQueue[_Missing] = queue.SimpleQueue()
        self._lock, self._closed = threading.Lock(), False
        self.counts: Counter[str] = Counter()
        self.late: set[int] = set()

    def meet(self, group: ProcessGroup, bucket: int) -> str:
        """Make the plan with the other ranks. Why there is none, "" when there is."""
        import torch.distributed as dist
        from torch.distributed import distributed_c10d

        if not dist.is_available() or not dist.is_initialized():
            return "torch.distributed is not initialized"
        if (rank := dist.get_rank(group)) < 0 or (size := dist.get_world_size(group)) < 2:
            return "it is the only rank of its group"
        _calls[group] = call = _calls.get(group, 0) + 1
        self._rendezvous = rendezvous = Rendezvous(
            distributed_c10d._get_process_group_store(group), f"bootseer.read/{call}", rank, size
        )
        try:
            needs = shared_plan.encode(self._to.needs())
            roll = rendezvous.join(needs, bucket, self._serve, self._deadline)
            here = any(member.rank == rank for member in roll.members)
            if here and not any(rank in ranks and one == needs for ranks, one in roll.needs):
                raise ConnectionAbortedError("they take it to need something else")
        except (OSError, RuntimeError, BootseerError, ValueError, msgspec.MsgspecError) as exc:
            _log.warning("this rank reads by itself: cannot meet the others: %s", exc or type(exc).__name__)
            return f"cannot meet the other ranks: {exc or type(exc).__name__}"
        finally:
            self._door = rendezvous.door
        if not here:
            _log.warning("this rank reads by itself: the others did not wait for it")
            return "the others did not wait for it"
        if len(roll.members) == 1:
            return "no other rank came"
        self._token, self._rank = rendezvous.token, rank
        self._begin(roll)
        return ""

    def _begin(self, roll: Roll) -> None:
        needs = [(sum(1 << rank for rank in ranks), shared_plan.decode(one)) for ranks, one in roll.needs]
        self._plan = plan = shared_plan.plan(needs, roll.bucket)
        self._members = {member.rank: member for member in roll.members}
        self.ranks = len(self._members)
        others = [rank for rank in self._members if rank != self._rank]
        self._outbox = Outbox(
            self._to,
            {rank: spans for rank in others if any(spans := plan.between(self._rank, rank))},
            self._deadline,
        )
        self._planned.set()
        faults.point("stripefs.shared.planned")
        for owner in others:
            if any(spans := plan.between(owner, self._rank)):
                thread = threading.Thread(
                    target=self._receive, args=(owner, spans), name="bootseer-receive", daemon=True
                )
                self._receivers[owner] = thread
                thread.start()

    # -- reading ------------------------------------------------------------------------------------------------------

    def work(self) -> None:
        """Read what is this rank's to read, then what the others did not send. Raises the first error."""
        with ThreadPoolExecutor(_READS, thread_name_prefix="bootseer-shared") as pool:
            reads: list[Future[None]] = []

            def read(spans: Sequence[Span], done: Callable[[dict[tuple[FileId, int], Chunk]], None] | None) -> None:
                chunks, count = self._to.read(spans, whole=done is not None)
                with self._lock:
                    self.counts["read"] += count
                if done is not None:
                    done(chunks)

            try:
                if self._plan is None:
                    own = shared_plan.alone(self._to.needs(), _REQUEST)
                else:
                    own = shared_plan.requests(self._plan.own[self._rank], _REQUEST)
                    assert self._outbox is not None
                    for index, spans in enumerate(self._plan.owned[self._rank]):
                        reads.append(pool.submit(read, spans, self._outbox.taker(index)))
                reads += [pool.submit(read, spans, None) for spans in own]
                for done in reads:
                    done.result()
                for _ in self._receivers:
                    reads += [pool.submit(read, spans, None) for spans in self._again(self._results.get())]
                for done in reads:
                    done.result()
                if self._outbox is not None:
                    self.counts["sent"] = self._outbox.finish()
                if self._rendezvous is not None:
                    self._rendezvous.finish()
            except BaseException:
                for waiting in reads:
                    waiting.cancel()
                self.close()
                raise

    def _again(self, missing: _Missing) -> list[list[Span]]:
        """What this rank reads in place of an owner, by request."""
        if not missing.chunks:
            return []
        self.late.add(missing.owner)
        member = self._members[missing.owner]
        _log.warning(
            "rank %d (%s) did not send %d chunks (%s): reading them from the store",
            member.rank, host_port((member.host, member.port)), len(missing.chunks), missing.why,
        )  # fmt: skip
        by_file: dict[FileId, list[int]] = {}
        for file, chunk in missing.chunks:
            by_file.setdefault(file, []).append(chunk)
        needs = {file: tuple(runs(chunks)) for file, chunks in by_file.items()}
        spans = shared_plan.alone(needs, _REQUEST)
        self.counts["read_again"] += sum(span.size for one in spans for span in one)
        return spans

    # -- receiving ----------------------------------------------------------------------------------------------------

    def _receive(self, owner: int, buckets: Sequence[Sequence[Span]]) -> None:
        """Fetch from ``owner`` what it reads for this rank."""
        wanted = [
            (span.file, n) for spans in buckets for span in spans for n in range(span.first, span.first + span.chunks)
        ]
        missing: list[tuple[FileId, int]] = []
        at, received, why = 0, 0, ""
        try:
            member = self._members[owner]
            until = time.monotonic() + self._deadline
            with peers.dial(member.host, member.port, self._token, peers.FETCH, self._rank, until) as sock:
                self._watch(sock)
                for index, spans in enumerate(buckets):
                    self._receive_mark(sock, index, until)
                    until = time.monotonic() + self._deadline
                    for file, number in wanted[at : at + sum(span.chunks for span in spans)]:
                        if self._receive_chunk(sock, file, number, until):
                            received += file.bytes_of(number, 1)
                        else:
                            missing.append((file, number))
                            why = "damaged on the way"
                        at += 1
                    faults.point("stripefs.shared.received")
                    until = time.monotonic() + self._deadline
        except OSError as exc:
            why = exc.strerror or str(exc)
        finally:
            with self._lock:
                self.counts["received"] += received
            self._results.put(_Missing(owner, missing + wanted[at:], why))

    def _watch(self, sock: socket.socket) -> None:
        """Have `close` end the connection, too."""
        with self._lock:
            self._sockets.append(sock)
            if self._closed:
                raise ConnectionAbortedError("this rank has given up")

    def _receive_mark(self, sock: socket.socket, index: int, until: float) -> None:
        """The owner has read bucket ``index``, which it says also to ranks that need nothing of it."""
        mark = bytearray(MARK.size)
        peers.receive(sock, [memoryview(mark)], until)
        if MARK.unpack(mark)[0] != index:
            raise ConnectionAbortedError("it sent something else")

    def _receive_chunk(self, sock: socket.socket, file: FileId, number: int, until: float) -> bool:
        """Whether the right bytes have come. `OSError` when the connection is of no use any more."""
        head = bytearray(HEADER.size)
        peers.receive(sock, [memoryview(head)], until)
        said, crc, check = HEADER.unpack(head)
        if said != number or check != header_check(file, number, crc):
            raise ConnectionAbortedError("it sent something else")
        chunk = self._to.chunk(file, number)
        peers.receive(sock, chunk.parts, until)
        expected = self._to.expected_crc(file, number)
        if chunk.crc() != (crc if expected is None else expected):
            return False
        self._to.keep(file, number, chunk)
        chunk.finish()
        return True

    # -- sending ------------------------------------------------------------------------------------------------------

    def _serve(self, sock: socket.socket, rank: int) -> None:
        if self._planned.wait(self._deadline) and self._outbox is not None:
            self._outbox.send(sock, rank)

    def close(self) -> None:
        """End all connections and their threads."""
        with self._lock:
            self._closed = True
            sockets = list(self._sockets)
        self._planned.set()
        if self._outbox is not None:
            self._outbox.give_up()
        for sock in sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        if self._door is not None:
            self._door.close()
        for thread in self._receivers.values():
            thread.join()
