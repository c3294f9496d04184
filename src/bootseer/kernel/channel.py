"""Messages between the processes of one server, over a SOCK_SEQPACKET pair that outlives each of them.

A supervisor keeps both ends, so a message that is sent while the other side is being restarted waits for it. Nothing
here blocks unless it is given a timeout.
"""

from __future__ import annotations

import array
import os
import select
import socket
import time
from typing import Any, ClassVar, Generic, Self, TypeVar

import msgspec

from bootseer.errors import DataError, UnavailableError

M = TypeVar("M")

_MAX_MESSAGE = 1 << 17
_BUFFER = 1 << 20
"""Of the socket: room for over a thousand small messages."""


class Channel(Generic[M]):
    """One end. A message is one packet and may be sent from any thread; one thread receives.

    A subclass names the type of its messages, a union of tagged structs, in ``message``.
    """

    message: ClassVar[Any]

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(self.message)

    @classmethod
    def pair(cls) -> tuple[Self, Self]:
        """Both ends."""
        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for one in ends:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        return cls(ends[0]), cls(ends[1])

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, message: M, *, fd: int = -1, timeout: float = 0.0) -> bool:
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

    def receive(self, *, timeout: float = 0.0) -> tuple[M, int] | None:
        """The next message and its descriptor (-1: none; the caller must close it); None when none came within
        ``timeout`` seconds.

        Raises `UnavailableError` when every process of the other side is gone, `DataError` for what is no message.
        """
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
            return self._decoder.decode(raw), fds.pop() if fds else -1
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
