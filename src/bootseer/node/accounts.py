"""Accounts: out of whose share a user number has what the node daemon holds for it, and how large the shares are. A
person may have thousands of numbers (subuid(5)), so what counts by number is bounded for nobody."""

from __future__ import annotations

import contextlib
import logging
import os
import pwd
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from bootseer.kernel import child

log = logging.getLogger(__name__)

ROOT = ""
"""Has no limits, and what `totals` leave of descriptors and processes."""
UNKNOWN = "the users that this node does not know"
_SUBUID = Path("/etc/subuid")
_SECONDS = 60.0
_LOOK_SECONDS = 1.0
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
    """Each is a text for messages. What was found is known for a while. A process asks the name service, which may
    never answer: then the daemon does without for as long, and goes by what was known, or else by the number alone."""

    def __init__(self, subuid: Path = _SUBUID) -> None:
        self._subuid = subuid
        self._known: dict[int | str, tuple[float, str]] = {}  # by number, or by the name of who was lent it
        self._lent: list[_Lent] = []
        self._read: tuple[int, int, int] | None = None  # which file these are from
        self._silent_until = 0.0

    def of(self, uid: int) -> str:
        """That of user ``uid``: of the user to whom the number is lent, of its own, or of all whom nobody knows."""
        if not uid:
            return ROOT
        now = time.monotonic()
        found = self._known.get(uid) or self._known.get(self._person(uid))
        if found is None or found[0] < now:
            self._refresh()
            person = self._person(uid)
            known = self._known.get(person, (0.0, f"user {person}"))[1]
            self._known.pop(uid, None)
            if len(self._known) >= _MOST:
                self._known.clear()
            found = self._known[person] = now + _SECONDS, self._look(person) or known
        return found[1]

    def _look(self, person: int | str) -> str:
        """Empty when nobody says it soon enough."""
        if self._silent_until > time.monotonic():
            return ""
        found = b""
        with contextlib.suppress(OSError):
            found = child.answer(
                "look for a user", lambda out: not os.write(out, _look(person).encode()), _LOOK_SECONDS, 1 << 10
            )
        if not found:
            log.warning("the name service does not say who user %s is: it is not asked for %.0f s", person, _SECONDS)
            self._silent_until = time.monotonic() + _SECONDS
        return found.decode()

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
