"""A mount of a striped store beside its node cache: what a restart reads, and files that the kernel reads by itself."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer import fsmount
from bootseer.chunks import eviction, inventory
from bootseer.config import Config
from bootseer.fsmount import FsMount, FsStatus
from bootseer.stripefs import StripeFS, open_fs
from bootseer.stripefs.checkpoint.access import AccessRecord, FileAccess
from support.node import kill_group
from support.waits import together, until

pytestmark = pytest.mark.root

UNIT = 3 << 16
DATA = os.urandom((9 << 20) + 123)


@pytest.fixture
def fs(tmp_path) -> StripeFS:
    fs = open_fs(str(tmp_path / "store"))
    with fs.create("f", width=3, unit=UNIT, striped=True) as out:
        out.write(DATA)
    return fs


class Mounts:
    """Mounts of the store, one after another or side by side, that are gone after the test."""

    def __init__(self, fs: StripeFS, base: Path, config: Config) -> None:
        self.fs, self.base, self.config = fs, base, config
        self.made: list[FsMount] = []

    def start(self, name: str = "mnt", **options: object) -> FsMount:
        made = fsmount.start(self.fs.url, self.base / name, config=self.config, **options)  # type: ignore[arg-type]
        self.made.append(made)
        return made

    def warm(self) -> None:
        made = self.start()
        assert (made.mountpoint / "f").read_bytes() == DATA
        made.unmount()


@pytest.fixture
def mounts(fs, tmp_path, config) -> Iterator[Mounts]:
    mounts = Mounts(fs, tmp_path, config)
    yield mounts
    for made in mounts.made:
        made.unmount()


def settled(made: FsMount, opens: int, served: int = 0) -> FsStatus:
    """Its status when it has counted that many opens, and bytes that the server read."""
    until(
        lambda: sum(figures(made)) >= opens and made.status().bytes_read >= served,
        20,
        f"{opens} opens and {served} bytes in the status",
        step=0.05,
    )
    return made.status()


def figures(made: FsMount) -> tuple[int, int]:
    status = made.status()
    return status.opened_passthrough, status.opened_served


def test_a_restart_reads_no_byte_from_the_store_and_the_kernel_reads_by_itself(mounts):
    mounts.warm()
    made = mounts.start()
    assert (made.mountpoint / "f").read_bytes() == DATA
    status = settled(made, 1)
    assert (status.fetched_demand, status.fetched_ahead, status.bytes_read) == (0, 0, 0)
    assert (status.opened_passthrough, status.opened_served) == (1, 0)


def test_what_the_kernel_reads_by_itself_is_in_the_record_of_the_start(mounts):
    """Else a start whose prefetch was quick would leave the next one a record without its checkpoint."""
    part = AccessRecord((FileAccess("f", len(DATA), ((1 << 20, 2 << 20),)),))
    whole = AccessRecord((FileAccess("f", len(DATA), ((0, len(DATA)),)),))
    mounts.warm()
    for prefetch, expected in ((True, whole), (part, part)):
        made = mounts.start(prefetch=prefetch)
        assert (made.mountpoint / "f").read_bytes() == DATA
        assert settled(made, 1).opened_passthrough == 1
        assert made.accessed() == expected
        made.unmount()


def test_a_damaged_chunk_is_fetched_again_and_the_file_is_served(mounts, config):
    mounts.warm()
    (data,) = Path(config.cache_dir).glob("blocks/*/data")
    with open(data, "r+b") as file:
        file.seek(7 * UNIT + 1)
        file.write(b"damage")
    made = mounts.start()
    assert (made.mountpoint / "f").read_bytes() == DATA
    status = settled(made, 1, len(DATA))
    assert (status.opened_passthrough, status.opened_served) == (0, 1)
    assert status.fetched_demand + status.fetched_ahead == UNIT
    made.unmount()
    made = mounts.start()
    assert (made.mountpoint / "f").read_bytes() == DATA
    assert settled(made, 1).opened_passthrough == 1


def test_an_open_does_not_wait_for_a_long_comparison(mounts, config, monkeypatch):
    """It goes on behind it: the file is served until then, and others are opened."""
    with mounts.fs.create("small", unit=UNIT, striped=True) as out:
        out.write(DATA[:UNIT])
    made = mounts.start()
    assert [(made.mountpoint / name).read_bytes() for name in ("f", "small")] == [DATA, DATA[:UNIT]]
    made.unmount()
    for compared in Path(config.cache_dir).glob("blocks/*/compared"):
        compared.unlink()
    monkeypatch.setenv("BOOTSEER_FAULTS", "stripefs.cache.compare=sleep:1")  # 12 s for all of f
    made = mounts.start()
    with open(made.mountpoint / "f", "rb") as first, open(made.mountpoint / "f", "rb") as second:
        assert settled(made, 2).opened_served == 2
        assert (made.mountpoint / "small").read_bytes() == DATA[:UNIT]
        assert (first.read(), second.read()) == (DATA, DATA)
    status = settled(made, 3, len(DATA))
    assert status.fetched_demand + status.fetched_ahead == 0
    until(lambda: (made.mountpoint / "f").read_bytes() == DATA and figures(made)[0] > 0, 60, "a comparison", step=0.3)


def test_the_modes_of_one_file_never_mix(mounts, config):
    """The kernel would fail the open with an input/output error."""
    made, cache = mounts.start(), Path(config.cache_dir)
    path = made.mountpoint / "f"
    with open(path, "rb") as first:
        assert first.read() == DATA
        until(lambda: inventory.parts(cache)[0].blocks_ready == -(-len(DATA) // UNIT), 20, "a whole file", step=0.1)
        time.sleep(0.2)  # the server knows a moment after the disk
        with open(path, "rb") as second:
            assert second.read() == DATA
        assert settled(made, 2).opened_served == 2
    until(lambda: path.read_bytes() == DATA and figures(made)[0] > 0, 20, "an open after the last close", step=0.3)
    with open(path, "rb") as first, open(path, "rb") as second:
        assert (first.read(), second.read()) == (DATA, DATA)
    assert figures(made)[1] >= 2


def test_maps_threads_and_forks_of_a_file_that_is_passed_through(mounts):
    mounts.warm()
    made = mounts.start()
    path = made.mountpoint / "f"
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages:
        child = os.fork()
        if child == 0:
            os._exit(0 if pages[:] == DATA and os.pread(file.fileno(), 999, 12345) == DATA[12345:13344] else 1)

        def reader(seed: int) -> None:
            for step in range(50):
                offset = (seed * 7919 * 4096 + step * 104729) % (len(DATA) - 5000)
                assert pages[offset : offset + 5000] == DATA[offset : offset + 5000]
                assert os.pread(file.fileno(), 5000, offset) == DATA[offset : offset + 5000]
                if step % 10 == 0:
                    with open(path, "rb") as own:
                        assert own.read(4096) == DATA[:4096]

        together(reader, range(16))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    status = settled(made, 81)
    assert (status.opened_served, status.bytes_read) == (0, 0)


def test_what_is_passed_through_is_not_evicted_even_without_its_server(mounts, config):
    mounts.warm()
    made = mounts.start()
    cache = Path(config.cache_dir)
    with open(made.mountpoint / "f", "rb", buffering=0) as file:
        assert settled(made, 1).opened_passthrough == 1
        assert eviction.collect(cache, 1 << 40).gone == []
        kill_group(made.pid)
        until(lambda: not made.status().alive, 20, "the end of the server", step=0.02)
        assert eviction.collect(cache, 1 << 40).gone == [], "the kernel has it open"
        assert os.pread(file.fileno(), len(DATA), 0) == DATA
    made.unmount()
    assert len(eviction.collect(cache, 1 << 40).gone) == 1


def test_two_mounts_of_one_file(mounts):
    first, second = mounts.start(), mounts.start("other")
    with open(first.mountpoint / "f", "rb") as one, open(second.mountpoint / "f", "rb") as two:
        assert together(lambda file: file.read(), [one, two]) == [DATA, DATA]
    until(lambda: (first.mountpoint / "f").read_bytes() == DATA and figures(first)[0] > 0, 20, "a whole file", step=0.3)
    with open(first.mountpoint / "f", "rb"):
        assert (second.mountpoint / "f").read_bytes() == DATA
    until(
        lambda: figures(second)[0] > 0 or (second.mountpoint / "f").read_bytes() != DATA, 20, "it elsewhere", step=0.3
    )


def test_a_full_disk_under_the_cache(mounts, tmp_path, config):
    """A disk that is smaller than the file: the first part is kept, everything is read."""
    cache = Path(config.cache_dir)
    cache.mkdir(mode=0o700)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m,mode=0700", "none", cache], check=True)
    try:
        for _ in range(2):
            made = mounts.start()
            assert (made.mountpoint / "f").read_bytes() == DATA
            status = settled(made, 1, len(DATA))
            assert status.alive
            assert status.opened_passthrough == 0
            made.unmount()
        assert 0 < status.fetched_demand + status.fetched_ahead < len(DATA), "what the disk took is there"
        assert 0 < inventory.parts(cache)[0].blocks_ready < len(DATA) // UNIT
    finally:
        subprocess.run(["umount", cache], check=True)


def test_what_the_kernel_does_not_take_is_served(mounts, config, tmp_path):
    """A cache on a file system that is stacked itself."""
    for name in ("lower", "upper", "work", "cache"):
        (tmp_path / name).mkdir(mode=0o700)
    over = f"lowerdir={tmp_path}/lower,upperdir={tmp_path}/upper,workdir={tmp_path}/work"
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", over, config.cache_dir], check=True)
    try:
        mounts.warm()
        made = mounts.start()
        assert (made.mountpoint / "f").read_bytes() == DATA
        status = settled(made, 1)
        assert (status.opened_passthrough, status.opened_served) == (0, 1)
        assert (status.fetched_demand, status.fetched_ahead) == (0, 0)
        log = next(Path(config.state_dir, "fs").glob("*.log")).read_text()
        assert log.count("files are read by the server") == 1
        made.unmount()
    finally:
        subprocess.run(["umount", config.cache_dir], check=True)


@pytest.mark.takeover
def test_after_a_killed_server_the_kernel_reads_the_same_file_on(mounts):
    """All descriptors of a file must be read in one way, also those that a server before this one gave out."""
    mounts.warm()
    made = mounts.start()
    with open(made.mountpoint / "f", "rb") as file:
        settled(made, 1)
        server = made.status().server_pid
        os.kill(server, signal.SIGKILL)
        until(lambda: made.status().server_pid not in (0, server), 20, "another server")
        for _ in range(2):
            assert (made.mountpoint / "f").read_bytes() == DATA
        assert file.read() == DATA
    assert (made.mountpoint / "f").read_bytes() == DATA
    assert figures(made)[1] == 0  # none was served
