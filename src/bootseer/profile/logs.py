"""Start-up events from the logs of programs that nobody changed: each line that a pattern knows begins a stage.

A lane is one rank of one node, as far as the lines say; lines of several logs of one node are of one lane. A line that
names no rank is of all ranks of its node that have a stage open. A stage ends where the next one of its lane begins;
where one rank alone says when its first step ended, the others' stages end with its own. Only lines that carry a time
count; others that match are counted. The patterns and their form: ``logpatterns.toml`` beside this file; what a line
says: `loglines`."""

from __future__ import annotations

import hashlib
import itertools
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, tzinfo
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from bootseer.errors import ConfigError
from bootseer.profile.events import VERSION, Event
from bootseer.profile.loglines import LOOK_AHEAD, Frame, Reader
from bootseer.wiretypes import document, known, loaded

READY, OVER = "ready", "over"
"""The pseudo-stages of a line that ends the first step, and of one that ends the training."""
_IDLE = 20_000
"""Lines in a row that end steps of ranks whose first one has ended, after which no other one is waited for."""
_PART = re.compile(r"(\w+) ([\d.]+)")


class Pattern(msgspec.Struct, forbid_unknown_fields=True):
    """One ``[[line]]`` of a pattern file."""

    match: Annotated[str, msgspec.Meta(min_length=1, max_length=1000)]
    stage: Annotated[str, msgspec.Meta(max_length=64)]
    program: str = ""
    cycle: bool = False
    inside: bool = False
    has: str = ""


class _File(msgspec.Struct, forbid_unknown_fields=True):
    line: list[Pattern]
    versions: dict[str, str] = {}


class Source(NamedTuple):
    """One log. ``node`` and ``rank`` are those of lines that name none."""

    lines: Iterable[str]
    node: str
    rank: int | None = None
    cycle: int = 0
    path: str = ""
    """Where it lies: logs that begin alike are told apart by it."""
    written: datetime | None = None
    """When it was last written; None: now."""


class Found(msgspec.Struct):
    """What logs gave."""

    events: list[Event] = []
    matched: int = 0
    """Lines that changed a lane's stage."""
    timeless: int = 0
    """Lines that match a pattern and carry no time."""
    steps: int = 0
    """How many steps the longest ``first_step`` has, where the log says nothing of single ones."""
    divided: list[str] = []
    """Nodes whose ranks are taken as several nodes."""
    most_ranks: int = 0
    """Of the node that has most."""


class _Mark(NamedTuple):
    """A line that a pattern knows."""

    frame: Frame
    pattern: Pattern
    said: dict[str, str | None]
    source: Source
    origin: bytes


def patterns(path: Path | None = None) -> list[Pattern]:
    """Those of a file, or bootseer's own. Raises `ConfigError` for a file that is none."""
    path = path or Path(__file__).with_name("logpatterns.toml")
    try:
        found = msgspec.convert(loaded(tomllib.loads, document(path).decode()), known(_File)).line
        for pattern in found:
            re.compile(pattern.match)
    except OSError as exc:
        raise ConfigError(f"cannot read the patterns {path}: {exc.strerror}") from None
    except (ValueError, re.error) as exc:
        raise ConfigError(
            f"{path} is no file of patterns: {exc}", hint="it has [[line]] tables with match and stage"
        ) from None
    return found


