"""The thread that renews leases: what it may not hold, what it survives, and what comes first."""

import gc
import threading
import weakref
from collections.abc import Iterator

import pytest

from bootseer.hdfs import lease
from support.waits import until


class Node:
    def __init__(self, said: list[str], error: Exception | None = None) -> None:
        self._said, self._error = said, error

    def renew_lease(self, *, deadline: float | None = None) -> None:
        self._said.append("lease")
        if self._error:
            raise self._error


class File:
    def __init__(self, namenode: Node, said: list[str]) -> None:
        self.namenode, self._said = namenode, said

    def keep_alive(self) -> None:
        self._said.append("beat")


def running() -> bool:
    return any(thread.name == "bootseer-leases" for thread in threading.enumerate())


@pytest.fixture(autouse=True)
def soon(monkeypatch) -> Iterator[None]:
    monkeypatch.setattr(lease, "RENEW", 0.02)
    yield
    with lease.lock:
        lease.held.clear()
    until(lambda: not running())


def test_leases_come_before_pipelines():
    said: list[str] = []
    file = File(Node(said), said)
    lease.hold(file)  # type: ignore[arg-type]
    until(lambda: len(said) >= 4)
    lease.release(file)  # type: ignore[arg-type]
    assert said[:4] == ["lease", "beat", "lease", "beat"]


def test_a_file_that_nobody_has_any_more_is_collected_and_the_thread_ends():
    said: list[str] = []
    file = File(Node(said), said)
    seen = weakref.ref(file)
    lease.hold(file)  # type: ignore[arg-type]
    until(lambda: len(said) >= 4)
    del file
    gc.collect()
    until(lambda: seen() is None)
    until(lambda: not running())


def test_an_unexpected_error_of_a_renewal_does_not_end_the_others(caplog):
    said: list[str] = []
    file = File(Node(said, ZeroDivisionError("what is this")), said)
    lease.hold(file)  # type: ignore[arg-type]
    until(lambda: said.count("lease") >= 3)
    assert "what is this" in caplog.text
    assert running()
    lease.release(file)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_after_the_death_of_the_thread_the_next_file_has_another(monkeypatch):
    said: list[str] = []

    def die() -> bool:
        raise SystemExit

    with monkeypatch.context() as patched:
        patched.setattr(lease, "_renew_all", die)
        first = File(Node(said), said)
        lease.hold(first)  # type: ignore[arg-type]
        until(lambda: not running())
    second = File(Node(said), said)
    lease.hold(second)  # type: ignore[arg-type]
    until(lambda: "lease" in said)
