"""FUSE mounts whose server is killed while another process holds its descriptors, and reads that are answered later."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bootseer.errors import DataError, UnsupportedError
from bootseer.kernel import fuse, mount
from support.waits import read_later, until

pytestmark = pytest.mark.root

DATA = random.Random(11).randbytes(3_000_001)
KEEP: set[int] = set()
OPTIONS = fuse.Options(direct_io=True)


# ---- answered later ----


class Waiting:
    """Reads that are put off, by offset."""

    def __init__(self) -> None:
        self.reads: dict[int, fuse.Context] = {}

    def read(self, offset: int, size: int, ctx: fuse.Context) -> fuse.ReadResult:
        assert (ctx.offset, ctx.size) == (offset, size)
        self.reads[offset] = ctx
        return fuse.LATER


def test_many_more_reads_wait_than_there_are_workers(mountpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "local").write_bytes(DATA)
    waiting = Waiting()
    operations = fuse.SingleFile("data", len(DATA), waiting.read)
    options = fuse.Options(direct_io=True)
    with (
        (tmp_path / "local").open("rb") as file,
        fuse.Server(operations, mountpoint, workers=2, options=options) as server,
    ):
        got = [read_later(mountpoint / "data", number * 8192, 5000) for number in range(24)]
        until(lambda: len(waiting.reads) == 24)
        assert not any(each.done() for each in got)
        for number, ctx in waiting.reads.items():
            right = DATA[number : number + 5000]
            result: fuse.ReadResult | Exception = right
            if number % 3 == 1:
                result = (file.fileno(), number)
            elif number % 3 == 2:
                result = memoryview(right)
            assert server.answer(ctx, result)
            assert not server.answer(ctx, result)  # once only
        for number, each in enumerate(got):
            assert each.result(20) == DATA[number * 8192 : number * 8192 + 5000]


@pytest.mark.parametrize(
    ("result", "number"),
    [
        (OSError(errno.ENOSPC, "full"), errno.ENOSPC),
        (ValueError("odd"), errno.EIO),
        (b"short", errno.EIO),
        (b"x" * 5000, errno.EIO),
        (fuse.LATER, errno.EIO),
        ((-1, 0), errno.EBADF),
    ],
)
def test_late_answers_that_are_errors(mountpoint: Path, result: object, number: int) -> None:
    waiting = Waiting()
    with fuse.Server(fuse.SingleFile("data", len(DATA), waiting.read), mountpoint, options=OPTIONS) as server:
        got = read_later(mountpoint / "data", 0, 4096)
        until(lambda: waiting.reads)
        assert server.answer(waiting.reads[0], result)  # type: ignore[arg-type]
        with pytest.raises(OSError, match=os.strerror(number)) as caught:
            got.result(20)
        assert caught.value.errno == number


def test_an_answer_from_within_the_read(mountpoint: Path) -> None:
    def read(offset: int, size: int, ctx: fuse.Context) -> fuse.ReadResult:
        server.answer(ctx, DATA[offset : offset + size])
        return fuse.LATER

    server = fuse.Server(fuse.SingleFile("data", len(DATA), read), mountpoint)
    with server:
        assert (mountpoint / "data").read_bytes() == DATA


def test_answers_after_the_end_go_nowhere(mountpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    waiting = Waiting()
    server = fuse.Server(fuse.SingleFile("data", len(DATA), waiting.read), mountpoint, options=OPTIONS)
    server.start()
    got = read_later(mountpoint / "data", 0, 4096)
    until(lambda: waiting.reads)
    server.stop(timeout=0.1)
    assert "aborting it" in caplog.text
    with pytest.raises(OSError, match="abort"):
        got.result(20)
    assert not server.answer(waiting.reads[0], b"x" * 4096)


def test_a_waiting_reader_can_be_interrupted(mountpoint: Path) -> None:
    asked = threading.Event()

    def read(offset: int, size: int, ctx: fuse.Context) -> fuse.ReadResult:
        ctx.on_interrupt = lambda: server.answer(ctx, InterruptedError(errno.EINTR, "interrupted")) and None
        asked.set()
        return fuse.LATER

    options = fuse.Options(direct_io=True)
    server = fuse.Server(fuse.SingleFile("data", len(DATA), read), mountpoint, workers=3, options=options)
    with server:
        pid = os.fork()
        if pid == 0:
            os.pread(os.open(mountpoint / "data", os.O_RDONLY), 4096, 0)
            os._exit(0)
        assert asked.wait(20)
        os.kill(pid, signal.SIGKILL)
        until(lambda: os.waitpid(pid, os.WNOHANG)[0])


# ---- served by one process after the other ----


def _serve(device: fuse.Device, note: int, read: Callable[..., fuse.ReadResult], negotiated: bytes = b"") -> None:
    """In a child: serve until the mount ends; writes what was negotiated to ``note``."""
    for fd in range(3, 256):  # such as files on the mount that the parent has open: they would keep it busy
        if fd not in (device.fd, note, *KEEP):
            with contextlib.suppress(OSError):
                os.close(fd)
    operations = fuse.SingleFile("data", len(DATA), read)
    if negotiated:
        server = fuse.Server.resume(operations, device, fuse.Negotiated.decode(negotiated), workers=2, options=OPTIONS)
    else:
        server = fuse.Server(operations, device.mountpoint, workers=2, options=OPTIONS, device=device)
        server.start()
    assert server.negotiated
    os.write(note, server.negotiated.encode())
    server.wait(30)


def _fork(body: Callable[[], None]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        body()
    finally:
        os._exit(0)


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_a_new_server_answers_what_the_dead_one_took(mountpoint: Path) -> None:
    device = fuse.Device.open(mountpoint, fuse.Options(direct_io=True))
    told, tell = os.pipe()
    seen, see = os.pipe()
    KEEP.add(see)

    def stuck(offset: int, size: int, ctx: fuse.Context) -> fuse.ReadResult:
        if offset < 16 * 8192:  # what was asked while this one lived: taken, never answered
            os.write(see, b".")
            return fuse.LATER
        return DATA[offset : offset + size]

    first = _fork(lambda: _serve(device, tell, stuck))
    second = 0
    try:
        negotiated = os.read(told, 4096)
        if "has_resend" not in fuse.Negotiated.decode(negotiated).flags:
            pytest.skip("Linux 6.9 sends requests again")
        kept = os.open(mountpoint / "data", os.O_RDONLY)
        assert os.pread(kept, 100, 1 << 20) == DATA[1 << 20 : (1 << 20) + 100]
        taken = [read_later(mountpoint / "data", number * 8192, 8192) for number in range(16)]
        count = 0
        while count < 16:
            count += len(os.read(seen, 100))
        _kill(first)
        fresh = read_later(mountpoint / "data", 2 << 20, 100)  # asked while nobody serves
        time.sleep(0.05)
        assert not fresh.done()
        assert not any(each.done() for each in taken)
        whole = lambda offset, size, ctx: DATA[offset : offset + size]  # noqa: E731
        second = _fork(lambda: _serve(device, tell, whole, negotiated))
        assert [each.result(20) for each in taken] == [DATA[at : at + 8192] for at in range(0, 16 * 8192, 8192)]
        assert fresh.result(20) == DATA[2 << 20 : (2 << 20) + 100]
        assert os.pread(kept, 100, 77) == DATA[77:177]
        os.close(kept)
        mount.unmount(mountpoint)
        assert os.waitpid(second, 0)[1] == 0
        second = 0
    finally:
        if second:
            _kill(second)
        device.close()
        KEEP.clear()
        for fd in (told, tell, seen, see):
            os.close(fd)


@pytest.mark.takeover
def test_short_reads_are_still_errors_after_a_takeover(mountpoint: Path) -> None:
    device = fuse.Device.open(mountpoint, OPTIONS)
    told, tell = os.pipe()
    first = _fork(lambda: _serve(device, tell, lambda offset, size, ctx: DATA[offset : offset + size]))
    negotiated = os.read(told, 4096)
    kept = os.open(mountpoint / "data", os.O_RDONLY)
    assert len(os.pread(kept, 100, 0)) == 100
    _kill(first)
    second = _fork(lambda: _serve(device, tell, lambda offset, size, ctx: b"short", negotiated))
    try:
        assert os.read(told, 4096) == negotiated
        for _ in range(2):  # an open and close of the same handle must not make it forget the size
            with pytest.raises(OSError, match=os.strerror(errno.EIO)):
                os.pread(kept, 100, 0)
            os.close(os.open(mountpoint / "data", os.O_RDONLY))
            time.sleep(0.05)
        os.close(kept)
    finally:
        _kill(second)
        device.close()
        os.close(told)
        os.close(tell)


def test_without_a_holder_left_readers_get_errors(mountpoint: Path) -> None:
    device = fuse.Device.open(mountpoint, OPTIONS)
    told, tell = os.pipe()
    first = _fork(lambda: _serve(device, tell, lambda offset, size, ctx: fuse.LATER))
    try:
        os.read(told, 4096)
        got = read_later(mountpoint / "data", 0, 4096)
        time.sleep(0.1)
        _kill(first)
        time.sleep(0.1)
        assert not got.done()
    finally:
        device.close()
        os.close(told)
        os.close(tell)
    with pytest.raises(OSError, match="abort"):
        got.result(20)


def test_kernels_that_cannot_send_again(mountpoint: Path) -> None:
    device = fuse.Device(mountpoint, None, -1)
    old = fuse.Negotiated(38, frozenset({"async_read"}))
    with pytest.raises(UnsupportedError, match="are lost"):
        fuse.Server.resume(fuse.Operations(), device, old)
    assert fuse.Negotiated.decode(old.encode()) == old
    for junk in (b"", b"{}", b"[1]", b"[1, 2]", b'["a", []]', b"\xff"):
        with pytest.raises(DataError):
            fuse.Negotiated.decode(junk)
