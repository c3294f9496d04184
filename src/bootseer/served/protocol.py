"""What crosses the control socket of a server, and the names of the files through which it is reached. A server has a
state folder, mode 0700; beside it are its log, ``<folder>.log``, and ``<folder>.lock``, which is held while it is
started or ended. A request and its reply are one JSON line each. What a server says when it has started, or cannot, is
a reply too."""

from __future__ import annotations

import msgspec

from bootseer.errors import BootseerError, UnavailableError

SOCKET = "control.sock"
LOCK = "server.lock"
"""Locked (flock) while a process of the server lives; its text is the server's process group."""
MAX_REQUEST = 1 << 16
MAX_REPLY = 64 << 20


class Order(msgspec.Struct):
    """What a server is started with: its state folder and a spec of its own kind. ``cgroup``: where it is to go; "":
    it stays in that of its caller."""

    folder: str
    spec: msgspec.Raw
    cgroup: str = ""


class Request(msgspec.Struct):
    """``do``: a word that the server knows; ``target``: what it is about; ``store``: where a new mount reads."""

    do: str
    target: str = ""
    store: str = ""


class Reply(msgspec.Struct):
    """``value``, or ``code``, ``error`` and ``hint`` of what went wrong."""

    value: msgspec.Raw = msgspec.Raw(b"null")
    error: str = ""
    hint: str = ""
    code: int = 0


def failure(exc: BaseException) -> Reply:
    """What an exception is to who asked."""
    if isinstance(exc, BootseerError):
        return Reply(error=exc.message, hint=exc.hint, code=exc.exit_code)
    return Reply(error=str(exc) if isinstance(exc, msgspec.MsgspecError) else repr(exc), code=BootseerError.exit_code)


class GoneError(UnavailableError):
    """Nobody listens any more: the server ended or died."""
