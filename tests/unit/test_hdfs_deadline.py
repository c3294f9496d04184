"""Calls with a deadline: hanging ones are left behind, but not without number."""

import threading
import time

import pytest

from bootseer.errors import UnavailableError
from bootseer.hdfs import deadline
from bootseer.hdfs.deadline import Workers


def test_hanging_calls_are_limited_and_forgotten_when_they_end(monkeypatch):
    monkeypatch.setattr(deadline, "LIMIT", 3)
    workers, go, ended = Workers(), threading.Event(), []

    def hang() -> None:
        go.wait(30)
        ended.append(1)

    for _ in range(3):
        assert workers.call(lambda: 5, 10.0) == 5
        with pytest.raises(TimeoutError):
            workers.call(hang, 0.01)
    began = time.monotonic()
    with pytest.raises(UnavailableError, match="3 earlier calls to HDFS have not ended"):
        workers.call(hang, 10.0)
    assert time.monotonic() - began < 5
    go.set()
    until = time.monotonic() + 20
    while workers._late and time.monotonic() < until:
        time.sleep(0.01)
    assert workers._late == 0
    assert len(ended) == 3  # the refused call was never begun
    assert workers.call(lambda: 6, 10.0) == 6


def test_a_timeout_of_the_call_itself_is_no_hanging_call():
    workers = Workers()

    def fail() -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        workers.call(fail, 10.0)
    assert workers._late == 0
