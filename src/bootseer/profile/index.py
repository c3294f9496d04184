"""Which start-ups there are in event files and Parquet files that change: for the pages of `bootseer profile serve`.

A file is read again when its size or time of change differs, and then every start-up with spans in it is analysed anew;
others keep their rows. Files are read some at a time, `_PART` bytes, and what they say is there to be shown before the
next ones are read. Memory: one row a start-up, of each event file the names of the start-ups in it, and `_HELD` pages.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from bootseer.errors import BootseerError, NotFoundError, UnavailableError
from bootseer.profile import analysis, events, files, page, starts
from bootseer.profile.events import EventLog, Identity, identity_text
from bootseer.profile.files import Found
from bootseer.profile.report import JobReport
from bootseer.profile.starts import Start
from bootseer.profile.timeline import GIVEN_UP_NS

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

_log = logging.getLogger(__name__)

_PAUSE, _SHARE = 2.0, 4
"""Seconds between two looks at the files; at least so many times what the last look took."""
_HELD = 8
"""Analysed start-ups that are kept for the pages that show them."""
_FRESH = 2.0
"""Seconds for which the page of a start that goes on is kept."""
_LARGE = 50_000
"""Spans of a start-up from which on it is analysed for its page, too, when its events are read: half a second."""
_PART = 256 << 20
"""Bytes of files that are read, or whose start-ups are read together, before what was found is shown."""
_PROBLEMS = 100
"""What is said of so many files and start-ups; of the rest, how many they are."""


class _File(NamedTuple):
    """An event file, or one with ``rows``, and what is wrong with it."""

    mark: tuple[int, int]
    identities: frozenset[Identity] = frozenset()
    rows: Sequence[Start] = ()
    problem: str = ""


class State(NamedTuple):
    """What was found at one time. ``rows``: by `key`, the latest start first; ``files``: where their events are;
    ``problems``: what cannot be read; ``whole``: whether all files have been read once."""

    rows: dict[str, Start]
    files: dict[str, list[Found]]
    problems: tuple[str, ...]
    version: int
    whole: bool


class Look(NamedTuple):
    """One start-up, analysed. ``body``: what its page says, as HTML."""

    report: JobReport
    body: str
    until: float = inf
    """When it is to be made anew, as what goes on grows (`time.monotonic`)."""


def goes_on(row: Start) -> bool:
    """Whether something may still come of it."""
    return row.startup_seconds is None and not row.ended and time.time() - row.heard_us / 1e6 < GIVEN_UP_NS / 1e9


def key(identity: Identity) -> str:
    """A short name for addresses, the same each time. Names of jobs may hold anything."""
    text = "\0".join(map(str, identity)).encode(errors="surrogatepass")
    return hashlib.sha256(text).hexdigest()[:16]


class Index:
    """What is in ``paths``: files, and folders that are searched each time. It is empty before the first `refresh`.
    Safe to use from any thread."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = list(paths)
        self._lock = threading.Lock()  # of what is read
        self._files: dict[Found, _File] = {}
        self._own: dict[Identity, Start | str] = {}
        """Its row, or why there is none."""
        self._pages = threading.Lock()  # of what is kept for pages
        self._analysis = threading.Lock()  # for a page: one at a time, each may take half a GB
        self._looks: dict[str, tuple[Start, Look]] = {}
        self._table: tuple[int, DuckDBPyConnection] | None = None
        self.state = State({}, {}, (), 0, False)

    def watch(self, stop: threading.Event) -> None:
        """Look again and again until ``stop`` is set. To be run in a thread."""
        pause = 0.0
        while not stop.wait(pause):
            began = time.monotonic()
            try:
                self.refresh()
            except Exception as exc:  # a page that is old is better than none
                _log.warning("cannot read the events again: %s", exc)
            pause = max(_PAUSE, _SHARE * (time.monotonic() - began))

    def refresh(self) -> None:
        """Read what has changed. What cannot be read is among the problems, and keeps nobody else's rows away."""
        with self._lock:
            problems: list[str] = []
            there = self._find(problems)
            new = [path for path in there if path not in self._files or self._files[path].mark != there[path]]
            for part in _parts(new, there):
                left = self._forget(path for path in self._files if path not in there)
                self._publish(self._read_changed(part, there, left), problems, self.state.whole)
            left = self._forget(path for path in self._files if path not in there)
            self._publish(self._read_changed([], there, left), problems, True)

    def _publish(self, changed: bool, problems: Sequence[str], whole: bool) -> None:
        told = [*problems, *(file.problem for file in self._files.values() if file.problem)]
        told += [why for why in self._own.values() if isinstance(why, str)]
        if len(told) > _PROBLEMS:
            told[_PROBLEMS:] = [f"{len(told) - _PROBLEMS} more"]
        if changed or tuple(told) != self.state.problems or whole != self.state.whole:
            held: dict[str, list[Found]] = {}
            for path, file in self._files.items():
                for identity in file.identities:
                    held.setdefault(key(identity), []).append(path)
            self.state = State(self._rows(), held, tuple(told), self.state.version + 1, whole)

    def row(self, name: str) -> Start:
        """The start-up of that key. Raises `NotFoundError`."""
        state = self.state
        found = state.rows.get(name)
        if found is None and not state.whole:
            raise UnavailableError("no such start-up so far", hint="the events are still being read: ask again")
        if found is None:
            raise NotFoundError("no such start-up", hint="its events may have been removed, or never came here")
        return found

    def look(self, name: str) -> Look | None:
        """The analysis of that start-up; None when only its row is here, from a Parquet file."""
        row = self.row(name)
        if (held := self._held(row, name)) is not None:
            return held
        held_in = self.state.files.get(name)
        if not held_in:
            return None
        with self._analysis:
            if (held := self._held(row, name)) is not None:  # somebody else asked for it, too
                return held
            identity = (row.job, row.attempt, row.cycle)
            found = analysis.look(events.read(held_in), identity, now=time.time_ns())
            until = time.monotonic() + _FRESH if goes_on(row) else inf
            return self._hold(row, Look(found[0], page.body(*found), until))

    def table(self) -> DuckDBPyConnection:
        """A database with the table ``starts`` of all rows: to be used by the calling thread, and not to be changed."""
        state = self.state
        with self._pages:
            if self._table is None or self._table[0] != state.version:
                self._table = state.version, starts.table(list(state.rows.values()))
            return self._table[1].cursor()

    def _held(self, row: Start, name: str) -> Look | None:
        with self._pages:
            held = self._looks.get(name)
        return held[1] if held is not None and held[0] is row and time.monotonic() < held[1].until else None

    def _hold(self, row: Start, look: Look) -> Look:
        name = key((row.job, row.attempt, row.cycle))
        with self._pages:
            self._looks.pop(name, None)
            self._looks[name] = row, look
            while len(self._looks) > _HELD:
                del self._looks[next(iter(self._looks))]
        return look

    # -- under the lock -------------------------------------------------------------------------------------------

    def _find(self, problems: list[str]) -> dict[Found, tuple[int, int]]:
        found: dict[Found, tuple[int, int]] = {}
        for given in self._paths:
            try:
                for path in files.find(given, (".jsonl", ".parquet")):
                    try:
                        found[path] = path.mark()
                    except FileNotFoundError:  # it went just now, the others are there
                        continue
                    except (BootseerError, OSError) as exc:
                        problems.append(f"cannot read {path}: {exc}")
            except (BootseerError, OSError) as exc:
                problems.append(str(exc))
        return found

    def _forget(self, gone: Iterable[Found]) -> set[Identity]:
        """The start-ups in files that went."""
        return {identity for path in list(gone) for identity in self._files.pop(path).identities}

    def _read_changed(self, new: Sequence[Found], there: Mapping[Found, tuple[int, int]], left: set[Identity]) -> bool:
        """Read these files, and analyse their start-ups, and those ``left``, whose files went."""
        changed = bool(new or left)
        for path in new:
            before = self._files.get(path, _File((0, 0)))
            self._files[path], last = self._read(path, there[path])
            left |= before.identities | self._files[path].identities
        if not left:
            return changed
        of: dict[Identity, list[Found]] = {}
        for path, file in self._files.items():
            for identity in file.identities:
                of.setdefault(identity, []).append(path)
        for identity in [one for one in self._own if one in left or events.origin(one) in left]:
            del self._own[identity]
        while left:
            mine, together = self._together(left, of)
            left -= mine
            if together:
                # one file that grows is the usual case: it has been read just now
                self._analyse(mine, sorted(together), last if [*together] == new and len(new) == 1 else None)
        return changed

    def _together(
        self, left: set[Identity], of: Mapping[Identity, Sequence[Found]]
    ) -> tuple[set[Identity], set[Found]]:
        """Some of ``left``, and their files, to be read once for all: as long as these are no more than `_PART` bytes,
        so that one file that names every start-up does not have all files read at once."""
        mine, together, size = set[Identity](), set[Found](), 0
        waiting = [next(iter(left))]
        while waiting:
            identity = waiting.pop()
            if identity in mine:
                continue
            new = set(of.get(identity, ())) - together
            more = sum(min(max(self._files[path].mark[0], 0), events.MOST) for path in new)
            if mine and more and size + more > _PART:
                continue
            mine.add(identity)
            together |= new
            size += more
            for path in new:
                waiting += self._files[path].identities & left
        return mine, together

    def _read(self, path: Found, mark: tuple[int, int]) -> tuple[_File, EventLog | None]:
        try:
            if path.ending == ".parquet":
                return _File(mark, rows=starts.rows([path])), None
            log = events.read([path])
            return _File(mark, frozenset(log.identities()), problem="; ".join(log.unread)), log
        except BootseerError as exc:
            return _File(mark, problem=str(exc) if mark[0] else ""), None  # an empty file is one that begins
        except Exception as exc:  # a fault of ours: the other files are shown all the same
            _log.warning("cannot read %s: %r", path, exc)
            return _File(mark, problem=f"cannot read {path}: {type(exc).__name__}"), None

    def _analyse(self, mine: set[Identity], together: Sequence[Found], log: EventLog | None) -> None:
        """``log``: what these files say, if that has just been read."""
        try:
            logs = (log or events.read(together)).by_identity()
        except BootseerError as exc:
            for path in together:  # one of them went meanwhile: they are read again next time
                self._files[path] = _File((-1, -1), self._files[path].identities, problem=str(exc))
            return
        for one in [one for one in logs if one in mine or events.origin(one) in mine]:
            try:
                found = analysis.look(logs[one], one)
                row = starts.row(found[0], logs[one])
            except BootseerError as exc:
                self._own[one] = f"{identity_text(*one)}: {exc}"
                continue
            except Exception as exc:  # a fault of ours, as above
                _log.warning("cannot analyse %s: %r", identity_text(*one), exc)
                self._own[one] = f"{identity_text(*one)}: {type(exc).__name__}"
                continue
            self._own[one] = row
            if len(logs[one].spans) >= _LARGE and not goes_on(row):
                self._hold(row, Look(found[0], page.body(*found)))

    def _rows(self) -> dict[str, Start]:
        found = {identity: row for identity, row in self._own.items() if isinstance(row, Start)}
        for file in self._files.values():
            for row in file.rows:
                identity = (row.job, row.attempt, row.cycle)
                if identity not in found or starts.fuller(row, found[identity]):
                    found[identity] = row
        latest = sorted(found.items(), key=lambda one: -one[1].began_us)
        return {key(identity): row for identity, row in latest}


def _parts(new: Sequence[Found], marks: Mapping[Found, tuple[int, int]]) -> Iterator[list[Found]]:
    """The files, so many at a time that what is read of them is `_PART` bytes; a larger one by itself."""
    part, size = list[Found](), 0
    for path in new:
        more = min(marks[path][0], events.MOST)
        if part and size + more > _PART:
            yield part
            part, size = [], 0
        part.append(path)
        size += more
    if part:
        yield part
