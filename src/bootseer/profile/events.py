"""Read start-up events and join them to spans. Format and states: ``docs/internals/events.md``.

Reading never fails on a bad line: it drops and counts it. Memory: spans only, about 0.7 kB each; lines are not kept.
"""

from __future__ import annotations

import enum
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import msgspec

from bootseer.errors import DataError, NotFoundError, doing

VERSION = 2
MAGIC = b'{"bootseer":'
LINE_LIMIT = 64 * 1024
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
    span: str
    wall: _Nanoseconds
    node: str
    job: str
    attempt: str | _Count = "0"
    """A number in version 1."""
    cycle: _Count = 0
    gpus: _Count = 0
    parent: str = ""
    stage: str = ""
    rank: _Count | None = None
    mono: _Nanoseconds | None = None
    boot: str = ""
    res: _Count = 0
    pid: int = 0
    lost: _Count = 0
    cut: _Count = 0
    attrs: dict[str, AttrValue] | None = None


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


class Span(msgspec.Struct, gc=False):
    """One stage on one node or rank. ``begin`` or ``end`` is missing when its event is."""

    id: str
    stage: str = ""
    job: str = ""
    attempt: str = "0"
    cycle: int = 0
    node: str = ""
    rank: int | None = None
    gpus: int = 0
    parent: str = ""
    begin: Stamp | None = None
    end: Stamp | None = None
    attrs: dict[str, AttrValue] = {}
    state: State = State.OPEN

    @property
    def identity(self) -> Identity:
        """(job, attempt, cycle)."""
        return (self.job, self.attempt, self.cycle)

    @property
    def duration(self) -> Duration | None:
        """How long it took; None unless the state is ``DONE``."""
        if self.state is not State.DONE or self.begin is None or self.end is None:
            return None
        return between(self.begin, self.end)


class EventLog(msgspec.Struct):
    """Spans of any number of start-ups, and how much could not be used."""

    spans: list[Span] = []
    events: int = 0
    torn: int = 0
    foreign: int = 0
    newer: int = 0
    duplicates: int = 0
    lost: int = 0
    """Events the emitters could not write."""
    cut: int = 0
    """Attributes the emitters left out."""

    def identities(self) -> list[Identity]:
        """Every (job, attempt, cycle) in here, in the order in which they began."""
        first: dict[Identity, int] = {}
        for span in self.spans:
            stamp = span.begin or span.end
            if stamp is not None and stamp.wall < first.get(span.identity, 1 << 63):
                first[span.identity] = stamp.wall
        return sorted(first, key=lambda key: (first[key], key))

    def by_identity(self) -> dict[Identity, EventLog]:
        """One for each of `identities`, in their order, with the same counts of what could not be used."""
        spans: dict[Identity, list[Span]] = {identity: [] for identity in self.identities()}
        for span in self.spans:
            if span.identity in spans:
                spans[span.identity].append(span)
        return {identity: msgspec.structs.replace(self, spans=found) for identity, found in spans.items()}


def between(begin: Stamp, end: Stamp) -> Duration | None:
    """``end - begin`` from the monotonic clock under one boot id, else from the wall clock; None if negative."""
    if begin.mono is not None and end.mono is not None and begin.boot and begin.boot == end.boot:
        ns = end.mono - begin.mono
        if ns >= -(begin.res + end.res):
            return Duration(max(ns, 0), uncertain=False)
    ns = end.wall - begin.wall
    return Duration(ns, uncertain=True) if ns >= 0 else None


def identity_text(job: str, attempt: str, cycle: int) -> str:
    """What a start-up is called in messages."""
    return f"job {job or '(no name)'}, attempt {attempt}, cycle {cycle}"


