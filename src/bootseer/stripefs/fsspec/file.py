"""A new file of a striped store as a file object of Python, published when it is closed.

A file of a striped store as a file object of Python, with read-ahead.

Concurrency: a reader belongs to one thread at a time, like any file of Python. It fetches what comes next in a thread
of the pool here, into memory of its own. In a forked child it opens its file again.

Many ranges of many files at once: near ones in one piece, those of a file in one request, the files side by side.
"""

from __future__ import annotations

import io
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Protocol

from bootseer.errors import BootseerError, DataError
from bootseer.stripefs.files.reader import ChunkFile, StripedFile
from bootseer.stripefs.scheduler import memory

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from _typeshed import ReadableBuffer, WriteableBuffer


_log = logging.getLogger(__name__)


class Writer(Protocol):
    """What `StripeOutput` needs of a `StripeWriter`."""

    @property
    def size(self) -> int: ...

    def write(self, data: bytes | bytearray | memoryview) -> int: ...

    def finish(self) -> object: ...

    def abandon(self) -> None: ...


class Errors(Protocol):
    """Makes a context in which errors of the store become those that the file's user expects."""

    def __call__(self) -> AbstractContextManager[None]: ...


class StripeOutput(io.BufferedIOBase):
    """A new file of the store. Closing it publishes; before that nothing is seen at its path.

    It is given up, with a line in the log, when it is closed because of an exception, or never closed: half a file must
    not replace a whole one. Without ``autocommit`` closing only ends the writing: `commit` publishes, `discard` gives
    up. Belongs to one thread at a time.
    """

    def __init__(self, writer: Writer, name: str, errors: Errors, *, autocommit: bool = True, mode: str = "wb") -> None:
        self._writer, self._errors, self._autocommit = writer, errors, autocommit
        self.name, self.path, self.mode = name, name, mode
        self._ended = False
        self._met = sys.exc_info()[1]

    def writable(self) -> bool:
        return True

    def write(self, data: ReadableBuffer) -> int:
        if self.closed:
            raise ValueError("write to a closed file")
        with self._errors():
            return self._writer.write(memoryview(data).cast("B"))

    def tell(self) -> int:
        return self._writer.size

    @property
    def size(self) -> int:
        """Bytes written so far."""
        return self._writer.size

    def close(self) -> None:
        if self.closed:
            return
        super().close()
        exc = sys.exc_info()[1]
        if exc is not None and exc is not self._met:
            _log.warning("%s is not published: %s while it was written", self.name, type(exc).__name__)
            self.discard()
        elif self._autocommit:
            self.commit()

    def commit(self) -> None:
        """Publish what was written; once."""
        if not self._ended:
            self._ended = True
            with self._errors():
                self._writer.finish()

    def discard(self) -> None:
        """Give up what was written; never raises."""
        if not self._ended:
            self._ended = True
            try:
                self._writer.abandon()
            except (BootseerError, OSError) as exc:
                _log.warning("a part of %s may be left: %s", self.name, exc)

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        if kind is not None and not self.closed:
            self.discard()
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_ended", True) and not self.closed:
            _log.warning("%s is not published: it was never closed", self.name)
            self.discard()


WINDOW = 16 << 20
"""Most bytes that a reader fetches ahead in one request."""
_BUFFER = 64 << 10
_PLAIN_GRAIN = 256 << 10
_THREADS = 4

_pool: ThreadPoolExecutor | None = None
_pool_lock = threading.Lock()


def _forget() -> None:
    global _pool, _pool_lock
    _pool, _pool_lock = None, threading.Lock()  # a forked child has none of its parent's threads


os.register_at_fork(after_in_child=_forget)


def _submit(task: Callable[[], memoryview]) -> Future[memoryview]:
    global _pool
    with _pool_lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="bootseer-ahead")
        return _pool.submit(task)


