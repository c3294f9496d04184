"""One stripe file being written, by a thread of its own: it computes CRCs and writes; a short queue, of one caller,
feeds it. Every wait ends after `STALL` seconds."""

from __future__ import annotations

import contextlib
import logging
import queue
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from bootseer import faults
from bootseer.backends.interface import DEADLINE, FILE_MODE, Backend, Sink
from bootseer.errors import UnavailableError, from_os_error
from bootseer.stripefs import layout
from bootseer.stripefs.layout import Footer, Header

_log = logging.getLogger(__name__)
T = TypeVar("T")

_DEPTH = 4
STALL = 9 * DEADLINE
"""Seconds for one chunk, or for the end of a stripe. A storage gives up before; this bounds one that does not."""


class StripeLost(UnavailableError):
    """A stripe could not be written. The storage may take another one: who still has the bytes may start anew."""


def again_when_lost(write: Callable[[], T], what: str) -> T:
    """``write()``; once more, from the beginning and under fresh names, when a stripe was lost."""
    try:
        return write()
    except StripeLost as exc:
        _log.warning("storing %s again from its beginning: %s", what, exc)
        return write()


class Stripe:
    """The stripe file at ``path``, written from now on. ``footer_crc`` is known after its end. ``error``: what ended
    its thread; `raise_error` raises it, as `StripeLost` where the storage did not answer."""

    def __init__(self, backend: Backend, path: str, header: Header, siblings: object, mode: int = FILE_MODE) -> None:
        self.path, self.footer_crc = path, 0
        self._backend, self._header, self._siblings, self._mode = backend, header, siblings, mode
        self._queue: queue.Queue[Sequence[memoryview] | int | None] = queue.Queue(_DEPTH)
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name=f"bootseer-write-{header.stripe}", daemon=True)
        self._thread.start()

    def put(self, item: Sequence[memoryview] | int | None) -> None:
        """Memory: a chunk. An integer: the size of the whole file, write the footer and close. None: give up."""
        until = time.monotonic() + STALL
        while self._thread.is_alive():
            if self.error is not None and item is not None:
                break
            with contextlib.suppress(queue.Full):
                self._queue.put(item, timeout=0.2)
                return
            if time.monotonic() >= until:
                raise self._stuck()
        if item is not None:
            self.raise_error()

    def raise_error(self) -> None:
        if isinstance(self.error, UnavailableError):
            raise StripeLost(self.error.message, hint=self.error.hint) from self.error
        if isinstance(self.error, OSError):
            raise from_os_error(self.error, f"write {self.path}") from self.error
        if self.error is not None:
            raise self.error

    def join(self) -> None:
        self._thread.join(STALL)
        if self._thread.is_alive():
            raise self._stuck()

    def _stuck(self) -> UnavailableError:
        return UnavailableError(
            f"writing {self.path} has not gone on for {STALL:.0f} s", hint="check that the storage answers"
        )

    def _work(self) -> None:
        sink: Sink | None = None
        crcs, table, length = list[int](), bytearray(), 0
        try:
            sink = self._backend.create(self.path, siblings=self._siblings, mode=self._mode)
            sink.write(layout.encode_header(self._header))
            while not isinstance(item := self._queue.get(), int | None):
                faults.point("stripefs.write.stripe")
                found, size = layout.sector_crcs(item), sum(map(len, item))
                for piece in item:
                    sink.write(piece)
                crcs.append(layout.joined(found, size))
                length += size
                if layout.sectors(size, self._header.unit):
                    table += struct.pack(f"<{len(found)}I", *found)
                del item  # it may be large, and the next one late
            if item is None:
                sink.abandon()
                return
            footer = Footer(self._header.uuid, self._header.stripe, length, item, tuple(crcs))
            encoded, self.footer_crc = layout.encode_footer(footer)
            sink.write(bytes(table) + encoded)
            faults.point("stripefs.write.close")
            sink.close()
        except BaseException as exc:
            self.error = exc
            if sink is not None:
                sink.abandon()
