"""Reads of files into the caller's memory, in whole chunks or parts of them: what striped and plain files share.

A checksum tells damage; which bytes a file has is for those who may write it: see `content_of`. A request becomes one
`Piece` per stripe: consecutive chunks, with the CRC that each must have. The backend reads all pieces at once, and
decides from where, in which order and in how large runs. Concurrency: any number of threads may read one file. A call
returns, or raises, when nothing can touch the destination any more."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Container, Iterable, Mapping, Sequence

from blake3 import blake3

from bootseer.backends.interface import Backend, Piece, Source
from bootseer.closing import Closing
from bootseer.errors import DataError, NotWritableError
from bootseer.ranges import flat
from bootseer.stripefs import layout
from bootseer.stripefs.layout import Geometry, Pointer

_log = logging.getLogger(__name__)

_PLAIN_UNIT = 1 << 20
"""What read-ahead and node cache know as a chunk of a plain file; a request may be cut at its multiples."""
_POINTER_READ = layout.MAX_REMNANT
"""Bytes of a small file that are read to see whether it is a pointer: nearly always all of one."""


Views = Sequence[tuple[int, memoryview]]
"""Memory, and the offset in the file of the bytes that it is for."""
Copies = list[tuple[memoryview, memoryview]]
"""(target, source) of what is to be copied when all is read."""


class Local:
    """What a node has of one open file, and who notes there what is read of it: nothing, and nobody, unless a subclass
    says more. Any thread may call anything."""

    def note(self, offset: int, length: int) -> None:
        """These bytes are about to be read."""

    def has(self, chunk: int) -> bool:
        """Whether `fill` will most likely find it."""
        return False

    def fill(self, wanted: Mapping[int, memoryview]) -> Mapping[int, memoryview]:
        """Fill the memory of those whole chunks that are here, checked. Returns the others."""
        return wanted

    def keep(self, chunk: int, data: Sequence[memoryview], *, steady: bool = False) -> None:
        """``chunk`` was fetched, and has its CRC. ``data`` makes it up, and may change after the call unless
        ``steady``."""

    def store(self, chunk: int, data: memoryview) -> bool:
        """As `keep`, but at once; whether it is here now."""
        return False

    def fd_of(self, first: int, last: int) -> int | None:
        """A file from which the kernel may read the chunks ``first`` to ``last`` (exclusive), at their offsets; None
        when one is not here. What was not checked yet is checked."""
        return None

    def fd_of_all(self, seconds: float) -> int | None:
        """`fd_of` all chunks; None also when the check takes longer, which goes on."""
        return None

    def close(self) -> None:
        """The file is not read any more."""


NOWHERE = Local()


class ChunkFile(Closing):
    """An open file of the store, read in chunks. ``content`` names what is at its path, and changes when that does;
    ``identity`` names it among all stores (`identity_of`).

    ``unfinished``: a plain file that a writer still had open; it is read as far as it was complete.
    ``local``: where its chunks are looked for first and kept, see `attach`. ``fetched``, ``cached``: bytes that came
    from the storage and from there."""

    content: str
    identity: str
    unfinished = False
    local: Local = NOWHERE
    fetched = cached = 0

    def __init__(self, backend: Backend, path: str, geometry: Geometry) -> None:
        self.path, self.geometry = path, geometry
        self.size, self.unit = geometry.size, geometry.unit
        self._backend = backend
        self._lock = threading.Lock()
        self._sources: dict[int, Source] = {}

    def read(self, offset: int, length: int) -> bytes:
        """Exactly ``length`` bytes from ``offset``. Raises `DataError` past the end or for damaged bytes."""
        data = bytearray(length)
        self.readinto(offset, memoryview(data))
        return bytes(data)

    def readinto(self, offset: int, view: memoryview) -> None:
        """Fill ``view`` with the bytes from ``offset``. Raises `DataError` past the end, and for bytes that are damaged
        or cannot be had; then ``view`` holds rubbish."""
        self.readinto_many([(offset, view)])

    def readinto_many(self, ranges: Views) -> int:
        """`readinto` of several (offset, view) in one request; returns how many bytes came from the storage. A chunk
        that several of them touch is read once."""
        views: list[tuple[int, memoryview]] = []
        for offset, target in ranges:
            view = flat(target)
            self.check_range(offset, len(view))
            if len(view):
                views.append((offset, view))
                self.local.note(offset, len(view))
        return self._read(views)

    def _read(self, views: Views) -> int:
        copies: Copies = []
        return self._fetch(self._pieces(views, copies), copies)

    def apart(self, offset: int, size: int) -> bool:
        """Whether a reader who has jumped there had better read these bytes by themselves, and not all of their chunks:
        not when that was said of these chunks often."""
        return False

    def check_range(self, offset: int, length: int) -> None:
        """Raise `DataError` for bytes that the file does not have."""
        if offset < 0 or offset + length > self.size:
            raise DataError(f"{self.path} ends at {self.size}, wanted {offset + length}")

    def read_chunks(self, first: int, parts: Sequence[memoryview], *, keep: Container[int] = ()) -> int:
        """Fill each of ``parts`` with one whole chunk, from chunk ``first`` on; returns how many bytes came from the
        storage. `local` gets the chunks ``keep``; the others the caller may give it, who has the memory. Errors as of
        `readinto`."""
        for chunk, part in enumerate(parts, first):
            if len(part) != self.geometry.chunk_length(chunk):
                raise ValueError(f"chunk {chunk} of {self.path} has {self.geometry.chunk_length(chunk)} bytes")
        self.local.note(first * self.unit, sum(map(len, parts)))
        return self._fetch(self.by_stripe(dict(enumerate(parts, first)), keep=keep))

    def _fetch(self, pieces: Sequence[Piece], copies: Iterable[tuple[memoryview, memoryview]] = ()) -> int:
        fetched = sum(len(part) for piece in pieces for part in piece.parts)
        if pieces:
            self._backend.read_many(pieces)
            with self._lock:
                self.fetched += fetched
        for target, source in copies:
            target[:] = source
        return fetched

    def by_stripe(self, wanted: Mapping[int, memoryview], *, keep: Container[int] | None = None) -> list[Piece]:
        """Whole chunks, each into its memory: a piece for each run of chunks that lie beside each other in a stripe."""
        runs: list[tuple[int, int, list[memoryview]]] = []
        last: dict[int, tuple[int, int, list[memoryview]]] = {}
        for chunk in sorted(wanted):
            position, stripe = divmod(chunk, self.geometry.width)
            run = last.get(stripe)
            if run is None or run[1] + len(run[2]) != position:
                run = last[stripe] = (stripe, position, [])
                runs.append(run)
            run[2].append(wanted[chunk])
        return [self._piece(*run, keep) for run in runs]

    def _pieces(self, views: Views, copies: Copies) -> list[Piece]:
        """The chunks that ``views`` touch. ``copies``: as of `_cut`."""
        return self.by_stripe(self._cut(views, copies, self.unit))

    def _cut(self, views: Views, copies: Copies, size: int) -> dict[int, memoryview]:
        """Memory for each part of ``size`` bytes of the file that ``views`` touch. One at an edge, whose CRC needs all
        of it, is read elsewhere, and ``copies`` gets (target in a view, source); so it does for one that another view
        has already."""
        wanted: dict[int, memoryview] = {}
        for offset, view in views:
            for number in range(offset // size, -(-(offset + len(view)) // size)):
                start = number * size - offset
                length = min(size, self.size - number * size)
                low, high = max(start, 0), min(start + length, len(view))
                if number not in wanted:
                    if high - low == length:
                        wanted[number] = view[low:high]
                        continue
                    wanted[number] = memoryview(bytearray(length))
                copies.append((view[low:high], wanted[number][low - start : high - start]))
        return wanted

    def _piece(self, stripe: int, first: int, parts: Sequence[memoryview], keep: Container[int] | None) -> Piece:
        """Consecutive whole chunks of ``stripe``, from position ``first`` on. ``keep``: these in `local`, or all."""
        raise NotImplementedError

    def _reopened(self, stripe: int) -> Callable[[], Source]:
        def reopen() -> Source:
            self._drop(stripe)
            return self._source(stripe)

        return reopen

    def _source(self, stripe: int) -> Source:
        with self._lock:
            if (source := self._sources.get(stripe)) is not None:
                return source
        source = self._open_source(stripe)
        with self._lock:
            kept = self._sources.setdefault(stripe, source)
        if kept is not source:
            source.close()
        return kept

    def _open_source(self, stripe: int) -> Source:
        raise NotImplementedError

    def _drop(self, stripe: int) -> None:
        # not closed here: another thread may be reading from it; it closes itself with its last user
        with self._lock:
            self._sources.pop(stripe, None)

    def attach(self, local: Local) -> None:
        """Look for chunks in ``local`` first, and keep them there, until the file is closed."""
        with self._lock:
            before, self.local = self.local, local
        before.close()

    def close(self) -> None:
        """Not while another thread reads."""
        with self._lock:
            sources, self._sources = self._sources, {}
        self.attach(NOWHERE)
        for source in sources.values():
            source.close()


def content_of(version: str, uuid: str = "") -> str:
    """Names what is at a path: the file there, by its ``version``, and what it says of itself, ``uuid``, "" of a plain
    file. A uuid alone names nothing: who can read a pointer can write another file with the same, and the same
    checksums."""
    return f"{uuid or 'plain'}-{version}"


def identity_of(backend: Backend, path: str, content: str) -> str:
    """Names the ``content`` of the file at ``path`` among all stores; can be a file name."""
    place = f"{backend.url.rstrip('/')}/{path}"
    named = "\0".join((place, content)).encode("utf-8", "surrogateescape")
    return f"{content.partition('-')[0]}-{blake3(named).hexdigest()}"


class PlainFile(ChunkFile):
    """A file stored as it is, by anyone; read in parallel ranges. Its bytes are checked only by the storage. ``head``:
    the first `_POINTER_READ` bytes of one that is as small as pointers are, else b""."""

    def __init__(self, backend: Backend, path: str) -> None:
        source = backend.open(path, pinned=True)
        super().__init__(backend, path, Geometry(source.size, _PLAIN_UNIT, 1))
        self.version = source.version
        self.content = content_of(source.version)
        self.identity = identity_of(backend, path, self.content)
        self._sources[0] = source
        self.unfinished = source.unfinished
        if self.unfinished:
            _log.warning(
                "%s is still being written: only the %d bytes of it that are complete are read", path, self.size
            )
        try:
            small = 0 < self.size <= layout.MAX_TEXT
            self.head = source.read(0, min(self.size, _POINTER_READ)) if small else b""
        except BaseException:
            self.close()
            raise

    def _open_source(self, stripe: int) -> Source:
        source = self._backend.open(self.path, pinned=True)
        if (source.size, source.version) != (self.size, self.version):
            source.close()
            raise DataError(f"{self.path} was replaced while it was read", hint="open it again")
        return source

    def apart(self, offset: int, size: int) -> bool:
        return True  # it has no checksums, for which more would be needed

    def _pieces(self, views: Views, copies: Copies) -> list[Piece]:
        found: list[tuple[int, list[memoryview]]] = []
        end = -1
        for offset, view in views:
            if offset != end:
                found.append((offset, []))
            found[-1][1].extend(view[start : start + _PLAIN_UNIT] for start in range(0, len(view), _PLAIN_UNIT))
            end = offset + len(view)
        return [
            Piece(self._source(0), offset, parts, reopen=self._reopened(0), name=self.path) for offset, parts in found
        ]

    def _piece(self, stripe: int, first: int, parts: Sequence[memoryview], keep: Container[int] | None) -> Piece:
        return Piece(self._source(0), first * self.unit, parts, reopen=self._reopened(0), name=self.path)


def refuse_unfinished(file: ChunkFile) -> None:
    """`NotWritableError` when ``file`` is to be taken as a whole, and its writer has not finished it."""
    if file.unfinished:
        raise NotWritableError(
            f"{file.path} is still being written",
            hint="run again when its writer has closed it, or after hdfs debug recoverLease when its writer is gone",
        )


def read_pointer(backend: Backend, path: str) -> Pointer | None:
    """The pointer at ``path``, None for a plain file. Raises `NotFoundError`, `DataError` for a damaged pointer."""
    with contextlib.closing(backend.open(path)) as source:
        if not source.size or source.size > layout.MAX_TEXT:
            return None
        data = source.read(0, min(source.size, _POINTER_READ))
        if not layout.is_pointer(data):
            return None
        if source.size > len(data):
            data += source.read(len(data), source.size - len(data))
    return layout.decode_pointer(data, path)
