"""The FUSE loop against a socket that plays the kernel: encodings, errors, interrupts, and that it always answers."""

from __future__ import annotations

import errno
import os
import socket
import stat
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.errors import UnsupportedError
from bootseer.kernel import fuse, fuse_device
from bootseer.kernel import fuse_wire as wire
from bootseer.kernel.fuse_loop import Loop


@pytest.mark.parametrize(
    ("layout", "size"),
    [
        (wire.IN_HEADER, 40),
        (wire.OUT_HEADER, 16),
        (wire.ATTR, 88),
        (wire.INIT_OUT, 64),
        (wire.OPEN_OUT, 16),
        (wire.DIRENT, 24),
        (wire.STATFS_OUT, 80),
        (wire.FORGET_ONE, 16),
        (wire.RELEASE_IN, 24),
        (wire.WRITE_IN, 40),
        (wire.SETATTR_IN, 88),
        (wire.CREATE_IN, 16),
        (wire.RENAME2_IN, 16),
    ],
)
def test_sizes_are_those_of_linux_fuse_h(layout: struct.Struct, size: int) -> None:
    assert layout.size == size
    assert wire.ENTRY_OUT.size + wire.ATTR.size == 128
    assert wire.ATTR_OUT.size + wire.ATTR.size == 104


class Listing(fuse.Operations):
    def __init__(self, names: list[str]) -> None:
        self.entries = [fuse.DirEntry(name, 10 + n, stat.S_IFREG) for n, name in enumerate(names)]

    def readdir(self, node: int, ctx: fuse.Context) -> list[fuse.DirEntry]:
        return self.entries


