"""Start-up events from the log of a program that nobody changed: each line that a pattern knows begins a stage.

A lane is one rank of one node, as far as the lines say (``[rank3]:``, ``3: `` of ``srun --label``, ``[pod/NAME/...]``
of ``kubectl logs --prefix``). A stage ends where the next one of its lane begins. Only lines that carry a time count;
others that match are counted. The patterns and their form: ``logpatterns.toml`` beside this file.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Iterable, Iterator
from datetime import datetime, tzinfo
from pathlib import Path
from typing import Annotated

import msgspec

from bootseer.errors import ConfigError
from bootseer.profile.events import VERSION, Event
from bootseer.wiretypes import known, loaded

READY = "ready"
"""The pseudo-stage of a line that ends the first step."""
LONGEST = 4096
"""Characters of a line that are looked at."""

_TIME = re.compile(
    r"\[?\b(?P<date>\d{4}-\d\d-\d\d)[ T](?P<clock>\d\d:\d\d:\d\d)(?:[.,](?P<part>\d{1,9}))?"
    r"(?P<zone>Z|[+-]\d\d:?\d\d)?\]?"
)
_GLOG = re.compile(r"[IWEFVDC](?P<month>\d\d)(?P<day>\d\d) (?P<clock>\d\d:\d\d:\d\d)\.(?P<part>\d{1,9}) ")
_POD = re.compile(r"^\[pod/(?P<node>[^/\]]+)/[^\]]*\] ")
_RANK = re.compile(r"^(?:\[(?:rank|default)(?P<torch>\d+)\]:? ?|\s*(?P<slurm>\d+): )")


class Pattern(msgspec.Struct, forbid_unknown_fields=True):
    """One ``[[line]]`` of a pattern file."""

    match: Annotated[str, msgspec.Meta(min_length=1, max_length=1000)]
    stage: Annotated[str, msgspec.Meta(max_length=64)]
    program: str = ""
    cycle: bool = False


class _File(msgspec.Struct, forbid_unknown_fields=True):
    line: list[Pattern]


class Found(msgspec.Struct):
    """What a log gave."""

    events: list[Event] = []
    matched: int = 0
    """Lines that changed a lane's stage."""
    timeless: int = 0
    """Lines that match a pattern and carry no time."""


def patterns(path: Path | None = None) -> list[Pattern]:
    """Those of a file, or bootseer's own. Raises `ConfigError` for a file that is none."""
    path = path or Path(__file__).with_name("logpatterns.toml")
    try:
        found = msgspec.convert(loaded(tomllib.loads, path.read_text()), known(_File)).line
        for pattern in found:
            re.compile(pattern.match)
    except OSError as exc:
        raise ConfigError(f"cannot read the patterns {path}: {exc.strerror}") from None
    except (ValueError, re.error) as exc:
        raise ConfigError(
            f"{path} is no file of patterns: {exc}", hint="it has [[line]] tables with match and stage"
        ) from None
    return found


class _Lane:
    """Where one rank is in its start; `enter` writes what changes."""

    def __init__(self, job: str, attempt: str, node: str, rank: int | None, gpus: int) -> None:
        self._identity = (job, attempt, node, rank, gpus)
        self._open: tuple[str, str] | None = None  # span and stage
        self._spans = 0
        self.cycle = 0
        self.ready = False

    @property
    def began(self) -> bool:
        return self._spans > 0

    def enter(self, stage: str, when: int) -> Iterator[Event]:
        """End the stage that is open and begin this one, if it is one."""
        if self._open is not None:
            if stage == self._open[1]:
                return
            yield self._event("end", *self._open, when)
            self._open = None
            self.ready = stage == READY
        if stage not in ("", READY):
            self._spans += 1
            name = "\0".join(map(str, (*self._identity, self._spans)))  # reading a log twice gives the same spans
            self._open = (hashlib.blake2b(name.encode("utf-8", "replace"), digest_size=8).hexdigest(), stage)
            yield self._event("begin", *self._open, when)

    def again(self, when: int) -> Iterator[Event]:
        """Begin the next cycle."""
        yield from self.enter("", when)
        self.cycle, self.ready = self.cycle + 1, False

    def _event(self, kind: str, span: str, stage: str, when: int) -> Event:
        job, attempt, node, rank, gpus = self._identity
        return Event(
            VERSION, kind, span, when, node, job, attempt, self.cycle, gpus, stage=stage, rank=rank,
            attrs={"source": "log"} if kind == "begin" else None,
        )  # fmt: skip


def extract(
    lines: Iterable[str],
    known: Iterable[Pattern],
    *,
    job: str,
    node: str,
    gpus: int = 0,
    attempt: str = "0",
    year: int | None = None,
    zone: tzinfo | None = None,
) -> Found:
    """Read a log. ``node`` is that of lines that name none; ``year`` that of times without one (default: this one).

    ``zone`` is that of times without one; None: this machine's. Never raises on a line.
    """
    found, lanes = Found(), dict[tuple[str, int | None], _Lane]()
    compiled = [(re.compile(pattern.match), pattern) for pattern in known]
    year = year or datetime.now(zone).year
    for line in lines:
        where, rank, when, text = _parts(line[:LONGEST].rstrip("\r\n"), year, zone)
        pattern = next((pattern for regex, pattern in compiled if regex.search(text)), None)
        if pattern is None:
            continue
        if when is None:
            found.timeless += 1
            continue
        where = where or node
        lane = lanes.get((where, rank)) or lanes.setdefault((where, rank), _Lane(job, attempt, where, rank, gpus))
        if pattern.cycle and lane.began:
            found.events += lane.again(when)
        if not lane.ready:
            found.events += lane.enter(pattern.stage, when)
            found.matched += 1
    return found


def _parts(line: str, year: int, zone: tzinfo | None) -> tuple[str, int | None, int | None, str]:
    """Node, rank and time (ns) that the line names, and the rest of it."""
    where, rank, when = "", None, None
    if pod := _POD.match(line):
        where, line = pod["node"], line[pod.end() :]
    if prefix := _RANK.match(line):
        rank, line = int((prefix["torch"] or prefix["slurm"])[:9]), line[prefix.end() :]
    time = _TIME.search(line) or _GLOG.search(line)
    if time is not None:
        when = _nanoseconds(time.groupdict(), year, zone)
        line = line[: time.start()] + line[time.end() :] if time.start() else line[time.end() :].removeprefix(" ")
    if rank is None and (prefix := _RANK.match(line)):  # behind the time that kubectl put before it
        rank, line = int((prefix["torch"] or prefix["slurm"])[:9]), line[prefix.end() :]
    return where, rank, when, line


def _nanoseconds(time: dict[str, str | None], year: int, zone: tzinfo | None) -> int | None:
    day = time.get("date") or f"{year}-{time['month']}-{time['day']}"
    offset = time.get("zone") or ""
    try:
        moment = datetime.fromisoformat(f"{day}T{time['clock']}{offset}")
        if not offset:
            moment = moment.replace(tzinfo=zone) if zone else moment.astimezone()
        seconds = int(moment.timestamp())
    except (ValueError, OverflowError, OSError):
        return None
    return seconds * 10**9 + int((time["part"] or "").ljust(9, "0")) if seconds >= 0 else None
