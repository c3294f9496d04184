"""Files of a striped store as Python file objects, and many ranges of many files at once. A file object belongs to one
thread at a time, like any file of Python."""

from __future__ import annotations

import bisect
import io
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import IO, TYPE_CHECKING, NamedTuple, cast

from bootseer.backends.pool import parallel
from bootseer.errors import DataError, logged
from bootseer.fsspecfs.paths import StripePaths, doing
from bootseer.kernel import finalisers
from bootseer.ranges import flat, merge
from bootseer.stripefs.files.readahead import ReadAhead
from bootseer.stripefs.files.reader import ChunkFile
from bootseer.stripefs.files.striped import StripedFile
from bootseer.stripefs.files.writer import StripeWriter

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from _typeshed import ReadableBuffer, WriteableBuffer


_log = logging.getLogger(__name__)


class StripeOutput(io.BufferedIOBase):
    """A new file of the store. Its owner's `close` publishes; before that nothing is seen at its path.

    It is given up, with a line in the log, when its owner never closes it, or closes it while an exception is handled
    that came after it was opened: half a file must not replace a whole one. `close` raises that exception again then,
    since it cannot tell a ``finally`` that the exception passes through from an ``except`` that has nothing to do with
    the file. A finaliser is no owner: what wraps the file (a text file, an archive) and is collected only ends the
    writing. Without ``autocommit`` closing only ends the writing, too: `commit` publishes, `discard` gives up.
    Belongs to one thread at a time."""

    def __init__(
        self,
        writer: StripeWriter,
        name: str,
        errors: Callable[[], AbstractContextManager[None]],
        *,
        autocommit: bool = True,
        mode: str = "wb",
    ) -> None:
        self._writer, self._errors, self._autocommit = writer, errors, autocommit
        self.name, self.path, self.mode = name, name, mode
        self._ended = self._collected = False
        self._late: list[bytes] = []
        """What the finaliser of a wrapper still wrote."""
        self._met, self._inside = _exception(), finalisers.running()

    def writable(self) -> bool:
        return True

    def write(self, data: ReadableBuffer) -> int:
        if self.closed:
            raise ValueError("write to a closed file")
        view = flat(data)
        if self._collected or sys.is_finalizing():
            self._late.append(bytes(view))
            return len(view)
        with self._errors():
            return self._writer.write(view)

    def _dealloc_warn(self, source: object) -> None:
        """Python's own wrappers say so before they close the file in their finaliser."""
        self._collected = True

    def tell(self) -> int:
        return self.size

    @property
    def size(self) -> int:
        """Bytes written so far."""
        return self._writer.size + sum(map(len, self._late))

    def close(self) -> None:
        collected = self._collected or finalisers.running() not in (0, self._inside)
        self._collected = False
        super().close()
        exc = _exception()
        if self._ended or collected:
            return
        if exc is not None and exc is not self._met:
            said = f"{self.name} is not published: it was closed while {type(exc).__name__} was handled"
            _log.warning("%s", said)
            self.discard()
            exc.add_note(f"{said}; to publish it, close it before or after that")
            raise exc
        if self._autocommit:
            self.commit()

    def commit(self) -> None:
        """Publish what was written; once."""
        if not self._ended:
            self._ended = True
            with self._errors():
                for data in self._late:
                    self._writer.write(data)
                self._writer.finish()

    def discard(self) -> None:
        """Give up what was written; never raises."""
        if not self._ended:
            self._ended = True
            with logged(_log.warning, "a part of %s may be left", self.name):
                self._writer.abandon()

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        if kind is not None and not self._ended:
            _log.warning("%s is not published: %s while it was written", self.name, kind.__name__)
            self.discard()
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_ended", True) and (self._autocommit or not self.closed):
            self._ended = True
            _log.warning("%s is not published: it was never closed", self.name)
            finalisers.later(self._writer.abandon)


class Compressed(io.BufferedIOBase):
    """``inner`` compresses into ``out``, a new file of the store, which it does not close itself."""

    def __init__(self, inner: IO[bytes], out: StripeOutput) -> None:
        self._inner, self._out = inner, out

    def writable(self) -> bool:
        return True

    def write(self, data: ReadableBuffer) -> int:
        return self._inner.write(data)

    def _dealloc_warn(self, source: object) -> None:
        self._out._dealloc_warn(source)

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._inner.close()
            self._out.close()


def _exception() -> BaseException | None:
    """The one being handled; at the end of the program what ended it, which is not the error of its other threads."""
    main = threading.main_thread()
    if (exc := sys.exc_info()[1]) is None and not main.is_alive() and threading.current_thread() is main:
        exc = getattr(sys, "last_value", None)
    return exc


