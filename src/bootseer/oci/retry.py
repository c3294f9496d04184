"""When to ask a server again: what it says in ``Retry-After``, else growing pauses, all of them spread at random."""

from __future__ import annotations

import datetime
import email.utils
import random

from bootseer.oci.transport import Answer
from bootseer.oci.wire import number


class Again(Exception):
    """A reason to repeat a request; ``after`` seconds if the server said so."""

    def __init__(self, why: str, *, after: float | None = None) -> None:
        super().__init__(why)
        self.after = after


def backoff(failures: int, exc: Exception) -> float:
    """Seconds to wait after the ``failures``-th failure in a row."""
    if isinstance(exc, Again) and exc.after is not None:
        # Spread, or all nodes that were told the same come back in the same second.
        return exc.after * random.uniform(1.0, 1.25)
    return float(min(8.0, 0.25 * 2**failures) * random.uniform(0.5, 1.0))


def retry_after(answer: Answer) -> float | None:
    """``Retry-After`` as seconds from now: a number, or an HTTP date (RFC 9110, 10.2.3)."""
    text = answer.headers.get("retry-after", "").strip()
    if (seconds := number(text)) is not None:
        return float(seconds)
    try:
        then = email.utils.parsedate_to_datetime(text)
        if then.tzinfo is None:
            then = then.replace(tzinfo=datetime.UTC)
        return max(0.0, (then - datetime.datetime.now(datetime.UTC)).total_seconds())
    except (ValueError, TypeError, OverflowError, IndexError):
        return None
