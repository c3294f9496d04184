"""The private folder of one conversion, and the removal of what killed conversions left."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bootseer.errors import FullError, from_os_error

log = logging.getLogger(__name__)

_PREFIX = "convert-"


@contextlib.contextmanager
def work_folder(parent: Path) -> Iterator[Path]:
    """A folder of our own below ``parent``, removed at the end; folders of conversions that died are removed first.

    A folder is in use while its file ``lock`` is locked. ``parent`` itself is locked from looking for dead ones until
    ours is locked, so that nobody takes ours for one.
    """
    with contextlib.ExitStack() as stack:
        try:
            parent.mkdir(parents=True, exist_ok=True)
            with _locked(parent):
                for old in parent.glob(f"{_PREFIX}*"):
                    _sweep(old)
                folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
                stack.callback(shutil.rmtree, folder, ignore_errors=True)
                lock = stack.enter_context(open(folder / "lock", "wb"))
                fcntl.flock(lock, fcntl.LOCK_EX)
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
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)  # held for milliseconds: what it protects never waits
        yield
    finally:
        os.close(fd)


def _sweep(folder: Path) -> None:
    try:
        with open(folder / "lock", "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        pass  # killed before it made its lock
    except OSError:
        return  # in use, or not ours
    log.warning("removing %s, left by an interrupted conversion", folder)
    shutil.rmtree(folder, ignore_errors=True)
