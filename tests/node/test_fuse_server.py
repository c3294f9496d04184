"""Real FUSE mounts of the server: contents, errors, concurrency, and how it ends."""

from __future__ import annotations

import errno
import logging
import os
import random
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from bootseer.errors import NotFoundError
from bootseer.kernel import fuse, mount
from support.waits import together

pytestmark = pytest.mark.root

DATA = random.Random(7).randbytes(5_000_001)


def _single(mountpoint: Path, read: object = None, **options: object) -> fuse.Server:
    chosen = read or (lambda offset, size, ctx: memoryview(DATA)[offset : offset + size])
    operations = fuse.SingleFile("data", len(DATA), chosen)  # type: ignore[arg-type]
    return fuse.Server(operations, mountpoint, options=fuse.Options(**options))  # type: ignore[arg-type]


@pytest.mark.parametrize("direct", [False, True])
def test_same_bytes_from_many_readers(mountpoint: Path, direct: bool) -> None:
    def read(seed: int) -> None:
        chance = random.Random(seed)
        with (mountpoint / "data").open("rb", buffering=0) as file:
            for _ in range(200):
                offset, size = chance.randrange(len(DATA) + 5000), chance.choice([1, 4096, 70_001, 1 << 20])
                assert os.pread(file.fileno(), size, offset) == DATA[offset : offset + size]

    with _single(mountpoint, direct_io=direct) as server:
        assert server.negotiated
        assert "async_read" in server.negotiated.flags
        together(read, range(6))
        assert (mountpoint / "data").read_bytes() == DATA
    assert not mount.is_mounted(mountpoint)


def test_bytes_from_a_local_file(mountpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "local").write_bytes(DATA)
    with (
        (tmp_path / "local").open("rb") as file,
        _single(mountpoint, lambda offset, size, ctx: (file.fileno(), offset), max_readahead=1 << 20),
    ):
        assert (mountpoint / "data").read_bytes() == DATA
        device = mount.find(mountpoint)
        assert device
        assert Path(f"/sys/class/bdi/{device.device}/read_ahead_kb").read_text().strip() == "1024"


def test_who_asks(mountpoint: Path) -> None:
    pids = set()

    def read(offset: int, size: int, ctx: fuse.Context) -> memoryview:
        pids.add(ctx.pid)
        return memoryview(DATA)[offset : offset + size]

    with _single(mountpoint, read):
        process = subprocess.Popen(["cat", mountpoint / "data"], stdout=subprocess.DEVNULL)
        assert process.wait(20) == 0
    assert pids == {process.pid}


