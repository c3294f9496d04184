"""Leases: a note in the store that a node is running the command just now, so that others may wait for its snapshot.

Advisory: leases expire, waits are bounded, two nodes may hold one at once after a race, and every failure means only
that nobody waits. No lock is ever taken on shared storage.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator

import msgspec

from bootseer.env.lookup import Lookup
from bootseer.errors import BootseerError
from bootseer.store import Store

log = logging.getLogger(__name__)

LIFETIME = 1800.0
"""Seconds after which a lease counts for nothing: its node died, or the command takes longer than a wait is worth."""
_POLL = 0.5


class Lease(msgspec.Struct, frozen=True):
    """Who runs the command, and until when (Unix seconds) others may believe it."""

    node: str
    expires: float


def lease_key(key: str) -> str:
    return f"env/leases/{key}.json"


def current(store: Store, key: str) -> Lease | None:
    """The lease in force, or None."""
    try:
        found = msgspec.json.decode(store.get(lease_key(key)), type=Lease)
    except (BootseerError, msgspec.DecodeError, OSError):
        return None
    return found if time.time() < found.expires <= time.time() + 2 * LIFETIME else None


@contextlib.contextmanager
def held(store: Store, key: str, node: str) -> Iterator[bool]:
    """Put up a lease while the command runs and its result is published. Yields whether it stands."""
    mine = False
    try:
        expired = current(store, key) is None and store.exists(lease_key(key))
        data = msgspec.json.encode(Lease(node, time.time() + LIFETIME))
        mine = store.put(lease_key(key), data, overwrite=expired)
    except (BootseerError, OSError) as exc:
        log.info("no lease: %s", exc)
    try:
        yield mine
    finally:
        if mine:
            try:
                store.delete(lease_key(key))
            except (BootseerError, OSError) as exc:
                log.info("the lease of %s stays until it expires: %s", key[:12], exc)


def wait_for(look: Lookup, again: Callable[[], Lookup], seconds: float) -> Lookup:
    """While another node's lease stands, at most ``seconds``: look again. Returns the last lookup."""
    until = time.monotonic() + seconds
    while look.found is None and look.store is not None and time.monotonic() < until:
        lease = current(look.store, look.key)
        if lease is None:
            return again()  # it may have published and left between our two looks
        log.info("waiting for %s, which runs the command", lease.node)
        time.sleep(min(_POLL, max(0.0, until - time.monotonic())))
        look = again()
    return look
