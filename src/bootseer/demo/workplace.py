"""The folder one demo works in, and the promise that nothing of it stays: no mount, no process, no file. For a demo
that is killed (SIGKILL, power) the next one keeps it, see `sweep`."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from bootseer.errors import BootseerError, ConfigError, UnavailableError
from bootseer.folders import private_folder
from bootseer.kernel import flock
from bootseer.kernel import mount as mounts

log = logging.getLogger(__name__)

_PREFIX = "run-"
_LOCK = "lock"
_EXIT_SECONDS = 10.0


def claim(cache: Path) -> Path:
    """The folder ``cache``, made if it is missing, as the demo's: it removes what has there the names of its own.
    Raises `ConfigError` when somebody else has files in it, or could put some there."""
    cache = private_folder(cache.resolve())
    if not (cache / _LOCK).exists() and any(cache.iterdir()):
        raise ConfigError(f"{cache} has files that are not the demo's", hint="name a new or an empty folder")
    return cache


@contextlib.contextmanager
def only_one(cache: Path) -> Iterator[None]:
    """Hold the demo's lock. Raises `BootseerError` when another demo runs from the same cache folder."""
    with flock.locked(cache / _LOCK, os.O_RDWR | os.O_CREAT) as alone:
        if not alone:
            raise BootseerError(f"another demo runs from {cache}", hint="wait for it, or pass another --cache")
        yield


@contextlib.contextmanager
def session(cache: Path, prepare: Callable[[], None]) -> Iterator[Path]:
    """A new work folder below ``cache``, removed at the end with all that runs in it, for the only demo there. What
    those that were killed left is removed before ``prepare`` is called. Raises `BootseerError` as `only_one` does."""
    with only_one(cache):
        sweep(cache)
        prepare()
        work = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=cache))
        try:
            yield work
        finally:
            remove(work)


def prefix(cache: Path) -> str:
    """Begins the names of the demo's network devices: one per cache folder, so that demos do not meet."""
    return "bs" + hashlib.sha256(os.fsencode(cache.absolute())).hexdigest()[:5]


def sweep(cache: Path) -> None:
    """Remove what demos that were killed left below ``cache``; call it while holding the lock."""
    for work in sorted(cache.glob(f"{_PREFIX}*")):
        log.warning("removing %s, left by a demo that was killed", work)
        remove(work)


def await_end(work: Path, seconds: float) -> None:
    """Wait for processes that name ``work``, such as a server that still publishes what it recorded. Raises
    `UnavailableError` when some are left after so many ``seconds``."""
    end = time.monotonic() + seconds
    while left := processes(work):
        if time.monotonic() > end:
            raise UnavailableError(f"processes {left} have not ended within {seconds:g} s")
        time.sleep(0.1)


def remove(work: Path) -> None:
    """End the processes that name ``work`` or have their root in it, unmount what is mounted below it, delete it."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in processes(work):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        end = time.monotonic() + _EXIT_SECONDS
        while processes(work) and time.monotonic() < end:
            time.sleep(0.1)
    for entry in reversed(mounts.below(work)):
        log.warning("%s was still mounted", entry.target)
        with contextlib.suppress(BootseerError):
            mounts.unmount(entry.target, lazy=True)
    if mounts.below(work):
        log.warning("%s is left: something is still mounted there", work)
        return
    shutil.rmtree(work, ignore_errors=True)


def processes(work: Path) -> list[int]:
    """Of the processes that name ``work`` in their command line or environment, or have their root in it."""
    name = os.fsencode(work) + b"/"
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                # a container's process names nothing of ours, but its root file system lies in the work folder
                roots = [
                    line for line in (entry / "mountinfo").read_bytes().splitlines() if line.split(b" ")[4] == b"/"
                ]
                said = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
                if name in said or any(name in line for line in roots):
                    found.append(int(entry.name))
    return found
