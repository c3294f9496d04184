"""Bounds of a process that works off what others have written: when the kernel ends it, and what memory it may take."""

from __future__ import annotations

import contextlib
import os
import resource
from pathlib import Path

_LEAST, _MOST, _SHARE = 512 << 20, 4 << 30, 0.25
_STACK, _THREADS = 8 << 20, 128
_SCORE = Path("/proc/self/oom_score_adj")


def be_ended_early(score: int = 0) -> None:
    """Where memory is short, be no better off than a process with this oom_score_adj, as jobs have it, whatever the
    unit of the service that has started this one protects."""
    with contextlib.suppress(OSError, ValueError):
        if int(_SCORE.read_text()) < score:
            _SCORE.write_text(str(score))


def limit_memory() -> None:
    """Take no more private memory than a quarter of the machine's, 4 GiB at most (RLIMIT_DATA, of this process and of
    those that it starts): beyond that is a `MemoryError` here, not the end of a job. Files that are mapped do not
    count, stacks of threads do, for which there is room besides."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    stack = resource.getrlimit(resource.RLIMIT_STACK)[0]
    most = int(_SHARE * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    most = max(_LEAST, min(_MOST, most)) + _THREADS * (_STACK if stack == resource.RLIM_INFINITY else stack)
    least = min([most, *(limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY)])
    with contextlib.suppress(OSError, ValueError, OverflowError):  # stacks of any size: then there is no such limit
        resource.setrlimit(resource.RLIMIT_DATA, (least, hard))
