"""Parallel reads of storage that is one place: nobody starves, nobody waits for a store that hangs but who uses it."""

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from bootseer.errors import UnavailableError
from bootseer.stripefs.storage import pool
from bootseer.stripefs.storage.folder import FolderBackend
from bootseer.stripefs.storage.interface import Piece


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


def until(true, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


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


def test_many_readers_of_a_slow_store_all_get_on(tmp_path, monkeypatch):
    monkeypatch.setattr(pool, "STALL", 0.5)
    backend, source, buffers = FolderBackend(tmp_path), Slow(0.1), []

    def read() -> None:
        some, buffer = wanted(source, 24)
        backend.read_many(some)
        buffers.append(buffer)

    assert threads_of(8, read) == [None] * 8
    assert buffers == [bytearray(b"x" * 24)] * 8
    assert source.most <= 16


def test_a_reader_that_waits_for_a_thread_has_not_stalled(tmp_path, monkeypatch):
    """All threads are taken by another request for much longer than a run may take, but that one gets on."""
    monkeypatch.setattr(pool, "STALL", 0.3)
    backend, source = FolderBackend(tmp_path), Slow(0.2)
    assert threads_of(6, lambda: backend.read_many(wanted(source, 16)[0])) == [None] * 6


def test_a_store_that_hangs_keeps_no_other_waiting(tmp_path, monkeypatch):
    monkeypatch.setattr(pool, "STALL", 1.0)
    gate, problems = threading.Event(), []
    hung = Slow(gate=gate)

    def hang() -> None:
        with pytest.raises(UnavailableError, match="no part of a read has ended") as caught:
            FolderBackend(tmp_path / "hung").read_many(wanted(hung, 16)[0])
        problems.append(caught.value)

    waiting = threading.Thread(target=hang)
    waiting.start()
    try:
        until(lambda: hung.begun == 16)
        some, buffer = wanted(Slow(), 40)
        FolderBackend(tmp_path / "fine").read_many(some)
        assert buffer == b"x" * 40
        with pytest.raises(UnavailableError, match="no part of a read has ended"):  # it never began
            FolderBackend(tmp_path / "hung").read_many(wanted(Slow(), 2)[0])
        assert not problems  # it holds the caller until nothing can write to its memory
    finally:
        gate.set()
        waiting.join()
    assert len(problems) == 1


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


def test_pools_are_few(monkeypatch):
    monkeypatch.setattr(pool, "_pools", type(pool._pools)())
    for number in range(100):
        assert pool.parallel([lambda: 1, lambda: 2], store=f"s{number}") == [1, 2]
    assert len(pool._pools) == pool._STORES
    gate = threading.Event()
    threads = [
        threading.Thread(target=pool.parallel, args=([gate.wait] * 2,), kwargs={"store": f"t{number}"})
        for number in range(pool._STORES + 4)
    ]
    for thread in threads:
        thread.start()
    try:
        until(lambda: sum(pool.users for pool in pool._pools.values()) == len(threads))
        assert len(pool._pools) <= pool._STORES + 1
        assert pool._pools[""].users >= 4
    finally:
        gate.set()
        for thread in threads:
            thread.join()


def test_large_parts_may_take_longer(tmp_path, monkeypatch):
    monkeypatch.setattr(pool, "STALL", 0.2)
    buffers = [bytearray(1 << 20), bytearray(1 << 20)]
    source = Slow(0.8)
    some = [Piece(source, 0, [memoryview(buffer)]) for buffer in buffers]
    FolderBackend(Path(tmp_path)).read_many(some)
    assert all(buffer == b"x" * (1 << 20) for buffer in buffers)
