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
from bootseer.blocks.serving.shared_memory import Count
from bootseer.blocks.serving.trace_publisher import TracePublisher


class Failing:
    """A recording in trouble."""

    def trace(self, *, complete: bool = True) -> Trace:
        raise ValueError("unforeseen")


@pytest.fixture
def counts() -> memoryview:
    return memoryview(bytearray(256 * 8)).cast("Q")


def publisher_of(counts: memoryview, key: ProfileKey | None) -> TracePublisher:
    """Only what the end of a recording needs."""
    tree = cast(Any, SimpleNamespace(digest="ab" * 32, cache=None, meta=None))
    cache = cast(Any, SimpleNamespace(blocks_now=lambda: SimpleNamespace(close=lambda: None)))
    none = cast(Any, None)
    return TracePublisher(cast(Any, Failing()), counts, none, key, none, tree, cache, plan=Plan)


@pytest.fixture
def publisher(counts: memoryview) -> TracePublisher:
    return publisher_of(counts, ProfileKey("train"))


def test_a_recording_that_fails_costs_a_line(
    publisher: TracePublisher, counts: memoryview, caplog: pytest.LogCaptureFixture
) -> None:
    publisher.end()
    assert counts[Count.RECORDED] == 1, "no other fetcher tries this again"
    publisher.finish()
    publisher.finish_detached()
    assert publisher.state == "failed"
    assert "is not published" in caplog.text


def test_publishing_holds_nobody_up(publisher: TracePublisher, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(key: ProfileKey) -> bool:
        time.sleep(0.5)
        return False

    monkeypatch.setattr(publisher, "_publish_trace", slow)
    began = time.monotonic()
    publisher.end()
    assert time.monotonic() - began < 0.4
    assert publisher.state == "publishing"
    publisher.finish()


def test_without_a_thread_to_be_had_nothing_is_published(
    publisher: TracePublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    publisher.end()
    assert publisher.state == "failed"
    assert not publisher.finish()


def test_what_is_recorded(publisher: TracePublisher, counts: memoryview) -> None:
    off = publisher_of(counts, None)
    off.end()
    off.finish()
    assert (off.state, publisher.state) == ("off", "recording")
    publisher.end()
    publisher.finish()
    assert publisher_of(counts, ProfileKey("train")).state == "ended"