def test_an_error_is_for_one_request_only(mountpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    def read(offset: int, size: int, ctx: fuse.Context) -> bytes | memoryview:
        if offset == 0:
            raise OSError(errno.ENODATA, "no block")
        if offset == 1 << 20:
            raise ZeroDivisionError
        if offset == 2 << 20:
            return DATA[offset : offset + size - 1]
        return memoryview(DATA)[offset : offset + size]

    with _single(mountpoint, read, direct_io=True), (mountpoint / "data").open("rb", buffering=0) as file:
        for offset, code in ((0, errno.ENODATA), (1 << 20, errno.EIO), (2 << 20, errno.EIO)):
            with pytest.raises(OSError) as failed:  # noqa: PT011
                os.pread(file.fileno(), 4096, offset)
            assert failed.value.errno == code
        assert os.pread(file.fileno(), 4096, 8192) == DATA[8192:12288]
    assert "ZeroDivisionError" in caplog.text


def test_an_answer_the_kernel_refuses_is_an_error(mountpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Unsized(fuse.SingleFile):
        def size(self, fh: int) -> int | None:  # type: ignore[override]
            return None

    # its length (in items) is not its size (in bytes), so the header of the answer is wrong
    operations = Unsized("data", 1 << 20, lambda offset, size, ctx: memoryview(bytes(size)).cast("I"))
    with fuse.Server(operations, mountpoint):
        # a process of its own: a reader that gets no answer cannot be killed, and would take this one along
        reader = subprocess.Popen(["cat", mountpoint / "data"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        try:
            _, stderr = reader.communicate(timeout=10)
        finally:
            if reader.poll() is None:
                mount.unmount(mountpoint, lazy=True, force=True)
                reader.communicate()
    assert reader.returncode == 1
    assert b"Input/output error" in stderr
    assert "cannot answer" in caplog.text


def test_nothing_can_be_written(mountpoint: Path) -> None:
    with _single(mountpoint):
        for action in (
            lambda: (mountpoint / "data").open("r+b"),
            lambda: (mountpoint / "new").write_text("x"),
            lambda: (mountpoint / "data").unlink(),
        ):
            with pytest.raises(OSError, match="Read-only"):
                action()


class Tree(fuse.Operations):
    """A large directory, attributes."""

    def __init__(self) -> None:
        self.names = [f"file-{number:05}-{'n' * (number % 90)}" for number in range(4000)] + [os.fsdecode(b"\xff\xfe")]
        self.nodes = {name: number for number, name in enumerate(self.names, start=10)}
        self.listed = 0

    def getattr(self, node: int, ctx: fuse.Context) -> fuse.Attr:
        if node == fuse.ROOT:
            return fuse.Attr(stat.S_IFDIR | 0o755, nlink=2)
        return fuse.Attr(stat.S_IFREG | 0o640, node, 3, 1_600_000_000_123_456_789)

    def lookup(self, parent: int, name: str, ctx: fuse.Context) -> fuse.Entry:
        node = self.nodes.get(name)
        if node is None:
            raise FileNotFoundError(errno.ENOENT, "no such name")
        return fuse.Entry(node, self.getattr(node, ctx))

    def readdir(self, node: int, ctx: fuse.Context) -> Iterable[fuse.DirEntry]:
        self.listed += 1
        for name, number in self.nodes.items():
            yield fuse.DirEntry(name, number, self.getattr(number, ctx).mode)


def test_a_tree(mountpoint: Path) -> None:
    operations = Tree()
    with fuse.Server(operations, mountpoint):
        assert sorted(os.listdir(mountpoint)) == sorted(operations.names)
        assert operations.listed == 1
        found = (mountpoint / operations.names[7]).stat()
        assert (found.st_size, found.st_nlink) == (17, 3)
        assert found.st_mtime_ns == 1_600_000_000_123_456_789
        assert not (mountpoint / "absent").exists()
        assert os.statvfs(mountpoint).f_namemax == 255
        done = subprocess.run(["ls", "-lR", mountpoint], capture_output=True, timeout=30, check=True)
        assert done.stdout.count(b"\n") > 4000


def test_pages_stay(mountpoint: Path) -> None:
    asked = []

    def read(offset: int, size: int, ctx: fuse.Context) -> memoryview:
        asked.append(offset)
        return memoryview(DATA)[offset : offset + size]

    with _single(mountpoint, read):
        assert (mountpoint / "data").read_bytes() == DATA
        for _ in range(5):  # under memory pressure pages may go at any time, but not each time
            before = len(asked)
            assert (mountpoint / "data").read_bytes() == DATA
            if len(asked) == before:
                break
        assert len(asked) == before


SERVER = """
import sys, time
from pathlib import Path
from bootseer.kernel import fuse
def read(offset, size, ctx):
    if offset >= 1 << 20:
        time.sleep(60)
    return bytes(size)
fuse.Server(fuse.SingleFile("data", 4 << 20, read), Path(sys.argv[1]), options=fuse.Options(direct_io=True)).start()
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_reader_can_be_killed_while_it_waits(mountpoint: Path) -> None:
    waiting, seen = threading.Event(), []

    def read(offset: int, size: int, ctx: fuse.Context) -> bytes:
        done = threading.Event()
        ctx.on_interrupt = done.set
        waiting.set()
        seen.append(done.wait(20))
        raise InterruptedError(errno.EINTR, "interrupted")

    with _single(mountpoint, read, direct_io=True):
        with subprocess.Popen(["dd", f"if={mountpoint}/data", "of=/dev/null"], stderr=subprocess.DEVNULL) as process:
            assert waiting.wait(20)
            started = time.monotonic()
            process.kill()
            process.wait(10)
        assert time.monotonic() - started < 5
    assert True in seen


def test_stop_of_a_busy_mount_aborts_it(mountpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = _single(mountpoint, direct_io=True)
    server.start()
    with (mountpoint / "data").open("rb", buffering=0) as file:
        assert file.read(10) == DATA[:10]
        server.stop(timeout=0.2)
        with pytest.raises(OSError, match=r"not connected|abort"):
            file.read(10)
    assert "still in use" in caplog.text
    assert server.wait(1)
    server.stop()


def test_stop_with_an_operation_that_does_not_end(mountpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    begun, free = threading.Event(), threading.Event()

    def read(offset: int, size: int, ctx: fuse.Context) -> bytes:
        begun.set()
        free.wait(30)
        return b""

    server = _single(mountpoint, read, direct_io=True)
    server.start()
    with subprocess.Popen(["cat", mountpoint / "data"], stderr=subprocess.DEVNULL) as reader:
        assert begun.wait(20)
        server.stop(timeout=0.2)
        assert reader.wait(10) != 0
    assert "left behind" in caplog.text
    free.set()
    assert server.wait(10)
    server.stop()


def test_unmount_from_elsewhere_ends_it(mountpoint: Path) -> None:
    server = _single(mountpoint)
    server.start()
    assert not server.wait(0.1)
    subprocess.run(["umount", mountpoint], check=True, timeout=20)
    assert server.wait(10)
    server.stop()


def test_stop_leaves_other_mounts_alone(mountpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = _single(mountpoint)
    server.start()
    mount.unmount(mountpoint)
    mount.mount("other", mountpoint, "tmpfs")
    try:
        caplog.set_level(logging.WARNING)
        server.stop()
        entry = mount.find(mountpoint)
        assert entry
        # the number of a file system that is gone may be given out again at once, so this can name either
        assert entry.fstype == "tmpfs"
    finally:
        mount.unmount(mountpoint)


def test_a_forked_child_does_not_keep_the_mount(mountpoint: Path, tmp_path: Path) -> None:
    """Else a dead server's readers would wait for a child that never answers."""
    script = SERVER.replace(
        'print("ready"', 'import os\nif os.fork() == 0:\n    time.sleep(5)\n    os._exit(0)\nprint("ready"'
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(mountpoint)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0
    ) as process:
        try:
            assert process.stdout
            assert process.stdout.readline() == b"ready\n"
            process.kill()
            process.wait(10)
            started = time.monotonic()
            with pytest.raises(OSError, match=r"not connected|abort"):
                (mountpoint / "data").read_bytes()
            assert time.monotonic() - started < 3  # the child lives for 5 s
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    mount.unmount(mountpoint)


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no such folder"):
        _single(tmp_path / "absent").start()