def extract(
    sources: Iterable[Source],
    known: Sequence[Pattern],
    *,
    job: str,
    attempt: str = "0",
    gpus: int = 0,
    ranks_per_node: int = 0,
    zone: tzinfo | None = None,
) -> Found:
    """Read logs. ``zone`` is that of times without one; None: this machine's. Where ``ranks_per_node`` is given, a log
    that names more ranks is of several nodes. Never raises on a line."""
    found, given = Found(), list(sources)
    by_node: defaultdict[str, list[tuple[int | None, str, _Mark]]] = defaultdict(list)
    for source in given:
        marks = []
        alone = sum(other.node == source.node for other in given) == 1
        for mark in _marks(source, known, zone, alone=alone):
            if mark.frame.when is None:
                found.timeless += 1
            else:
                marks.append(mark)
        for node, rank, process, mark in _placed(marks, ranks_per_node, found):
            by_node[node].append((rank, process, mark))
    nodes = []
    for node, marked in by_node.items():
        found.most_ranks = max(found.most_ranks, len({rank for rank, _, _ in marked} - {None}))
        nodes.append(_Node(found, (job, attempt, node, gpus)))
        for rank, process, mark in sorted(marked, key=lambda one: one[2].frame.when or 0):
            nodes[-1].take(rank, process, mark)
    for cycle in sorted({cycle for one in nodes for cycle in one.starts}):
        of = [one for one in nodes if cycle in one.starts]
        for one in of:
            one.look_at(cycle)
        ready = max(one.ready() for one in of)
        ends = _ends(found, cycle) if ready else _told(nodes, cycle)
        for one in of:
            if ready < 2:  # one rank speaks for all: nobody makes a step alone
                one.settle(ends)
            one.finish()
    return found


def _marks(source: Source, known: Sequence[Pattern], zone: tzinfo | None, *, alone: bool) -> Iterator[_Mark]:
    """The lines of a log that patterns know. Where it is the only one of its node, lines that end a first step and have
    none to end are left out: a log has millions."""
    reader = Reader(zone, source.written or datetime.now(UTC))
    lines = iter(source.lines)
    first, room = list[str](), LOOK_AHEAD << 12  # lines may be long
    while room > 0 and len(first) < LOOK_AHEAD and (line := next(lines, None)) is not None:
        first.append(line)
        room -= len(line)
    reader.ahead(first)
    compiled = [(pattern.has, re.compile(pattern.match).search, pattern) for pattern in known]
    begins = list({one.has: None for one in known if one.stage != READY or "<seconds>" in one.match})
    idle = 0
    words = everything = list(dict.fromkeys(pattern.has for pattern in known))
    origin = hashlib.blake2b(source.path.encode("utf-8", "replace"), digest_size=8)
    going: dict[tuple[str, int | None, int | None, str], bool] = {}
    """Lane, as far as the line says -> whether a stage of it is open."""
    for line in itertools.chain(first, lines):
        if not going:  # up to the first line that counts: the log may grow
            origin.update(line.encode("utf-8", "replace"))
        for word in words:
            if word in line:
                break
        else:
            if not reader.goes_on and " P " not in line and '"MESSAGE"' not in line:
                continue
        for frame in reader.frames(line):
            lane = (frame.node, frame.rank, frame.label, frame.process)
            for word, search, pattern in compiled:
                if word in frame.text and (match := search(frame.text)):
                    said = match.groupdict()
                    ends = pattern.stage == READY
                    of = [lane]
                    if ends and frame.rank is None and frame.label is None:  # it is of all ranks
                        of += [one for one in going if (one[0], one[3]) == (frame.node, frame.process)]
                    idle = idle + 1 if ends and not any(going.get(one, True) for one in of) else 0
                    if idle > _IDLE:
                        words = begins
                    elif not (alone and idle):
                        yield _Mark(frame._replace(text=""), pattern, said, source, origin.digest())
                        if frame.when is not None:
                            going |= dict.fromkeys(of, not ends)
                            words = everything if any(going.values()) or not alone else begins
                    break


