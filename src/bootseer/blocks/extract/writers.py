"""`Writers`: processes that make the small files of an extraction, which take the kernel longer than their bytes.

Threads would not do: each system call of one gives the interpreter away, and gets it back when another lets it."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import pickle
import select
import signal
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from bootseer.chunks.hashing import Buffer
from bootseer.errors import BootseerError, UnavailableError
from bootseer.kernel.child import Child, die_with

_HEADER = struct.Struct("<II")
"""Number of a file and its length; then its bytes."""
_END = 0xFFFFFFFF, 0
_BUFFER = 1 << 20


class Writers:
    """``count`` forked processes. One of them calls ``make(number, data)`` for each file that is given to it, and at
    the end what ``say()`` returns there is heard. To be ended (`end`) in any case. For many threads."""

    def __init__(
        self, count: int, make: Callable[[int, bytes], None], say: Callable[[], object], seconds: float
    ) -> None:
        """``seconds``: for one that takes nothing, and for the end of each."""
        self._make, self._say, self._seconds = make, say, seconds
        self._turn = threading.Lock()
        self._children: list[Child] = []
        self._ends: list[socket.socket] = []
        self._error: Exception | None = None
        for _ in range(count):
            ours, theirs = socket.socketpair()
            ours.settimeout(seconds)
            with theirs:
                self._ends.append(ours)
                child = Child("process that makes files", functools.partial(self._run, theirs, os.getpid()))
            if child.pid:
                self._children.append(child)
            else:
                self._ends.pop().close()

    @property
    def count(self) -> int:
        """How many could be forked."""
        return len(self._children)

    def give(self, files: Iterable[tuple[int, Buffer]]) -> None:
        """Have these made, by the one that has room first. Raises what one of them could not do, `UnavailableError`
        when none takes them, `OSError`."""
        words = b"".join(part for number, data in files for part in (_HEADER.pack(number, len(data)), data))
        with self._turn:
            if self._error:
                raise self._error
            try:
                with _named():
                    self._free().sendall(words)
            except Exception as exc:
                self._error = exc
                raise

    def _free(self) -> socket.socket:
        ready = select.poll()
        for end in self._ends:
            ready.register(end, select.POLLOUT | select.POLLIN)
        found = dict(ready.poll(self._seconds * 1000))
        for number, end in enumerate(self._ends):
            if told := found.get(end.fileno()):
                if told & ~select.POLLOUT:
                    self._heard(end)
                self._ends.append(self._ends.pop(number))
                return end
        raise TimeoutError

    def end(self) -> list[Any]:
        """Wait until all is made; what each says. Raises as `give`, and when one was killed."""
        try:
            with self._turn:
                if self._error:
                    raise self._error
                for end in self._ends:
                    with contextlib.suppress(OSError):  # what it said tells why
                        end.sendall(_HEADER.pack(*_END))
                with _named():
                    return [self._heard(end) for end in self._ends]
        finally:
            for end in self._ends:
                end.close()
            for child in self._children:
                child.end()

    def _heard(self, end: socket.socket) -> Any:
        with end.makefile("rb") as file:
            said = pickle.load(file)
        if isinstance(said, Exception):
            raise said
        return said

    def _run(self, end: socket.socket, parent: int) -> int:
        die_with(parent)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for other in self._ends:  # else it would not be seen that their owner has closed them
            other.close()
        gc.freeze()  # a look at what is shared would copy it
        said: object
        with end.makefile("rb", _BUFFER) as file:
            try:
                while (header := _HEADER.unpack(file.read(_HEADER.size))) != _END:
                    self._make(header[0], file.read(header[1]))
                said = self._say()
            except Exception as exc:
                said = exc
            with contextlib.suppress(OSError):  # nobody listens any more
                end.sendall(pickle.dumps(said))
                while file.read(_BUFFER):  # until it was heard
                    pass
        return 0


@contextlib.contextmanager
def _named() -> Iterator[None]:
    try:
        yield
    except (EOFError, ConnectionError) as exc:
        raise BootseerError("a process that makes files was killed") from exc
    except TimeoutError as exc:
        raise UnavailableError("a process that makes files does not answer in time") from exc
