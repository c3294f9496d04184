"""The end of a recording in the fetcher process: advice, so that no trouble of it may cost the process."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import cast

import pytest

from bootseer.blocks.cache.blockfile import ReadyBlocks
from bootseer.blocks.fetch import prefetch
from bootseer.blocks.fetch.prefetch import Plan
from bootseer.blocks.formats.trace import Trace
from bootseer.blocks.profiles import library
from bootseer.blocks.serving.recorder import Purpose, Recorder
from bootseer.blocks.serving.shared import Count
from bootseer.store import Store


class Source:
    driver = "fuse"

    def __init__(self, trouble: Exception) -> None:
        self._trouble = trouble

    def poll(self) -> int:
        raise self._trouble

    def trace(self, *, complete: bool = True) -> Trace:
        raise self._trouble


@pytest.fixture
def counts() -> memoryview:
    return memoryview(bytearray(256 * 8)).cast("Q")


@pytest.fixture
def recorder(counts: memoryview) -> Recorder:
    """Only what the end of a recording needs."""
    purpose = Purpose(
        cast(Store, None),
        library.ProfileKey("train"),
        cast(prefetch.Target, None),
        lambda: cast(ReadyBlocks, None),
        Path("/nonexistent"),
        Path("/nonexistent"),
        Plan,
        lambda blocks: None,
    )
    return Recorder("tree", Source(ValueError("unforeseen")), counts, purpose)


def test_a_recording_that_fails_costs_a_line(
    recorder: Recorder, counts: memoryview, caplog: pytest.LogCaptureFixture
) -> None:
    recorder.end()
    assert counts[Count.RECORDED] == 1, "no other fetcher tries this again"
    recorder.finish()
    assert recorder.state == "failed"
    assert "is not published" in caplog.text


def test_a_poll_that_fails_ends_the_recording(recorder: Recorder, counts: memoryview) -> None:
    recorder.poll()
    assert recorder.state == "failed"
    assert counts[Count.RECORDED] == 1
    recorder.end()
    recorder.finish()
    assert recorder.state == "failed"


def test_publishing_holds_nobody_up(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(purpose: Purpose) -> bool:
        time.sleep(0.5)
        return False

    monkeypatch.setattr(recorder, "_publish_trace", slow)
    began = time.monotonic()
    recorder.end()
    assert time.monotonic() - began < 0.4
    assert recorder.state == "publishing"
    recorder.finish()


def test_without_a_thread_to_be_had_nothing_is_published(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    recorder.end()
    assert recorder.state == "failed"
    recorder.finish()


def test_what_is_recorded(recorder: Recorder, counts: memoryview) -> None:
    source = Source(ValueError("unforeseen"))
    off = Recorder("tree", source, counts, None)
    off.poll()
    off.end()
    off.finish()
    assert (off.state, recorder.state) == ("off", "recording")
    recorder.end()
    recorder.finish()
    assert Recorder("tree", source, counts, recorder._purpose).state == "ended"