class _Window:
    """Bytes of a file from ``start``: here (``data``), or on their way after `fetch`."""

    def __init__(self, start: int, length: int, data: memoryview | None = None) -> None:
        self.start, self.end = start, start + length
        self._data = data
        self.coming: Future[memoryview] | None = None

    def holds(self, position: int) -> bool:
        return self.start <= position < self.end

    def fetch(self, file: ChunkFile) -> bool:
        """Begin to read in another thread. False when this process has no memory to spare for it."""
        length = self.end - self.start
        if not memory.process().try_take(length):
            return False

        def read() -> memoryview:
            data = memoryview(bytearray(length))
            file.readinto(self.start, data)
            return data

        self.coming = _submit(read)
        return True

    def data(self) -> memoryview:
        if self._data is None:
            assert self.coming is not None
            self._data = self.coming.result()  # reads have deadlines
        return self._data

    def drop(self) -> None:
        """Not needed any more; once."""
        if self.coming is not None:
            self.coming.cancel()
            self.coming.add_done_callback(lambda _: memory.process().give(self.end - self.start))


class _Raw(io.RawIOBase):
    """Reads each chunk once as long as the reader goes forward: what a request leaves of its last chunk is kept."""

    def __init__(self, open_file: Callable[[], ChunkFile], name: str, errors: Errors, window: int) -> None:
        self._open, self._errors = open_file, errors
        self.name, self.mode = name, "rb"
        self._file, self._pid = open_file(), os.getpid()
        self.size, self._identity = self._file.size, self._file.identity
        self._grain = self._file.unit if isinstance(self._file, StripedFile) else _PLAIN_GRAIN
        self._most = max(self._grain, window - window % self._grain)
        self._position, self._expected = 0, -1
        self._ahead = self._grain
        self._window: _Window | None = None
        self._next: _Window | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size}[whence]
        if position < 0:
            raise ValueError(f"seek to {position}")
        self._position = position
        return position

    def readall(self) -> bytes:
        data = bytearray(max(0, self.size - self._position))
        self._read(memoryview(data))
        return bytes(data)

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer).cast("B")
        view = view[: max(0, min(len(view), self.size - self._position))]
        self._read(view)
        return len(view)

    def _read(self, view: memoryview) -> None:
        if not len(view):
            return
        with self._errors():
            if self._pid != os.getpid():
                self._reopen()
            sequential = self._position == self._expected
            done = self._from_windows(view)
            if done < len(view):
                self._ahead = min(2 * self._ahead, self._most) if sequential else self._grain
                self._fetch(view[done:])
            self._expected = self._position
            if sequential and self._ahead > self._grain:
                self._look_ahead()

    def _from_windows(self, view: memoryview) -> int:
        """Copy what is here already; how much that was."""
        done = 0
        while done < len(view):
            if self._next is not None and self._next.holds(self._position):
                self._keep(self._next)
                self._next = None
            if self._window is None or not self._window.holds(self._position):
                break
            try:
                data = self._window.data()
            except BootseerError as exc:  # nobody had asked for it: whoever does now gets an error of his own
                _log.info("reading %s again: %s", self.name, exc)
                self._keep(None)
                break
            low = self._position - self._window.start
            piece = data[low : low + len(view) - done]
            view[done : done + len(piece)] = piece
            done += len(piece)
            self._position += len(piece)
        return done

    def _fetch(self, view: memoryview) -> None:
        """Fill ``view``: whole chunks straight; the last one, if only its beginning is wanted, as part of a window."""
        end = self._position + len(view)
        straight = end if end == self.size else max(self._position, end - end % self._grain)
        ranges = []
        if straight > self._position:
            ranges.append((self._position, view[: straight - self._position]))
        start = straight - straight % self._grain
        kept = memoryview(bytearray(min(self._ahead, self.size - start) if straight < end else 0))
        ranges.append((start, kept))
        self._file.readinto_many(ranges)
        if straight < end:
            view[straight - self._position :] = kept[straight - start : end - start]
            self._keep(_Window(start, len(kept), kept))
        self._position = end

    def _look_ahead(self) -> None:
        """Let what follows come, once the window in use is half read."""
        window, start = self._window, self._position
        if window is not None and window.start <= self._position <= window.end:
            start = window.end
            if self._position < (window.start + window.end) // 2:
                return
        if self._next is not None:
            if self._next.start == start:
                return
            self._next.drop()
            self._next = None
        if start < self.size:
            following = _Window(start, min(self._ahead, self.size - start))
            if following.fetch(self._file):
                self._next = following

    def _keep(self, window: _Window | None) -> None:
        if self._window is not None:
            self._window.drop()
        self._window = window

    def _reopen(self) -> None:
        # connections are those of the parent process; what its threads were reading never comes
        self._window = self._next = None
        self._file, self._pid = self._open(), os.getpid()
        if self._file.identity != self._identity:
            raise DataError(f"{self._file.path} was replaced while it was read", hint="open it again")

    def close(self) -> None:
        if self.closed:
            return
        super().close()
        file, pending = self._file, self._next.coming if self._next is not None else None
        if self._pid != os.getpid():
            return  # its connections are those of the parent process
        for window in (self._window, self._next):
            if window is not None:
                window.drop()
        self._window = self._next = None
        if pending is None:
            file.close()
        else:
            pending.add_done_callback(lambda _: file.close())  # not while a thread reads from it


