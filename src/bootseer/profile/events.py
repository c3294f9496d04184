"""Read start-up events and join them to spans. Format and states: ``docs/internals/events.md``. Reading never fails on
a bad line: it drops and counts it. Memory: spans only, about 0.25 kB each; lines are not kept."""

from __future__ import annotations

import enum
import logging
import os
import sys
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Self

import msgspec

from bootseer.errors import DataError, doing
from bootseer.profile import files
from bootseer.profile.files import Found
from bootseer.wiretypes import known, loaded

_log = logging.getLogger(__name__)

VERSION = 2
MAGIC = b'{"bootseer":'
LINE_LIMIT = 64 * 1024
MOST = 1 << 30
"""Bytes of one file that are read."""
_STRANGE = 4 << 20
"""Bytes in a row without one event, after which a file is read no further: holes cost their maker nothing."""
TOP_STAGES = ("queue", "alloc", "image", "env", "init")
INIT_STAGES = (
    "import",
    "dist_init",
    "model_init",
    "optimizer_init",
    "data_loader_init",
    "checkpoint_load",
    "compile",
    "first_step",
)
WAIT = "wait"
"""A span of this name, in any stage, is waiting for another node, and no work."""

Identity = tuple[str, str, int]
"""(job, attempt, cycle) of a start-up."""
AttrValue = str | int | float | bool | None
_Nanoseconds = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
LONGEST_NAME = 4200
"""Characters. Whole lines of emitters have fewer than 4096; Python makes no number of more than 4300 digits."""
_Name = Annotated[str, msgspec.Meta(max_length=LONGEST_NAME)]
_Value = (
    str
    | Annotated[int, msgspec.Meta(gt=-(1 << 62), lt=1 << 62)]
    | Annotated[float, msgspec.Meta(gt=-1e100, lt=1e100)]
    | bool
    | None
)
"""What sums of them can be made of."""


class State(enum.Enum):
    """What is known of a span; only ``DONE`` has a duration."""

    DONE = "DONE"
    OPEN = "OPEN"
    LOST = "LOST"
    SKEWED = "SKEWED"


class Event(msgspec.Struct, gc=False):
    """One line. Times in ns."""

    version: int = msgspec.field(name="bootseer")
    ev: str
    span: _Name
    wall: _Nanoseconds
    node: _Name
    job: _Name
    attempt: _Name = "0"
    cycle: _Count = 0
    gpus: _Count = 0
    parent: _Name = ""
    stage: _Name = ""
    rank: _Count | None = None
    mono: _Nanoseconds | None = None
    boot: _Name = ""
    res: _Count = 0
    pid: _Count = 0
    lost: _Count = 0
    cut: _Count = 0
    attrs: dict[str, _Value] | None = None


class Stamp(msgspec.Struct, frozen=True, gc=False):
    """One moment on one node: wall clock, ``CLOCK_BOOTTIME`` under a boot id (if known), its resolution; all ns."""

    wall: int
    mono: int | None
    boot: str
    res: int


class Duration(msgspec.Struct, frozen=True, gc=False):
    """``ns`` is never negative; ``uncertain``: taken from the wall clock, which may have been set in between."""

    ns: int
    uncertain: bool


class Span(msgspec.Struct, frozen=True, gc=False):
    """One stage on one node or rank. ``begin`` or ``end`` is missing when its event is."""

    id: str
    stage: str
    job: str
    attempt: str
    cycle: int
    node: str
    rank: int | None
    gpus: int
    parent: str
    begin: Stamp | None
    end: Stamp | None
    attrs: dict[str, AttrValue]
    state: State
    duration: Duration | None
    """How long it took; None unless the state is ``DONE``."""


class Lane(msgspec.Struct, frozen=True, cache_hash=True, gc=False):
    """What the spans of a rank, or of a node's own work, have in common: one object for all of them."""

    identity: Identity
    node: str
    rank: int | None
    gpus: int


def numbers() -> array[int]:
    return array("q")


class _Columns(msgspec.Struct):
    def take(self, rows: Iterable[int]) -> Self:
        """These rows alone."""
        found = type(self)()
        for name in self.__struct_fields__:
            column = getattr(self, name)
            if isinstance(column, _Columns):
                setattr(found, name, column.take(rows))
            else:
                getattr(found, name).extend(column[row] for row in rows)
        return found


