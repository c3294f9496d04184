"""Starting, joining and ending block server processes, and cleaning up after one that died."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from bootseer import errors
from bootseer.blocks.serving import control, standby, widen
from bootseer.blocks.serving.control import Request
from bootseer.blocks.serving.guarded import guard_in_use
from bootseer.blocks.serving.members import members
from bootseer.blocks.serving.spec import FUSE_FOLDER, SPEC, TARGETS, ServerSpec
from bootseer.errors import BootseerError, UnavailableError, from_os_error
from bootseer.kernel import mount as mounts

log = logging.getLogger(__name__)

_START_SECONDS = 60.0
_BUSY_SECONDS = 5.0
_GRACE_SECONDS = 3.0
_LOCK_SECONDS = 120.0
_LOG_BYTES = 4 << 20


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One process at a time mounts or unmounts the tree whose state is in ``folder``."""
    path = folder.with_suffix(".lock")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        raise from_os_error(exc, f"open {path}") from exc
    try:
        until = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise UnavailableError(
                        f"another process mounts or unmounts tree {folder.name} for too long"
                    ) from None
                time.sleep(0.02)
        yield
    finally:
        os.close(fd)


def join_or_start(folder: Path, spec: ServerSpec, command: Sequence[str]) -> str:
    """See to it that a server for ``spec`` runs and knows its target; returns its driver. Raises what kept it from
    starting."""
    if folder.exists():
        try:
            status = control.ask(folder, Request("add", spec.target))
        except control.GoneError as exc:  # any other error says that it lives, and others may use it
            log.warning("%s; cleaning up after it", exc)
            clear(folder)
        else:
            if status.digest != spec.digest:
                raise BootseerError(f"tree id {spec.id} is taken by {status.digest}")
            return status.driver
    try:
        (folder / FUSE_FOLDER).mkdir(parents=True, mode=0o700)
        (folder / SPEC).write_bytes(msgspec.json.encode(spec))
        return _start(folder, command)
    except BaseException as exc:
        clear(folder)
        if isinstance(exc, OSError):
            raise from_os_error(exc, f"start a block server in {folder}") from exc
        raise


def _start(folder: Path, command: Sequence[str]) -> str:
    path = folder.with_suffix(".log")
    if path.exists() and path.stat().st_size > _LOG_BYTES:
        os.replace(path, path.with_suffix(".log.old"))
    server = standby.take(command, folder, path)
    if server is None:
        with open(path, "ab") as out:
            server = standby.spawn([*command, str(folder)], stdin=subprocess.DEVNULL, out=out)
    try:
        answer = _read_answer(server.answer_fd)
    finally:
        server.reap()
    if not answer.startswith("ok "):
        raise _startup_error(answer, path)
    return answer.split(" ")[2]


def _read_answer(fd: int) -> str:
    until = time.monotonic() + _START_SECONDS
    data = b""
    while not data.endswith(b"\n"):
        ready, _, _ = select.select([fd], [], [], max(0.0, until - time.monotonic()))
        piece = os.read(fd, 4096) if ready else b""
        if not piece:
            break
        data += piece
    return data.decode(errors="replace").strip()


def _startup_error(answer: str, path: Path) -> BootseerError:
    if not answer.startswith("error "):
        return UnavailableError("the block server did not start", hint=f"see {path}")
    _, code, text = answer.split(" ", 2)
    kinds = {
        kind.exit_code: kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, BootseerError)
    }
    return kinds.get(int(code), BootseerError)(text)


def unmount_target(target: Path) -> None:
    """Unmount the EROFS on ``target``; lazily, with a log line, when it stays in use."""
    until = time.monotonic() + _BUSY_SECONDS
    while mounts.is_mounted(target):
        late = time.monotonic() >= until
        if late:
            log.warning("%s is in use; detaching it, its users keep it until the block server ends", target)
        try:
            mounts.unmount(target, lazy=late)
        except BootseerError:
            if late:
                raise
            time.sleep(0.05)


def await_exit(folder: Path, pid: int, timeout: float) -> None:
    """Wait until ``pid``, a process of the server of ``folder``, ended; kill the server, with a log line, when that
    takes longer than ``timeout``.

    Raises `UnavailableError` when readers would get zeros then: it guards a data file that is in use, and stays until
    that ends.
    """
    try:
        fd = os.pidfd_open(pid)
        group = os.getpgid(pid)
    except ProcessLookupError:
        return
    try:
        if pid not in members(folder):
            return  # it has ended, and the number is another's
        if not select.select([fd], [], [], timeout)[0]:
            if guard_in_use(members(folder)):
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(fd, signal.SIGTERM)
                raise UnavailableError(
                    f"block server {pid} does not end, and without it users of tree {folder.name} would read zeros",
                    hint=f"end what uses it; see {folder.with_suffix('.log')}",
                )
            log.warning("block server %d has not ended within %g s; killing it", pid, timeout)
            _kill(group)
            select.select([fd], [], [], 5.0)
    finally:
        os.close(fd)


def clear(folder: Path) -> None:
    """Remove what a server that ended or died left: stuck processes, a dead FUSE mount, its state files.

    Raises `UnavailableError` when one lives without which readers would get zeros.
    """
    for pid in members(folder):
        # One that failed to start is about to end by itself.
        await_exit(folder, pid, _GRACE_SECONDS)
    if mounts.is_mounted(folder / FUSE_FOLDER):
        log.warning("detaching the FUSE mount that a block server left in %s", folder)
        mounts.unmount(folder / FUSE_FOLDER, lazy=True)
    for name in (SPEC, TARGETS, f"{TARGETS}.tmp", control.SOCKET, standby.PID):
        (folder / name).unlink(missing_ok=True)
    for path in folder.glob(widen.NAMES):
        path.unlink(missing_ok=True)
    for path in (folder / FUSE_FOLDER, folder):
        with contextlib.suppress(FileNotFoundError):
            path.rmdir()


def clear_unwatched(folder: Path) -> None:
    """A server that stayed after its last mount ends: remove its state, unless somebody is just about to use it."""
    with contextlib.suppress(OSError):
        fd = os.open(folder.with_suffix(".lock"), os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            clear(folder)
        finally:
            os.close(fd)


def _kill(group: int) -> None:
    """All processes of one server: they share a process group, which nothing else is in."""
    if group not in (0, 1, os.getpgid(0)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