def _parse(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(data):
        _, offset, length, _ = wire.DIRENT.unpack_from(data, at)
        yield offset, data[at + 24 : at + 24 + length]
        at += 24 + (length + 7) // 8 * 8
    assert at == len(data)


@given(
    names=st.lists(
        st.binary(min_size=1, max_size=60).filter(lambda name: not {47, 0} & set(name) and name.strip(b"."))
    ),
    size=st.integers(300, 5000),
)
def test_a_directory_read_in_pieces_is_whole(names: list[bytes], size: int) -> None:
    answers = Loop(Listing([os.fsdecode(name) for name in names]), Path("/nowhere"), fuse.Options())
    ctx = fuse.Context(1, 1, 0)
    fh = wire.OPEN_OUT.unpack(answers.answer(wire.OPENDIR, ctx, memoryview(bytes(8))))[0]
    seen, offset = [], 0
    while True:
        body = memoryview(wire.READ_IN.pack(fh, offset, size))
        part = answers.answer(wire.READDIR, ctx, body)
        assert len(part) <= size
        if not part:
            break
        for offset, name in _parse(part):  # noqa: B007
            seen.append(name)
    assert seen == [b".", b"..", *names]


class Kernel:
    """The other end of the device: requests go out, answers come back."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock, self.unique = sock, 0

    def send(self, opcode: int, body: bytes = b"", node: int = 1) -> int:
        self.unique += 2
        header = wire.IN_HEADER.pack(40 + len(body), opcode, self.unique, node, 0, 0, 77, 0, 0)
        self.sock.send(header + body)
        return self.unique

    def answer(self) -> tuple[int, int, bytes]:
        data = self.sock.recv(2 << 20)
        length, code, unique = wire.OUT_HEADER.unpack_from(data)
        assert length == len(data)
        return unique, code, data[16:]

    def ask(self, opcode: int, body: bytes = b"", node: int = 1) -> tuple[int, bytes]:
        unique = self.send(opcode, body, node)
        got, code, answer = self.answer()
        assert got == unique
        return code, answer


class Odd(fuse.Operations):
    """Reads misbehave by their offset."""

    def __init__(self) -> None:
        self.forgotten: list[tuple[int, int]] = []
        self.waiting = threading.Event()

    def open(self, node: int, flags: int, ctx: fuse.Context) -> int:
        return 5

    def size(self, fh: int) -> int:
        return 1 << 20

    def forget(self, node: int, lookups: int) -> None:
        self.forgotten.append((node, lookups))

    def read(self, fh: int, offset: int, size: int, ctx: fuse.Context) -> fuse.ReadResult:
        if offset == 0:
            return b"x" * size
        if offset == 4096:
            return b"short"
        if offset == 8192:
            return b"x" * (size + 1)
        if offset == 12288:
            raise SystemExit("an operation may not end its worker")
        if offset == 16384:
            return memoryview(b"x" * size).cast("I")  # its length is not its size
        if offset == 20480:
            raise TimeoutError
        if offset == 24576:
            done = threading.Event()
            ctx.on_interrupt = done.set
            self.waiting.set()
            assert done.wait(10)
            assert ctx.interrupted
            raise InterruptedError(errno.EINTR, "interrupted")
        raise OSError(errno.ESTALE, "stale")


def _start(
    monkeypatch: pytest.MonkeyPatch, init: bytes, operations: fuse.Operations, **options: int
) -> tuple[Kernel, fuse.Server]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(10)
    monkeypatch.setattr(fuse_device, "_open_and_mount", lambda *_, **__: theirs.detach())
    server = fuse.Server(operations, Path("/nowhere"), workers=2, options=fuse.Options(**options))
    kernel = Kernel(ours)
    kernel.send(wire.INIT, init)
    return kernel, server


@pytest.fixture
def odd(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Kernel, Odd, fuse.Server]]:
    operations = Odd()
    kernel, server = _start(monkeypatch, wire.INIT_IN.pack(7, 45, 1 << 20, 0xFFFFFFFF) + b"\xff" * 4, operations)
    server.start()
    code, body = kernel.answer()[1:]
    assert code == 0
    major, minor, readahead, flags, background, threshold, _, _, pages, _, flags2, *_ = wire.INIT_OUT.unpack(body)
    assert (major, minor, readahead, background, threshold, pages) == (7, 40, 128 << 10, 64, 48, 256)
    assert flags | flags2 << 32 == sum(wire.INIT_FLAGS.values()) | wire.INIT_EXT
    yield kernel, operations, server
    kernel.sock.close()
    assert server.wait(10)
    server.stop()


@pytest.mark.parametrize(("offered", "asked"), [(True, 240), (False, 240), (True, 0)])
def test_the_kernel_ends_a_mount_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, offered: bool, asked: int
) -> None:
    """Where it can, and is asked to."""
    flags2 = wire.REQUEST_TIMEOUT >> 32 if offered else 0
    init = wire.INIT_IN.pack(7, 43, 1 << 20, wire.INIT_EXT) + wire.INIT_IN_FLAGS2.pack(flags2)
    kernel, server = _start(monkeypatch, init, Odd(), request_timeout=asked)
    server.start()
    *_, granted, _, seconds = wire.INIT_OUT.unpack(kernel.answer()[2])
    assert seconds == asked
    assert bool(granted & wire.REQUEST_TIMEOUT >> 32) == (offered and asked > 0)
    kernel.sock.close()
    assert server.wait(10)
    server.stop()


def test_every_read_gets_one_answer(odd: tuple[Kernel, Odd, fuse.Server], caplog: pytest.LogCaptureFixture) -> None:
    kernel, _, _ = odd
    kernel.ask(wire.OPEN, wire.OPEN_IN.pack(os.O_RDONLY, 0))
    expected = [0, errno.EIO, errno.EIO, errno.EIO, errno.EIO, errno.EIO]
    for number, code in enumerate(expected):
        got, body = kernel.ask(wire.READ, wire.READ_IN.pack(5, number * 4096, 4096))
        assert (number, got) == (number, -code)
        assert body == (b"x" * 4096 if code == 0 else b"")
    assert kernel.ask(wire.READ, wire.READ_IN.pack(5, 1 << 19, 4096)) == (-errno.ESTALE, b"")
    assert kernel.ask(wire.READ, wire.READ_IN.pack(5, 0, 4096)) == (0, b"x" * 4096)
    assert "returned 5" in caplog.text


def test_requests_of_a_writable_file_system_are_refused(odd: tuple[Kernel, Odd, fuse.Server]) -> None:
    kernel, _, _ = odd
    assert kernel.ask(16, bytes(40)) == (-errno.ENOSYS, b"")  # WRITE
    assert kernel.ask(9999) == (-errno.ENOSYS, b"")
    assert kernel.ask(wire.OPEN, wire.OPEN_IN.pack(os.O_RDWR, 0)) == (-errno.EROFS, b"")


def test_interrupt_reaches_the_waiting_operation(odd: tuple[Kernel, Odd, fuse.Server]) -> None:
    kernel, operations, _ = odd
    unique = kernel.send(wire.READ, wire.READ_IN.pack(5, 24576, 4096))
    assert operations.waiting.wait(10)
    kernel.send(wire.INTERRUPT, wire.INTERRUPT_IN.pack(unique))
    assert kernel.answer() == (unique, -errno.EINTR, b"")


def test_interrupt_of_an_unknown_request_is_asked_again(odd: tuple[Kernel, Odd, fuse.Server]) -> None:
    kernel, _, _ = odd
    assert kernel.ask(wire.INTERRUPT, wire.INTERRUPT_IN.pack(4711)) == (-errno.EAGAIN, b"")


def test_forgets_are_counted_and_not_answered(odd: tuple[Kernel, Odd, fuse.Server]) -> None:
    kernel, operations, _ = odd
    kernel.send(wire.FORGET, wire.FORGET_IN.pack(3), node=9)
    pairs = b"".join(wire.FORGET_ONE.pack(node, node + 1) for node in range(200))
    kernel.send(wire.BATCH_FORGET, wire.BATCH_FORGET_IN.pack(200, 0) + pairs)
    kernel.ask(wire.STATFS)
    kernel.ask(wire.STATFS)
    for _ in range(100):
        if len(operations.forgotten) == 201:
            break
        threading.Event().wait(0.02)
    assert sorted(operations.forgotten) == sorted([(9, 3), *((node, node + 1) for node in range(200))])


def test_when_no_worker_is_left_the_connection_ends(
    odd: tuple[Kernel, Odd, fuse.Server], caplog: pytest.LogCaptureFixture
) -> None:
    kernel, _, server = odd
    for _ in range(2):
        kernel.sock.send(b"no request")
    assert kernel.sock.recv(100) == b""
    assert server.wait(10)
    assert "serving ends" in caplog.text


def test_kernel_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, server = _start(monkeypatch, wire.INIT_IN.pack(7, 26, 1 << 17, 0), Odd())
    closer = threading.Timer(0.3, kernel.sock.close)
    closer.start()
    with pytest.raises(UnsupportedError, match="too old"):
        server.start()
    closer.join()


def test_attribute_values() -> None:
    operations = fuse.SingleFile("data", 12345, lambda offset, size, ctx: b"")
    ctx = fuse.Context(1, fuse.ROOT, 0)
    answers = Loop(operations, Path("/nowhere"), fuse.Options(entry_timeout=1.5, attr_timeout=2.25))
    body = answers.answer(wire.LOOKUP, ctx, memoryview(b"data\0"))
    assert wire.ENTRY_OUT.unpack_from(body) == (2, 0, 1, 2, 500_000_000, 250_000_000)
    values = wire.ATTR.unpack_from(body, wire.ENTRY_OUT.size)
    assert values[:3] == (2, 12345, 25)
    assert values[9] == stat.S_IFREG | 0o444
    with pytest.raises(FileNotFoundError):
        answers.answer(wire.LOOKUP, ctx, memoryview(b"other\0"))