class Stamps(_Columns):
    """Columns: when each span began, or ended. What is missing is -1; ``clock`` is the boot id and the resolution."""

    wall: array[int] = msgspec.field(default_factory=numbers)
    mono: array[int] = msgspec.field(default_factory=numbers)
    clock: list[tuple[str, int]] = []

    def __getitem__(self, row: int) -> Stamp | None:
        wall, mono = self.wall[row], self.mono[row]
        return Stamp(wall, mono if mono >= 0 else None, *self.clock[row]) if wall >= 0 else None


class Spans(_Columns):
    """Spans in columns: a large start-up has millions, and an object each would take twice the memory."""

    id: list[str] = []
    stage: list[str] = []
    lane: list[Lane] = []
    parent: list[str] = []
    attrs: list[dict[str, AttrValue]] = []
    begin: Stamps = msgspec.field(default_factory=Stamps)
    end: Stamps = msgspec.field(default_factory=Stamps)
    state: list[State] = []
    ns: array[int] = msgspec.field(default_factory=numbers)
    """Durations; -1 unless the state is ``DONE``."""
    uncertain: bytearray = msgspec.field(default_factory=bytearray)
    detail: bytearray = msgspec.field(default_factory=bytearray)
    """Whether it has a name of its own and lies inside a stage, which then accounts for it."""

    def __len__(self) -> int:
        return len(self.lane)

    def __getitem__(self, row: int) -> Span:
        lane, ns = self.lane[row], self.ns[row]
        return Span(
            self.id[row], self.stage[row], *lane.identity, lane.node, lane.rank, lane.gpus, self.parent[row],
            self.begin[row], self.end[row], self.attrs[row], self.state[row],
            Duration(ns, bool(self.uncertain[row])) if ns >= 0 else None,
        )  # fmt: skip

    def __iter__(self) -> Iterator[Span]:
        return map(self.__getitem__, range(len(self)))


class EventLog(msgspec.Struct):
    """Spans of any number of start-ups, and how much could not be used."""

    spans: Spans = msgspec.field(default_factory=Spans)
    events: int = 0
    torn: int = 0
    foreign: int = 0
    newer: int = 0
    duplicates: int = 0
    lost: int = 0
    """Events the emitters could not write."""
    cut: int = 0
    """Attributes the emitters left out."""
    unread: list[str] = []
    """Of each file that was not read to its end, which one it is, and why."""

    def identities(self) -> list[Identity]:
        """Every (job, attempt, cycle) in here, in the order in which they began."""
        first: dict[Identity, int] = {}
        for lane, begin, end in zip(self.spans.lane, self.spans.begin.wall, self.spans.end.wall, strict=True):
            wall = begin if begin >= 0 else end
            if wall < first.get(lane.identity, _NEVER):
                first[lane.identity] = wall
        return sorted(first, key=lambda key: (first[key], key))

    def by_identity(self) -> dict[Identity, EventLog]:
        """One for each of `identities`, in their order, with the same counts of what could not be used."""
        rows: dict[Identity, array[int]] = {identity: numbers() for identity in self.identities()}
        if len(rows) == 1:
            return dict.fromkeys(rows, self)
        for row, lane in enumerate(self.spans.lane):
            rows[lane.identity].append(row)
        return {one: msgspec.structs.replace(self, spans=self.spans.take(found)) for one, found in rows.items()}


def identity_text(job: str, attempt: str, cycle: int) -> str:
    """What a start-up is called in messages."""
    return f"job {job or '(no name)'}, attempt {attempt}, cycle {cycle}"


def attempt_name(text: str) -> str:
    """What an attempt is called: JOB.RESTART of Slurm, as batch scripts name it, is JOB.RESTART.0, its first step's."""
    job, dot, restart = text.partition(".")
    return f"{text}.0" if dot and job.isdecimal() and restart.isdecimal() else text


def origin(identity: Identity) -> Identity:
    """The start-up that this one was parted from, because it had been queued again; itself for others."""
    return identity[0], identity[1].partition(_AGAIN)[0], identity[2]