WINDOW = 16 << 20
"""Most bytes that a reader fetches ahead in one request."""
_BUFFER = 64 << 10


class _Raw(io.RawIOBase):
    """In a forked child it opens its file again: threads and connections are those of the parent process."""

    def __init__(self, fs: StripePaths, name: str, window: int) -> None:
        self._fs, self._window = fs, window
        self.name, self.mode, self._collected = name, "rb", False
        with doing(name):
            self._start()
        self.size, self._identity = self._file.size, self._file.identity
        self._position = 0

    def _start(self) -> None:
        finalisers.prepare()
        self._file, self._pid = self._fs.reader(self.name), os.getpid()
        unit = self._file.unit
        window = max(2 * unit, self._window)
        self._ahead = ReadAhead(memory=2 * window, step=2 * unit, far=window)

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
        view = flat(buffer)
        view = view[: max(0, min(len(view), self.size - self._position))]
        self._read(view)
        return len(view)

    def _read(self, view: memoryview) -> None:
        if not len(view):
            return
        with doing(self.name):
            if self._pid != os.getpid():
                self._start()
                if self._file.identity != self._identity:
                    raise DataError(f"{self._file.path} was replaced while it was read", hint="open it again")
            self._ahead.readinto(self._file, self._position, view)
            self._position += len(view)
        self._fs.load.tell_soon()

    def _dealloc_warn(self, source: object) -> None:
        self._collected = True

    def close(self) -> None:
        if not self.closed:
            super().close()
            if self._collected or finalisers.running():
                finalisers.later(partial(_release, self._pid, self._ahead, self._file))
            else:
                _release(self._pid, self._ahead, self._file)

    def __del__(self) -> None:
        self._collected = True
        if hasattr(self, "_ahead"):
            self.close()


def _release(process: int, ahead: ReadAhead, file: ChunkFile) -> None:
    if process == os.getpid():
        ahead.close()  # not while one of its threads reads from the file
        file.close()


class StripeFile(io.BufferedReader):
    """A file of the store open for reading: ``size`` bytes, checked like every read of the store. Can be pickled. With
    what clients of fsspec look for (``fs``, ``path``, ``details``). ``window``: most bytes that are fetched ahead in
    one request once reads follow each other."""

    def __init__(self, fs: StripePaths, path: str, window: int = WINDOW) -> None:
        self.fs, self.path, self.blocksize = fs, path, window
        raw = _Raw(fs, path, window)
        self.size = raw.size
        super().__init__(raw, _BUFFER)

    @property
    def full_name(self) -> str:
        return self.fs.unstrip_protocol(self.path)

    @property
    def details(self) -> dict[str, object]:
        return cast("dict[str, object]", self.fs.info(self.path))

    def info(self) -> dict[str, object]:
        return self.details

    # What ``blockcache::`` needs of a file. The cache that it gives one is not asked: the node cache is there.

    def _fetch_range(self, start: int, end: int) -> bytes:
        return self.fs.cat_file(self.path, start, end)  # type: ignore[no-any-return]

    @property
    def closed(self) -> bool:
        return super().closed

    @closed.setter
    def closed(self, value: bool) -> None:
        pass  # it closes the file before

    def __reduce__(self) -> tuple[object, ...]:
        return StripeFile, (self.fs, self.path, self.blocksize), self.tell()

    def __setstate__(self, position: int) -> None:
        self.seek(position)


_NEAR = 64 << 10


class Wanted(NamedTuple):
    """A range as in a slice: negative counts from the end, None is an end."""

    path: str
    start: int | None
    end: int | None


def read_ranges(file: ChunkFile, wanted: Sequence[Wanted], gap: int | None) -> list[bytes]:
    """The bytes of each range, in order, as slices have them: fewer where the file ends before. Of a striped file whole
    chunks or sectors are read, each once. Raises what `ChunkFile.readinto` does."""
    ranges = [slice(item.start, item.end).indices(file.size)[:2] for item in wanted]
    striped = isinstance(file, StripedFile)
    grain = file.geometry.grain if striped else 1
    wide = [(start // grain * grain, min(-(-end // grain) * grain, file.size)) for start, end in ranges if start < end]
    found = merge(wide, gap if gap is not None else (0 if striped else _NEAR))
    buffers = [memoryview(bytearray(end - start)) for start, end in found]
    starts = [start for start, _ in found]
    file.readinto_many(list(zip(starts, buffers, strict=True)))
    out = []
    for start, end in ranges:
        number = bisect.bisect_right(starts, start) - 1
        out.append(bytes(buffers[number][start - starts[number] : end - starts[number]]) if start < end else b"")
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

    parallel(read, by_path)
    return out
