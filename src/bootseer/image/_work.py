"""The private folder of one conversion, and the removal of what killed conversions left."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from bootseer.errors import FullError, UnavailableError, from_os_error

log = logging.getLogger(__name__)

_PREFIX = "convert-"
_DEAD = "dead-"
"""A folder that nobody uses any more: whoever sees it may remove it."""
_LOCK_SECONDS = 30.0


@contextlib.contextmanager
def work_folder(parent: Path) -> Iterator[Path]:
    """A folder of our own below ``parent``, removed at the end; folders of conversions that died are removed first.

    A folder is in use while its file ``lock`` is locked. ``parent`` itself is locked from looking for dead ones until
    ours is locked, so that nobody takes ours for one. Dead ones are only renamed meanwhile: removing gigabytes takes
    seconds, for which no other conversion should wait.
    """
    with contextlib.ExitStack() as stack:
        try:
            parent.mkdir(parents=True, exist_ok=True)
            with _locked(parent):
                for old in parent.glob(f"{_PREFIX}*"):
                    _set_aside(old)
                folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
                stack.callback(shutil.rmtree, folder, ignore_errors=True)
                lock = stack.enter_context(open(folder / "lock", "wb"))
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for old in parent.glob(f"{_DEAD}*"):
                shutil.rmtree(old, ignore_errors=True)
        except OSError as exc:
            raise from_os_error(exc, f"work in {parent}") from exc
        yield folder


def check_space(folder: Path, wanted: int, doing: str) -> None:
    """`FullError` when less than ``wanted`` bytes are free around ``folder``, a work folder."""
    stat = os.statvfs(folder)
    free = stat.f_bavail * stat.f_frsize
    if free < wanted:
        raise FullError(
            f"cannot {doing}: {folder.parent} has {free / 1e9:.1f} GB free, {wanted / 1e9:.1f} GB are needed",
            hint="free some space there or choose another --work-dir",
        )


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """``folder``, locked. What is done under the lock takes milliseconds; `UnavailableError` after half a minute."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    end = time.monotonic() + _LOCK_SECONDS
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise UnavailableError(
                        f"another conversion has kept {folder} locked for {_LOCK_SECONDS:.0f} s",
                        hint="end it, or choose another --work-dir",
                    ) from None
                time.sleep(0.02)
        yield
    finally:
        os.close(fd)


def _set_aside(folder: Path) -> None:
    """Rename ``folder``, of a conversion, if that has died."""
    try:
        with open(folder / "lock", "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        pass  # killed before it made its lock, or removed by its conversion at this moment
    except OSError:
        return  # in use, or not ours
    with contextlib.suppress(FileNotFoundError):
        folder.rename(folder.with_name(_DEAD + folder.name))
        log.warning("removing %s, left by an interrupted conversion", folder)
