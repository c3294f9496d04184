"""Parallel reads of storage that is one place: nobody starves, nobody waits for a store that hangs but who uses it."""

import threading
import time
from collections.abc import Sequence

import pytest

from bootseer.backends.folder import FolderBackend
from bootseer.backends.interface import Piece
from support.waits import until


class Slow:
    """Each read takes ``seconds``; or waits for ``gate``."""

    size, version = 1 << 40, ""

    def __init__(self, seconds: float = 0.0, gate: threading.Event | None = None) -> None:
        self.seconds, self.gate = seconds, gate
        self.begun = self.now = self.most = 0
        self._lock = threading.Lock()

    def readinto(self, offset: int, parts: Sequence[memoryview]) -> None:
        with self._lock:
            self.begun, self.now = self.begun + 1, self.now + 1
            self.most = max(self.most, self.now)
        if self.gate is not None:
            assert self.gate.wait(30)
        time.sleep(self.seconds)
        for part in parts:
            part[:] = b"x" * len(part)
        with self._lock:
            self.now -= 1

    def close(self) -> None: ...


def wanted(source: Slow, runs: int) -> tuple[list[Piece], bytearray]:
    buffer = bytearray(runs)
    return [Piece(source, i, [memoryview(buffer)[i : i + 1]]) for i in range(runs)], buffer


def threads_of(count: int, read) -> list[BaseException | None]:
    problems: list[BaseException | None] = [None] * count

    def one(number: int) -> None:
        try:
            read()
        except BaseException as exc:
            problems[number] = exc

    threads = [threading.Thread(target=one, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return problems


def test_many_readers_of_a_slow_store_all_get_on(tmp_path):
    backend, source, buffers = FolderBackend(tmp_path), Slow(0.1), []

    def read() -> None:
        some, buffer = wanted(source, 24)
        backend.read_many(some)
        buffers.append(buffer)

    assert threads_of(8, read) == [None] * 8
    assert buffers == [bytearray(b"x" * 24)] * 8


def test_a_store_that_hangs_keeps_no_other_waiting(tmp_path):
    gate = threading.Event()
    hung = Slow(gate=gate)
    waiting = threading.Thread(target=lambda: FolderBackend(tmp_path).read_many(wanted(hung, 40)[0]))
    waiting.start()
    try:
        until(lambda: hung.begun == 16)
        some, buffer = wanted(Slow(), 40)
        FolderBackend(tmp_path).read_many(some)
        assert buffer == b"x" * 40
        assert hung.begun == 16
    finally:
        gate.set()
        waiting.join()


def test_after_an_error_no_more_runs_begin(tmp_path):
    source = Slow(0.01)

    def check(number: int, part: memoryview) -> None:
        raise ZeroDivisionError

    some, _ = wanted(source, 200)
    some[3] = some[3]._replace(check=check)
    with pytest.raises(ZeroDivisionError):
        FolderBackend(tmp_path).read_many(some)
    begun = source.begun
    time.sleep(0.1)
    assert source.now == 0
    assert source.begun == begun < 100
