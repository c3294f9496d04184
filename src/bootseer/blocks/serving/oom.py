"""Which processes of a block server the kernel ends when memory runs out (``oom_score_adj``)."""

from __future__ import annotations

import logging
from pathlib import Path

log = logging.getLogger(__name__)

_SCORE = Path("/proc/self/oom_score_adj")


def protect() -> None:
    """The kernel is to end any other process first when memory runs out: without this one readers would get zeros."""
    if not set_score(-1000):
        log.warning("this process cannot be kept from the OOM killer: that needs CAP_SYS_RESOURCE")


def score() -> int | None:
    """That of this process, -1000 to 1000; None: it cannot be told."""
    try:
        return int(_SCORE.read_text())
    except (OSError, ValueError):
        return None


def set_score(score: int) -> bool:
    """Whether this process may have that ``score``, and has it now."""
    try:
        _SCORE.write_text(str(score))
    except OSError:
        return False
    return True
