"""What a program does with a block server: start or join one, ask it, see it out, clean up after one that died."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from bootseer.blocks.serving.mount_readahead import NAMES
from bootseer.blocks.serving.protocol import (
    FUSE_FOLDER,
    LOCK,
    MAX_LINE,
    SOCKET,
    SPEC,
    GoneError,
    Reply,
    Request,
    ServerSpec,
    StoppingError,
    TreeStatus,
)
from bootseer.errors import BootseerError, UnavailableError, doing, from_exit_code, from_os_error
from bootseer.kernel import background, flock
from bootseer.kernel import mount as mounts

log = logging.getLogger(__name__)

SERVER = background.program("bootseer.blocks.serving.server")
_START_SECONDS = 60.0
_BUSY_SECONDS = 5.0
_GRACE_SECONDS = 3.0
_LOCK_SECONDS = 120.0
_ATTEMPT_SECONDS = 8.0
PATIENCE = 30.0
"""A server on an overloaded node, or one whose disk is stuck, may take this long to answer; it is not dead."""
_LOOK_SECONDS = 0.005
_TAKE_BACK_SECONDS = 1.0


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One process at a time mounts or unmounts the tree whose state is in ``folder``."""
    path = folder.with_suffix(".lock")
    with contextlib.ExitStack() as stack:
        with doing(f"open {path}"):
            folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            alone = stack.enter_context(flock.locked(path, os.O_RDWR | os.O_CREAT, _LOCK_SECONDS))
        if not alone:
            raise UnavailableError(f"another process mounts or unmounts tree {folder.name} for too long")
        yield


# -- asking ------------------------------------------------------------------------------------------------------------


def ask(folder: Path, request: Request, *, timeout: float = PATIENCE) -> TreeStatus:
    """One request to the server whose state is in ``folder``; every request may be repeated, and is.

    Raises `GoneError` when there is no such server, `UnavailableError` when it does not answer within ``timeout``
    seconds (then it may well live), and the error of its own that it answers with. While a process of the server lives
    without a supervisor, another is about to start, so that is waited for.
    """
    until = time.monotonic() + timeout
    while True:
        try:
            return _ask(folder, request, min(_ATTEMPT_SECONDS, max(0.1, until - time.monotonic())))
        except (OSError, ValueError, StoppingError) as exc:
            if isinstance(exc, ConnectionRefusedError | FileNotFoundError) and not alive(folder):
                raise GoneError(f"no block server answers in {folder}: {exc}") from None
            if time.monotonic() >= until:
                raise UnavailableError(
                    f"the block server in {folder} does not answer: {exc}",
                    hint="it may be overloaded, or its disk be stuck; its log says more",
                ) from None
        time.sleep(0.05)


def _ask(folder: Path, request: Request, timeout: float) -> TreeStatus:
    # Through a descriptor of the folder: a socket's own path may have 107 bytes only.
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(timeout)
            sock.connect(f"/proc/self/fd/{fd}/{SOCKET}")
            sock.sendall(msgspec.json.encode(request) + b"\n")
            with sock.makefile("rb") as lines:
                reply = msgspec.json.decode(lines.readline(MAX_LINE), type=Reply)
    finally:
        os.close(fd)
    if reply.status is None:
        text = f"block server in {folder}: {reply.error}"
        raise StoppingError(text) if reply.stopping else from_exit_code(reply.code, text)
    return reply.status


# -- starting ----------------------------------------------------------------------------------------------------------


