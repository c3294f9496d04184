"""A new file of a striped store as a file object of Python, published when it is closed."""

from __future__ import annotations

import io
import logging
import sys
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from bootseer.errors import BootseerError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from _typeshed import ReadableBuffer

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
