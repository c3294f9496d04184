"""What both kinds of new HDFS files share: how one ends, how its first error stays, what a forked child may not do."""

from __future__ import annotations

import abc
import contextlib
import logging
import os
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Self

from bootseer.errors import BootseerError, UnavailableError, logged

_log = logging.getLogger(__name__)


class NewFile(abc.ABC):
    """The file at ``path``, open for writing. As a context manager it closes the file, or abandons it on an exception.
    After an error of `write` or `close`, also a passed deadline, only `abandon` makes sense: some of its bytes are
    lost, or may still be on their way. In a forked child `write` and `close` raise `BootseerError`, and giving up
    touches neither the file nor the lock."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._lock, self._process = threading.Lock(), os.getpid()
        self._open = True
        self._failure: BaseException | None = None

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Append ``data``; returns its length in bytes."""
        self._check_process()
        with self._lock:
            if not self._open:
                raise ValueError(f"write to {self.path}, which is closed")
            memoryview(data)  # a wrong type is the caller's mistake, and no end of the file
            with self._final():
                return self._write(data)

    def close(self) -> None:
        """Finish the file: the storage has every byte, and the NameNode knows the length."""
        self._check_process()
        with self._lock:
            if self._open:
                with self._final():
                    self._finish()
                self._open = False

    def abandon(self) -> None:
        """Stop writing and remove the unfinished file, as far as the NameNode answers. Never raises. Does nothing to a
        closed file, and in a forked child."""
        if self._foreign:
            return
        with self._lock:
            if not self._open:
                return
            self._open = False
            self._failure = None  # its frames hold what was being written
            with logged(_log.warning, "the unfinished %s is left behind", self.path, kinds=BootseerError):
                self._remove()

    @abc.abstractmethod
    def _write(self, data: bytes | bytearray | memoryview) -> int: ...

    @abc.abstractmethod
    def _finish(self) -> None: ...

    @abc.abstractmethod
    def _remove(self) -> None: ...

    @property
    def _foreign(self) -> bool:
        """In a process that was forked from the writer's."""
        return os.getpid() != self._process

    def _check_process(self) -> None:
        if self._foreign:
            raise BootseerError(
                f"cannot write {self.path}: another process writes it, of which this one is a child",
                hint="create files in the process that writes them",
            )

    @contextlib.contextmanager
    def _final(self) -> Iterator[None]:
        """An error inside is the end of the file: whoever goes on must not succeed."""
        if (earlier := self._failure) is not None:
            said = getattr(earlier, "message", "") or str(earlier) or type(earlier).__name__
            message = f"cannot write {self.path}: an earlier write of it failed ({said})"
            raise UnavailableError(message, hint=getattr(earlier, "hint", "")) from earlier
        try:
            yield
        except BaseException as exc:
            self._failure = exc
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        try:
            if kind is None and not self._foreign:
                self.close()
        finally:
            self.abandon()  # nothing, once it is closed
