"""The control socket of a server: one JSON line each way per connection, answered by the loop of one of its
processes."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
from collections.abc import Callable
from pathlib import Path

import msgspec

from bootseer.closing import descriptor
from bootseer.errors import BootseerError, logged
from bootseer.served.protocol import MAX_REQUEST, SOCKET, Reply, Request, failure
from bootseer.wiretypes import json_as

log = logging.getLogger(__name__)

_PEER_SECONDS = 2.0
"""A client's line is on its way when it connects; who takes longer is left, as others wait behind it."""


class ControlServer:
    """Listens in ``folder``. It survives a fork: any process of the server may answer. ``fd``: where it does so
    already."""

    def __init__(self, folder: Path, fd: int = -1) -> None:
        if fd >= 0:
            self._sock = socket.socket(fileno=fd)
            return
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # Through a descriptor of the folder: a socket's own path may have 107 bytes only.
        with descriptor(os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as fd:
            try:
                (folder / SOCKET).unlink(missing_ok=True)
                self._sock.bind(f"/proc/self/fd/{fd}/{SOCKET}")
                self._sock.listen(64)
                self._sock.setblocking(False)
            except BaseException:
                self._sock.close()
                raise

    def fileno(self) -> int:
        return self._sock.fileno()

    def answer(self, handle: Callable[[Request], object]) -> None:
        """Answer who has connected, if anybody, with what ``handle`` says. Never raises for what a client does."""
        with contextlib.suppress(BlockingIOError):
            peer, _ = self._sock.accept()
            with peer, logged(log.warning, "control connection", kinds=OSError):
                peer.settimeout(_PEER_SECONDS)
                with peer.makefile("rb") as lines:
                    line = lines.readline(MAX_REQUEST)
                if not _hung_up(peer):  # else it has given up, and told its user so
                    peer.sendall(msgspec.json.encode(_reply(line, handle)) + b"\n")

    def close(self) -> None:
        """Answer nobody any more. Who asks waits for the end of the server."""
        self._sock.close()


def _hung_up(peer: socket.socket) -> bool:
    poll = select.poll()
    poll.register(peer.fileno(), select.POLLRDHUP)
    return bool(poll.poll(0))


def _reply(line: bytes, handle: Callable[[Request], object]) -> Reply:
    try:
        return Reply(msgspec.Raw(msgspec.json.encode(handle(json_as(line, Request)))))
    except Exception as exc:
        if not isinstance(exc, BootseerError | msgspec.MsgspecError):
            log.exception("control request failed")
        return failure(exc)
