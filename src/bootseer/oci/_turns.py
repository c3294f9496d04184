"""Turns: threads of this process that write the same thing in a registry go one after the other."""

from __future__ import annotations

import threading

_COUNT = 64
_locks: dict[str, list[threading.Lock]] = {}
_guard = threading.Lock()


def turn(name: str, kind: str = "index") -> threading.Lock:
    """The lock of ``name``, shared with some others of its ``kind``. Nobody may take two of one kind.

    Kinds are ordered by who calls whom: a ``key`` of a store may take an ``index``, not the other way round.
    """
    with _guard:
        locks = _locks.setdefault(kind, [threading.Lock() for _ in range(_COUNT)])
    return locks[hash(name) % _COUNT]
