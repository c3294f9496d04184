"""The end of a recording in the fetcher process: advice, so that no trouble of it may cost the process."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from bootseer.blocks import profiles
from bootseer.blocks.fetcherd import FetcherProcess
from bootseer.blocks.prefetch import Plan
from bootseer.blocks.shared import Count


class Recorder:
    driver = "fuse"

    def __init__(self, trouble: Exception) -> None:
        self._trouble = trouble

    def poll(self) -> int:
        raise self._trouble

    def trace(self, *, complete: bool) -> object:
        raise self._trouble


@pytest.fixture
def process() -> FetcherProcess:
    """Only what the end of a recording needs."""
    process = object.__new__(FetcherProcess)
    vars(process).update(
        _shared=SimpleNamespace(counts=[0] * 256),
        _key=profiles.ProfileKey("train"),
        _spec=SimpleNamespace(id="tree", digest="ab" * 32),
        _plan=Plan(),
        _recording="recording",
        _recorder=Recorder(ValueError("unforeseen")),
        _renewal=None,
        _hurry=threading.Event(),
        _renewal_stop=threading.Event(),
    )
    return process


def test_a_recording_that_fails_costs_a_line(process: FetcherProcess, caplog: pytest.LogCaptureFixture) -> None:
    process._end_recording()
    assert process._shared.counts[Count.RECORDED] == 1, "no other fetcher tries this again"
    process._end_renewal()
    assert process._recording == "failed"
    assert "is not published" in caplog.text


def test_a_poll_that_fails_ends_the_recording(process: FetcherProcess) -> None:
    process._poll()
    assert process._recording == "failed"
    process._end_recording()
    assert process._renewal is None


def test_publishing_holds_nobody_up(process: FetcherProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(key: profiles.ProfileKey) -> bool:
        time.sleep(0.5)
        return False

    monkeypatch.setattr(process, "_publish_trace", slow)
    began = time.monotonic()
    process._end_recording()
    assert time.monotonic() - began < 0.4
    assert process._recording == "publishing"
    process._end_renewal()


def test_without_a_thread_to_be_had_nothing_is_published(
    process: FetcherProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    process._end_recording()
    assert process._recording == "failed"
    process._end_renewal()
