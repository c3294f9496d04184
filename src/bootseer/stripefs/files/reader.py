"""Reads of striped and plain files into the caller's memory, every chunk of a striped file compared with its checksum.

A checksum tells damage. Which bytes a file has is for those who may write it, and for nobody else: see `content_of`.

A request becomes one `Piece` per stripe: consecutive chunks, with the CRC that each must have. The backend reads all
pieces at once, and decides from where, in which order and in how large runs.

Concurrency: any number of threads may read one file. A call returns, or raises, when nothing can touch the destination
any more.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Self

from blake3 import blake3
from crc32c import crc32c

from bootseer.backends.interface import Backend, Piece, Source, join
from bootseer.backends.pool import parallel
from bootseer.errors import BootseerError, DataError, NotFoundError, NotWritableError
from bootseer.ranges import flat
from bootseer.stripefs import layout
from bootseer.stripefs.layout import Footer, Geometry, Pointer

_log = logging.getLogger(__name__)

_PLAIN_UNIT = 1 << 20
"""What read-ahead and node cache know as a chunk of a plain file; a request may be cut at its multiples."""
_POINTER_READ = layout.MAX_REMNANT
"""Bytes of a small file that are read to see whether it is a pointer: nearly always all of one."""


_TRIES = 5
"""How often a file that is replaced all the time is opened."""


class Local:
    """What a node has of one open file, and who notes there what is read of it: nothing, and nobody, unless a subclass
    says more. Any thread may call anything."""

    def note(self, offset: int, length: int) -> None:
        """These bytes are about to be read."""

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


class ChunkFile:
    """An open file of the store, read in chunks. ``content`` names what is at its path, and changes when that does;
    ``identity`` names it among all stores (`identity_of`).

    ``unfinished``: a plain file that a writer still had open; it is read as far as it was complete.
    ``local``: where its chunks are looked for first and kept, see `attach`. ``fetched``, ``cached``: bytes that came
    from the storage and from there.
    """

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
        """Fill ``view`` with the bytes from ``offset``.

        Raises `DataError` past the end, and for bytes that are damaged or cannot be had; then ``view`` holds rubbish.
        """
        self.readinto_many([(offset, view)])

    def readinto_many(self, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """`readinto` of several (offset, view) in one request. A chunk that several of them touch is read once."""
        views: list[tuple[int, memoryview]] = []
        for offset, target in ranges:
            view = flat(target)
            self.check_range(offset, len(view))
            if len(view):
                views.append((offset, view))
                self.local.note(offset, len(view))
        copies: list[tuple[memoryview, memoryview]] = []
        self._fetch(self._pieces(views, copies))
        for target, source in copies:
            target[:] = source

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

    def _fetch(self, pieces: Sequence[Piece]) -> int:
        if not pieces:
            return 0
        self._backend.read_many(pieces)
        fetched = sum(len(part) for piece in pieces for part in piece.parts)
        with self._lock:
            self.fetched += fetched
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

    def _pieces(
        self, views: Sequence[tuple[int, memoryview]], copies: list[tuple[memoryview, memoryview]]
    ) -> list[Piece]:
        """The chunks that ``views`` (file offset, memory) touch.

        Of a chunk at an edge only a part may be wanted, but its CRC needs all of it: it is read elsewhere, and
        ``copies`` gets (target in a view, source); so it does for a chunk that another view has already.
        """
        wanted: dict[int, memoryview] = {}
        for offset, view in views:
            for chunk in range(offset // self.unit, -(-(offset + len(view)) // self.unit)):
                start = chunk * self.unit - offset
                length = self.geometry.chunk_length(chunk)
                low, high = max(start, 0), min(start + length, len(view))
                if chunk not in wanted:
                    if high - low == length:
                        wanted[chunk] = view[low:high]
                        continue
                    wanted[chunk] = memoryview(bytearray(length))
                copies.append((view[low:high], wanted[chunk][low - start : high - start]))
        return self.by_stripe(wanted)

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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def content_of(version: str, uuid: str = "") -> str:
    """Names what is at a path: the file there, by its ``version``, and what it says of itself, ``uuid``, "" of a plain
    file. A uuid alone names nothing: who can read a pointer can write another file with the same, and the same
    checksums."""
    return f"{uuid or 'plain'}-{version}"


def identity_of(backend: Backend, path: str, content: str) -> str:
    """Names the ``content`` of the file at ``path`` among all stores; can be a file name."""
    place = join(backend.url.rstrip("/"), path)
    named = "\0".join((place, content)).encode("utf-8", "surrogateescape")
    return f"{content.partition('-')[0]}-{blake3(named).hexdigest()}"


class PlainFile(ChunkFile):
    """A file stored as it is, by anyone; read in parallel ranges. Its bytes are checked only by the storage.

    ``head``: the first `_POINTER_READ` bytes of one that is as small as pointers are, else b"".
    """

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

    def _pieces(
        self, views: Sequence[tuple[int, memoryview]], copies: list[tuple[memoryview, memoryview]]
    ) -> list[Piece]:
        runs: list[tuple[int, list[memoryview]]] = []
        end = -1
        for offset, view in views:
            if offset != end:
                runs.append((offset, []))
            runs[-1][1].extend(view[start : start + _PLAIN_UNIT] for start in range(0, len(view), _PLAIN_UNIT))
            end = offset + len(view)
        return [
            Piece(self._source(0), offset, parts, reopen=self._reopened(0), name=self.path) for offset, parts in runs
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


class StripedFile(ChunkFile):
    """A striped file, whose ``pointer`` was read from a file of that ``version``. Opening reads and checks every
    footer."""

    def __init__(self, backend: Backend, path: str, pointer: Pointer, version: str = "") -> None:
        super().__init__(backend, path, pointer.geometry)
        self.pointer, self.content = pointer, content_of(version, pointer.uuid)
        self.identity = identity_of(backend, path, self.content)
        self._footers: tuple[Footer, ...] = ()
        try:
            self._footers = self._read_footers()
        except BaseException:
            self.close()
            raise

    def _open_source(self, stripe: int) -> Source:
        name = self.pointer.stripe_path(self.path, stripe)
        try:
            source = self._backend.open(name)
        except NotFoundError:
            raise self._gone(f"stripe {stripe} of {self.path} is missing ({name})") from None
        if source.size != (expected := self.geometry.stripe_length(stripe)):
            found = source.size
            source.close()
            raise DataError(f"stripe {stripe} of {self.path} has {found} bytes, not {expected} ({name})")
        return source

    def _gone(self, problem: str) -> BootseerError:
        """What a missing stripe means: a writer replaced the file, or a part of it is lost."""
        try:
            now = read_pointer(self._backend, self.path)
        except BootseerError:
            now = None
        if now is None or now.uuid != self.pointer.uuid:
            return DataError(f"{self.path} was replaced while it was read", hint="open it again")
        return DataError(problem, hint="a checkpoint must be moved or copied with its .bsx folder")

    def _read_footers(self) -> tuple[Footer, ...]:
        stripes, footers = range(self.pointer.width), dict[int, Footer]()

        def piece(stripe: int) -> Piece:
            def check(part: int, data: memoryview) -> None:
                footers[stripe] = self._decode_footer(stripe, data)

            buffer = memoryview(bytearray(layout.footer_length(self.geometry.stripe_chunks(stripe))))
            offset = self.geometry.footer_offset(stripe)
            return Piece(self._source(stripe), offset, [buffer], check, self._reopened(stripe), self.path)

        parallel(self._source, stripes)
        self._backend.read_many([piece(i) for i in stripes])
        return tuple(footers[i] for i in stripes)

    def by_stripe(self, wanted: Mapping[int, memoryview], *, keep: Container[int] | None = None) -> list[Piece]:
        every, wanted = wanted, self.local.fill(wanted)
        with self._lock:
            self.cached += sum(len(view) for chunk, view in every.items() if chunk not in wanted)
        return super().by_stripe(wanted, keep=keep)

    def _decode_footer(self, stripe: int, data: memoryview) -> Footer:
        name = self.pointer.stripe_path(self.path, stripe)
        footer, crc = layout.decode_footer(bytes(data), name)
        if crc != self.pointer.footers[stripe] or footer.stripe != stripe or footer.size != self.size:
            raise DataError(f"{name} is not stripe {stripe} of {self.path}")
        return footer

    def _piece(self, stripe: int, first: int, parts: Sequence[memoryview], keep: Container[int] | None) -> Piece:
        crcs = self._footers[stripe].crcs

        def check(part: int, data: memoryview) -> None:
            position = first + part
            chunk = position * self.geometry.width + stripe
            if crc32c(data) != crcs[position]:
                name = self.pointer.stripe_path(self.path, stripe)
                raise DataError(f"chunk {chunk} of {self.path} is damaged ({name})", hint="restore it from a copy")
            if keep is None or chunk in keep:
                self.local.keep(chunk, [data])

        source, offset = self._source(stripe), self.geometry.chunk_offset(first)
        return Piece(source, offset, parts, check, self._reopened(stripe), self.path)

    def check_headers(self) -> None:
        """Read and check the header of every stripe, which reads of the content do not need."""
        for stripe in range(self.geometry.width):
            name = self.pointer.stripe_path(self.path, stripe)
            header = layout.decode_header(self._source(stripe).read(0, layout.HEADER_SIZE), name)
            expected = (self.pointer.uuid, stripe, self.pointer.width, self.pointer.unit, self.pointer.epoch)
            if (header.uuid.hex(), header.stripe, header.width, header.unit, header.epoch) != expected:
                raise DataError(f"{name} is not stripe {stripe} of {self.path}")

    def chunk_crc(self, chunk: int) -> int:
        """CRC-32C that ``chunk`` must have."""
        return self._footers[chunk % self.geometry.width].crcs[chunk // self.geometry.width]


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


def open_file(backend: Backend, path: str) -> ChunkFile:
    """Open the file at ``path``, striped or plain, as it is now: one that is replaced meanwhile is opened again."""
    for left in reversed(range(_TRIES)):
        file = PlainFile(backend, path)
        if not layout.is_pointer(file.head):
            break
        try:
            with file:
                text = file.head if len(file.head) == file.size else file.read(0, file.size)
            return StripedFile(backend, path, layout.decode_pointer(text, path), file.version)
        except DataError:
            if not left or backend.stat(path).version == file.version:
                raise
    return file
