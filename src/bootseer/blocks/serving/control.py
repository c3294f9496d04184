"""Talking to a block server: one JSON line each way over a Unix socket in its state folder.

The folder belongs to the user who mounted, mode 0700. Every exchange has a deadline.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from bootseer.blocks.serving.members import members
from bootseer.errors import BootseerError, UnavailableError

log = logging.getLogger(__name__)

SOCKET = "control.sock"
_MAX_LINE = 1 << 16
_ATTEMPT_SECONDS = 8.0
"""Longer than a server's own wait for its holder, so that what went wrong there is heard."""
_PATIENCE = 30.0
"""A server on an overloaded node, or one whose disk is stuck, may take this long to answer; it is not dead."""


class GoneError(UnavailableError):
    """Nobody listens any more: the server ended or died."""


class Request(msgspec.Struct):
    """``do``: ``status``, ``ready``, ``add`` or ``remove`` (of the mount ``target``), ``stop``."""

    do: str
    target: str = ""


class TreeStatus(msgspec.Struct, kw_only=True):
    """A running lazy tree. Bytes are stored bytes, that is, what came over the network; times in seconds."""

    id: str
    digest: str
    pid: int
    """The holder, which starts the others anew."""
    front_pid: int = 0
    fetcher_pid: int = 0
    driver: str = "fuse"
    """``fanotify``, ``fuse``, or ``local``: everything is on this node, the kernel reads it by itself."""
    front_restarts: int = 0
    fetcher_restarts: int = 0
    holder_restarts: int = 0
    lingering: bool = False
    """All targets are gone, but somebody still uses what was mounted there: the server stays until that ends."""
    targets: list[str] = []
    blocks_total: int = 0
    blocks_ready: int = 0
    complete: bool = False
    """Every block is on this node: the store is needed no more."""
    cache_full: bool = False
    hot_total: int = 0
    hot_ready: int = 0
    bytes_demand: int = 0
    bytes_hot: int = 0
    bytes_background: int = 0
    reads: int = 0
    """Requests of the kernel; of a part of a file each."""
    slow_faults: int = 0
    stall_seconds: float = 0.0
    """Summed over readers, which may wait at the same time."""
    failed_reads: int = 0
    denied: int = 0
    """Reads that failed without an answer of a fetcher."""
    taken_over: int = 0
    """Reads that a restarted front answered for the one before."""
    bad_blocks: int = 0
    retries: int = 0
    direct_misses: int = 0
    """Missing blocks fetched because a reader wanted them; `stream_waits` were left to the hot stream, `hedges` of
    these fetched after all."""
    stream_waits: int = 0
    hedges: int = 0
    read_ahead_bytes: int = 0
    """Of the mount, read before the job. Neither that nor what the job then finds there is among `reads`."""
    hot_unused_bytes: int = 0
    """Of the prefetched stored bytes, those that the recorded start never touched (unknown, so 0, where anything was
    read ahead); and what it touched besides."""
    hot_missed_bytes: int = 0
    hot_pack: str = ""
    """The hot pack in use; after the recording what became of the new one: `bootseer.blocks.fetch.prefetch.renew`."""
    recording: str = "off"
    """``off``, ``recording``, or how the trace ended: ``published``, ``published incomplete``, ``not needed``,
    ``left to others``, ``read ahead`` (so there is nothing to learn from it), ``empty``, ``failed``."""
    uptime: float = 0.0


class Reply(msgspec.Struct):
    status: TreeStatus | None = None
    error: str = ""
    code: int = BootseerError.exit_code
    stopping: bool = False
    """The server ends: ask again, soon nobody will answer."""


class StoppingError(BootseerError):
    """Of a handler: this server is about to end."""


def ask(folder: Path, request: Request, *, timeout: float | None = None) -> TreeStatus:
    """One request to the server whose state is in ``folder``; every request may be repeated, and is.

    Raises `GoneError` when there is no such server, and `UnavailableError` when it does not answer within ``timeout``
    seconds (30): then it may well live. The fetcher answers; while its server lives without one, another is about to
    start, so that is waited for too. Who took it for the end would take the fanotify group from readers, who would get
    zeros.
    """
    until = time.monotonic() + (_PATIENCE if timeout is None else timeout)
    while True:
        try:
            return _ask(folder, request, min(_ATTEMPT_SECONDS, max(0.1, until - time.monotonic())))
        except (ConnectionRefusedError, FileNotFoundError) as exc:
            if not members(folder):
                raise GoneError(f"no block server answers in {folder}: {exc}") from None
            if time.monotonic() >= until:
                raise UnavailableError(
                    f"the block server in {folder} has had no fetcher for too long", hint="its log says why"
                ) from None
        except (OSError, msgspec.MsgspecError, StoppingError) as exc:
            if time.monotonic() >= until:
                raise UnavailableError(
                    f"the block server in {folder} does not answer: {exc}",
                    hint="it may be overloaded, or its disk be stuck; try again",
                ) from None
        time.sleep(0.1)


def _ask(folder: Path, request: Request, timeout: float) -> TreeStatus:
    # Through a descriptor of the folder: a socket's own path may have 107 bytes only.
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(timeout)
            sock.connect(f"/proc/self/fd/{fd}/{SOCKET}")
            sock.sendall(msgspec.json.encode(request) + b"\n")
            reply = msgspec.json.decode(_line(sock), type=Reply)
    finally:
        os.close(fd)
    if reply.status is None:
        text = f"block server in {folder}: {reply.error}"
        if reply.stopping:
            raise StoppingError(text)
        raise UnavailableError(text) if reply.code == UnavailableError.exit_code else BootseerError(text)
    return reply.status


def _line(sock: socket.socket) -> bytes:
    data = b""
    while not data.endswith(b"\n") and len(data) < _MAX_LINE:
        piece = sock.recv(_MAX_LINE)
        if not piece:
            break
        data += piece
    return data


class ControlServer:
    """Answers requests with ``handle`` in one thread, one at a time, until `close`."""

    def __init__(self, folder: Path, handle: Callable[[Request], TreeStatus]) -> None:
        self._handle = handle
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            (folder / SOCKET).unlink(missing_ok=True)
            self._sock.bind(f"/proc/self/fd/{fd}/{SOCKET}")
        except BaseException:
            self._sock.close()
            raise
        finally:
            os.close(fd)
        self._sock.listen(16)
        self._sock.settimeout(1.0)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="control", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while not self._stop.is_set():
            try:
                peer, _ = self._sock.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            with peer:
                try:
                    peer.settimeout(5.0)
                    peer.sendall(msgspec.json.encode(self._answer(_line(peer))) + b"\n")
                except OSError as exc:
                    log.warning("control connection: %s", exc)

    def _answer(self, line: bytes) -> Reply:
        try:
            return Reply(status=self._handle(msgspec.json.decode(line, type=Request)))
        except BootseerError as exc:
            return Reply(error=str(exc), code=exc.exit_code, stopping=isinstance(exc, StoppingError))
        except msgspec.MsgspecError as exc:
            return Reply(error=str(exc))
        except Exception as exc:
            log.exception("control request failed")
            return Reply(error=repr(exc))

    def close(self) -> None:
        self._stop.set()
        # Closing alone would leave the thread in accept until its timeout.
        self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        self._thread.join(2.0)
