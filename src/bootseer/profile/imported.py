"""Writes spans that others have recorded, such as a scheduler, as lines of an events file."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import msgspec

from bootseer.profile.events import VERSION, AttrValue, Identity

_LIMIT = 128


def lines(
    by: str, identity: Identity, stage: str, node: str, begin: int, end: int, *,
    gpus: int = 0, attrs: Mapping[str, AttrValue], more: str | None = None,
) -> Iterator[bytes]:  # fmt: skip
    """Begin and end of one span, in ns since 1970; 0: not yet. The same span always has the same id, so that what is
    imported a second time counts as a duplicate; ``more`` tells spans apart that are alike in all else."""
    job, attempt, cycle = identity[0][:_LIMIT], identity[1][:_LIMIT], identity[2]
    about = "|".join((by, job, attempt, stage, node) + (() if more is None else (more,)))
    span = hashlib.blake2b(about.encode("utf-8", "replace"), digest_size=8).hexdigest()
    for kind, when in (("begin", begin), ("end", max(begin, end) if end else 0)):
        if when:
            line = {
                "bootseer": VERSION, "ev": kind, "span": span, "stage": stage, "job": job, "attempt": attempt,
                "cycle": cycle, "node": node[:_LIMIT], "gpus": gpus, "wall": when, "attrs": attrs,
            }  # fmt: skip
            yield msgspec.json.encode(line) + b"\n"
