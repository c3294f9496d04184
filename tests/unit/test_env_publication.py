"""Publications in the background: cancelled ones stop, and a start's end waits for what still reads the layers."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

import pytest

from bootseer.env import Publication
from bootseer.launch import node
from bootseer.launch.node import Start, seen_out


def record() -> Start:
    start = Start(job="j", attempt=0, cycle=0, node="n", events="")
    start.env = {"how": "ran", "reason": "miss"}
    return start


def until_cancelled(cancelled: Callable[[], bool]) -> tuple[bool, str]:
    end = time.monotonic() + 20
    while not cancelled() and time.monotonic() < end:
        time.sleep(0.01)
    return False, "stopped"


@pytest.mark.parametrize("kind", [None, KeyboardInterrupt])
def test_the_end_of_a_start_cancels_what_is_not_done(
    monkeypatch: pytest.MonkeyPatch, kind: type[BaseException] | None
) -> None:
    monkeypatch.setattr(node, "_PUBLICATION_DEADLINE", 0.1)
    publication, start = Publication(until_cancelled), record()
    with contextlib.suppress(KeyboardInterrupt), seen_out(publication, start):
        if kind:
            raise kind
    assert publication.ended(0)
    assert start.env == {"how": "ran", "reason": "miss; stopped"}


def test_a_publication_that_ends_in_time_counts() -> None:
    done = threading.Event()
    publication, start = Publication(lambda cancelled: (done.wait(20) and not cancelled(), "")), record()
    threading.Timer(0.1, done.set).start()
    with seen_out(publication, start):
        pass
    assert start.env["how"] == "ran-and-published"