def read(paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> EventLog:
    """Read event files, and every ``*.jsonl`` below folders.

    Raises `NotFoundError` for a path that does not exist, `DataError` when there is not one event in all of them.
    """
    given = [Path(paths)] if isinstance(paths, (str, os.PathLike)) else [Path(path) for path in paths]
    joiner = _Joiner()
    for file in dict.fromkeys(path.resolve() for path in _files(given)):
        with doing(f"read events from {file}"):
            joiner.add_file(file)
    log = joiner.finish()
    if not log.events:
        where = ", ".join(str(path) for path in given) or "no file"
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


def _files(given: Iterable[Path]) -> Iterator[Path]:
    for path in given:
        if path.is_dir():
            yield from sorted(file for file in path.rglob("*.jsonl") if file.is_file())
        elif path.exists():
            yield path
        else:
            raise NotFoundError(f"no events file or job folder {path}")


_NONE: dict[str, AttrValue] = {}
"""Attributes of the many spans that have none: shared, and never changed."""


class _Joiner:
    """Lines in any order in, spans out."""

    def __init__(self) -> None:
        self.log = EventLog()
        self._decoder = msgspec.json.Decoder(Event)
        self._spans: dict[str, Span] = {}
        self._notes: dict[str, dict[str, AttrValue]] = {}

    def add_file(self, path: Path) -> None:
        with path.open("rb") as file:
            while line := file.readline(LINE_LIMIT):
                if not line.endswith(b"\n") and len(line) == LINE_LIMIT:
                    self.log.foreign += 1
                    while line and not line.endswith(b"\n"):
                        line = file.readline(LINE_LIMIT)
                else:
                    self.add_line(line)

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
            event = self._decoder.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError):
            try:  # a shell may have passed on bytes that are no UTF-8
                event = self._decoder.decode(text.decode("utf-8", "replace"))
            except msgspec.DecodeError:
                return None
        if event.ev not in ("begin", "end", "note") or not event.span or (event.ev == "begin" and not event.stage):
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
        span = self._spans.get(event.span)
        if span is None:
            span = self._spans[event.span] = Span(id=event.span, attrs=_NONE)
        begins = event.ev == "begin"
        if (span.begin if begins else span.end) is not None:
            self.log.duplicates += 1
            return
        if begins or span.begin is None:
            # The begin says what the span is; an end may come from a process that knows less.
            span.job, span.attempt, span.cycle = sys.intern(event.job), sys.intern(str(event.attempt)), event.cycle
            span.node, span.rank, span.gpus = sys.intern(event.node), event.rank, event.gpus
            parent = self._spans.get(event.parent)
            span.stage, span.parent = sys.intern(event.stage), parent.id if parent is not None else event.parent
        stamp = Stamp(event.wall, event.mono, sys.intern(event.boot), event.res)
        if begins:
            span.begin = stamp
        else:
            span.end = stamp
        if event.attrs:
            span.attrs = {**event.attrs, **span.attrs} if begins else {**span.attrs, **event.attrs}

    def finish(self) -> EventLog:
        for span_id, attrs in self._notes.items():
            if (span := self._spans.get(span_id)) is not None:
                span.attrs = {**span.attrs, **attrs}
        _settle(self._spans)
        self.log.spans = list(self._spans.values())
        return self.log


def _settle(spans: dict[str, Span]) -> None:
    """Give every span its state."""
    began: dict[tuple[str, str, str], int] = {}  # (job, node, attempt) -> when
    for span in spans.values():
        if span.begin is not None:
            attempt = (span.job, span.node, span.attempt)
            began[attempt] = min(span.begin.wall, began.get(attempt, span.begin.wall))

    def progress(span: Span) -> tuple[int, int, int]:
        return (began[span.job, span.node, span.attempt], span.cycle, _TOP_RANK.get(span.stage, -1))

    latest: dict[tuple[str, str], tuple[int, int, int]] = {}  # (job, node) -> (attempt, cycle, top-level stage)
    for span in spans.values():
        if span.begin is not None:
            key, at = (span.job, span.node), progress(span)
            if at > latest.get(key, (-1, -1, -1)):
                latest[key] = at
    boots: dict[str, tuple[int, str]] = {}
    for span in spans.values():
        for stamp in (span.begin, span.end):
            if stamp is not None and stamp.boot and stamp.wall > boots.get(span.node, (-1, ""))[0]:
                boots[span.node] = (stamp.wall, stamp.boot)
    for span in spans.values():
        if span.begin is not None and span.end is not None:
            span.state = State.SKEWED if between(span.begin, span.end) is None else State.DONE
        elif span.begin is None:
            span.state = State.LOST
        else:
            parent = spans.get(span.parent)
            rebooted = bool(span.begin.boot) and boots[span.node][1] != span.begin.boot
            passed = progress(span) < latest[(span.job, span.node)]
            ended = parent is not None and parent.end is not None
            span.state = State.LOST if rebooted or passed or ended else State.OPEN


_TOP_RANK = {name: index for index, name in enumerate(TOP_STAGES)} | dict.fromkeys(INIT_STAGES, len(TOP_STAGES) - 1)
