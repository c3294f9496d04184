"""The inventory: every entry of a captured difference, as ``docs/internals/snapshot.md`` lays it out."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Literal

import msgspec
import zstandard

from bootseer.env.canonical import canonical
from bootseer.errors import DataError
from bootseer.wiretypes import known, loaded

Kind = Literal["d", "o", "f", "l", "h", "w"]
Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Nanoseconds = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
MAX_UNPACKED = 512 << 20
MAX_ENTRIES = 1_000_000
MAX_RATIO = 64
"""Unpacked bytes for each that is stored, beside the first MiB: hashes of files hardly compress."""
_MAX_LINE = 4 << 20
_MAX_WINDOW = 1 << 27
MAX_STORED = 64 << 20
"""Bytes of an inventory as it is stored: those of a million entries take about 40."""
MAGIC = "bootseer-env-list"


class Entry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One line. ``path`` begins with the number of its target; ``size`` in bytes; ``mtime_ns`` since the epoch."""

    path: str
    kind: Kind
    mode: Count
    uid: Count
    gid: Count
    size: Count
    mtime_ns: Nanoseconds
    data: str = ""
    xattrs: dict[str, bytes] = {}

    @property
    def target(self) -> int:
        return int(self.path.partition("/")[0])

    @property
    def inner(self) -> str:
        """The path below the target; empty for the target itself."""
        return self.path.partition("/")[2]


def sort_key(path: str) -> bytes:
    """Order of entries: by path bytes with ``/`` lowest, so that a directory is followed at once by its content."""
    return path.encode("utf-8", "surrogateescape").replace(b"/", b"\0")


def encode(entries: Sequence[Entry]) -> bytes:
    """The compressed object. Entries must be sorted by `sort_key`."""
    lines = [canonical({"magic": MAGIC, "version": 1, "entries": len(entries)})]
    lines += [canonical(msgspec.to_builtins(entry)) for entry in entries]
    return zstandard.ZstdCompressor(level=3).compress(b"\n".join(lines) + b"\n")


def digest(stored: bytes) -> str:
    return hashlib.sha256(stored).hexdigest()


def decode(stored: bytes, *, targets: int, expect: str = "") -> list[Entry]:
    """Entries of a stored inventory for a snapshot of ``targets`` targets. Raises `DataError` for wrong bytes
    (``expect`` is the object's SHA-256) and for every entry that could write outside its target: nothing has been
    written by then."""
    if expect and digest(stored) != expect:
        raise DataError("inventory of the snapshot has the wrong checksum")
    try:
        size = zstandard.frame_content_size(stored)
        if not 0 <= size <= min(MAX_UNPACKED, (1 << 20) + MAX_RATIO * len(stored)):
            raise DataError(f"inventory of the snapshot claims {size} bytes in {len(stored)}")
        lines = _lines(stored, size)
        head = loaded(json.loads, next(lines))
        if head.get("magic") != MAGIC or head.get("version") != 1:
            raise DataError("not an inventory of version 1")
        if not isinstance(head.get("entries"), int) or not 0 <= head["entries"] <= MAX_ENTRIES:
            raise DataError(f"inventory of the snapshot claims {head.get('entries')} entries")
        entries = [_entry(loaded(json.loads, line)) for line in itertools.islice(lines, head["entries"] + 1)]
        if len(entries) != head["entries"]:
            raise DataError("not an inventory of version 1")
    except DataError:
        raise
    except (zstandard.ZstdError, ValueError, TypeError, StopIteration, LookupError, AttributeError, MemoryError) as exc:
        raise DataError(f"cannot read the inventory of the snapshot: {exc}") from None
    _check(entries, targets)
    return entries


def _lines(stored: bytes, size: int) -> Iterator[bytes]:
    """The lines, as they are unpacked; of no more than ``size`` bytes."""
    rest = b""
    with zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW).stream_reader(stored) as reader:
        while data := reader.read(min(1 << 20, size + 1)):
            size -= len(data)
            *whole, rest = (rest + data).split(b"\n")
            if size < 0 or len(rest) > _MAX_LINE:
                raise DataError("inventory of the snapshot has too long a line, or more than it claims")
            yield from whole
    if rest:
        yield rest


def _entry(row: object) -> Entry:
    if not isinstance(row, list) or len(row) != len(Entry.__struct_fields__):
        raise DataError("inventory line without nine fields")
    try:
        return msgspec.convert(row, known(Entry))
    except msgspec.ValidationError as exc:
        raise DataError(f"inventory entry {row[0]!r}: {exc}") from None


def _check(entries: Sequence[Entry], targets: int) -> None:
    roots = {str(number) for number in range(targets)}
    kinds: dict[str, str] = {}
    for entry in entries:
        if why := _senseless(entry, roots, kinds):
            raise DataError(f"inventory entry {entry.path!r} {why}", hint="the snapshot is not used")
        kinds[entry.path] = entry.kind
    missing = roots - kinds.keys()
    if missing:
        raise DataError(f"inventory lacks target {min(missing)}")


def _senseless(entry: Entry, roots: set[str], kinds: Mapping[str, str]) -> str:
    """Why the entry could write outside of its target, or is none; ``kinds`` of those before it, by path."""
    parts, above = entry.path.split("/"), entry.path.rpartition("/")[0]
    if any(part in ("", ".", "..") or "\0" in part or len(part) > 255 for part in parts) or "\0" in entry.data:
        return "is not a plain relative path"
    if entry.path in kinds:
        return "appears twice"
    if parts[0] not in roots:
        return "belongs to no target"
    if (kinds.get(above) if above else entry.kind) not in ("d", "o"):
        return "lies under no directory" if above else "is a target, and is not a directory"
    if entry.kind == "h" and kinds.get(entry.data) != "f":
        return "links to no earlier file"
    return "carries overlay attributes" if any(name.startswith("trusted.overlay.") for name in entry.xattrs) else ""
