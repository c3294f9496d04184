"""Places to mount on, whose mounts are gone after the test."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.kernel import mount
from support.waits import until


@pytest.fixture
def mountpoint(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "mnt"
    path.mkdir()
    yield path
    while mount.is_mounted(path):  # whatever a failed test left
        mount.unmount(path, lazy=True, force=True)


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder on a disk file system."""
    path = Path("/var/tmp") / f"bootseer-test-{os.getpid()}"
    path.mkdir()
    yield path
    for entry in reversed(mount.below(path)):
        mount.unmount(entry.target, lazy=True, force=True)
    until(lambda: _removed(path), 20, f"{path}, in which somebody still writes: its removal")


def _removed(path: Path) -> bool:
    """A block server that has just lost its mount may still end what it was writing."""
    shutil.rmtree(path, ignore_errors=True)
    return not path.exists()
