"""What the environment stage did, and how long its steps took."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import msgspec

from bootseer.env import overlay
from bootseer.env.publication import Publication
from bootseer.env.spec import Outcome


class EnvResult(msgspec.Struct, kw_only=True):
    """``exit_code`` is the command's, 0 when its result was restored. ``timings`` in seconds, by step."""

    outcome: Outcome
    reason: str
    exit_code: int
    key: str
    seconds: float = 0.0
    mounts: list[overlay.Group] = []
    publication: Publication | None = None
    """Still going on: wait for it or cancel it before the mounts are unmounted, or it is ended then."""
    timings: dict[str, float] = {}


class Timer:
    """Seconds of each step, added up by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - began
