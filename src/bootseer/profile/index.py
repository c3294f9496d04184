"""Which start-ups there are in event files and Parquet files that change: for the pages of `bootseer profile serve`.

A file is read again when its size or time of change differs, and then every start-up with spans in it is analysed anew;
others keep their rows. Memory: one row a start-up, of each event file the names of the start-ups in it, and `_HELD`
pages.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from bootseer.errors import BootseerError, NotFoundError
from bootseer.profile import analysis, events, page, starts
from bootseer.profile.events import EventLog, Identity, identity_text
from bootseer.profile.report import JobReport
from bootseer.profile.starts import Start

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

_log = logging.getLogger(__name__)

_PAUSE, _SHARE = 2.0, 4
"""Seconds between two looks at the files; at least so many times what the last look took."""
_HELD = 8
"""Analysed start-ups that are kept for the pages that show them."""
_LARGE = 50_000
"""Spans of a start-up from which on it is analysed for its page, too, when its events are read: half a second."""


class _File(NamedTuple):
    """An event file, or one with ``rows``, and what is wrong with it."""

    mark: tuple[int, int]
    identities: frozenset[Identity] = frozenset()
    rows: Sequence[Start] = ()
    problem: str = ""


class State(NamedTuple):
    """What was found at one time. ``rows``: by `key`, the latest start first; ``files``: where their events are;
    ``problems``: what cannot be read."""

    rows: dict[str, Start]
    files: dict[str, list[Path]]
    problems: tuple[str, ...]
    version: int


class Look(NamedTuple):
    """One start-up, analysed. ``body``: what its page says, as HTML."""

    report: JobReport
    body: str


def key(identity: Identity) -> str:
    """A short name for addresses, the same each time. Names of jobs may hold anything."""
    text = "\0".join(map(str, identity)).encode(errors="surrogatepass")
    return hashlib.sha256(text).hexdigest()[:16]


class Index:
    """What is in ``paths``: files, and folders that are searched each time. Safe to use from any thread."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = list(paths)
        self._lock = threading.Lock()  # of what is read
        self._files: dict[Path, _File] = {}
        self._own: dict[Identity, Start | str] = {}
        """Its row, or why there is none."""
        self._pages = threading.Lock()  # of what is kept for pages
        self._analysis = threading.Lock()  # for a page: one at a time, each may take half a GB
        self._looks: dict[str, tuple[Start, Look]] = {}
        self._table: tuple[int, DuckDBPyConnection] | None = None
        self.state = State({}, {}, (), 0)
        self.refresh()

    def watch(self, stop: threading.Event) -> None:
        """Look again and again until ``stop`` is set. To be run in a thread."""
        took = 0.0
        while not stop.wait(max(_PAUSE, _SHARE * took)):
            began = time.monotonic()
            try:
                self.refresh()
            except Exception as exc:  # a page that is old is better than none
                _log.warning("cannot read the events again: %s", exc)
            took = time.monotonic() - began

    def refresh(self) -> None:
        """Read what has changed. What cannot be read is among the problems, and keeps nobody else's rows away."""
        with self._lock:
            problems: list[str] = []
            there = self._find(problems)
            changed = self._read_changed(there)
            problems += [file.problem for file in self._files.values() if file.problem]
            problems += [why for why in self._own.values() if isinstance(why, str)]
            if changed or tuple(problems) != self.state.problems:
                rows = self._rows()
                files: dict[str, list[Path]] = {}
                for path, file in self._files.items():
                    for identity in file.identities:
                        files.setdefault(key(identity), []).append(path)
                self.state = State(rows, files, tuple(problems), self.state.version + 1)

    def row(self, name: str) -> Start:
        """The start-up of that key. Raises `NotFoundError`."""
        found = self.state.rows.get(name)
        if found is None:
            raise NotFoundError("no such start-up", hint="its events may have been removed, or never came here")
        return found

    def look(self, name: str) -> Look | None:
        """The analysis of that start-up; None when only its row is here, from a Parquet file."""
        row = self.row(name)
        if (held := self._held(row, name)) is not None:
            return held
        files = self.state.files.get(name)
        if not files:
            return None
        with self._analysis:
            if (held := self._held(row, name)) is not None:  # somebody else asked for it, too
                return held
            identity = (row.job, row.attempt, row.cycle)
            found = analysis.look(events.read(files), identity)
            return self._hold(row, Look(found[0], page.body(*found)))

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
        return held[1] if held is not None and held[0] is row else None

    def _hold(self, row: Start, look: Look) -> Look:
        name = key((row.job, row.attempt, row.cycle))
        with self._pages:
            self._looks.pop(name, None)
            self._looks[name] = row, look
            while len(self._looks) > _HELD:
                del self._looks[next(iter(self._looks))]
        return look

    # -- under the lock -------------------------------------------------------------------------------------------

    def _find(self, problems: list[str]) -> dict[Path, tuple[int, int]]:
        found: dict[Path, tuple[int, int]] = {}
        for given in self._paths:
            try:
                for path in itertools.chain(*starts.files(given)):
                    with contextlib.suppress(FileNotFoundError):  # it went just now, the others are there
                        status = path.stat()
                        found[path] = (status.st_size, status.st_mtime_ns)
            except (BootseerError, OSError) as exc:
                problems.append(str(exc))
        return found

    def _read_changed(self, there: dict[Path, tuple[int, int]]) -> bool:
        gone = [path for path in self._files if path not in there]
        new = [path for path in there if path not in self._files or self._files[path].mark != there[path]]
        left = {identity for path in gone for identity in self._files.pop(path).identities}
        for path in new:
            before = self._files.get(path, _File((0, 0)))
            self._files[path], last = self._read(path, there[path])
            left |= before.identities | self._files[path].identities
        for identity in left:
            self._own.pop(identity, None)
        while left:  # those that share files are read together
            files, mine = set[Path](), {left.pop()}
            while more := {path for path, file in self._files.items() if file.identities & mine} - files:
                files |= more
                mine |= left & frozenset().union(*(self._files[path].identities for path in more))
            left -= mine
            if files:
                # one file that grows is the usual case: it has been read just now
                self._analyse(mine, sorted(files), last if files == {*new} and len(new) == 1 else None)
        return bool(gone or new)

    def _read(self, path: Path, mark: tuple[int, int]) -> tuple[_File, EventLog | None]:
        try:
            if path.suffix == ".parquet":
                return _File(mark, rows=starts.rows([path])), None
            log = events.read([path])
            return _File(mark, frozenset(log.identities())), log
        except BootseerError as exc:
            return _File(mark, problem=str(exc) if mark[0] else ""), None  # an empty file is one that begins

    def _analyse(self, mine: set[Identity], files: Sequence[Path], log: EventLog | None) -> None:
        """``log``: what these files say, if that has just been read."""
        try:
            logs = (log or events.read(files)).by_identity()
        except BootseerError as exc:
            for path in files:  # one of them went meanwhile: they are read again next time
                self._files[path] = _File((-1, -1), self._files[path].identities, problem=str(exc))
            return
        for one in mine & logs.keys():
            try:
                found = analysis.look(logs[one], one)
            except BootseerError as exc:
                self._own[one] = f"{identity_text(*one)}: {exc}"
                continue
            self._own[one] = row = starts.row(found[0], logs[one])
            if len(logs[one].spans) >= _LARGE:
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
