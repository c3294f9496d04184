"""Accounts: out of whose share a user number has what the node daemon holds for it, and how large the shares are.

A person may have thousands of numbers (subuid(5)), so what counts by number is bounded for nobody.
"""

from __future__ import annotations

import contextlib
import pwd
import resource
import time
from collections.abc import Iterator
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


class _Lent(NamedTuple):
    """A range of numbers, and to whom it is lent."""

    first: int
    end: int
    owner: str


class Accounts:
    """Each is a text for messages. What was found is known for a while: a name service may be slow."""

    def __init__(self, subuid: Path = _SUBUID) -> None:
        self._subuid = subuid
        self._known: dict[int | str, tuple[float, str]] = {}  # by number, or by the name of who was lent it
        self._lent: list[_Lent] = []
        self._read: tuple[int, int, int] | None = None  # which file these are from

    def of(self, uid: int) -> str:
        """That of user ``uid``: of the user to whom the number is lent, of its own, or of all whom nobody knows."""
        if not uid:
            return ROOT
        now = time.monotonic()
        found = self._known.get(uid) or self._known.get(self._person(uid))
        if found is None or found[0] < now:
            self._refresh()
            self._known.pop(uid, None)
            if len(self._known) >= _MOST:
                self._known.clear()
            person = self._person(uid)
            found = self._known[person] = now + _SECONDS, _look(person)
        return found[1]

    def _person(self, uid: int) -> int | str:
        """To whom the number ``uid`` is lent, as /etc/subuid names this user; itself when it is lent to nobody."""
        return next((lent.owner for lent in self._lent if lent.first <= uid < lent.end), uid)

    def _refresh(self) -> None:
        """Read /etc/subuid again when it has changed."""
        try:
            info = self._subuid.stat()
            if (mark := (info.st_ino, info.st_size, info.st_mtime_ns)) != self._read:
                self._lent = list(_parsed(self._subuid.read_text(errors="replace")))
                self._read = mark
        except OSError:
            self._lent, self._read = [], None


def _parsed(text: str) -> Iterator[_Lent]:
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            name, first, count = line.strip().split(":")
            yield _Lent(int(first), int(first) + int(count), name)


def _look(person: int | str) -> str:
    with contextlib.suppress(KeyError, OverflowError):
        return f"user {pwd.getpwuid(person).pw_uid if isinstance(person, int) else _number(person)}"
    return UNKNOWN


def _number(name: str) -> int:
    """Raises `KeyError`."""
    return int(name) if name.isdecimal() else pwd.getpwnam(name).pw_uid
