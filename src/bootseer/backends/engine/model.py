"""What the scheduler of reads deals with, and its sizes and times (`Tuning`).

    ReadRequest  one call of a reader
      BlockRange    consecutive parts of it in one block (`Place`); any DataNode with a replica may give any part
        Run      consecutive parts of such a range that are read at once
          Attempt   one transfer: the primary one into the caller's memory, at most one more into scratch memory

Nothing here does input or output; the engine keeps its own things (buffers, transfers) in the fields ``tag`` and
``handle``."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from bootseer.backends.engine.datanodes import NodeState
from bootseer.errors import BootseerError


@dataclass(frozen=True, slots=True)
class Tuning:
    """Sizes in bytes, times in seconds."""

    streams: int = 2
    """Bulk transfers that may be under way at one DataNode."""
    total: int = 32
    """Bulk transfers under way in the process, not counting as many from which nothing comes; each has a thread."""
    small: int = 256 << 10
    """Requests up to this size go first, and do not wait for the slots of larger ones."""
    small_slots: int = 4
    small_total: int = 32
    min_run: int = 1 << 20
    max_run: int = 4 << 20
    """Of a DataNode that is not known yet, or not quick."""
    quick_seconds: float = 0.06
    """What a quick DataNode is given at once: the more, the fewer requests, which cost both sides CPU time."""
    long_run: int = 8 << 20
    """The largest run of a quick DataNode. Hedges of two such runs are within `hedging.BURST`."""
    plan_from: int = 8 << 20
    """Requests from this size on have a plan."""
    stall: float = 0.25
    """An attempt that gets nothing for so long, and for 4 times the 95th percentile, is stopped."""
    patience: float = 60.0
    """A request fails when nothing of it has come for so long."""
    rounds: int = 4
    """How often fresh locations are asked for on behalf of one run."""
    round_wait: float = 0.25
    """Seconds before the second of these rounds is tried; three times as many before each one after it."""
    tries: int = 2
    """How often one DataNode is asked for one run between fresh locations."""


class Transfer(Protocol):
    """One read under way; `cancel` from any thread makes it raise `Cancelled` soon. ``received``: bytes so far."""

    received: int

    def cancel(self) -> None: ...


class Outcome(enum.Enum):
    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"
    """The DataNode did not answer, or broke off."""
    UNASKED = "not asked"
    """This process had no socket to ask it with."""
    REFUSED = "refused"
    """It answers, but not with this replica: the block is gone, or the token is old."""
    UNCHECKED = "without checksums"
    """It has no checksums of this replica, and they were asked for."""
    DAMAGED = "damaged"
    """The bytes are not those of the file; nobody knows yet whose fault that is."""
    CORRUPT = "corrupt"
    """The replica does not have its own checksums."""


@dataclass(slots=True, eq=False)
class Checksums:
    """Whether some replica of some block of a file had HDFS's checksums, ever: then the file was written with them."""

    seen: bool = False


class Place:
    """One block of an open file. ``file``: what to ask for fresh locations; requests of one file share its places.
    ``keys``: DataNodes with a replica, nearest first. ``bad``: those of them not to be asked until there are fresh
    locations, and why. ``unchecked``: those without checksums. ``checksums``: the file's, kept when locations change.
    ``tag``: the engine's."""

    def __init__(
        self, file: object, keys: Sequence[str], tag: object = None, checksums: Checksums | None = None
    ) -> None:
        self.file, self.keys, self.tag = file, tuple(keys), tag
        self.bad: dict[str, Outcome] = {}
        self.unchecked: set[str] = set()
        self.checksums = checksums or Checksums()

    @property
    def without_checksums(self) -> bool:
        """The file was written without checksums, as far as all its replicas say. One that does not answer, is gone or
        damaged says nothing; one that lost its checksums is never read unchecked: nobody would notice."""
        return bool(self.unchecked) and not self.checksums.seen and self.unchecked.issuperset(self.keys)

    @property
    def usable(self) -> list[str]:
        return [key for key in self.keys if key not in self.bad]