class StripeReader(io.BufferedReader):
    """A file of the store open for reading: ``size`` bytes, checked like every read of the store.

    ``window``: most bytes that are fetched ahead in one request once reads follow each other.
    """

    def __init__(self, open_file: Callable[[], ChunkFile], name: str, errors: Errors, window: int = WINDOW) -> None:
        with errors():
            raw = _Raw(open_file, name, errors, window)
        self.size = raw.size
        super().__init__(raw, _BUFFER)


_NEAR = 64 << 10
_FILES = 8
"""Files that are read at once."""


class Wanted(NamedTuple):
    """A range as in a slice: negative counts from the end, None is an end."""

    path: str
    start: int | None
    end: int | None


class _Block(NamedTuple):
    start: int
    end: int
    members: list[tuple[int, int, int]]
    """Number, start and end of each range in it."""


def blocks(ranges: Sequence[tuple[int, int]], grain: int, gap: int) -> list[_Block]:
    """``ranges`` (start, end) merged where they overlap, share a unit of ``grain`` bytes, or are ``gap`` apart."""
    found: list[_Block] = []
    for number, (start, end) in sorted(enumerate(ranges), key=lambda item: item[1]):
        if start >= end:
            continue
        if found:
            last = found[-1]
            reach = max(last.end + gap, -(-last.end // grain) * grain - 1)
            if start <= reach:
                found[-1] = last._replace(end=max(last.end, end), members=[*last.members, (number, start, end)])
                continue
        found.append(_Block(start, end, [(number, start, end)]))
    return found


def read_ranges(file: ChunkFile, wanted: Sequence[Wanted], gap: int | None) -> list[bytes]:
    """The bytes of each range, in order, as slices have them: fewer where the file ends before.

    Raises what `ChunkFile.readinto` does.
    """
    ranges = [slice(item.start, item.end).indices(file.size)[:2] for item in wanted]
    striped = isinstance(file, StripedFile)
    found = blocks(ranges, file.unit if striped else 1, gap if gap is not None else (0 if striped else _NEAR))
    buffers = [memoryview(bytearray(block.end - block.start)) for block in found]
    file.readinto_many([(block.start, buffer) for block, buffer in zip(found, buffers, strict=True)])
    out = [b""] * len(ranges)
    for block, buffer in zip(found, buffers, strict=True):
        for number, start, end in block.members:
            out[number] = bytes(buffer[start - block.start : end - block.start])
    return out


def gather(
    open_file: Callable[[str], ChunkFile], wanted: Sequence[Wanted], *, gap: int | None = None
) -> list[bytes | BaseException]:
    """Bytes or the error of each range, in order. ``gap``: bytes between two ranges that may be read for nothing."""
    by_path: dict[str, list[int]] = {}
    for number, item in enumerate(wanted):
        by_path.setdefault(item.path, []).append(number)
    out: list[bytes | BaseException] = [b""] * len(wanted)

    def read(path: str) -> None:
        numbers = by_path[path]
        try:
            with open_file(path) as file:
                data: Sequence[bytes | BaseException] = read_ranges(file, [wanted[number] for number in numbers], gap)
        except Exception as exc:
            data = [exc] * len(numbers)
        for number, found in zip(numbers, data, strict=True):
            out[number] = found

    if len(by_path) == 1:
        read(next(iter(by_path)))
    elif by_path:
        with ThreadPoolExecutor(min(_FILES, len(by_path)), thread_name_prefix="bootseer-ranges") as pool:
            list(pool.map(read, by_path))
    return out
