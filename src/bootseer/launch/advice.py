"""Advice to a start: what the job does without."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from bootseer.errors import BootseerError

log = logging.getLogger(__name__)


@contextlib.contextmanager
def advisory(doing: str) -> Iterator[None]:
    """The job runs whether this works or not: trouble is a log line."""
    try:
        yield
    except (BootseerError, OSError) as exc:
        log.warning("cannot %s: %s", doing, exc)
