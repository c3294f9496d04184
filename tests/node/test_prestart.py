"""Block servers started beforehand: used once, right bytes, gone when unused or when their owner dies."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bootseer import erofs
from bootseer.blocks import tree
from bootseer.blocks.serving import prestart
from bootseer.config import Config
from bootseer.store import open_store

pytestmark = pytest.mark.root


@pytest.fixture
def digest(tmp_path: Path) -> str:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/file").write_bytes(os.urandom(300_000))
    erofs.build(tmp_path / "tree", tmp_path / "meta", tmp_path / "data")
    return tree.publish(open_store(str(tmp_path / "store")), tmp_path / "meta", tmp_path / "data").digest


def mounted(tmp_path: Path, digest: str) -> tree.TreeMount:
    return tree.mount(str(tmp_path / "store"), digest, tmp_path / "mnt", cache_dir=tmp_path / "cache",
                      state_dir=tmp_path / "state", config=Config(background_fill=False))  # fmt: skip


def waiting() -> set[int]:
    """Those of this test run: others on the machine serve somebody, and are killed by nobody here."""
    ours = f"BOOTSEER_TEST_RUN={os.getpid()}".encode()
    found = set()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            known = entry.name.isdecimal() and ours in (entry / "environ").read_bytes().split(b"\0")
            if known and b"\0bootseer.blocks.serving.server\0-\0" in (entry / "cmdline").read_bytes():
                found.add(int(entry.name))
    return found


def test_a_mount_takes_the_waiting_server(tmp_path: Path, digest: str) -> None:
    with tree.prestart("/x"):
        made = mounted(tmp_path, digest)
        try:
            assert prestart._waiting == []
            command = Path("/proc", str(made.status().pid), "cmdline").read_bytes()
            assert b"\0-\0" in command
            assert (tmp_path / "mnt/file").read_bytes() == (tmp_path / "tree/file").read_bytes()
        finally:
            made.unmount()


def test_an_unused_one_ends_with_the_context(tmp_path: Path) -> None:
    before = waiting()
    with tree.prestart(str(tmp_path), 2):
        assert len(prestart._waiting) == 2
    end = time.monotonic() + 10
    while waiting() - before and time.monotonic() < end:
        time.sleep(0.05)
    assert waiting() - before == set()


def test_it_ends_when_its_owner_is_killed() -> None:
    before = waiting()
    code = (
        "from bootseer.blocks import tree; import time\nwith tree.prestart('/x'): print(1, flush=True); time.sleep(60)"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    owner.stdout.readline()
    owner.send_signal(signal.SIGKILL)
    owner.wait(10)
    owner.stdout.close()
    end = time.monotonic() + 10
    while waiting() - before and time.monotonic() < end:
        time.sleep(0.05)
    assert waiting() - before == set()


def test_one_that_died_is_replaced(tmp_path: Path, digest: str, caplog: pytest.LogCaptureFixture) -> None:
    with tree.prestart("/x"):
        end = time.monotonic() + 10
        while not waiting() and time.monotonic() < end:
            time.sleep(0.05)
        time.sleep(0.3)
        for pid in waiting():
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.2)
        made = mounted(tmp_path, digest)
        try:
            assert (tmp_path / "mnt/file").read_bytes() == (tmp_path / "tree/file").read_bytes()
        finally:
            made.unmount()
    assert "starting another" in caplog.text


def test_a_dead_server_of_this_kind_is_found_and_cleared(tmp_path: Path, digest: str) -> None:
    with tree.prestart("/x"):
        made = mounted(tmp_path, digest)
    os.kill(made.status().pid, signal.SIGKILL)
    made.unmount()
    again = mounted(tmp_path, digest)
    try:
        assert (tmp_path / "mnt/file").read_bytes() == (tmp_path / "tree/file").read_bytes()
    finally:
        again.unmount()
