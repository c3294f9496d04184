"""Writes that publish atomically: stripes in parallel, then their lengths, then a pointer renamed into place.

Concurrency: the caller's thread cuts chunks and computes CRCs; each stripe has one thread that writes its file, fed by
a short queue, so a slow stripe holds back the caller and memory stays below ``width * (depth + 1) * unit``.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import uuid
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple

from blake3 import blake3
from crc32c import crc32c

from bootseer import faults
from bootseer.errors import (
    BootseerError,
    DataError,
    FullError,
    NotFoundError,
    NotWritableError,
    UnavailableError,
    from_os_error,
)
from bootseer.stripefs import layout
from bootseer.stripefs.backend import DEADLINE, Backend, Sink, join, read_all
from bootseer.stripefs.layout import Footer, Geometry, Header, Pointer
from bootseer.stripefs.read import read_pointer

_log = logging.getLogger(__name__)
_DEPTH = 4
_STALL = 3 * DEADLINE


class Written(NamedTuple):
    """What a finished write made: size in bytes and BLAKE3 digest of the content, uuid ("" for a plain file)."""

    size: int
    digest: str
    uuid: str


class _Stripe:
    """The thread that writes one stripe file."""

    def __init__(self, backend: Backend, path: str, header: Header) -> None:
        self.path, self.crcs, self.data, self.length, self.footer_crc = path, list[int](), 0, 0, 0
        self._backend, self._header = backend, header
        self._queue: queue.Queue[bytes | int | None] = queue.Queue(_DEPTH)
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name=f"bootseer-write-{header.stripe}", daemon=True)
        self._thread.start()

    def put(self, item: bytes | int | None) -> None:
        """Bytes: a chunk. An integer: the size of the whole file, write the footer and close. None: give up."""
        while self._thread.is_alive():
            if self.error is not None and item is not None:
                break
            with contextlib.suppress(queue.Full):
                self._queue.put(item, timeout=1.0)
                return
        if item is not None:
            self.raise_error()

    def raise_error(self) -> None:
        if isinstance(self.error, OSError):
            raise from_os_error(self.error, f"write {self.path}") from self.error
        if self.error is not None:
            raise self.error

    def join(self) -> None:
        self._thread.join(_STALL)
        if self._thread.is_alive():
            raise UnavailableError(f"writing {self.path} has not ended within {_STALL:.0f} s")

    def _work(self) -> None:
        sink: Sink | None = None
        try:
            sink = self._backend.create(self.path)
            sink.write(layout.encode_header(self._header))
            while isinstance(item := self._queue.get(), bytes):
                faults.point("stripefs.write.stripe")
                sink.write(item)
            if item is None:
                sink.abandon()
                return
            footer = Footer(self._header.uuid, self._header.stripe, self.data, item, tuple(self.crcs))
            encoded, self.footer_crc = layout.encode_footer(footer)
            sink.write(encoded)
            faults.point("stripefs.write.close")
            sink.close()
        except BaseException as exc:
            self.error = exc
            if sink is not None:
                sink.abandon()


class StripeWriter:
    """A new file at ``path``: `write` its bytes in order, then `finish`. Nothing is seen at ``path`` before that.

    Content below `layout.PLAIN_BELOW` is stored plain, unless ``striped``. As a context manager it finishes, or
    abandons on an exception. Raises `NotWritableError` when another writer replaced ``path`` meanwhile.

    ``before``: called when all is written and nothing published, with the pointer (None for a plain file, whose bytes
    are in the temporary file only); an error of it ends the write. The stripes can be read through the pointer then.
    """

    def __init__(
        self,
        backend: Backend,
        path: str,
        *,
        width: int = layout.WIDTH,
        unit: int = layout.UNIT,
        striped: bool = False,
        before: Callable[[Pointer | None], None] | None = None,
    ) -> None:
        layout.check_shape(width, unit)
        if not path:
            raise NotWritableError("the base folder of a striped store is no file")
        self.path, self._backend, self._width, self._unit = path, backend, width, unit
        self._parent = path.rpartition("/")[0]
        self._uuid = uuid.uuid4()
        self._temporary_path = join(self._parent, f"{layout.TEMPORARY}{self._uuid.hex}")
        self._temporary: Sink | None = None
        self._before = before
        self._existed = True
        self._old = self._current()
        self._epoch = self._old.epoch + 1 if self._old else 1
        self._stripes: list[_Stripe] = []
        self._striped = striped
        self._held = bytearray()  # less than one chunk, or the whole content as long as it may become a plain file
        self._chunks = self._size = 0
        self._digest = blake3()
        self._finished = self._renaming = False

    def _current(self) -> Pointer | None:
        try:
            return read_pointer(self._backend, self.path)
        except NotFoundError:
            if self._is_folder():
                raise NotWritableError(f"cannot write {self.path}: it is a folder") from None
            if self._temporary is None:
                self._existed = False  # then the rename does not overwrite, and of two writers one gives up
            return None
        except DataError as exc:
            _log.warning("replacing %s: %s", self.path, exc)
            return None

    def _is_folder(self) -> bool:
        try:
            return self._backend.stat(self.path).is_dir
        except NotFoundError:
            return False

    @property
    def size(self) -> int:
        """Bytes written so far."""
        return self._size

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Append ``data``. Returns its length in bytes, as a file's ``write`` does."""
        view = memoryview(data).cast("B")
        self._digest.update(view)
        self._size += len(view)
        length = len(view)
        if not self._striped:
            self._held += view
            if len(self._held) < layout.PLAIN_BELOW and not layout.is_pointer(self._held):
                return length
            self._striped = True
            view = memoryview(self._held)
            self._held = bytearray()
        if self._held:
            take = min(self._unit - len(self._held), len(view))
            self._held += view[:take]
            view = view[take:]
            if len(self._held) == self._unit:
                self._chunk(bytes(self._held))
                self._held.clear()
        while len(view) >= self._unit:
            self._chunk(bytes(view[: self._unit]))
            view = view[self._unit :]
        self._held += view
        return length

    def _start_stripes(self) -> None:
        name = self.path.rpartition("/")[2]
        headers = [Header(self._uuid.bytes, i, self._width, self._unit, self._epoch, name) for i in range(self._width)]
        folder = join(self._parent, layout.FOLDER)
        self._stripes = [
            _Stripe(self._backend, f"{folder}/{self._uuid.hex}.{header.stripe}", header) for header in headers
        ]

    def _chunk(self, data: bytes) -> None:
        if not self._stripes:
            self._start_stripes()
        stripe = self._stripes[self._chunks % self._width]
        stripe.crcs.append(crc32c(data))
        stripe.data += len(data)
        stripe.put(data)
        self._chunks += 1

    def finish(self) -> Written:
        """Publish. On an error nothing has changed at the path."""
        self._finished = True
        try:
            return self._finish_striped() if self._striped else self._finish_plain()
        except BaseException as exc:
            if self._renaming and not isinstance(exc, NotWritableError | FullError):
                # the rename has happened, or may have, or may still: without its stripes the file would be lost
                _log.warning("it is unknown whether %s was published; its stripes are left in place", self.path)
            else:
                self._remove_stripes()
                if self._temporary:
                    self._temporary.abandon()
            if isinstance(exc, OSError):
                raise from_os_error(exc, f"write {self.path}") from exc
            raise

    def _finish_plain(self) -> Written:
        self._begin_publication()
        self._publish(bytes(self._held), None)
        return Written(self._size, self._digest.hexdigest(), "")

    def _finish_striped(self) -> Written:
        if self._held:
            self._chunk(bytes(self._held))
        elif not self._stripes:
            self._start_stripes()
        # Before any stripe is complete: so a complete set of stripes with neither a temporary file nor a pointer is
        # that of a lost pointer, and not what a killed writer left.
        self._begin_publication()
        for stripe in self._stripes:
            stripe.put(self._size)
        for stripe in self._stripes:
            stripe.join()
            stripe.raise_error()
        pointer = Pointer(
            uuid=self._uuid.hex,
            size=self._size,
            unit=self._unit,
            width=self._width,
            footers=tuple(stripe.footer_crc for stripe in self._stripes),
            digest=self._digest.hexdigest(),
            epoch=self._epoch,
            name=self.path.rpartition("/")[2],
        )
        self._publish(layout.encode_pointer(pointer), pointer)
        return Written(self._size, pointer.digest, pointer.uuid)

    def _begin_publication(self) -> None:
        self._temporary = self._backend.create(self._temporary_path)
        faults.point("stripefs.write.intent")

    def _check_lengths(self) -> None:
        geometry = Geometry(self._size, self._unit, self._width)
        for index, stripe in enumerate(self._stripes):
            expected, found = geometry.stripe_length(index), self._backend.stat(stripe.path).size
            if found != expected:
                raise DataError(f"stripe {stripe.path} has {found} bytes after writing {expected}")

    def _publish(self, content: bytes, pointer: Pointer | None) -> None:
        """Order matters: whoever ends a writer from outside (a garbage collection, a later save of the checkpoint)
        first moves the stripes or claims the folder, then takes the temporary file away. So each check comes after the
        temporary file is whole, and one that passed is void when the rename finds no source.
        """
        assert self._temporary is not None
        faults.point("stripefs.write.pointer")
        self._temporary.write(content)
        self._temporary.close()
        faults.point("stripefs.write.verify")
        self._check_lengths()
        if self._before is not None:
            self._before(pointer)
        now = self._current()
        if (now and now.uuid) != (self._old and self._old.uuid):
            raise NotWritableError(f"{self.path} was replaced by another writer meanwhile", hint="run again")
        faults.point("stripefs.write.rename")
        self._renaming = True
        try:
            self._backend.rename(self._temporary_path, self.path, overwrite=self._existed)
        except (FileExistsError, NotFoundError):
            # also after a rename that was tried again because its answer was lost
            if not self._is_published(content):
                raise NotWritableError(
                    f"{self.path} was written by another writer meanwhile", hint="run again"
                ) from None
        faults.point("stripefs.write.cleanup")
        if self._old is not None and not self._old.owns_stripes(self.path):
            _log.warning(
                "the stripes of the replaced %s are left in place: they were written as %r", self.path, self._old.name
            )
        elif self._old is not None:
            for index in range(self._old.width):
                try:
                    self._backend.delete(self._old.stripe_path(self.path, index))
                except (BootseerError, OSError) as exc:
                    _log.warning("stripe %d of the replaced %s is left behind: %s", index, self.path, exc)

    def _is_published(self, content: bytes) -> bool:
        try:
            return read_all(self._backend, self.path, limit=len(content) + 1) == content
        except NotFoundError:
            return False

    def abandon(self) -> None:
        """Give up: remove what was written. Does nothing after `finish`."""
        if not self._finished:
            self._finished = True
            self._remove_stripes()

    def _remove_stripes(self) -> None:
        for stripe in self._stripes:
            stripe.put(None)
        for stripe in self._stripes:
            with contextlib.suppress(BootseerError, OSError):
                stripe.join()
                self._backend.delete(stripe.path)

    def __enter__(self) -> StripeWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None and not self._finished:
            self.finish()
        else:
            self.abandon()
