"""Advice to a start: what the job does without."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from bootseer.errors import logged

log = logging.getLogger(__name__)


@contextlib.contextmanager
def advisory(doing: str) -> Iterator[None]:
    """The job runs whether this works or not: trouble is a log line."""
    with logged(log.warning, f"cannot {doing}"):
        yield