def read(paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str] | Found]) -> EventLog:
    """Read event files, and every ``*.jsonl`` below folders. Raises `NotFoundError` for a path that does not exist,
    `DataError` when there is not one event in all of them."""
    given = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    joiner, seen = _Joiner(), set[tuple[int, int]]()
    for path in given:
        for file in (
            [path] if isinstance(path, Found) else files.find(Path(path), (".jsonl",), "events file or job folder")
        ):
            with doing(f"read events from {file}"):
                joiner.add_file(file, seen)
    log = joiner.finish()
    if not log.events:
        where = ", ".join(map(str, given)) or "no file"
        raise DataError(
            f"no events in {where}" + (f" ({log.foreign} other lines)" if log.foreign else ""),
            hint="set BOOTSEER_EVENTS to a file ending in .jsonl for the start you want to profile",
        )
    return log


def parse(lines: Iterable[bytes]) -> EventLog:
    """Join lines, from wherever they come, to spans. Never raises on a line; an empty log is possible."""
    joiner = _Joiner()
    for line in lines:
        joiner.add_line(line)
    return joiner.finish()


_NONE: dict[str, AttrValue] = {}
"""Attributes of the many spans that have none: shared, and never changed."""
_NEVER = 1 << 63
_AGAIN = "+"


class _Joiner:
    """Lines in any order in, spans out."""

    def __init__(self) -> None:
        self.log = EventLog()
        self._decoder = msgspec.json.Decoder(known(Event))
        self._rows: dict[str, int] = {}
        """Span id -> row, in the order of the rows."""
        self._one: dict[Any, Any] = {}
        """One object for all that are equal."""
        self._notes: dict[str, dict[str, AttrValue]] = {}
        spans = self.log.spans
        self._blanks: list[tuple[Any, object]] = [
            (spans.stage, ""), (spans.lane, _NOWHERE), (spans.parent, ""), (spans.attrs, _NONE),
            *((column, -1) for stamps in (spans.begin, spans.end) for column in (stamps.wall, stamps.mono)),
            *((stamps.clock, _NO_CLOCK) for stamps in (spans.begin, spans.end)),
        ]  # fmt: skip

    def add_file(self, path: Found, seen: set[tuple[int, int]]) -> None:
        """``seen``: the files that were read already, which it joins."""
        with open(path.open(), "rb") as file:
            found = os.fstat(file.fileno())
            if (found.st_dev, found.st_ino) in seen:
                return
            seen.add((found.st_dev, found.st_ino))
            at, known, limit = 0, self.log.events, min(_STRANGE, MOST)
            while line := file.readline(LINE_LIMIT):
                at += len(line)
                if not line.endswith(b"\n") and len(line) == LINE_LIMIT:
                    self.log.foreign += 1
                    while line and not line.endswith(b"\n") and at < limit:
                        line = file.readline(LINE_LIMIT)
                        at += len(line)
                else:
                    self.add_line(line)
                if at >= limit:
                    if (self.log.events == known or at >= MOST) and at < os.fstat(file.fileno()).st_size:
                        why = "that much of a file is read" if at >= MOST else "nothing shortly before it is an event"
                        self.log.unread.append(f"{path}: not read from byte {at} on: {why}")
                        _log.warning("%s", self.log.unread[-1])
                        return
                    known, limit = self.log.events, min(at + _STRANGE, MOST)

    def add_line(self, line: bytes) -> None:
        text = line.strip()
        if not text:
            return
        event = self._decode(text)
        if event is None:
            if line.endswith(b"\n"):
                self.log.foreign += 1
            else:
                self.log.torn += 1
            later = text.find(MAGIC, 1)
            event = self._decode(text[later:]) if later > 0 else None
        if event is not None:
            self._add(event)

    def _decode(self, text: bytes) -> Event | None:
        if not text.startswith(MAGIC):
            return None
        try:
            event = loaded(self._decoder.decode, text)
        except ValueError:
            try:  # a shell may have passed on bytes that are no UTF-8
                event = loaded(self._decoder.decode, text.decode("utf-8", "replace"))
            except ValueError:
                return None
        if (
            event.version < VERSION
            or event.ev not in ("begin", "end", "note")
            or not event.span
            or (event.ev == "begin" and not event.stage)
        ):
            return None
        return event

    def _add(self, event: Event) -> None:
        if event.version > VERSION:
            self.log.newer += 1
            return
        self.log.events += 1
        self.log.lost += event.lost
        self.log.cut += event.cut
        if event.ev == "note":
            self._notes.setdefault(event.span, {}).update(event.attrs or {})
            return
        spans, row = self.log.spans, self._rows.get(event.span)
        if row is None:
            row = self._rows[event.span] = len(self._rows)
            spans.id.append(event.span)
            if row == len(spans.lane):
                for column, blank in self._blanks:
                    column.extend([blank] * _BLANKS)
        begins = event.ev == "begin"
        stamps = spans.begin if begins else spans.end
        if stamps.wall[row] >= 0:
            self.log.duplicates += 1
            return
        if begins or spans.begin.wall[row] < 0:
            # The begin says what the span is; an end may come from a process that knows less.
            identity = (event.job, attempt_name(event.attempt), event.cycle)
            identity = self._one.setdefault(identity, identity)
            lane = Lane(identity, sys.intern(event.node), event.rank, event.gpus)
            spans.lane[row] = self._one.setdefault(lane, lane)
            above = self._rows.get(event.parent)
            spans.stage[row] = sys.intern(event.stage)
            spans.parent[row] = event.parent if above is None else spans.id[above]
        clock = (event.boot, event.res)
        stamps.wall[row], stamps.clock[row] = event.wall, self._one.setdefault(clock, clock)
        if event.mono is not None:
            stamps.mono[row] = event.mono
        if event.attrs:
            old = spans.attrs[row]
            spans.attrs[row] = {**event.attrs, **old} if begins else {**old, **event.attrs}

    def finish(self) -> EventLog:
        for column, _ in self._blanks:
            del column[len(self._rows) :]
        attrs = self.log.spans.attrs
        for span_id, more in self._notes.items():
            if (row := self._rows.get(span_id)) is not None:
                attrs[row] = {**attrs[row], **more}
        self._part_starts()
        self._name_nodes()
        self._settle()
        self._find_details()
        return self.log

    def _part_starts(self) -> None:
        """Part starts that have one name, as of pods that a controller makes again: where a second `queue` begins after
        the first has ended, what began since then is of an attempt of its own."""
        spans, queues = self.log.spans, dict[Identity, list[tuple[int, int]]]()
        for stage, lane, began, ended in zip(spans.stage, spans.lane, spans.begin.wall, spans.end.wall, strict=True):
            if stage == "queue" and began >= 0:
                queues.setdefault(lane.identity, []).append((began, ended if ended >= 0 else _NEVER))
        again: dict[Identity, list[int]] = {}
        for identity, found in queues.items():
            until = min(found)[1]
            for began, ended in sorted(found):
                if began > until:
                    again.setdefault(identity, []).append(began)
                until = max(until, ended)
        if not again:
            return
        for row, (lane, began, ended) in enumerate(zip(spans.lane, spans.begin.wall, spans.end.wall, strict=True)):
            number = bisect_right(again.get(lane.identity, ()), began if began >= 0 else ended)
            if number:
                job, attempt, cycle = lane.identity
                other = msgspec.structs.replace(lane, identity=(job, f"{attempt}{_AGAIN}{number}", cycle))
                spans.lane[row] = self._one.setdefault(other, other)

    def _name_nodes(self) -> None:
        """Give a node one name, where some spans of a start have its host's whole name, and others the first part of it
        alone, as Slurm's NodeName is."""
        lanes, nodes = self.log.spans.lane, dict[Identity, set[str]]()
        for lane in (known := set(lanes)):
            nodes.setdefault(lane.identity, set()).add(lane.node)
        renamed: dict[Lane, Lane] = {}
        for lane in known:
            first, dot, _ = lane.node.partition(".")
            if not dot or first not in (names := nodes[lane.identity]):
                continue
            if sum(name.startswith(f"{first}.") for name in names) == 1:
                renamed[lane] = msgspec.structs.replace(lane, node=first)
        if renamed:
            lanes[:] = [renamed.get(lane, lane) for lane in lanes]

    def _settle(self) -> None:
        """Give every span its state and its duration: from the monotonic clock under one boot id, else from the wall
        clock."""
        spans, begin, end = self.log.spans, self.log.spans.begin, self.log.spans.end
        for began, mono, (boot, res), ended, mono_end, (boot_end, res_end) in zip(
            begin.wall, begin.mono, begin.clock, end.wall, end.mono, end.clock, strict=True
        ):
            ns, uncertain, state = -1, False, State.LOST if began < 0 else State.OPEN
            if began >= 0 and ended >= 0:
                ns = mono_end - mono
                uncertain = mono < 0 or mono_end < 0 or not boot or boot != boot_end or ns < -(res + res_end)
                ns = ended - began if uncertain else max(ns, 0)
                state = State.DONE if ns >= 0 else State.SKEWED
            spans.state.append(state)
            spans.ns.append(max(ns, -1))
            spans.uncertain.append(uncertain and ns >= 0)
        if State.OPEN in spans.state:
            self._settle_open()

    def _settle_open(self) -> None:
        """Tell the spans without an end whose end cannot come any more."""
        spans = self.log.spans
        seen: dict[Lane, tuple[int, int]] = {}  # when it began, and its latest top-level stage
        boots: dict[str, tuple[int, str]] = {}
        tops: dict[tuple[Identity, str, int | None], int] = {}  # when its last top-level stage began; -1: of any rank
        for lane, stage, began, clock, ended, clock_end in zip(
            spans.lane, spans.stage, spans.begin.wall, spans.begin.clock, spans.end.wall, spans.end.clock, strict=True
        ):
            if began >= 0:
                first, place = seen.get(lane, (began, -1))
                seen[lane] = min(first, began), max(place, _TOP_RANK.get(stage, -1))
                for rank in (lane.rank, -1) if stage in _TOP_RANK else ():
                    of = lane.identity, lane.node, rank
                    tops[of] = max(began, tops.get(of, 0))
            for wall, (boot, _) in ((began, clock), (ended, clock_end)):
                if boot and wall > boots.get(lane.node, (-1, ""))[0]:
                    boots[lane.node] = wall, boot
        attempts: dict[tuple[str, str, str], int] = {}  # (job, attempt, node) -> when it began
        for lane, (began, _) in seen.items():
            attempt = (*lane.identity[:2], lane.node)
            attempts[attempt] = min(began, attempts.get(attempt, began))

        def progress(lane: Lane, place: int) -> tuple[int, int, int]:
            return attempts[(*lane.identity[:2], lane.node)], lane.identity[2], place

        latest: dict[tuple[str, str], tuple[int, int, int]] = {}  # (job, node) -> attempt, cycle, top-level stage
        for lane, (_, place) in seen.items():
            at, key = progress(lane, place), (lane.identity[0], lane.node)
            latest[key] = max(at, latest.get(key, at))
        for row, state in enumerate(spans.state):
            if state is State.OPEN:
                lane, boot, above = spans.lane[row], spans.begin.clock[row][0], self._rows.get(spans.parent[row])
                rebooted = bool(boot) and boots[lane.node][1] != boot
                around = _TOP_RANK.get(spans.stage[above], -1) if above is not None else -1
                place = _TOP_RANK.get(spans.stage[row], around)
                passed = progress(lane, len(_TOP_RANK) if place < 0 else place) < latest[lane.identity[0], lane.node]
                if place < 0:  # one of the user's own: it ended where a stage began after it
                    ranks = (-1,) if lane.rank is None else (lane.rank, None)
                    after = (tops.get((lane.identity, lane.node, rank), 0) for rank in ranks)
                    passed |= max(after) > spans.begin.wall[row]
                if rebooted or passed or (above is not None and spans.end.wall[above] >= 0):
                    spans.state[row] = State.LOST

    def _find_details(self) -> None:
        """Whether a stage of the same start-up is somewhere above each span with a name of its own: asked once of each
        row, however long the chain above it is."""
        spans, inside = self.log.spans, bytearray(len(self._rows))  # 0: not known yet, 1: not inside, 2: inside
        for row, (stage, parent) in enumerate(zip(spans.stage, spans.parent, strict=True)):
            if parent and stage not in _TOP_RANK:
                chain, here = list[int](), row
                while not inside[here]:
                    inside[here] = 1  # where the chain ends, and where it leads back to itself
                    chain.append(here)
                    above = self._rows.get(spans.parent[here])
                    if above is None or spans.lane[above].identity != spans.lane[here].identity:
                        break
                    if spans.stage[above] in _TOP_RANK:
                        inside[here] = 2
                        break
                    here = above
                for one in chain:
                    inside[one] = inside[here]
            spans.detail.append(inside[row] == 2)


_TOP_RANK = {name: index for index, name in enumerate(TOP_STAGES)} | dict.fromkeys(INIT_STAGES, len(TOP_STAGES) - 1)
_NOWHERE = Lane(("", "", 0), "", None, 0)
_NO_CLOCK = ("", 0)
_BLANKS = 1024
"""Rows that are added to the columns at once."""
