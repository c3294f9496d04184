"""The use of a cache, as the process sees it that watches it."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bootseer.env.cacheuse import Use
from bootseer.kernel import libc


@pytest.mark.parametrize("how", ["watched", "not restored", "a folder that is gone"])
def test_a_watch_that_has_ended_leaves_nothing_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    pipes = list[int]()

    def init(*args: object) -> int:
        pipes.extend(os.pipe2(os.O_NONBLOCK))
        return pipes[-2]

    def mark(*args: object) -> None:
        if how == "a folder that is gone":
            raise FileNotFoundError

    monkeypatch.setattr(libc, "fanotify_init", init)
    monkeypatch.setattr(libc, "fanotify_mark", mark)
    held: Any = SimpleNamespace(
        restored=how != "not restored", group=True, joined=False, folder=tmp_path, known=set, entries=dict
    )
    before = set(os.listdir("/proc/self/fd"))
    Use(held).ended()
    for end in pipes[1:]:
        os.close(end)
    assert set(os.listdir("/proc/self/fd")) == before
