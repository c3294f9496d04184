"""Places to mount on, whose mounts are gone after the test."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import tempfile
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


@pytest.fixture(scope="session")
def python_with_pip() -> Iterator[Path]:
    """The Python of an environment with our pip and nothing else, which everybody may run. pip looks at all that is
    installed beside it; to have one installed takes seconds."""
    import pip

    folder = Path(tempfile.mkdtemp(prefix="bootseer-pytest-pip-", dir="/var/tmp"))
    folder.chmod(0o755)
    subprocess.run(["/usr/bin/python3", "-m", "venv", "--without-pip", folder], check=True)
    shutil.copytree(Path(pip.__file__).parent, next(folder.glob("lib/python3*/site-packages")) / "pip")
    yield folder / "bin/python"
    shutil.rmtree(folder)


@pytest.fixture
def open_device(place: Path) -> Iterator[None]:
    """Everybody may open /dev/fuse, as on most machines; in this run's mounts alone."""
    if os.stat("/dev/fuse").st_mode & 0o006 == 0o006:
        yield
        return
    node = place / "fuse"
    os.mknod(node, 0o666 | stat.S_IFCHR, os.stat("/dev/fuse").st_rdev)
    node.chmod(0o666)
    subprocess.run(["mount", "--bind", node, "/dev/fuse"], check=True)
    yield
    subprocess.run(["umount", "/dev/fuse"], check=True)


def _removed(path: Path) -> bool:
    """A block server that has just lost its mount may still end what it was writing."""
    shutil.rmtree(path, ignore_errors=True)
    return not path.exists()
