"""What clients and the node daemon say to each other: one packet each way per connection, over the Unix socket
``<node_dir>/node.sock``, SOCK_SEQPACKET: a request is one JSON document in one packet, never a part of one. Who asks
the kernel says (SO_PEERCRED, SO_PEERPIDFD), never the request."""

from __future__ import annotations

import os
import re
import socket
import struct
from pathlib import Path

import msgspec

from bootseer import __version__
from bootseer.blocks.tree import TreeStatus
from bootseer.errors import BootseerError, ConfigError
from bootseer.oci.credentials import Logins
from bootseer.oci.spec import ContainerConfig
from bootseer.wiretypes import json_as

SOCKET = "node.sock"
MAX_REQUEST, MAX_REQUEST_OF_ROOT = 8192, 1 << 17
MAX_REPLY = 1 << 20
MAX_REF = 1024
"""Bytes of an image's name; registries allow less."""
MAX_CONFIG = 1 << 17
"""Bytes of what an image says of its containers: an answer to a user is 200 KiB at most."""
PAGE = 64
"""Mounts in one answer."""
REQUEST_SECONDS = 180.0
"""What a request may take; then it is given up and what it did is undone."""
LOGINS = ("DOCKER_CONFIG", "REGISTRY_AUTH_FILE")
"""Variables of a client that name files with its user's logins."""
VERSION = 1
_CREDENTIALS = struct.Struct("3i")
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}\Z")


class NodeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """``do``: ``mount`` (of ``ref``), ``unmount``, ``ready`` or ``look`` (of the mount ``id``), ``mounts`` (the next
    `PAGE` after ``id``), ``node``, ``drain``, ``digest`` (of ``ref``, for who has just the logins in the file
    that comes with the packet: the daemon does not read it, a process of its own does), ``errand`` (of root, which the
    file tells)."""

    do: str
    version: int
    id: str = ""
    ref: str = ""
    job: str = ""
    """The mount ends when somebody ends this job's mounts; empty: with the session of the client."""
    process: bool = False
    """It ends with the client's process instead of its session."""
    profile: str = ""
    """Whose earlier starts to prefetch by."""
    user: int = -1
    """For whom to mount, if not for the client's own user; only root may."""
    logins: dict[str, str] = {}
    """Values of `LOGINS`."""


class Mount(msgspec.Struct, frozen=True, kw_only=True):
    """A mounted image as clients see it."""

    id: str
    folder: str
    reference: str
    uid: int
    job: str = ""
    state: str = "mounting"
    """``mounting``, ``mounted`` or ``ending``."""
    image: str = ""
    """Digest of the manifest."""
    made: float = 0.0
    """Seconds since 1970."""
    config: ContainerConfig | None = None
    """What the image says of its containers: only for who has it mounted, at once."""


class PartStatus(msgspec.Struct, frozen=True):
    """Of a part of the service. ``pid`` is 0 while it does not run; ``mounts`` of the part ``node`` are in
    `NodeStatus`."""

    pid: int
    starts: int
    serves: bool
    mounts: int


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the service, and counters of the daemon since its start."""

    pid: int
    version: str
    started: float
    """Seconds since 1970."""
    draining: bool
    mounts: int
    lingering: int = 0
    """Mounts that were ended, but that somebody still uses."""
    running: int
    """Requests that are being worked off."""
    connections: int
    done: dict[str, int]
    """Requests that succeeded, by what they were to do."""
    failed: dict[str, int]
    cgroup: str = ""
    """Where the daemon runs, below the top of the hierarchy; empty: unknown."""
    parts: dict[str, PartStatus] = {}


class NodeReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``error`` and ``code`` (its exit code) say what failed; else one of the others answers the request."""

    error: str = ""
    hint: str = ""
    code: int = 0
    mount: Mount | None = None
    mounts: list[Mount] | None = None
    node: NodeStatus | None = None
    tree: TreeStatus | None = None
    digest: str = ""


def failure(exc: BaseException) -> NodeReply:
    """The reply that says ``exc``."""
    if isinstance(exc, BootseerError):
        return NodeReply(error=exc.message, hint=exc.hint, code=exc.exit_code)
    return NodeReply(error=f"the node daemon failed: {exc!r}", hint="its log says more", code=BootseerError.exit_code)


def decode_request(packet: bytes, whole: bool) -> NodeRequest:
    """The request in ``packet``. Raises `ConfigError` for anything else, however deep, long or broken it is."""
    reason = "it is too long"
    if whole:
        try:
            request = json_as(packet, NodeRequest)
            if request.version == VERSION:
                return request
            reason = f"it has version {request.version}"
        except ValueError as exc:
            reason = str(exc)
    raise ConfigError(
        f"the node daemon does not understand the request: {reason}", hint=f"use a client of bootseer {__version__}"
    )


def read_logins(fd: int) -> Logins:
    """Those in the file ``fd``; none where there is no file. Raises `ConfigError`."""
    try:
        return json_as(os.pread(fd, MAX_REQUEST_OF_ROOT, 0), Logins) if fd >= 0 else Logins()
    except (OSError, ValueError):  # without its text: it has passwords
        raise ConfigError("the logins that came with the request are not understood") from None


def check_word(text: str, what: str) -> None:
    """Raises `ConfigError` when ``text`` is no short plain word (or empty): it becomes part of names and messages."""
    if text and not _WORD.match(text):
        raise ConfigError(f"bad {what} {text[:64]!r}", hint="up to 100 letters, digits, dots, dashes and underscores")


def credentials(sock: socket.socket) -> tuple[int, int]:
    """Process and user at the other end, as they were when it connected (or began to listen). Raises `OSError`."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid


def socket_path(node_dir: str) -> Path:
    return Path(node_dir).absolute() / SOCKET
