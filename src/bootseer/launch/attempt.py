"""The attempt that a start is part of, where no scheduler has named it: nodes agree on it by the events folder."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from bootseer.launch.identity import Identity

_TOGETHER = 120.0
"""Nodes that begin within these seconds of each other are of one start."""


def join_attempt(folder: Path, identity: Identity) -> str:
    """The newest attempt in ``folder`` if another node joined it within `_TOGETHER`, this one has not, and not all
    nodes have, else a new one; a restart by torchrun is of the newest one. Nodes that share ``folder`` agree on it."""
    attempts, name = folder / identity.job, f"{identity.node}.jsonl"
    attempts.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=attempts) as file:
        now = os.fstat(file.fileno()).st_mtime  # by the clock of the folder's server, as all times of files there
    while True:
        found = [path.name.removeprefix("attempt-") for path in attempts.glob("attempt-*")]
        newest = max((int(number) for number in found if number.isdecimal()), default=-1)
        place = attempts / f"attempt-{newest}"
        if identity.restarts and (place / name).is_file():
            return place.name.removeprefix("attempt-")
        full = identity.nodes and len(list(place.glob("*.jsonl"))) >= identity.nodes
        if newest < 0 or abs(now - place.stat().st_mtime) > _TOGETHER or os.path.lexists(place / name) or full:
            place = attempts / f"attempt-{newest + 1}"
            place.mkdir(exist_ok=True)
        with contextlib.suppress(FileExistsError):  # another start on this node was quicker
            (place / name).touch(exist_ok=False)
            return place.name.removeprefix("attempt-")
