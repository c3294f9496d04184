"""The control socket of a block server: one JSON line each way per connection, answered by the supervisor's own
loop."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
from collections.abc import Callable
from pathlib import Path

import msgspec

from bootseer.blocks.serving.protocol import MAX_LINE, SOCKET, Reply, Request, StoppingError, TreeStatus
from bootseer.errors import BootseerError

log = logging.getLogger(__name__)

_PEER_SECONDS = 2.0
"""A client's line is on its way when it connects; who takes longer is left, as others wait behind it."""


class ControlServer:
    """Listens in ``folder``. It survives a fork: whoever supervises accepts."""

    def __init__(self, folder: Path) -> None:
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # Through a descriptor of the folder: a socket's own path may have 107 bytes only.
        fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            (folder / SOCKET).unlink(missing_ok=True)
            self._sock.bind(f"/proc/self/fd/{fd}/{SOCKET}")
            self._sock.listen(64)
            self._sock.setblocking(False)
        except BaseException:
            self._sock.close()
            raise
        finally:
            os.close(fd)

    def fileno(self) -> int:
        return self._sock.fileno()

    def answer(self, handle: Callable[[Request], TreeStatus]) -> None:
        """Answer who has connected, if anybody, with what ``handle`` says. Never raises for what a client does."""
        with contextlib.suppress(BlockingIOError):
            peer, _ = self._sock.accept()
            with peer:
                try:
                    peer.settimeout(_PEER_SECONDS)
                    with peer.makefile("rb") as lines:
                        line = lines.readline(MAX_LINE)
                    if not _hung_up(peer):  # else it has given up, and told its user so
                        peer.sendall(msgspec.json.encode(_reply(line, handle)) + b"\n")
                except OSError as exc:
                    log.warning("control connection: %s", exc)

    def close(self) -> None:
        self._sock.close()


def _hung_up(peer: socket.socket) -> bool:
    poll = select.poll()
    poll.register(peer.fileno(), select.POLLRDHUP)
    return bool(poll.poll(0))


def _reply(line: bytes, handle: Callable[[Request], TreeStatus]) -> Reply:
    try:
        return Reply(status=handle(msgspec.json.decode(line, type=Request)))
    except BootseerError as exc:
        return Reply(error=str(exc), code=exc.exit_code, stopping=isinstance(exc, StoppingError))
    except msgspec.MsgspecError as exc:
        return Reply(error=str(exc))
    except Exception as exc:
        log.exception("control request failed")
        return Reply(error=repr(exc))
