"""Contents of captured files on their way into a tree: each file is read once, hashed, searched for secrets and placed.

This may begin while the command still runs. What a file held then counts only if nobody had it open for writing (what
is written through a mapping that exists changes no times), and the file is the same at the end (device, inode, size,
times); what was placed in vain is of no file then, and nobody reads it.

Byte code names the time of its source, which is another one after each install. A source with byte code beside it gets
one that follows from its content, as does that byte code: equal sources give equal bytes."""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from blake3 import blake3

from bootseer import erofs
from bootseer.closing import descriptor
from bootseer.env import layer, scan
from bootseer.env.credentials import WINDOW, SecretScan
from bootseer.env.inventory import Entry
from bootseer.env.layer import Item
from bootseer.erofs import Attrs, Node
from bootseer.errors import DataError
from bootseer.kernel import beneath, flock
from bootseer.patterns import pattern

ALIGN = 64 << 10
"""What is placed side by side begins and ends at a multiple of it: equal `_units` give equal blocks, whatever is beside
them."""
_FOLDERS = 16
"""Small folders that are placed side by side, about."""
_AT_ONCE = 4 << 20
_SINCE, _SPAN = 0x30000000, 0x20000000
"""Times of sources (seconds): before 2013, so that a change by the job is never taken for what was compiled."""
_BYTE_CODE = pattern(r"__pycache__/([^/.]+)\.[^/]*\.pyc$")
_MOVED = pattern(r"\.pyc?$|\.dist-info/(?:RECORD|direct_url\.json)$")
_PROBED = 8192
"""Bytes among which a NUL says that a file is binary; such are not searched, see `SecretScan.look`."""

State = tuple[int, int, int, int, int]


class File(NamedTuple):
    """A regular file to be placed: ``path`` below the descriptor ``root``, as it was listed."""

    root: int
    path: str
    status: os.stat_result


class LayerContent(NamedTuple):
    """What layers hold: ``items`` as they were listed, ``entries`` in inventory order, ``own`` those of the first root
    alone, with the times that they have there, and (path, what) of the secrets in them; then there are no entries."""

    items: list[Item]
    entries: list[Entry]
    own: list[Entry]
    secrets: list[tuple[str, str]]


def read_layers(contents: Contents, targets: int, *roots: Path, known: Iterable[Item] = ()) -> LayerContent:
    """Place all that the layer directories ``0``, ``1``, ... of ``roots`` hold; a name that several have is that of the
    first, of which ``known`` is the list, if there is one. Raises `UnsupportedError` for device nodes, sockets and
    FIFOs, and for entries only their own overlay can read; `DataError` when something changes meanwhile, `OSError` when
    it cannot be read."""
    items, gone = layer.list_layers(targets, *roots, known=known)
    first = layer.firsts(items)
    with contextlib.ExitStack() as stack:
        opened = {root: stack.enter_context(beneath.folder(root)) for root in roots if root.exists()}
        secrets = contents.finish([File(opened[item.base], item.path, item.status) for item in first.values()])
    if secrets:
        return LayerContent(items, [], [], secrets)
    entries = layer.entries_of(items, first, contents.digest)
    own = [entry for item, entry in zip(items, entries, strict=True) if item.base == roots[0]]
    entries = [contents.timed(entry, item.status) for item, entry in zip(items, entries, strict=True)]
    return LayerContent(items, entries, own + layer.entries_of(gone, first, contents.digest), [])


