"""What a log line is, and limits of the log of a process that lives long: of repeated lines, and of its size."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
import time
from typing import Any, NamedTuple

from bootseer.units import one_line

USER = "user"
"""Attribute of a record (``extra``): on whose behalf the line is. Each has lines of its own."""
_KINDS = 1000


class _Kind(NamedTuple):
    logger: str
    level: int
    text: str
    user: object

    @property
    def of(self) -> str:
        if self.user is None:
            return ""
        return f" of user {self.user}" if isinstance(self.user, int) else f" of {self.user}"


class OneLine(logging.Formatter):
    """Names in a store, and what a job asks for, are others' words: they begin no line of their own, and do nothing to
    the terminal of who reads the log."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return one_line(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        return "\n".join(f"  {one_line(line)}" for line in super().formatException(ei).splitlines())


def to_stderr() -> None:
    """Have this process, which is a server's, log there."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLine("%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


class LogRateLimit(logging.Filter):
    """A damaged store and a job that tries again and again made 50 MB of log in a minute, where ``state_dir`` may be
    memory. Passes ``most`` lines of one kind (level, unformatted text, `USER`) per ``seconds``; the next line that
    passes says how many of each kind were left out. For a handler; a race between threads miscounts a line, no more."""

    def __init__(self, most: int = 100, seconds: float = 10.0) -> None:
        super().__init__()
        self._most, self._seconds = most, seconds
        self._seen: dict[_Kind, tuple[float, int]] = {}
        self._next = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        kind = _Kind(record.name, record.levelno, str(record.msg), getattr(record, USER, None))
        now = time.monotonic()
        began, count = self._seen.get(kind, (now, 0))
        if count >= self._most and now - began < self._seconds:
            self._seen[kind] = began, count + 1
            return False
        if len(self._seen) >= _KINDS:
            self._seen.clear()
        left_out = self._left_out(now) if now >= self._next else {}
        began, count = self._seen.get(kind, (now, 0))
        self._seen[kind] = began, count + 1
        if left_out:
            parts = []
            if own := left_out.pop(kind, 0):
                parts.append(f"and {own} such lines{kind.of} before it, left out")
            parts += [f"left out: {many} lines{other.of} as {other.text!r}" for other, many in left_out.items()]
            record.msg, record.args = f"{record.getMessage()} ({'; '.join(parts)})", ()
        return True

    def _left_out(self, now: float) -> dict[_Kind, int]:
        """How many lines of which kinds, in times that have ended: these are counted no more."""
        over = [kind for kind, (began, _) in self._seen.items() if now - began >= self._seconds]
        ended = {kind: self._seen.pop(kind)[1] for kind in over}
        self._next = min((began for began, _ in self._seen.values()), default=now) + self._seconds
        return {kind: count - self._most for kind, count in ended.items() if count > self._most}


class LogSizeLimit(logging.Filter):
    """The file that standard error appends to begins anew when it has ``most`` bytes; what was in it is then beside it,
    with ``.old`` at its name. For a handler of each process that writes there: of two at once one does it, or both."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def filter(self, record: logging.LogRecord) -> bool:
        with contextlib.suppress(OSError):  # a full disk is no reason to end
            if os.fstat(2).st_size > self._most:
                path = os.readlink("/proc/self/fd/2")
                try:
                    shutil.copyfile(path, f"{path}.old")
                finally:
                    os.ftruncate(2, 0)
        return True