def _placed(marks: Sequence[_Mark], ranks_per_node: int, found: Found) -> Iterator[tuple[str, int | None, str, _Mark]]:
    """Of each line its node, rank and process."""
    ranks = {one.frame.rank for one in marks} - {None}
    labels = {one.frame.label for one in marks} - {None}
    tasks = any(one.frame.label not in (None, one.frame.rank) for one in marks if one.frame.rank is not None)
    divided = not tasks and 0 < ranks_per_node < max(len(ranks), len(labels))
    if divided:
        found.divided.append(f"{marks[0].source.node} with {max(len(ranks), len(labels))} ranks")
    processes = len({one.frame.process for one in marks if one.frame.process.startswith("mpi")}) > 1
    quiet = {(one.frame.node, one.frame.process) for one in marks if one.frame.rank is None}
    largest = max((int(one.said.get("nranks") or 0) for one in marks), default=0)
    for one in marks:
        frame, node = one.frame, one.frame.node or one.source.node
        rank = one.source.rank if frame.rank is None else frame.rank
        if frame.soft and (frame.node, frame.process) in quiet:
            rank = one.source.rank
        if frame.label is not None and tasks:  # a task for each node, whose processes name their ranks
            node = f"{node}-{frame.label}"
        elif frame.label is not None and rank is None:
            rank = frame.label
        if rank is None and processes and frame.process.startswith("mpi"):
            rank = int(frame.process[3:])
        if rank is None and one.said.get("rank"):
            if int(one.said.get("nranks") or 0) < largest:
                continue  # a rank of a few of the processes, and not of all
            rank = int((one.said["rank"] or "0")[:9])
        if divided and rank is None and one.pattern.stage == READY:
            for number in sorted({(other or 0) // ranks_per_node for other in ranks or labels}):
                yield f"{node}-{number}", rank, frame.process, one
            continue
        if divided:
            node = f"{node}-{(rank or 0) // ranks_per_node}"
        yield node, rank, frame.process, one


def _ends(found: Found, cycle: int) -> dict[str, int]:
    """When a stage of this restart ended, by its name, as the last one who says it."""
    told = {one.span: one.stage for one in found.events if one.ev == "begin" and one.cycle == cycle}
    return {told[one.span]: one.wall for one in found.events if one.ev == "end" and one.span in told}


def _told(nodes: Sequence[_Node], cycle: int) -> dict[str, int]:
    """When the first step of this start ended, as a rank says of which nothing else is known."""
    here = [lane for one in nodes for lane in one.starts.get(cycle, {}).values()]
    begun = max((lane.open[False][2] for lane in here if lane.stage == "first_step"), default=0)
    lanes = (lane for one in nodes for lanes in one.starts.values() for lane in lanes.values())
    until = [one.since[cycle + 1] for one in nodes if cycle + 1 in one.since]
    ends = [lane.stepped for lane in lanes if 0 < begun <= lane.stepped < min(until, default=lane.stepped + 1)]
    return {"first_step": min(ends)} if ends else {}


class _Lane:
    """Where one rank, or process that names none, is in its start."""

    last: _Mark

    def __init__(self, rank: int | None, process: str) -> None:
        self.rank, self.process = rank, process
        self.open: dict[bool, tuple[str, str, int]] = {}
        """Span, stage and begin of the stage (False), and of the one inside of it (True)."""
        self.before = ("", 0)
        """The last span inside of a stage, and when it ended."""
        self.began = self.ready = self.resumed = self.over = False
        """Whether a line was seen, its first step ended, a checkpoint loaded, and a training was over."""
        self.begun = self.ended = 0
        """When its first stage began, or its first one after a line without a rank; when its last one ended."""
        self.stepped = 0
        """When a line ended its first step of which nothing said that it began."""
        self.starts = set[str]()
        """Lines that begin a start, and were seen since a training was over."""

    @property
    def stage(self) -> str:
        return self.open[False][1] if False in self.open else ""

    @property
    def gathered(self) -> bool:
        """Whether a line without a rank spoke for it, and it has not spoken since."""
        return bool(self.ended and not self.begun)


class _Lanes(dict[tuple[int | None, str], _Lane]):
    def __missing__(self, key: tuple[int | None, str]) -> _Lane:
        return self.setdefault(key, _Lane(*key))


class _Node:
    """The start of a node; `take` writes what changes with a line."""

    def __init__(self, found: Found, identity: tuple[str, str, str, int]) -> None:
        self._found, self._identity = found, identity
        self.starts: dict[int, _Lanes] = {}
        self.since: dict[int, int] = {}
        """By cycle: its lanes, and when its first line was."""
        self._out: defaultdict[str, dict[int | None, _Lane]] = defaultdict(dict)
        """Of each process the ranks that have a stage open."""
        self.look_at(-1)

    def look_at(self, cycle: int) -> None:
        """Go on with this cycle."""
        self.cycle, self.lanes = cycle, self.starts.get(cycle, _Lanes())
        self._out.clear()

    def take(self, rank: int | None, process: str, mark: _Mark) -> None:
        """The next line in time."""
        when, pattern, lane, shared = (
            mark.frame.when or 0,
            mark.pattern,
            self.lanes[rank, process],
            self.lanes[None, process],
        )
        if mark.source.cycle > self.cycle or self._again(lane, pattern):  # of all of the node's processes
            self._leave(shared)
            for other in () if pattern.stage else self.lanes.values():
                self._enter(other, "", when, mark, error="cancelled")
            cycle = max(self.cycle + 1, mark.source.cycle)
            self.starts[cycle], self.since[cycle] = _Lanes(), when
            self.look_at(cycle)
            lane, shared = self.lanes[rank, process], self.lanes[None, process]
        if pattern.stage == OVER:
            lane.over = True
            lane.starts.clear()
        if pattern.stage == OVER or (pattern.cycle and not pattern.stage):
            return
        launched = pattern.inside or pattern.stage == "rendezvous"
        if rank is None and not launched and self._gather(shared, mark):
            return
        if pattern.cycle:
            lane.starts.add(pattern.match)
        if lane.ready or (lane.gathered and shared.ready):
            return
        self._found.matched += 1
        lane.began, lane.last = True, mark
        seconds, stage = int(float(mark.said.get("seconds") or 0) * 1e9), pattern.stage
        if pattern.inside:
            self._inside(lane, mark, when, seconds)
            return
        lane.resumed |= stage == "checkpoint_load"
        steps = 0 if lane.resumed else int((mark.said.get("steps") or "0")[:9])
        if stage == READY:
            if seconds and int((mark.said.get("step") or "0")[:9]) <= 1 and lane.stage != "first_step":
                self._enter(lane, "first_step", max(when - seconds, lane.open.get(False, ("", "", 0))[2]), mark)
            elif shared.stage == "first_step" and rank is not None and not lane.begun:
                self._enter(lane, "first_step", max(shared.open[False][2], lane.ended), mark)
                lane.begun = when
            elif (lane.begun or lane.ended) and lane.stage != "first_step":  # nothing said when it began
                self._enter(lane, "first_step", when, mark)
            lane.ready, stage = bool(lane.begun), ""
            lane.stepped = lane.stepped or when
        self._enter(lane, stage, when, mark, steps=steps if steps > 1 else 0)

    def _again(self, lane: _Lane, pattern: Pattern) -> bool:
        """Whether the node starts again with a line, or ended before its first step."""
        if not pattern.cycle or not pattern.stage:
            return pattern.cycle and any(one.stage for one in self.lanes.values())
        known = pattern.stage == "rendezvous" or pattern.match in lane.starts
        known |= lane.ready and bool(lane.starts) and not lane.over
        return known and lane.began and lane.stage != pattern.stage

    def ready(self) -> int:
        """How many ranks, or processes where none is named, have made their first step."""
        ready = [
            one.rank
            for one in self.lanes.values()
            if one.ready or (one.gathered and self.lanes[None, one.process].ready)
        ]
        return len(ready) - ready.count(None) or len(ready)

    def settle(self, ends: Mapping[str, int]) -> None:
        """End what ranks have left open that say nothing more, where others say when that stage ended (`_ends`)."""
        if "first_step" not in ends:
            return
        for lane in self.lanes.values():
            if False in lane.open and lane.rank is None and not lane.process and lane.stage != "first_step":
                self._leave(lane)
            elif False in lane.open:
                _, stage, begun = lane.open[False]
                self._enter(lane, "", max(ends.get(stage, ends["first_step"]), begun), lane.last)

    def finish(self) -> None:
        """What a line without a rank began has ended where all ranks went on."""
        for lane in self.lanes.values():
            if lane.rank is None and lane.open and not any(one.gathered for one in self.lanes.values()):
                self._leave(lane)

    def _leave(self, shared: _Lane) -> None:
        """End what a process without a rank has open, such as an agent, where the first of the ranks goes on that it
        made, or spoke for."""
        begun = shared.open[False][2] if False in shared.open else 0
        firsts = [one.begun for one in self.lanes.values() if one.rank is not None and one.begun >= begun > 0]
        if firsts:
            self._enter(shared, "", min(firsts), shared.last)

    def _gather(self, shared: _Lane, mark: _Mark) -> bool:
        """A line without a rank is of all ranks that have a stage open: theirs ends, and the next one is one span of
        all of them. Whether that is all that it says."""
        out, stage = list(self._out[shared.process].values()), mark.pattern.stage
        if not out:
            return False
        self._leave(shared)
        others = [one for one in out if one.stage != stage]
        for one in others:
            if stage == READY:
                self.take(one.rank, one.process, mark)
            else:
                self._enter(one, "", mark.frame.when or 0, mark)
                one.begun, shared.ready = 0, False
        if stage != READY:
            return not others
        shared.ready |= not shared.open and any(one.gathered for one in self.lanes.values())
        return not shared.open

    def _inside(self, lane: _Lane, mark: _Mark, when: int, seconds: int) -> None:
        """A stage inside of the one that is open: it begins, ends, or has ended and says how long it took."""
        stage, begun = mark.pattern.stage, when - seconds
        if not seconds:
            if not stage or stage != lane.stage:
                self._enter(lane, stage, when, mark, inside=True)
            return
        self._enter(lane, "", when, mark, inside=True)
        around = lane.open[False][0] if lane.stage == stage else lane.before[0] if lane.before[1] >= begun else ""
        if not around:
            around = self._span(lane, stage, begun, when, mark)
        for name, took in _PART.findall(mark.said.get("parts") or ""):
            ended = begun + int(float(took) * 1e9)
            self._span(lane, name, begun, ended, mark, parent=around)
            begun = ended

    def _enter(
        self, lane: _Lane, stage: str, when: int, mark: _Mark, *, inside: bool = False, steps: int = 0, error: str = ""
    ) -> None:
        """End the stage that is open, with an ``error`` or without, and begin this one, if it is one."""
        if inside in lane.open:
            span, name, begun = lane.open[inside]
            if stage == name or when < begun:
                return
            attrs: dict[str, str | int | float | bool | None] = {"error": error} if error else {}
            if not inside:
                self._enter(lane, "", when, mark, inside=True)
            else:
                lane.before = span, when
            del lane.open[inside]
            if steps and name == "first_step":
                attrs["steps"] = steps
                self._found.steps = max(self._found.steps, steps)
            if not inside:
                lane.ended = when
                self._out[lane.process].pop(lane.rank, None)
            self._write("end", span, name, lane.rank, when, attrs=attrs or None)
        if stage:
            lane.open[inside] = self._span(lane, stage, when, None, mark), stage, when
            if not inside:
                lane.begun = lane.begun or when
                if lane.rank is not None:
                    self._out[lane.process][lane.rank] = lane

    def _span(self, lane: _Lane, stage: str, begin: int, end: int | None, mark: _Mark, parent: str = "") -> str:
        parent = parent or (lane.open[False][0] if False in lane.open else "")
        about = (
            mark.origin.hex(),
            *self._identity[:3],
            self.cycle,
            lane.rank,
            mark.frame.process,
            stage,
            begin,
            parent,
        )
        span = hashlib.blake2b("\0".join(map(str, about)).encode("utf-8", "replace"), digest_size=8).hexdigest()
        self._write("begin", span, stage, lane.rank, begin, parent=parent, attrs={"source": "log"})
        if end is not None:
            self._write("end", span, stage, lane.rank, end)
        return span

    def _write(
        self, kind: str, span: str, stage: str, rank: int | None, when: int, *,
        parent: str = "", attrs: dict[str, str | int | float | bool | None] | None = None,
    ) -> None:  # fmt: skip
        job, attempt, node, gpus = self._identity
        self._found.events.append(
            Event(
                VERSION, kind, span, when, node, job, attempt, self.cycle, gpus, stage=stage, rank=rank,
                parent=parent, attrs=attrs,
            )
        )  # fmt: skip
