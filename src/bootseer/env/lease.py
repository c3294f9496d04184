"""Leases: a note in the store that a node is running the command just now, so that the others wait for its snapshot.

``env/leases/<key>/<n>`` names who runs it. A node renews its lease while it lives; who sees one unchanged for long, by
its own clock, takes number n + 1, which the store gives to one node only. The last of 0, 1, ... counts. No lock is ever
taken on shared storage, and all is advisory: waits are bounded, where a store has no atomic publication two nodes may
lead at once, and any failure means only that a node runs the command without waiting.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import random
import threading
import time
import uuid
from collections.abc import Callable
from typing import Literal

import msgspec

from bootseer.env.lookup import Lookup
from bootseer.errors import BootseerError, NotFoundError
from bootseer.store import Store

log = logging.getLogger(__name__)

RENEWAL = 3.0
"""Seconds between two renewals."""
DEAD = 15.0
"""Seconds without a renewal after which its node counts as dead."""
OLD = 600.0
"""Seconds since the last renewal, by the clocks of two nodes, after which nobody watches it for `DEAD` seconds more."""
_POLL, _POLL_MOST = 0.5, 5.0
_TOLD = 60.0
_JOIN = 60.0


class Lease(msgspec.Struct, frozen=True):
    """``run`` is another one each time; ``written`` in Unix seconds, at renewal ``count``."""

    node: str
    run: str
    count: int
    written: float


def lease_key(key: str, number: int) -> str:
    return f"env/leases/{key}/{number}"


def failure_key(key: str) -> str:
    """The object that names the last run of which nothing was published."""
    return f"env/leases/{key}/failed"


class Lead:
    """This node runs the command. A context manager; at its end the others go on: with what was published, or, when
    `failed` is set, with the command, all at once; else one of them leads.

    Concurrency: a thread renews the lease in between.
    """

    def __init__(self, store: Store, key: str, node: str, number: int) -> None:
        self.failed = False
        """Whether another node would fare no better with the command, or with the publication of its result."""
        self._store, self._key, self._number = store, key, number
        self._lease = Lease(node, uuid.uuid4().hex, 0, time.time())
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="env-lease", daemon=True)

    def taken(self) -> bool:
        """Take the number; False when another node did. Raises `BootseerError`, `OSError`."""
        if not self._put(overwrite=False):
            return False
        self._thread.start()
        return True

    def __enter__(self) -> Lead:
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self._thread.join(_JOIN)
        try:
            if self.failed:
                self._store.put(failure_key(self._key), self._lease.run.encode(), overwrite=True)
            for number in range(self._number, -1, -1):  # without a gap at any time
                self._store.delete(lease_key(self._key, number))
        except (BootseerError, OSError) as error:
            log.info("the lease of %s stays until others see that it is not renewed: %s", self._key[:12], error)

    def _put(self, *, overwrite: bool) -> bool:
        data = msgspec.json.encode(self._lease)
        return self._store.put(lease_key(self._key, self._number), data, overwrite=overwrite)

    def _renew(self) -> None:
        while not self._ended.wait(RENEWAL):
            self._lease = msgspec.structs.replace(self._lease, count=self._lease.count + 1, written=time.time())
            try:
                self._put(overwrite=True)
            except (BootseerError, OSError) as exc:
                log.info("cannot renew the lease of %s; another node may run the command, too: %s", self._key[:12], exc)


def take_turn(look: Lookup, again: Callable[[], Lookup], node: str, seconds: float) -> tuple[Lookup, Lead | None]:
    """Become the one node that runs the command, or wait for the one that does, at most ``seconds``.

    Returns what is known then, and the `Lead` of this node, to be left as a context manager. Without it there is
    something to restore, or the command is to be run all the same: nothing was published, or not in time, or for
    other inputs (nodes of which each has its own would take turns).
    """
    if look.store is None:
        return look, None
    store, key, until = look.store, look.key, time.monotonic() + seconds
    try:
        while True:
            number = _last(store, key)
            end: _End = "dead" if number < 0 else _watch(store, key, number, until)
            while end == "dead":
                number += 1
                lead = Lead(store, key, node, number)
                if lead.taken():
                    with contextlib.ExitStack() as stack:
                        stack.enter_context(lead)
                        look = again()
                        if look.found is None and look.store is not None:
                            stack.pop_all()
                            return look, lead
                    return look, None
                end = _watch(store, key, number, until)
            nearest, look = look.nearest, again()  # it may have published and left between two looks
            if look.found is not None or look.store is None or end != "gone":
                return look, None
            if look.nearest != nearest:
                log.info("another node published what does not fit here; waiting for no other")
                return look, None
    except (BootseerError, OSError) as exc:
        log.warning("cannot agree with other nodes on who runs the command: %s; running it", exc)
        return look, None


def _last(store: Store, key: str) -> int:
    """The number of the lease that counts; -1 for none."""
    return next(number for number in itertools.count() if not store.exists(lease_key(key, number))) - 1


_End = Literal["gone", "dead", "failed", "late"]


def _watch(store: Store, key: str, number: int, until: float) -> _End:
    """Wait until the lease is ``gone``, or its node is ``dead`` or has ``failed``, or it is ``until``."""
    seen, since, told, poll = b"", time.monotonic(), -_TOLD, _POLL
    while True:
        now = time.monotonic()
        try:
            read = store.get(lease_key(key, number))
        except NotFoundError:
            return "failed" if _failed(store, key, seen) else "gone"
        except (BootseerError, OSError) as exc:
            log.info("cannot see whether the lease is renewed: %s", exc)
            read = seen
        if read != seen:
            seen, since = read, now
        lease = _decoded(seen)
        if lease is None or abs(time.time() - lease.written) > OLD or now - since >= DEAD:
            log.warning("%s ran the command and renews its lease no more", lease.node if lease else "another node")
            return "dead"
        if now >= until:
            log.warning("%s still runs the command; waiting no longer", lease.node)
            return "late"
        if now >= told + _TOLD:
            told = now
            log.info("waiting for %s, which runs the command, at most %.0f s", lease.node, until - now)
        time.sleep(min(random.uniform(0.5, 1.0) * poll, max(0.0, until - now)))
        poll = min(1.5 * poll, _POLL_MOST)


def _failed(store: Store, key: str, seen: bytes) -> bool:
    lease = _decoded(seen)
    try:
        return lease is not None and store.get(failure_key(key)) == lease.run.encode()
    except (BootseerError, OSError):
        return False


def _decoded(data: bytes) -> Lease | None:
    try:
        return msgspec.json.decode(data, type=Lease)
    except msgspec.DecodeError:
        return None
