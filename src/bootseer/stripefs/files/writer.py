"""Writes that publish atomically: stripes in parallel, then their lengths, then a pointer (`publication`).

Concurrency: the caller's thread cuts chunks and computes the digest. Each stripe has a thread of its own (`Stripe`),
fed by a short queue, so a slow stripe holds back the caller. Memory stays below ``width * (depth + 1) * unit``, and
what a storage keeps until it has it safely (`bootseer.hdfs.output.WINDOW` for each stripe on HDFS).

A forked child has neither these threads nor a right to the file: there, giving up touches nothing."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import uuid
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple, TypeVar

from blake3 import blake3

from bootseer import faults
from bootseer.backends.interface import FILE_MODE, Backend, join
from bootseer.errors import (
    BootseerError,
    DataError,
    NotWritableError,
    from_os_error,
)
from bootseer.hdfs.pieces import cut, kept
from bootseer.kernel import finalisers
from bootseer.ranges import flat
from bootseer.stripefs import layout
from bootseer.stripefs.files.publication import Publication, patiently
from bootseer.stripefs.files.stripe import Stripe
from bootseer.stripefs.layout import Geometry, Header, Pointer

_log = logging.getLogger(__name__)
T = TypeVar("T")

_SMALL, _GATHER = 4096, 256
_END = 10.0
"""Seconds that the end of a program waits for the removal of what it began and did not finish."""


class Written(NamedTuple):
    """What a finished write made: size in bytes and BLAKE3 digest of the content, uuid ("" for a plain file)."""

    size: int
    digest: str
    uuid: str


class StripeWriter:
    """A new file at ``path``: `write` its bytes in order, then `finish`. Nothing is seen at ``path`` before that.

    Content below `layout.PLAIN_BELOW` is stored plain, unless ``striped``. As a context manager it finishes, or
    abandons on an exception. Raises `ReplacedError` when another writer replaced ``path`` meanwhile. In a forked
    child `write` and `finish` raise `BootseerError`, and the end of the context, whatever its reason, does nothing.

    ``mode``: of the file, where the storage keeps modes; its owner may read and write it as long as it is written.
    ``before``: called when all is written and nothing published, with the pointer (None for a plain file, whose bytes
    are in the temporary file only); an error of it ends the write. The stripes can be read through the pointer then.

    ``known``, ``exclusive``: as of `Publication`.

    ``temporary``: path of what is renamed into place, a pointer or the whole content of a plain file. ``replaces``:
    whether there was a file at the path at first. ``size``: bytes written so far."""

    def __init__(
        self,
        backend: Backend,
        path: str,
        *,
        width: int = layout.WIDTH,
        unit: int = layout.UNIT,
        striped: bool = False,
        mode: int = FILE_MODE,
        before: Callable[[Pointer | None], None] | None = None,
        known: str | None = None,
        exclusive: bool = False,
    ) -> None:
        layout.check_shape(width, unit)
        if not path:
            raise NotWritableError("the base folder of a striped store is no file")
        backend.check_new(path)
        self.path, self._backend, self._width, self._unit = path, backend, width, unit
        self.mode = mode & 0o777 | 0o600
        self._process = os.getpid()
        self._uuid = uuid.uuid4()
        self._publication = Publication(backend, path, self._uuid.hex, self.mode, known=known, exclusive=exclusive)
        self.temporary, self.replaces = self._publication.temporary, self._publication.replaces
        self._before = before
        self._stripes: list[Stripe] = []
        self._striped = striped
        # what is not written yet: less than a chunk, or the whole content as long as it may become a plain file
        self._pieces: list[memoryview] = []
        self._held = 0
        self._chunks = self.size = 0
        self._digest = blake3()
        self._finished = False
        finalisers.prepare()

    @property
    def _foreign(self) -> bool:
        """In a process that was forked from the writer's: the file is that one's, and so are the threads and locks."""
        return os.getpid() != self._process

    def _check_process(self) -> None:
        if self._foreign:
            raise BootseerError(
                f"cannot write {self.path}: process {self._process} writes it, of which this one is a child",
                hint="create files in the process that writes them",
            )

    @property
    def digest(self) -> str:
        """BLAKE3 of what was written so far."""
        return self._digest.hexdigest()

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Append ``data``. Returns its length in bytes, as a file's ``write`` does. `bytes`, and views of them, are not
        copied; anything else is, once, since it may change before it is stored."""
        self._check_process()
        view = flat(data)
        length = len(view)
        self._digest.update(view)
        while view:
            room = (self._unit if self._striped else layout.PLAIN_BELOW) - self._held
            self._hold(view[:room])
            view = view[room:]
            self._striped = self._striped or self._held >= layout.PLAIN_BELOW
            while self._striped and self._held >= self._unit:
                self._chunk(self._unit)
        self.size += length
        return length

    def _hold(self, view: memoryview) -> None:
        self._pieces.append(kept(view))
        self._held += len(view)
        if len(view) < _SMALL and len(self._pieces) >= _GATHER:  # many small writes
            self._pieces = [memoryview(b"".join(self._pieces))]

    def _start_stripes(self) -> None:
        name = self.path.rpartition("/")[2]
        id, epoch = self._uuid.bytes, self._publication.epoch
        headers = [Header(id, i, self._width, self._unit, epoch, name) for i in range(self._width)]
        folder = join(self.path.rpartition("/")[0], layout.FOLDER)
        siblings = self._backend.siblings()
        self._stripes = [
            Stripe(self._backend, f"{folder}/{self._uuid.hex}.{header.stripe}", header, siblings, self.mode)
            for header in headers
        ]

    def _chunk(self, length: int) -> None:
        """Give the first ``length`` bytes of what is held to the stripe whose turn it is."""
        if not self._stripes:
            self._start_stripes()
        chunk, self._pieces = cut(self._pieces, length)
        self._held -= length
        self._stripes[self._chunks % self._width].put(chunk)
        self._chunks += 1

    def finish(self) -> Written:
        """Publish. On an error nothing has changed at the path."""
        self._check_process()
        self._finished = True
        try:
            content = b"" if self._striped else b"".join(self._pieces)
            if self._striped or layout.is_pointer(content):  # which readers would take for one
                return self._finish_striped()
            self._publication.begin()
            self._publish(content, None)
            return Written(self.size, self.digest, "")
        except BaseException as exc:
            if self._foreign:
                raise  # a child that ``before`` forked
            if self._publication.may_have_happened(exc):
                _log.warning("it is unknown whether %s was published; its stripes are left in place", self.path)
            else:
                self._remove_stripes()
                self._publication.undo()
            if isinstance(exc, OSError):
                raise from_os_error(exc, f"write {self.path}") from exc
            raise

    def _finish_striped(self) -> Written:
        while self._held:
            self._chunk(min(self._held, self._unit))
        if not self._stripes:
            self._start_stripes()
        self._publication.begin()
        for stripe in self._stripes:
            stripe.put(self.size)
        for stripe in self._stripes:
            stripe.join()
            stripe.raise_error()
        pointer = Pointer(
            uuid=self._uuid.hex,
            size=self.size,
            unit=self._unit,
            width=self._width,
            footers=tuple(stripe.footer_crc for stripe in self._stripes),
            digest=self.digest,
            epoch=self._publication.epoch,
            name=self.path.rpartition("/")[2],
        )
        self._publish(layout.encode_pointer(pointer), pointer)
        return Written(self.size, pointer.digest, pointer.uuid)

    def _check_lengths(self) -> None:
        geometry = Geometry(self.size, self._unit, self._width)
        for index, stripe in enumerate(self._stripes):
            expected = geometry.stripe_length(index)
            found = patiently(lambda stripe=stripe: self._backend.stat(stripe.path).size)  # type: ignore[misc]
            if found != expected:
                raise DataError(f"stripe {stripe.path} has {found} bytes after writing {expected}")

    def _publish(self, content: bytes, pointer: Pointer | None) -> None:
        self._publication.fill(content)
        faults.point("stripefs.write.verify")
        self._check_lengths()
        if self._before is not None:
            self._before(pointer)
        self._publication.rename(content)

    def abandon(self) -> None:
        """Give up: remove what was written. Does nothing after `finish`, and in a forked child."""
        if not self._finished and not self._foreign:
            self._finished = True
            self._remove_stripes()

    def _remove_stripes(self) -> None:
        for stripe in self._stripes:
            with contextlib.suppress(BootseerError, OSError):  # of one that is stuck: the others are told all the same
                stripe.put(None)
        for stripe in self._stripes:
            with contextlib.suppress(BootseerError, OSError):
                stripe.join()
                self._backend.delete(stripe.path)

    def __del__(self) -> None:
        if getattr(self, "_finished", True) or not self._stripes or self._foreign:
            return
        _log.warning("%s is not published: its writer was neither finished nor abandoned", self.path)
        finalisers.later(self.abandon)

    def __enter__(self) -> StripeWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None and not self._finished and not self._foreign:
            self.finish()
        else:
            self.abandon()


@atexit.register
def _end() -> None:
    """Let go of what nobody closed while there are threads to do it. What is open stays: its owner may close it yet."""
    finalisers.settle(_END)