class BlockRange:
    """Parts of a request in one block: part ``i`` is at ``starts[i]`` to ``starts[i + 1]`` of the block. ``verify``:
    have the DataNode's checksums checked, because nothing else checks these bytes. ``split``: a piece of a part that
    lies in several blocks, verified where the replica has checksums: the check of the whole part does not tell which
    replica is wrong."""

    def __init__(
        self, place: Place, starts: Sequence[int], *, verify: bool = False, split: bool = False, tag: object = None
    ) -> None:
        self.place, self.starts, self.verify, self.split, self.tag = place, starts, verify, split, tag
        self.next = 0
        self.again: list[Run] = []
        self.quota: dict[str, float] = {}
        self.request: ReadRequest

    @property
    def fresh(self) -> int:
        """Bytes that no run has taken yet."""
        return self.starts[-1] - self.starts[self.next]

    @property
    def pending(self) -> int:
        """Bytes that wait for a DataNode."""
        return self.fresh + sum(run.size for run in self.again)

    def cut(self, size: int) -> Run:
        """The next run: as many parts as fit in ``size`` bytes, at least one."""
        first = last = self.next
        start = self.starts[first]
        last += 1
        while last < len(self.starts) - 1 and self.starts[last + 1] - start <= size:
            last += 1
        self.next = last
        return Run(self, first, last)


class Run:
    """Parts ``first`` to ``last`` (exclusive) of ``span``. ``failures``: tries by DataNode that did not work. ``won``:
    the hedge that has all bytes, while the primary attempt is being stopped. ``rounds``: how often fresh locations were
    asked for on its account; it is not tried before the time ``not_before``. ``done``: its bytes are in the caller's
    memory, right as far as they can be checked alone."""

    def __init__(self, span: BlockRange, first: int, last: int) -> None:
        self.span, self.first, self.last = span, first, last
        self.offset = span.starts[first]
        self.size = span.starts[last] - self.offset
        self.verify = span.verify or span.split
        self.failures: dict[str, int] = {}
        self.outcomes: set[Outcome] = set()
        self.error: BootseerError | None = None
        self.rounds, self.not_before = 0, 0.0
        self.primary: Attempt | None = None
        self.hedge: Attempt | None = None
        self.won: Attempt | None = None
        self.done = False


class ReadRequest:
    """One call of a reader. ``left``: bytes not there yet; ``pending``: those of them that wait for a DataNode.
    ``touching``: attempts (or copies) that may write into the caller's memory; the call may return only at 0."""

    def __init__(self, spans: Sequence[BlockRange], name: str = "") -> None:
        self.spans, self.name = list(spans), name
        self.size = sum(span.starts[-1] - span.starts[0] for span in self.spans)
        self.left = self.pending = self.size
        self.flying = 0
        self.touching = 0
        self.error: BaseException | None = None
        self.over = not self.left
        self.nodes: list[NodeState] = []
        self.spans_of: dict[str, list[BlockRange]] = {}
        self.small = False
        self.progress_at = 0.0
        self.planned_at: float | None = None
        self.planned_with: dict[str, float] = {}  # the rates, by DataNode
        self.healthy: list[NodeState] = []
        self.rates, self.seen = 0.0, -1
        for span in self.spans:
            span.request = self

    @property
    def finished(self) -> bool:
        return self.over and not self.touching


@dataclass(slots=True, eq=False)
class Attempt:
    """One transfer. ``kind``: ``primary`` writes into the caller's memory, the others into scratch memory. ``confirm``:
    asks whether a replica is damaged. ``size`` bytes from ``offset`` of the block at ``place``. ``silent``: nothing has
    come for long, and there is nobody else to ask."""

    kind: str
    node: NodeState
    place: Place
    offset: int
    size: int
    run: Run | None
    verify: bool
    started: float = 0.0
    progress_at: float = 0.0
    received: int = 0
    cancelled: bool = False
    rescued: bool = False
    silent: bool = False
    handle: Transfer | None = None
    tag: object = None


@dataclass(slots=True, eq=False)
class Relocate:
    """Ask the NameNode again where the blocks of ``file`` are, at the time ``not_before``, then tell the scheduler."""

    file: object
    not_before: float


@dataclass(slots=True, eq=False)
class CopyBack:
    """The bytes of ``attempt`` (a hedge) belong into the caller's memory: copy them, then tell the scheduler."""

    run: Run
    attempt: Attempt


def attempt_at(kind: str, node: NodeState, run: Run) -> Attempt:
    """An attempt of ``kind`` to read ``run`` from ``node``."""
    span, place = run.span, run.span.place
    # where the reader has checksums of its own, a replica that lost HDFS's is as good as any
    unneeded = place.without_checksums or (not span.verify and node.key in place.unchecked)
    return Attempt(kind, node, place, run.offset, run.size, run, run.verify and not unneeded)
