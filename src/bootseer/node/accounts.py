"""Accounts: out of whose share a user number has what the node daemon holds for it, and how large the shares are.

A person may have thousands of numbers (subuid(5)), so what counts by number is bounded for nobody.
"""

from __future__ import annotations

import contextlib
import pwd
import resource
import time
from pathlib import Path
from typing import NamedTuple

ROOT = ""
"""Has no limits, and what `totals` leave of descriptors and processes."""
UNKNOWN = "the users that this node does not know"
_SUBUID = Path("/etc/subuid")
_SECONDS = 60.0
_MOST = 4096


class Totals(NamedTuple):
    """What all users but root may have together."""

    connections: int
    mounts: int
    running: int


def totals() -> Totals:
    """A connection takes two descriptors of the daemon, a mount one, a running request two: together less than two
    thirds of those that it may have."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return Totals(min(1024, files // 8), min(1024, files // 4), min(64, files // 16))


class Accounts:
    """Each is a text for messages. What was found is known for a while: a name service may be slow."""

    def __init__(self, subuid: Path = _SUBUID) -> None:
        self._subuid = subuid
        self._known: dict[int, tuple[float, str]] = {}

    def of(self, uid: int) -> str:
        """That of user ``uid``: of the user to whom the number is lent, of its own, or of all whom nobody knows."""
        if not uid:
            return ROOT
        now = time.monotonic()
        found = self._known.get(uid)
        if found is None or found[0] < now:
            if len(self._known) >= _MOST:
                self._known.clear()
            found = self._known[uid] = now + _SECONDS, self._look(uid)
        return found[1]

    def _look(self, uid: int) -> str:
        owner = self._lender(uid)
        with contextlib.suppress(KeyError, OverflowError):
            return f"user {pwd.getpwuid(uid).pw_uid if owner is None else _number(owner)}"
        return UNKNOWN

    def _lender(self, uid: int) -> str | None:
        """Who has lent the number ``uid``, as /etc/subuid names this user."""
        try:
            lines = self._subuid.read_text(errors="replace").splitlines()
        except OSError:
            return None
        for line in lines:
            with contextlib.suppress(ValueError):
                name, first, count = line.strip().split(":")
                if int(first) <= uid < int(first) + int(count):
                    return name
        return None


def _number(name: str) -> int:
    """Raises `KeyError`."""
    return int(name) if name.isdecimal() else pwd.getpwnam(name).pw_uid
