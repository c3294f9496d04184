"""A limit of repeated lines in the log of a process that lives long."""

from __future__ import annotations

import logging
import time


class LogRateLimit(logging.Filter):
    """A damaged store and a job that tries again and again made 50 MB of log in a minute, where ``state_dir`` may be
    memory. Passes ``most`` lines of one kind (level and unformatted text) per ``seconds``; the next one that passes
    says how many were left out. For a handler; a race between threads miscounts a line, no more."""

    def __init__(self, most: int = 100, seconds: float = 10.0) -> None:
        super().__init__()
        self._most, self._seconds = most, seconds
        self._seen: dict[tuple[str, int, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        key, now = (record.name, record.levelno, str(record.msg)), time.monotonic()
        began, count = self._seen.get(key, (now, 0))
        if now - began >= self._seconds:
            if count > self._most:
                record.msg = f"{record.getMessage()} (and {count - self._most} such lines before it, left out)"
                record.args = ()
            began, count = now, 0
        self._seen[key] = began, count + 1
        return count < self._most
