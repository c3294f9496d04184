"""Which ranges of a checkpoint's files a start has read, kept for the next start.

`AccessLog` notes what readers of a mount ask for; its `AccessRecord` goes to the store of bootseer, one object for each
node of a job and each folder of checkpoints: the next start prefetches just those ranges, also from a later checkpoint
of the folder, and on another machine with the same place in the job. All of it is advice: trouble is a log line."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec
from blake3 import blake3

from bootseer.backends.interface import clean
from bootseer.errors import BootseerError, DataError, NotFoundError, logged
from bootseer.objects import Store
from bootseer.ranges import merge
from bootseer.wiretypes import json_as

_log = logging.getLogger(__name__)

UNIT = 1 << 20
"""Bytes: ranges begin and end at its multiples, or at the end of the file."""
VERSION = 1
MAX_STORED = 16 << 20
"""Bytes of a stored record that are accepted."""
MAX_FILES = 10_000
"""Files of which reads are noted: the record is written again with each new one. Of more, those that came first."""
_SAME = 0.01
"""A file whose size differs by a larger share from what was recorded is another one."""

Ranges = tuple[tuple[int, int], ...]
"""(first byte, byte after the last), ascending, none touching another."""


class FileAccess(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was read of the file at ``path`` (relative to the checkpoint), which had ``size`` bytes."""

    path: str
    size: int
    ranges: Ranges

    def of(self, size: int) -> Ranges:
        """The same ranges of a file of ``size`` bytes; none when it is too different. The end stays the end."""
        if abs(size - self.size) > _SAME * max(size, self.size):
            return ()
        moved = ((first, size if last == self.size else last) for first, last in self.ranges)
        return tuple((first, min(last, size)) for first, last in moved if first < size)


class AccessRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a start read, in the order in which it first read each file."""

    files: tuple[FileAccess, ...] = ()
    version: int = VERSION

    @property
    def bytes(self) -> int:
        return sum(last - first for file in self.files for first, last in file.ranges)


_NUMBER = re.compile(r"\d+", re.ASCII)
_DIGITS = 18
"""A longer run of digits is part of a name, such as a hash, and no number."""


def counterparts(files: Iterable[FileAccess], sizes: Mapping[str, int]) -> list[tuple[str, Ranges]]:
    """What ``files`` of one checkpoint are in another one, whose files have these ``sizes`` by path, and which ranges
    of them; in the order of ``files``, without those that have none.

    A path that is there is that file. Where none of the same shape (the path without its numbers, which may be a
    step's) is there, and both checkpoints have equally many of it, they are matched in the order of their numbers;
    where not equally many, those match that differ by one number, the same for all."""
    wanted = list(files)
    kept = {_shape(file.path) for file in wanted if file.path in sizes}
    before = _by_shape(file.path for file in wanted)
    now = _by_shape(sizes)
    renamed: dict[str, str] = {}
    for shape in before.keys() & now.keys() - kept:
        if len(before[shape]) == len(now[shape]):
            renamed.update(zip(before[shape], now[shape], strict=True))
        else:
            renamed.update(_renumbered(before[shape], now[shape]))
    found = ((file, path) for file in wanted if (path := renamed.get(file.path, file.path)) in sizes)
    return [(path, ranges) for file, path in found if (ranges := file.of(sizes[path]))]


def _shape(path: str) -> str:
    return _NUMBER.sub(lambda found: "0" if len(found[0]) <= _DIGITS else found[0], path)


def _numbers(path: str) -> list[int]:
    return [int(digits) for digits in _NUMBER.findall(path) if len(digits) <= _DIGITS]


def _by_shape(paths: Iterable[str]) -> dict[str, list[str]]:
    """Paths of each shape, in the order of their numbers."""
    found: dict[str, list[str]] = {}
    for path in sorted(paths, key=lambda path: (_numbers(path), path)):
        found.setdefault(_shape(path), []).append(path)
    return found


def _renumbered(before: Iterable[str], now: Iterable[str]) -> dict[str, str]:
    """The renaming of paths by another value of one number that finds most of them; of several, the largest value."""
    there: dict[tuple[int | None, ...], list[tuple[int, str]]] = {}
    for path in now:
        for value, rest in _without_each(path):
            there.setdefault(rest, []).append((value, path))
    found: dict[tuple[int, int], dict[str, str]] = {}
    for path in before:
        for value, rest in _without_each(path):
            for other, match in there.get(rest, ()):
                found.setdefault((value, other), {})[path] = match
    return max(found.items(), key=lambda item: (len(item[1]), item[0][1]))[1] if found else {}


def _without_each(path: str) -> Iterable[tuple[int, tuple[int | None, ...]]]:
    """Each number of ``path``, and its numbers with None in place of that one."""
    numbers = _numbers(path)
    return [(value, tuple(None if number == value else number for number in numbers)) for value in {*numbers}]


class AccessLog:
    """Notes reads, but of files whose names are not UTF-8, which a record cannot name. Any thread may call anything: a
    note is one assignment to a slice of a byte string."""

    def __init__(self) -> None:
        self._files: dict[str, tuple[int, bytearray]] = {}  # path -> size, one byte for each unit
        self.changes = 0
        """Grows with what is new."""

    def add(self, path: str, size: int, offset: int, length: int) -> None:
        """Note that ``length`` bytes from ``offset`` of ``path``, which has ``size`` bytes, were read."""
        held = self._files.get(path)
        if held is None or held[0] != size:
            if (held is None and len(self._files) >= MAX_FILES) or path != path.encode(errors="ignore").decode():
                return
            made = size, bytearray(-(-size // UNIT))
            if held is None:
                held = self._files.setdefault(path, made)  # another thread may have noted a read of it meanwhile
            if held[0] != size:
                held = self._files[path] = made
        first, last = offset // UNIT, -(-(offset + length) // UNIT)
        if held[1].find(b"\0", first, last) >= 0:
            held[1][first:last] = b"\1" * (last - first)
            self.changes += 1

    def add_all(self, record: AccessRecord) -> None:
        """Note what another process noted before this one."""
        for file in record.files:
            for first, last in file.ranges:
                self.add(file.path, file.size, first, last - first)

    def record(self) -> AccessRecord:
        """What was noted so far."""
        files = (
            FileAccess(path, size, tuple(_ranges(bytes(units), size))) for path, (size, units) in [*self._files.items()]
        )
        return AccessRecord(tuple(file for file in files if file.ranges))


def _ranges(units: bytes, size: int) -> Iterable[tuple[int, int]]:
    at = units.find(b"\1")
    while at >= 0:
        end = units.find(b"\0", at)
        end = len(units) if end < 0 else end
        yield at * UNIT, min(end * UNIT, size)
        at = units.find(b"\1", end)


class Lineage(NamedTuple):
    """Whose reads are alike: those of one node of a job that resumes from checkpoints in one folder. ``url``: that of
    the checkpoint; its last part, the step, does not count. ``nodes``: of the job, 0 where nobody said."""

    job: str
    url: str
    node: int = 0
    nodes: int = 0

    @property
    def key(self) -> str:
        """Of its record in a store. The URL, in which a login may stand, is a digest in it."""
        folder = self.url.rstrip("/").rpartition("/")[0]
        name = blake3("\0".join((self.job, folder)).encode("utf-8", "surrogateescape")).hexdigest()[:32]
        return f"checkpoints/{name}/{self.nodes}-{self.node}.json"


def load(store: Store, lineage: Lineage) -> AccessRecord | None:
    """What the start before recorded; None when there is nothing, or nothing that can be used (with a log line)."""
    try:
        return decode(store.get(lineage.key, most=MAX_STORED))
    except NotFoundError:
        return None
    except BootseerError as exc:
        _log.warning("cannot use the access record of the start before: %s", exc)
        return None


def save(store: Store, lineage: Lineage, record: AccessRecord) -> bool:
    """Have the next start know ``record``; False when that was not needed, or did not work (with a log line)."""
    with logged(_log.warning, "cannot keep what this start read of its checkpoint", kinds=BootseerError):
        if record.files and record != load(store, lineage):
            store.put(lineage.key, encode(record), overwrite=True)
            return True
    return False


def merged(records: Iterable[AccessRecord]) -> AccessRecord:
    """What all of ``records`` name, at most `MAX_FILES` files; of one with several sizes, the first that is named."""
    found: dict[str, tuple[int, list[tuple[int, int]]]] = {}
    for file in (file for record in records for file in record.files):
        if file.path in found or len(found) < MAX_FILES:
            size, ranges = found.setdefault(file.path, (file.size, []))
            ranges += file.ranges if size == file.size else ()
    return AccessRecord(tuple(FileAccess(path, size, tuple(merge(ranges))) for path, (size, ranges) in found.items()))


def encode(record: AccessRecord) -> bytes:
    return msgspec.json.encode(record)


def decode(data: bytes) -> AccessRecord:
    """Raises `DataError` for what is no record of this version."""
    try:
        record = json_as(data, AccessRecord)
    except ValueError as exc:
        raise DataError(f"it is damaged: {exc}") from None
    if record.version != VERSION:
        raise DataError(f"it has version {record.version}, known is {VERSION}")
    for file in record.files:
        ends = [0, *(end for pair in file.ranges for end in pair)]
        if clean(file.path) != file.path or ends != sorted(ends) or ends[-1] > file.size:
            raise DataError(f"it names impossible ranges of {file.path!r}")
    return record