def join_or_start(folder: Path, spec: ServerSpec, server: Sequence[str]) -> TreeStatus:
    """See to it that a server for ``spec`` runs and knows its target; of one that was started here only the driver is
    known, and ``pid`` is 0. Raises what kept it from starting."""
    if folder.exists():
        try:
            status = ask(folder, Request("add", spec.target))
        except GoneError as exc:  # any other error says that it lives, and others may use it
            log.warning("%s; cleaning up after it", exc)
            clear(folder)
        except BaseException:
            with contextlib.suppress(BootseerError):  # it may have heard of the mount that is not to be
                ask(folder, Request("remove", spec.target), timeout=_TAKE_BACK_SECONDS)
            raise
        else:
            if status.digest != spec.digest:
                raise BootseerError(f"tree id {spec.id} is taken by {status.digest}")
            if status.cache_dir != spec.cache_dir:
                log.warning("tree %s is served out of %s until all its mounts end", spec.id, status.cache_dir)
            return status
    try:
        folder.mkdir(mode=0o700)
        (folder / FUSE_FOLDER).mkdir(mode=0o700)
        with open(folder / SPEC, "wb", opener=_private) as out:
            out.write(msgspec.json.encode(spec))
        return TreeStatus(
            id=spec.id, digest=spec.digest, pid=0, driver=_start(folder, server), cache_dir=spec.cache_dir
        )
    except BaseException as exc:
        clear(folder)
        if isinstance(exc, OSError):
            raise from_os_error(exc, f"start a block server in {folder}") from exc
        raise


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def _start(folder: Path, server: Sequence[str]) -> str:
    """Have a new ``server`` serve what the spec in ``folder`` says. Its driver. Raises what kept it from starting."""
    said = background.start(server, os.fsencode(folder), seconds=_START_SECONDS, ending=signal.SIGKILL)
    word, _, rest = said.decode(errors="replace").partition(" ")
    if word == "ok":
        return rest
    if word == "error":
        code, _, text = rest.partition(" ")
        raise from_exit_code(int(code), text)
    raise UnavailableError("the block server did not start", hint=f"see {folder.with_suffix('.log')}")


# -- the end -----------------------------------------------------------------------------------------------------------


def unmount_target(target: Path) -> None:
    """Unmount the EROFS on ``target``; lazily, with a log line, when it stays in use."""
    until = time.monotonic() + _BUSY_SECONDS
    while mounts.is_mounted(target):
        late = time.monotonic() >= until
        if late:
            log.warning("%s is in use; detaching it, its users keep it until they end", target)
        try:
            mounts.unmount(target, lazy=late)
        except BootseerError:
            if late:
                raise
            time.sleep(0.05)


def alive(folder: Path) -> bool:
    """Whether a process of the server of ``folder`` lives; one that finishes a hot pack behind it does not count."""
    try:
        with flock.locked(folder / LOCK) as alone:
            return not alone
    except FileNotFoundError:
        return False


def await_exit(folder: Path, timeout: float) -> None:
    """Wait until no process of the server of ``folder`` lives; kill them, with a log line, when that takes longer than
    ``timeout`` seconds: the FUSE mount fails closed, who still reads gets errors."""
    if _ended(folder, timeout):
        return
    group = int((folder / LOCK).read_text() or 0)  # empty: it was stopped before it wrote its number
    log.warning("the block server in %s has not ended within %g s; killing process group %d", folder, timeout, group)
    if group not in (0, 1, os.getpgid(0)):
        with contextlib.suppress(ProcessLookupError):  # while one of them lives the number is nobody else's
            os.killpg(group, signal.SIGKILL)
    if not _ended(folder, 5.0):
        raise UnavailableError(f"the block server in {folder} cannot be killed", hint="its disk or its store may hang")


def _ended(folder: Path, timeout: float) -> bool:
    until = time.monotonic() + timeout
    while alive(folder):
        if time.monotonic() >= until:
            return False
        time.sleep(_LOOK_SECONDS)
    return True


def clear(folder: Path) -> None:
    """Remove what a server that ended or died left: stuck processes, a dead FUSE mount, its state files."""
    await_exit(folder, _GRACE_SECONDS)  # one that failed to start is about to end by itself
    if mounts.is_mounted(folder / FUSE_FOLDER):
        log.warning("detaching the FUSE mount that a block server left in %s", folder)
        mounts.unmount(folder / FUSE_FOLDER, lazy=True)
    with doing(f"remove the state of a block server in {folder}"):
        _remove_state(folder)


def _remove_state(folder: Path) -> None:
    for path in (folder / SPEC, folder / SOCKET, folder / LOCK, *folder.glob(NAMES)):
        path.unlink(missing_ok=True)
    for path in (folder / FUSE_FOLDER, folder):
        with contextlib.suppress(FileNotFoundError):
            path.rmdir()


def clear_unwatched(folder: Path) -> None:
    """In a server that ends by itself: remove its state, unless somebody waits for its end or is about to use it."""
    with contextlib.suppress(OSError), flock.locked(folder.with_suffix(".lock")) as alone:
        if alone:
            _remove_state(folder)
