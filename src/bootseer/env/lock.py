"""One environment stage at a time per target on this node: lock files on its own disk, never on shared storage."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from bootseer.env.spec import Target
from bootseer.errors import UnavailableError, doing
from bootseer.folders import private_folder
from bootseer.kernel import flock

WAIT_SECONDS = 3600.0
"""Longer than a wait for another node and set-up commands usually take: all ranks of a node want the first one's
result."""
_LOOK_SECONDS = 300.0


@contextlib.contextmanager
def locked(targets: tuple[Target, ...], state_dir: Path, *, wait: float = WAIT_SECONDS) -> Iterator[None]:
    """Hold the locks of all targets (in one order everywhere, so two callers cannot wait for each other). Raises
    `UnavailableError` when another stage holds one for longer than ``wait`` seconds."""
    until = time.monotonic() + wait
    with contextlib.ExitStack() as stack:
        for host in sorted({os.path.realpath(target.host) for target in targets}):
            name = hashlib.sha256(os.fsencode(host)).hexdigest()[:24]
            stack.enter_context(_held(state_dir, name, until, f"another environment stage works on {host}"))
        yield


@contextlib.contextmanager
def groups_locked(state_dir: Path) -> Iterator[None]:
    """One process at a time looks which environments are in use, and takes them down: one may have several targets.
    Raises `UnavailableError` when another one does so for too long."""
    with _held(state_dir, "groups", time.monotonic() + _LOOK_SECONDS, "another start removes an environment"):
        yield


@contextlib.contextmanager
def _held(state_dir: Path, name: str, until: float, busy: str) -> Iterator[None]:
    path = private_folder(state_dir, sub="env/locks") / name
    with contextlib.ExitStack() as stack:
        with doing(f"lock {path}"):
            held = stack.enter_context(flock.locked(path, os.O_RDWR | os.O_CREAT, until - time.monotonic()))
        if not held:
            raise UnavailableError(f"{busy} for too long")
        yield
