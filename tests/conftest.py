"""Shared by all suites: what a test needs, said in its marker; a check that it left no mount or process behind."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


def pytest_configure() -> None:
    """Give the run mounts of its own: other runs do not see them, nor we theirs, and they end with the run."""
    from bootseer.kernel.mount import private_namespace

    if os.geteuid() == 0 and private_namespace():
        subprocess.run(["mount", "--make-rprivate", "/"], check=True, timeout=10)


def _hadoop() -> str:
    from bootseer.errors import BootseerError
    from support import hadoop

    try:
        hadoop.jars()
    except BootseerError as exc:
        return str(exc)
    return "" if shutil.which("java") else "no java"


def _torch() -> str:
    import importlib.util

    return "" if importlib.util.find_spec("torch") else "torch is not installed"


NEEDS: dict[str, Callable[[], str]] = {
    "root": lambda: "" if os.geteuid() == 0 else "needs root and mount rights",
    "hdfs": _hadoop,
    "registry": lambda: "" if shutil.which("docker-registry") else "needs docker-registry (scripts/setup installs it)",
    "runtime": lambda: "" if shutil.which("runc") or shutil.which("crun") else "needs runc or crun",
    "torch": _torch,
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run, with the reason; where ``CI`` is set nothing may be missing."""
    missing: dict[str, str] = {}
    for item in items:
        for name in {mark.name for mark in item.iter_markers()} & NEEDS.keys():
            if name not in missing:
                missing[name] = NEEDS[name]()
            if missing[name] and not os.environ.get("CI"):
                item.add_marker(pytest.mark.skip(reason=missing[name]))


def _mounts() -> set[str]:
    """Mount points that are bootseer's or a test's; others on this machine come and go as they like."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return {line.split(" ")[4] for line in lines if "bootseer" in line or "pytest" in line}


_RUN = f"BOOTSEER_TEST_RUN={os.getpid()}"
os.environ["BOOTSEER_TEST_RUN"] = str(os.getpid())


def _servers() -> set[int]:
    """Block servers and mounts, however detached, that this test run started and that are still alive."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                ours = _RUN.encode() in (entry / "environ").read_bytes().split(b"\0")
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if ours and (b"bootseer.blocks.serving.server" in line or b"bootseer.stripefs" in line):
                found.add(int(entry.name))
    return found


def _await_packs(before: set[int]) -> None:
    """A server that finishes a hot pack behind the unmount ends by itself."""
    end = time.monotonic() + 20.0
    while time.monotonic() < end and any(_name(pid) == "bootseer-pack" for pid in _servers() - before):
        time.sleep(0.01)


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a mount or a server process behind."""
    if not any(mark.name in ("root", "hdfs", "registry", "runtime") for mark in request.node.iter_markers()):
        yield
        return
    mounts, servers = _mounts(), _servers()
    yield
    assert _mounts() - mounts == set()
    _await_packs(servers)
    assert _servers() - servers == set()