def state_of(status: os.stat_result) -> State:
    """What is equal while nobody changes the file."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


class Contents:
    """Writes the data of a tree to ``sink``, file by file, and then says what its metadata are. One thread."""

    def __init__(self, sink: erofs.DataSink) -> None:
        self._writer = erofs.Writer(sink, align=ALIGN)
        self._scan = SecretScan()
        self._placed: dict[State, tuple[Node, str]] = {}
        self._times: dict[str, tuple[bytes, bytes]] = {}
        """Of sources: what byte code says of one, and is to say."""
        self._aside = Node(stat.S_IFDIR, Attrs(0o700))
        self._suspects: list[File] = []
        self._early: set[str] = set()
        """Paths of which something was placed early, or may not be."""
        self._left_out: set[str] = set()
        self.placed_bytes = 0

    def early(self, files: Iterable[File], before: float) -> Iterator[None]:
        """Place those of ``files``, all there are, that last changed before then, while the command still runs, unit by
        unit, with a pause after each. Of a path that has changed since it was placed nothing is placed early again."""
        for unit in _units(files):
            left = [file for file in unit if file.path not in self._early]
            if left and all(file.status.st_ctime < before for file in unit):
                self._unit(left, early=True)
                yield

    def finish(self, files: Sequence[File]) -> list[tuple[str, str]]:
        """Place what is left of ``files``, all there are at the end; (path, what) of secrets among them, and then not
        all is placed: without these it may be called again. Raises `DataError` when one changes meanwhile,
        `OSError`."""
        suspects, self._suspects = {file.path for file in self._suspects}, []
        for path in (self._early | suspects) - {file.path for file in files}:
            self._scan.forget(_below_target(path))
        for file in files if self._early else ():
            if file.path not in self._early and _MOVED.search(file.path):  # what they say depends on where they lie
                self._placed.pop(state_of(file.status), None)
        for unit in _units(files) if any(state_of(file.status) not in self._placed for file in files) else ():
            self._unit(unit)
        if found := list(self._scan.findings()):
            return found
        for file in self._suspects:  # a wheel from an index brought them
            self._place(file, believed=True)
        compiled = {_source_of(file.path) for file in files}
        for file in files:
            if file.path in compiled and (known := self._times.get(file.path)):
                self._placed[state_of(file.status)][0].mtime_ns = _mtime_ns(known[1])
        return []

    def digest(self, status: os.stat_result) -> str:
        """BLAKE3 (hex) of a file that was placed."""
        return self._placed[state_of(status)][1]

    def timed(self, entry: Entry, status: os.stat_result) -> Entry:
        """``entry`` with the time that the tree has of it."""
        if entry.kind != "f":
            return entry
        return msgspec.structs.replace(entry, mtime_ns=self._placed[state_of(status)][0].mtime_ns)

    def seal(self, items: Sequence[Item], entries: Sequence[Entry]) -> bytes:
        """The metadata of the tree of ``entries``, those of ``items``."""
        for item, entry in zip(items, entries, strict=True):
            name, status = os.fsencode(item.path), item.status
            if entry.kind == "f":
                self._writer.add_hardlink(name, self._placed[state_of(status)][0])
            elif entry.kind == "h":
                self._writer.add_hardlink(name, os.fsencode(entry.data))
            else:
                attrs = erofs.attributes(status, os.fsencode(item.full), self._left_out, name)
                if entry.kind in ("d", "o"):
                    self._writer.add_dir(name, attrs)
                elif entry.kind == "l":
                    self._writer.add_symlink(name, attrs, os.fsencode(entry.data))
                else:
                    self._writer.add_device(name, attrs, stat.S_IFCHR, 0)
        return self._writer.finish()

    def dead(self) -> list[tuple[int, int]]:
        """What was placed in vain, as of now."""
        return self._writer.dead_ranges()

    def _unit(self, files: list[File], *, early: bool = False) -> None:
        self._writer.begin_layer()
        for file in files:
            try:
                self._place(file, early=early)
            except (DataError, OSError):
                if not early:
                    raise
        if early:
            self._suspects.clear()  # looked at again in the end

    def _place(self, file: File, *, believed: bool = False, early: bool = False) -> None:
        state, size, source = state_of(file.status), file.status.st_size, _source_of(file.path)
        if state in self._placed or (early and source and source not in self._times):
            return  # another name of it; or byte code before its source
        with descriptor(beneath.open_regular(file.path, root=file.root)) as fd:
            _check(fd, file)
            if early and not flock.nobody_writes(fd):
                return
            hasher = blake3()
            data = os.read(fd, size) if size <= _AT_ONCE else b""
            binary = b"\0" in (data[:_PROBED] or os.pread(fd, _PROBED, 0))
            path = _below_target(file.path)
            if not binary and not believed and self._scan.look(path, [data] if data else _windows(fd)):
                self._suspects.append(file)
                self._early.add(file.path)
                self._times.pop(file.path, None)
                return
            pieces: Iterable[erofs.Buffer | erofs.Hole] = [data]
            if len(data) < size or file.status.st_blocks * 512 < size:
                pieces = erofs.contents(fd, file.status)
            if early:
                self._early.add(file.path)
            attrs = erofs.attributes(file.status, fd, self._left_out, os.fsencode(path))
            said, says = self._times.get(source, (b"", b""))
            if said and data.startswith(said, 4):
                pieces = [data[:4] + says + data[4 + len(says) :]]
            node = self._writer.add_file(b"file", attrs, size, _hashed(pieces, hasher) if size else (), at=self._aside)
            _check(fd, file)
        self._placed[state] = node, str(hasher.hexdigest())
        self.placed_bytes += size
        if file.path.endswith(".py") and len(data) == size and not believed:
            seconds = _SINCE + int.from_bytes(hasher.digest(4), "little") % _SPAN
            self._times[file.path] = _header(int(file.status.st_mtime), size), _header(seconds, size)


def _check(fd: int, file: File) -> None:
    if state_of(os.fstat(fd)) != state_of(file.status):
        raise DataError(f"{_below_target(file.path)} changed while it was captured")


def _source_of(path: str) -> str:
    """The source of the byte code ``path``; empty for other files."""
    if not path.endswith(".pyc"):
        return ""
    source = _BYTE_CODE.sub(r"\1.py", path)
    return source if source != path else ""


def _header(mtime: int, size: int) -> bytes:
    """What byte code says of its source, behind its first four bytes (PEP 552)."""
    return struct.pack("<III", 0, mtime & 0xFFFFFFFF, size & 0xFFFFFFFF)


def _mtime_ns(header: bytes) -> int:
    """The time in a `_header`."""
    return int(struct.unpack("<III", header)[1]) * 10**9


def _below_target(path: str) -> str:
    return path.partition("/")[2]


def _units(files: Iterable[File]) -> list[list[File]]:
    """What is placed side by side: a large file; the other files of a folder, with all in it, that has enough of them;
    of what is smaller some folders that are neighbours. Which, their names and sizes say alone, so that a change
    elsewhere moves nothing in here; byte code is apart, as it changes more often than its source."""
    out: list[list[File]] = []
    small: dict[tuple[bool, str], list[File]] = {}
    for file in sorted(files, key=lambda file: file.path.rpartition("/")[::2]):
        if file.status.st_size >= ALIGN:
            out.append([file])
        else:
            folder = file.path.rpartition("/")[0]
            small.setdefault((folder.endswith("/__pycache__"), folder), []).append(file)
    above = {(code, folder) for code, path in small for folder in ("", path, *scan.above(path))}
    for code, folder in sorted(above, key=lambda one: (-len(one[1].split("/")), one[1] == "", one)):
        found = small.pop((code, folder), [])
        if folder and sum(file.status.st_size for file in found) < ALIGN:
            small.setdefault((code, os.path.dirname(folder)), []).extend(found)
        elif found:
            out.extend(_cut(found))
    return sorted(out, key=lambda unit: ("/__pycache__/" in unit[0].path, unit[0].path))


def _cut(files: list[File]) -> Iterator[list[File]]:
    unit: list[File] = []
    for folder, some in itertools.groupby(files, lambda file: file.path.rpartition("/")[0]):
        if unit and zlib.crc32(os.fsencode(folder)) % _FOLDERS == 0:
            yield unit
            unit = []
        unit += some
    yield unit


def _windows(fd: int) -> Iterator[bytes]:
    at = 0
    while window := os.pread(fd, WINDOW, at):
        at += len(window)
        yield window


def _hashed(pieces: Iterable[erofs.Buffer | erofs.Hole], hasher: blake3) -> Iterator[erofs.Buffer | erofs.Hole]:
    for piece in pieces:
        if isinstance(piece, erofs.Hole):
            for at in range(0, piece.length, WINDOW):
                hasher.update(bytes(min(WINDOW, piece.length - at)))
        else:
            hasher.update(piece)
        yield piece
