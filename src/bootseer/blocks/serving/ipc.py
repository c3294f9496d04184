"""Messages between FUSE server and fetcher of a block server. The channel, a SOCK_SEQPACKET pair, outlives both: the
supervisor keeps both ends, so a message that is sent while the other side is being restarted waits for it. So every
message may come twice or not at all: a fetcher that starts says `Repeat`, and the FUSE server repeats what it still
wants."""

from __future__ import annotations

import array
import os
import select
import socket
import time
from typing import Self

import msgspec

from bootseer.errors import DataError, UnavailableError
from bootseer.wiretypes import known

_GENERATION_SHIFT = 40
_MAX_MESSAGE = 1 << 17
_BUFFER = 1 << 20
"""Of the socket: room for over a thousand small messages."""


class Wanted(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """FUSE server to fetcher: blocks ``first`` to ``last`` (inclusive) are needed by thread ``pid``."""

    id: int
    first: int
    last: int
    pid: int


class Came(msgspec.Struct, tag=2, array_like=True, frozen=True):
    """Fetcher to FUSE server: the blocks of request ``id`` are ready (``errno`` 0), or failed. A descriptor may come
    along: a memfd with the bytes of all blocks of the request, because some could not be cached; they are not ready."""

    id: int
    errno: int = 0


class Repeat(msgspec.Struct, tag=3, array_like=True, frozen=True):
    """Fetcher to FUSE server: I have just started, repeat what you still want."""


class Finish(msgspec.Struct, tag=4, array_like=True, frozen=True):
    """Supervisor to fetcher: the last mount is gone: finish, and end."""


Message = Wanted | Came | Repeat | Finish
_decode = msgspec.msgpack.Decoder(known(Message)).decode


def request_id(generation: int, number: int) -> int:
    """An id that no other FUSE server of this tree uses: ``number`` counts from 0 in each."""
    return generation << _GENERATION_SHIFT | number


class Channel:
    """One end; of a pair, the fetcher's is the second. A message is one packet and may be sent from any thread; one
    thread receives. Nothing here blocks unless it is given a timeout."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    @classmethod
    def pair(cls) -> tuple[Self, Self]:
        """Both ends."""
        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for one in ends:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        return cls(ends[0]), cls(ends[1])

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, message: Message, *, fd: int = -1, timeout: float = 0.0) -> bool:
        """Queue ``message``, with a duplicate of ``fd`` unless that is -1. False when there has been no room for
        ``timeout`` seconds, or the other side is gone."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))] if fd >= 0 else []
        raw = msgspec.msgpack.encode(message)
        until = time.monotonic() + timeout
        while True:
            try:
                self._sock.sendmsg([raw], rights, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                return True
            except BlockingIOError:
                left = until - time.monotonic()
                if left <= 0:
                    return False
                _wait(self._sock, select.POLLOUT, left)
            except ConnectionError:
                return False

    def receive(self, *, timeout: float = 0.0) -> tuple[Message, int] | None:
        """The next message and its descriptor (-1: none; the caller must close it); None when none came within
        ``timeout`` seconds. Raises `UnavailableError` when every process of the other side is gone, `DataError` for
        what is no message."""
        if timeout > 0 and not _wait(self._sock, select.POLLIN, timeout):
            return None
        fds = array.array("i")
        try:
            raw, ancillary, _, _ = self._sock.recvmsg(
                _MAX_MESSAGE, socket.CMSG_SPACE(4), socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return None
        except ConnectionError:
            raw, ancillary = b"", []
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
        if not raw:
            raise UnavailableError("the other end of a server's channel is gone")
        try:
            return _decode(raw), fds.pop() if fds else -1
        except ValueError as exc:
            raise DataError(f"a server's channel carries what is no message: {exc}") from None
        finally:
            for fd in fds:
                os.close(fd)

    def close(self) -> None:
        self._sock.close()


def _wait(sock: socket.socket, event: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(sock.fileno(), event)
    return bool(poll.poll(max(1, int(seconds * 1000))))
