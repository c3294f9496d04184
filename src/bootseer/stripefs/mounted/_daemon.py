"""Starting a mount's server as a process of its own, and what it leaves on disk about itself.

State folder, one set of files per mount point (its path hashed): ``<id>.json`` who serves what (`Record`),
``<id>.status`` the server's latest `FsStatus`, ``<id>.log`` its log.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from bootseer import errors
from bootseer.errors import BootseerError, UnavailableError, from_os_error

_log = logging.getLogger(__name__)

START_SECONDS = 60.0


class Record(msgspec.Struct, frozen=True):
    """A running server. ``born``: its start time in clock ticks since boot, so that a reused pid is not mistaken."""

    url: str
    mountpoint: str
    pid: int
    born: int


class ServerSpec(msgspec.Struct, frozen=True):
    """What a server process is told."""

    url: str
    mountpoint: str
    state: str
    cache_dir: str
    cache_budget: int
    memory: int
    prefetch: tuple[str, ...]


class FsStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What a mount has moved, in bytes. ``fetched_*``: from the store, because a reader waited or ahead of readers."""

    url: str
    mountpoint: str
    pid: int
    alive: bool = True
    bytes_read: int = 0
    fetched_demand: int = 0
    fetched_ahead: int = 0
    prefetch: Literal["none", "running", "done", "failed"] = "none"
    prefetch_total: int = 0
    prefetch_done: int = 0


class Paths:
    """The files of the mount at ``mountpoint``."""

    def __init__(self, state_dir: Path, mountpoint: Path) -> None:
        self.folder = state_dir / "fs"
        name = hashlib.sha256(os.fsencode(mountpoint)).hexdigest()[:16]
        self.record, self.status, self.log = (
            self.folder / f"{name}{suffix}" for suffix in (".json", ".status", ".log")
        )

    def remove(self) -> None:
        for path in (self.record, self.status, self.log):
            path.unlink(missing_ok=True)


def born(pid: int) -> int:
    """Start time of a process; 0 when there is none, or it has ended and only waits to be reaped."""
    try:
        text = Path("/proc", str(pid), "stat").read_text()
    except OSError:
        return 0
    fields = text.rsplit(")", 1)[1].split()
    return 0 if fields[0] in "ZX" else int(fields[19])


def write_atomically(path: Path, data: bytes) -> None:
    tmp = path.with_name(f"{path.name}.new")
    tmp.write_bytes(data)
    os.replace(tmp, path)


def find(state_dir: Path, mountpoint: Path) -> Record | None:
    """The record of the mount at ``mountpoint``, alive or not."""
    try:
        return msgspec.json.decode(Paths(state_dir, mountpoint).record.read_bytes(), type=Record)
    except (OSError, msgspec.DecodeError):
        return None


def records(state_dir: Path) -> Iterator[Record]:
    """Every record, in the order of mount points."""
    found = []
    for path in (state_dir / "fs").glob("*.json"):
        with contextlib.suppress(OSError, msgspec.DecodeError):
            found.append(msgspec.json.decode(path.read_bytes(), type=Record))
    yield from sorted(found, key=lambda record: record.mountpoint)


def spawn(spec: ServerSpec, paths: Paths) -> int:
    """Start a server and wait until its mount works. Returns its pid; raises what kept it from starting."""
    try:
        paths.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        log = open(paths.log, "wb")  # noqa: SIM115  closed below
    except OSError as exc:
        raise from_os_error(exc, f"write {paths.folder}") from exc
    read_fd, write_fd = os.pipe()
    with log:
        try:
            starter = subprocess.Popen(
                [sys.executable, "-m", "bootseer.stripefs.mounted.server", str(write_fd)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=[write_fd],
                start_new_session=True,
            )
        except BaseException:
            os.close(read_fd)
            raise
        finally:
            os.close(write_fd)
    try:
        assert starter.stdin is not None
        with contextlib.suppress(BrokenPipeError), starter.stdin as pipe:
            pipe.write(msgspec.json.encode(spec))
        answer = _read_line(read_fd)
    finally:
        os.close(read_fd)
        try:
            starter.wait(5.0)  # it forks the server and ends
        except subprocess.TimeoutExpired:
            os.killpg(starter.pid, signal.SIGKILL)
            starter.wait(5.0)
    kind, _, text = answer.partition(" ")
    if kind == "ok":
        return int(text)
    if kind != "error":
        raise UnavailableError(f"the server of {spec.mountpoint} did not start", hint=f"see {paths.log}")
    name, message, hint = msgspec.json.decode(text, type=tuple[str, str, str])
    found = getattr(errors, name, BootseerError)
    raise found(message, hint=hint)


def _read_line(fd: int) -> str:
    until, data = time.monotonic() + START_SECONDS, b""
    while not data.endswith(b"\n"):
        if not select.select([fd], [], [], max(0.0, until - time.monotonic()))[0]:
            break
        if not (piece := os.read(fd, 4096)):
            break
        data += piece
    return data.decode(errors="replace").strip()


def tell(fd: int, answer: int | BootseerError) -> None:
    """The server's side: its pid, or why it does not start."""
    if isinstance(answer, int):
        line = f"ok {answer}\n"
    else:
        packed = msgspec.json.encode((type(answer).__name__, answer.message, answer.hint)).decode()
        line = f"error {packed}\n"
    with contextlib.suppress(OSError):
        os.write(fd, line.encode())
    os.close(fd)


def await_end(record: Record, seconds: float) -> None:
    """Tell the server to end and wait for it; kill it, with a log line, when that takes longer than ``seconds``.

    Its mount being gone from here is not enough: a mount namespace that some container made may still hold a copy.
    """
    try:
        fd = os.pidfd_open(record.pid)
    except ProcessLookupError:
        return
    try:
        if born(record.pid) != record.born:
            return
        if not select.select([fd], [], [], min(seconds, 0.5))[0]:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGTERM)
        if not select.select([fd], [], [], seconds)[0]:
            _log.warning("the server of %s has not ended within %g s; killing it", record.mountpoint, seconds)
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
            select.select([fd], [], [], 5.0)
    finally:
        os.close(fd)
