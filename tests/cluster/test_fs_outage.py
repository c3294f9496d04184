"""The mount of a striped store while the NameNode is away."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer import fsmount
from bootseer.config import Config
from bootseer.fsmount import FsMount
from bootseer.stripefs import open_fs
from support.hadoop import HadoopCluster
from support.waits import later, together, until

pytestmark = [pytest.mark.hdfs, pytest.mark.root]

READERS = 8
AWAY_SECONDS = 20.0
DATA = os.urandom((8 << 20) + 77)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HadoopCluster]:
    with HadoopCluster(tmp_path_factory.mktemp("hdfs") / "root", 1) as running:
        fs = open_fs(f"{running.url}/run")
        for number in range(READERS):
            with fs.create(f"file-{number}", unit=1 << 18, striped=True) as out:
                out.write(DATA[number:])
        yield running


@pytest.fixture
def mounted(cluster: HadoopCluster, tmp_path: Path) -> Iterator[FsMount]:
    config = Config(cache_dir=str(tmp_path / "cache"), state_dir=str(tmp_path / "state"))
    made = fsmount.start(f"{cluster.url}/run", tmp_path / "mnt", config=config)
    yield made
    made.unmount()


@pytest.mark.parametrize("way", ["frozen", pytest.param("killed", marks=pytest.mark.soak)])
def test_what_is_open_goes_on_and_what_is_opened_ends_in_time(
    cluster: HadoopCluster, mounted: FsMount, way: str
) -> None:
    stop = threading.Event()
    opened = threading.Barrier(READERS + 1)
    rounds = [0] * READERS

    def read(number: int) -> None:
        held = os.open(mounted.mountpoint / f"file-{number}", os.O_RDONLY)
        assert os.pread(held, 100, 0) == DATA[number:][:100]
        opened.wait(60)
        while not stop.is_set():
            os.posix_fadvise(held, 0, 0, os.POSIX_FADV_DONTNEED)
            for offset in range(0, 8 << 20, 1 << 20):
                assert os.pread(held, 1 << 20, offset) == DATA[number:][offset : offset + (1 << 20)]
            rounds[number] += 1
            stop.wait(0.3)
        os.close(held)

    def look() -> float:
        """Names that nobody has asked for: the NameNode must be asked."""
        began = time.monotonic()
        with pytest.raises(OSError, match="Input/output error"):
            os.stat(mounted.mountpoint / f"new-{began}")
        return time.monotonic() - began

    readers = later(lambda: together(read, range(READERS)))
    opened.wait(60)
    if way == "killed":
        cluster.kill_namenode()
        away = None
    else:
        away = cluster.frozen_namenode()
        away.__enter__()
    began = time.monotonic()
    try:
        lookers = [later(look) for _ in range(2)]
        seen = list(rounds)
        until(
            lambda: readers.done() or all(now > then + 1 for now, then in zip(rounds, seen, strict=True)),
            AWAY_SECONDS * 2,
        )
        assert not readers.done()
        assert max(looker.result(60) for looker in lookers) < 40
        threading.Event().wait(max(0.0, AWAY_SECONDS - (time.monotonic() - began)))
    finally:
        if away is None:
            cluster.restart_namenode()
        else:
            away.__exit__(None, None, None)
    seen = list(rounds)
    until(lambda: readers.done() or all(now > then for now, then in zip(rounds, seen, strict=True)), 60)
    stop.set()
    readers.result(60)
    assert sorted(os.listdir(mounted.mountpoint)) == [f"file-{number}" for number in range(READERS)]
    assert (mounted.mountpoint / "file-3").read_bytes() == DATA[3:]
    assert mounted.status().restarts == 0


MAPPED = """if True:
    import mmap, sys
    file = open(sys.argv[1])
    mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    print(flush=True)
    sys.stdin.readline()
    mapped[5 << 20]
"""


def state_of(pid: int) -> str:
    """The state of a process; D: it waits for a page."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]


@pytest.mark.soak
def test_with_every_datanode_frozen_whoever_waits_has_an_error_after_a_minute(
    cluster: HadoopCluster, tmp_path: Path
) -> None:
    """As docs/howto/stripefs.md says: who mapped a file, who renames over one. An unmount ends who waits."""
    config = Config(cache_dir=str(tmp_path / "cache"), state_dir=str(tmp_path / "state"))
    made = fsmount.start(f"{cluster.url}/run", tmp_path / "mnt", config=config, writable=True)

    def reading(name: str) -> subprocess.Popen[bytes]:
        """Has mapped the file, whose opening reads its pointer."""
        argv = [sys.executable, "-c", MAPPED, str(made.mountpoint / name)]
        found = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert found.stdout is not None
        assert found.stdout.readline()
        return found

    def begin(reader: subprocess.Popen[bytes]) -> None:
        assert reader.stdin is not None
        reader.stdin.close()

    with contextlib.ExitStack() as stack:
        stack.callback(made.unmount)
        mapped = stack.enter_context(reading("file-0"))
        stack.callback(mapped.kill)
        waiting = stack.enter_context(reading("file-3"))
        stack.callback(waiting.kill)
        stack.enter_context(cluster.frozen(0))
        began = time.monotonic()
        begin(mapped)
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            os.rename(made.mountpoint / "file-1", made.mountpoint / "file-2")
        renamed = time.monotonic() - began
        assert mapped.wait(60) == -signal.SIGBUS
        took = time.monotonic() - began
        assert (renamed < 75, 55 < took < 75) == (True, True), (renamed, took)
        begin(waiting)
        until(lambda: state_of(waiting.pid) == "D")
        began = time.monotonic()
        made.unmount()
        assert waiting.wait(30) == -signal.SIGBUS
        assert (took := time.monotonic() - began) < 30, took
        assert not os.path.ismount(made.mountpoint)
