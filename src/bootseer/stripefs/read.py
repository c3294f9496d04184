"""Parallel reads of striped and plain files into the caller's memory, every chunk of a striped file checked.

A request is cut in runs of consecutive chunks of one stripe; the runs go to a pool of threads at once, each fills its
part of the destination and checks the CRC of every chunk. A run that fails is tried once more on a fresh connection.

Concurrency: any number of threads may read one file. Pool threads only read and check, they never wait for each other.
A call returns, or raises, when none of its runs can touch the destination any more.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TypeVar

from blake3 import blake3
from crc32c import crc32c

from bootseer.errors import BootseerError, DataError, NotFoundError, UnavailableError
from bootseer.stripefs import layout
from bootseer.stripefs.backend import DEADLINE, Backend, Source, read_all
from bootseer.stripefs.layout import Footer, Geometry, Pointer, Run

_log = logging.getLogger(__name__)
T = TypeVar("T")

RUN = 4 << 20
"""Largest single read from the storage."""
STALL = 3 * DEADLINE
"""A request fails when none of its runs has ended for so long: each has its own deadline, twice with the second try."""
_PLAIN_UNIT = 4 << 20
_THREADS = 16

_pool: ThreadPoolExecutor | None = None
_pool_lock = threading.Lock()


def _forget_pool() -> None:
    global _pool, _pool_lock
    _pool, _pool_lock = None, threading.Lock()  # a forked child has none of its parent's threads


os.register_at_fork(after_in_child=_forget_pool)


def parallel(tasks: Sequence[Callable[[], T]]) -> list[T]:
    """Run ``tasks`` in the pool; their results in order, or the first error after all have ended or been cancelled."""
    if len(tasks) == 1:
        return [tasks[0]()]
    global _pool
    with _pool_lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="bootseer-stripe")
    futures = [_pool.submit(task) for task in tasks]
    try:
        _all_done(futures)
    except BaseException:
        for future in futures:
            future.cancel()
        wait(futures)  # no task may write into the caller's memory after this
        raise
    return [future.result() for future in futures]


def _all_done(futures: Iterable[Future[T]]) -> None:
    pending = set(futures)
    while pending:
        done, pending = wait(pending, timeout=STALL, return_when=FIRST_COMPLETED)
        if not done:
            raise UnavailableError(f"no part of a read has ended within {STALL:.0f} s")
        for future in done:
            future.result()


class ChunkFile:
    """An open file of the store, read in chunks. ``identity`` changes when the content does."""

    identity: str

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
        view = view.cast("B")
        end = offset + len(view)
        if offset < 0 or end > self.size:
            raise DataError(f"{self.path} ends at {self.size}, wanted {end}")
        if not len(view):
            return
        first, last = offset // self.unit, -(-end // self.unit)
        runs = self.geometry.runs(first, last, max(1, RUN // self.unit))
        parallel([lambda run=run: self._read_run(run, offset, view) for run in runs])  # type: ignore[misc]

    def _read_run(self, run: Run, offset: int, view: memoryview) -> None:
        """Read the chunks of ``run`` and put what of them lies in ``view`` (file offset ``offset``) there."""
        parts, copies = [], []
        for position in range(run.first, run.first + run.chunks):
            chunk = position * self.geometry.width + run.stripe
            start = chunk * self.unit - offset
            length = self.geometry.chunk_length(chunk)
            if start >= 0 and start + length <= len(view):
                parts.append(view[start : start + length])
            else:  # only a part of the chunk is wanted, but its CRC needs all of it
                whole = memoryview(bytearray(length))
                parts.append(whole)
                low, high = max(start, 0), min(start + length, len(view))
                copies.append((view[low:high], whole[low - start : high - start]))
        try:
            self._fill(run, parts)
        except (DataError, UnavailableError) as exc:
            _log.warning("reading %s again: %s", self.path, exc)
            self._drop(run.stripe)
            self._fill(run, parts)
        for target, source in copies:
            target[:] = source

    def _fill(self, run: Run, parts: Sequence[memoryview]) -> None:
        raise NotImplementedError

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

    def close(self) -> None:
        """Not while another thread reads."""
        with self._lock:
            sources, self._sources = self._sources, {}
        for source in sources.values():
            source.close()

    def __enter__(self) -> ChunkFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def plain_identity(backend: Backend, path: str, version: str) -> str:
    """Names one content of one plain file among all stores; can be a file name."""
    named = "\0".join((backend.url, path, version)).encode("utf-8", "surrogateescape")
    return f"plain-{blake3(named).hexdigest()[:32]}"


class PlainFile(ChunkFile):
    """A file stored as it is, by anyone; read in parallel ranges. Its bytes are checked only by the storage."""

    def __init__(self, backend: Backend, path: str) -> None:
        source = backend.open(path, pinned=True)
        super().__init__(backend, path, Geometry(source.size, _PLAIN_UNIT, 1))
        self._version = source.version
        self.identity = plain_identity(backend, path, source.version)
        self._sources[0] = source

    def _open_source(self, stripe: int) -> Source:
        source = self._backend.open(self.path, pinned=True)
        if (source.size, source.version) != (self.size, self._version):
            source.close()
            raise DataError(f"{self.path} was replaced while it was read", hint="open it again")
        return source

    def _fill(self, run: Run, parts: Sequence[memoryview]) -> None:
        self._source(0).readinto(run.first * self.unit, parts)


class StripedFile(ChunkFile):
    """A striped file. Opening reads and checks every footer."""

    def __init__(self, backend: Backend, path: str, pointer: Pointer) -> None:
        super().__init__(backend, path, pointer.geometry)
        self.pointer, self.identity = pointer, pointer.uuid
        self._footers: tuple[Footer, ...] = ()
        try:
            self._footers = tuple(
                parallel([lambda i=i: self._footer(i) for i in range(pointer.width)])  # type: ignore[misc]
            )
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

    def _footer(self, stripe: int) -> Footer:
        name = self.pointer.stripe_path(self.path, stripe)
        data = bytearray(layout.footer_length(self.geometry.stripe_chunks(stripe)))
        self._source(stripe).readinto(self.geometry.footer_offset(stripe), [memoryview(data)])
        footer, crc = layout.decode_footer(bytes(data), name)
        if crc != self.pointer.footers[stripe] or footer.stripe != stripe or footer.size != self.size:
            raise DataError(f"{name} is not stripe {stripe} of {self.path}")
        return footer

    def _fill(self, run: Run, parts: Sequence[memoryview]) -> None:
        self._source(run.stripe).readinto(self.geometry.chunk_offset(run.first), parts)
        crcs = self._footers[run.stripe].crcs
        for position, part in enumerate(parts, run.first):
            if crc32c(part) != crcs[position]:
                chunk = position * self.geometry.width + run.stripe
                name = self.pointer.stripe_path(self.path, run.stripe)
                raise DataError(f"chunk {chunk} of {self.path} is damaged ({name})", hint="restore it from a copy")

    def check_headers(self) -> None:
        """Read and check the header of every stripe, which reads of the content do not need."""
        for stripe in range(self.geometry.width):
            name = self.pointer.stripe_path(self.path, stripe)
            data = bytearray(layout.HEADER_SIZE)
            self._source(stripe).readinto(0, [memoryview(data)])
            header = layout.decode_header(bytes(data), name)
            expected = (self.pointer.uuid, stripe, self.pointer.width, self.pointer.unit, self.pointer.epoch)
            if (header.uuid.hex(), header.stripe, header.width, header.unit, header.epoch) != expected:
                raise DataError(f"{name} is not stripe {stripe} of {self.path}")

    def chunk_crc(self, chunk: int) -> int:
        """CRC-32C that ``chunk`` must have."""
        return self._footers[chunk % self.geometry.width].crcs[chunk // self.geometry.width]


def read_pointer(backend: Backend, path: str) -> Pointer | None:
    """The pointer at ``path``, None for a plain file. Raises `NotFoundError`, `DataError` for a damaged pointer."""
    source = backend.open(path)
    try:
        head = bytearray(min(source.size, len(layout.POINTER_LINE)))
        if not head or source.size > layout.MAX_TEXT:
            return None
        source.readinto(0, [memoryview(head)])
        if not layout.is_pointer(head):
            return None
        data = bytearray(source.size)
        source.readinto(0, [memoryview(data)])
    finally:
        source.close()
    return layout.decode_pointer(bytes(data), path)


def open_file(backend: Backend, path: str) -> ChunkFile:
    """Open the file at ``path``, striped or plain."""
    pointer = read_pointer(backend, path)
    return PlainFile(backend, path) if pointer is None else StripedFile(backend, path, pointer)


__all__ = [
    "ChunkFile",
    "PlainFile",
    "StripedFile",
    "open_file",
    "parallel",
    "plain_identity",
    "read_all",
    "read_pointer",
]
