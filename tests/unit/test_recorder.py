"""The end of a recording in the fetcher process: advice, so that no trouble of it may cost the process."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bootseer.blocks.fetch.prefetch import Plan
from bootseer.blocks.formats.trace import Trace
from bootseer.blocks.profiles.library import ProfileKey
from bootseer.blocks.serving.recorder import Recorder
from bootseer.blocks.serving.shared_memory import Count


class Failing:
    """A recording in trouble."""

    def poll(self) -> int:
        raise ValueError("unforeseen")

    def trace(self, *, complete: bool = True) -> Trace:
        raise ValueError("unforeseen")


@pytest.fixture
def counts() -> memoryview:
    return memoryview(bytearray(256 * 8)).cast("Q")


def recorder_of(counts: memoryview, key: ProfileKey | None) -> Recorder:
    """Only what the end of a recording needs."""
    tree = cast(Any, SimpleNamespace(digest="ab" * 32, cache=None, meta=None))
    cache = cast(Any, SimpleNamespace(blocks_now=lambda: SimpleNamespace(close=lambda: None)))
    none = cast(Any, None)
    return Recorder(cast(Any, Failing()), counts, none, key, none, tree, cache, plan=Plan, keep_hot=lambda blocks: None)


@pytest.fixture
def recorder(counts: memoryview) -> Recorder:
    return recorder_of(counts, ProfileKey("train"))


def test_a_recording_that_fails_costs_a_line(
    recorder: Recorder, counts: memoryview, caplog: pytest.LogCaptureFixture
) -> None:
    recorder.end()
    assert counts[Count.RECORDED] == 1, "no other fetcher tries this again"
    recorder.finish()
    recorder.finish_detached()
    assert recorder.state == "failed"
    assert "is not published" in caplog.text


def test_a_poll_that_fails_ends_the_recording(recorder: Recorder, counts: memoryview) -> None:
    recorder.poll()
    assert recorder.state == "failed"
    assert counts[Count.RECORDED] == 1
    recorder.end()
    assert not recorder.finish()
    assert recorder.state == "failed"


def test_publishing_holds_nobody_up(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(key: ProfileKey) -> bool:
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
    assert not recorder.finish()


def test_what_is_recorded(recorder: Recorder, counts: memoryview) -> None:
    off = recorder_of(counts, None)
    off.poll()
    off.end()
    off.finish()
    assert (off.state, recorder.state) == ("off", "recording")
    recorder.end()
    recorder.finish()
    assert recorder_of(counts, ProfileKey("train")).state == "ended"
