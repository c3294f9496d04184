"""The channel between a front and a fetcher: small messages over a SOCK_SEQPACKET pair that outlives both.

The holder keeps both ends, so a message sent while the other side is being restarted waits for it. Every message may
therefore come twice or not at all: a fetcher that starts says `Again`, and the front repeats what is outstanding.
`Wanted.id` carries the front's generation (`request_id`), so that a new front tells answers to its predecessor from
its own. Nothing here blocks unless it is given a timeout; both sides poll.
"""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import struct
import time
from typing import NamedTuple

from bootseer.errors import DataError, UnavailableError

_WANTED, _CAME, _AGAIN = 1, 2, 3
_MESSAGE = struct.Struct("<IIQQQ")  # kind, pid or errno, id, first, last
_BUFFER = 1 << 20
"""Of the socket: room for over a thousand messages, as many as there may be waiting readers."""
_GENERATION_SHIFT = 40


class Wanted(NamedTuple):
    """Front to fetcher: blocks ``first`` to ``last`` (inclusive) are needed by process ``pid``, answer to ``id``."""

    id: int
    first: int
    last: int
    pid: int


class Came(NamedTuple):
    """Fetcher to front: the blocks of request ``id`` are ready (``errno`` 0), or failed.

    ``fd`` (not -1: the receiver must close it): a memfd with the bytes of all blocks of the request, from the first
    one's first byte on, because some could not be cached; they are not ready. Only for fronts that can serve bytes
    from elsewhere (FUSE).
    """

    id: int
    errno: int = 0
    fd: int = -1


class Again(NamedTuple):
    """Fetcher to front: I have just started, repeat what you still want."""


Message = Wanted | Came | Again


def request_id(generation: int, number: int) -> int:
    """An id no other front of this tree uses: ``number`` counts from 0 in each front."""
    return generation << _GENERATION_SHIFT | number


class Channel:
    """One end. Sends are single packets and may come from any thread; one thread receives."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        """The front's end and the fetcher's."""
        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for one in ends:
            with contextlib.suppress(OSError):
                one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        return cls(ends[0]), cls(ends[1])

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, message: Message, *, timeout: float = 0.0) -> bool:
        """Queue ``message``; False when there has been no room for ``timeout`` seconds (or the other side is gone)."""
        ancillary = []
        if isinstance(message, Wanted):
            raw = _MESSAGE.pack(_WANTED, message.pid & 0xFFFFFFFF, message.id, message.first, message.last)
        elif isinstance(message, Came):
            raw = _MESSAGE.pack(_CAME, message.errno, message.id, 0, 0)
            if message.fd >= 0:
                ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [message.fd]))]
        else:
            raw = _MESSAGE.pack(_AGAIN, 0, 0, 0, 0)
        until = time.monotonic() + timeout
        while True:
            try:
                self._sock.sendmsg([raw], ancillary, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                return True
            except BlockingIOError:
                left = until - time.monotonic()
                if left <= 0:
                    return False
                poller = select.poll()
                poller.register(self._sock.fileno(), select.POLLOUT)
                poller.poll(max(1, int(left * 1000)))
            except (BrokenPipeError, ConnectionError):
                return False

    def receive(self, *, timeout: float = 0.0) -> Message | None:
        """The next message; None when none came within ``timeout`` seconds.

        Raises `UnavailableError` when each process of the other side is gone, `DataError` for what is no message.
        """
        if timeout > 0:
            poller = select.poll()
            poller.register(self._sock.fileno(), select.POLLIN)
            if not poller.poll(max(1, int(timeout * 1000))):
                return None
        try:
            raw, ancillary, _, _ = self._sock.recvmsg(
                _MESSAGE.size, socket.CMSG_SPACE(4), socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return None
        except ConnectionError:
            raw, ancillary = b"", []
        fds = array.array("i")
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
        if not raw:
            raise UnavailableError("the other end of the block server's channel is gone")
        try:
            kind, small, id, first, last = _MESSAGE.unpack(raw)
            if kind == _CAME:
                return Came(id, small, fds.pop() if fds else -1)
            if kind == _WANTED:
                return Wanted(id, first, last, small)
            if kind == _AGAIN:
                return Again()
        except struct.error:
            pass
        finally:
            for fd in fds:
                os.close(fd)
        raise DataError("the block server's channel carries what is no message")

    def close(self) -> None:
        self._sock.close()
