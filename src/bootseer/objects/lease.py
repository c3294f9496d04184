"""Leases: objects in a store by which nodes that start together agree on the one that does a piece of work.

``leases/<name>/<number>`` says which node does it, and how that ended; the rules are in ``docs/internals/lease.md``.
All is advisory: each wait is bounded, and any trouble, or what others say of a failure, means only that a node does the
work without waiting. Whoever publishes a result must see to it that the first one wins (`Store.put`,
`Store.replace`)."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from typing import Annotated, Literal, NamedTuple

import msgspec

from bootseer import faults
from bootseer.errors import BootseerError, NotFoundError, logged
from bootseer.objects.base import Store
from bootseer.profile import emit
from bootseer.units import one_line
from bootseer.wiretypes import json_as

log = logging.getLogger(__name__)

FOLDER = "leases"
WAIT = 1800.0
"""Seconds that a node waits at most where nobody says how long."""
RENEWAL = 3.0
"""Seconds between two renewals."""
DEAD = 15.0
"""Seconds without a renewal after which the node counts as dead, and without an answer after which the store does."""
POLL = 1.0
"""Seconds between two looks at a lease."""
FAILURES = 2
"""After so many failures in a row nobody waits any more: each node that has waited does the work by itself, once."""
_KEPT = 4
"""Leases before a failed one, whose ends others may not have seen yet."""
_JOIN = 60.0
_LONGEST = 300
"""Characters of a name or a message: others write them into this node's log."""
_MAX_BYTES = 16 << 10
"""Of the object: three lines of 300 characters, each of at most four bytes, and little else."""

_Line = Annotated[str, msgspec.Meta(pattern=r"^[^\x00-\x1f\x7f-\x9f]*\Z", max_length=_LONGEST)]


_Amount = Annotated[float, msgspec.Meta(ge=0, le=1e18)]


class Progress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of a node whose work is done and whose result is on its way: seconds that the work took and since then, bytes
    that are left and bytes a second (0: not known yet)."""

    elapsed: _Amount
    since: _Amount
    left: _Amount
    rate: _Amount


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """The object. ``run`` is another one for each, ``count`` grows with each renewal."""

    format: Literal["bootseer-lease"] = "bootseer-lease"
    version: Literal[1] = 1
    node: _Line
    run: _Line
    count: int = 0
    state: Literal["held", "failed", "unshared"] = "held"
    """``failed``: the work failed; ``unshared``: it did not, and its result cannot be published."""
    failures: Annotated[int, msgspec.Meta(ge=0)] = 0
    """In a row, this one included."""
    message: _Line = ""
    """Of a failure, or why the result was not published; without secrets."""
    progress: Progress | None = None
    """None while the work goes on."""


class Handed(NamedTuple):
    """A lead on its way to another process of this node: see `Lead.hand_on`."""

    folder: str
    number: int
    lease: Lease

    def resumed(self, store: Store, progress: Callable[[], Progress]) -> Lead:
        """The lead, held by this process now, which makes known its ``progress``."""
        lead = Lead(store, self.folder, self.number, self.lease.node, self.lease.failures)
        lead.resume(self.lease, progress)
        return lead


class Lead:
    """This node does the work. A context manager; at its end the others look for the result, and one of them does the
    work if there is none. A thread renews the lease in between."""

    def __init__(self, store: Store, folder: str, number: int, node: str, failures: int) -> None:
        self._store, self._folder, self._number = store, folder, number
        self._lease = Lease(node=node, run=os.urandom(16).hex(), failures=failures)
        self._end: Lease | None = None
        self._handed = False
        self._progress: Callable[[], Progress] | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)

    def failed(self, message: str) -> None:
        """The work failed: another node tries it, until it has failed `FAILURES` times."""
        change = {"state": "failed", "failures": self._lease.failures + 1, "message": _line(message)}
        self._end = msgspec.structs.replace(self._lease, **change)

    def unshared(self, why: str) -> None:
        """The result cannot be published: the other nodes each do the work, all at once. Also of a lead that was handed
        on to who has ended without resuming it."""
        self._handed = False
        self._end = msgspec.structs.replace(self._lease, state="unshared", message=_line(why))

    def take(self) -> bool:
        """Make the object; False when another node did. Raises `BootseerError`, `OSError`."""
        if not self._put(self._lease, overwrite=False):
            return False
        self._thread.start()
        faults.point("lease.taken")
        return True

    def hand_on(self) -> Handed:
        """Give it to who gets what this returns, and has a while to resume it; here it is renewed no more."""
        self._handed = True
        self._ended.set()
        return Handed(self._folder, self._number, self._lease)

    def resume(self, lease: Lease, progress: Callable[[], Progress]) -> None:
        """Renew ``lease`` from now on."""
        self._lease, self._progress = lease, progress
        self._thread.start()

    def __enter__(self) -> Lead:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._handed:
            return
        self._ended.set()
        self._thread.join(_JOIN)
        if self._thread.is_alive():
            log.warning("the store does not answer; the lease stays until others see that it is not renewed")
            return
        faults.point("lease.before-end")
        with logged(log.warning, "the lease stays until others see that it is not renewed"):
            told = self._end is not None and self._told(self._end)
            if not told:  # first: who waits is let go, and a store that does not answer holds us up once only
                self._store.delete(_key(self._folder, self._number))
            for number in _numbers(self._store, self._folder) if self._number else []:
                if number < self._number - _KEPT * told:
                    self._store.delete(_key(self._folder, number))

    def _told(self, end: Lease) -> bool:
        with logged(log.warning, "other nodes are not told that this one has %s", end.state):
            return self._put(end, overwrite=True)
        return False  # a full store still lets us delete

    def _put(self, lease: Lease, *, overwrite: bool) -> bool:
        return self._store.put(_key(self._folder, self._number), msgspec.json.encode(lease), overwrite=overwrite)

    def _renew(self) -> None:
        while not self._ended.wait(RENEWAL):
            told = self._progress() if self._progress else None
            self._lease = msgspec.structs.replace(self._lease, count=self._lease.count + 1, progress=told)
            with logged(log.warning, "cannot renew the lease; another node may do the same work"):
                self._put(self._lease, overwrite=True)


class Turn(NamedTuple):
    """What came of `take_turn`. With a ``lead`` this node does the work inside it. Without one there is a result, or
    this node does the work by itself. ``follows_dead``: who led before was killed."""

    lead: Lead | None = None
    follows_dead: bool = False


def take_turn(
    store: Store,
    name: str,
    *,
    work: str,
    seconds: float,
    settled: Callable[[], bool],
    waits: Callable[[Progress], bool] = lambda told: True,
) -> Turn:
    """Become the one node that does a piece of work, or wait for the one that does, at most ``seconds``.

    ``name`` is that of the work, a relative path of the store; ``work`` says it in log lines: ``converts IMAGE``.
    ``settled`` looks whether there is a result, or another reason to go on without taking turns: after each wait and
    each time that this node could lead. ``waits`` says whether to wait on for a result on its way."""
    try:
        if not store.exclusive:
            log.info("store %s cannot make one of two writers lose: each node %s by itself", store.shown, work)
            return Turn()
        return _Contest(store, f"{FOLDER}/{name}", work, time.monotonic() + seconds, settled, waits).run()
    except (BootseerError, OSError) as exc:
        log.warning("cannot agree with other nodes on the one that %s: %s; this node does", work, exc)
        return Turn()


class _Contest:
    def __init__(
        self,
        store: Store,
        folder: str,
        work: str,
        until: float,
        settled: Callable[[], bool],
        waits: Callable[[Progress], bool],
    ) -> None:
        self._store, self._folder, self._work, self._waits = store, folder, work, waits
        self._until, self._settled, self._node = until, settled, _line(this_node())

    def run(self) -> Turn:
        # ``old``: what there was before this node came; when it has ended, it may be of an earlier start
        number, failures, old = self._newest(), 0, True
        missing = -1, 0.0  # a number that can neither be read nor taken, and since when
        dead = False
        while True:
            if number >= 0:
                began = time.monotonic()
                end = self._watch(number, old)
                dead = end == "dead"
                if end == "late":
                    return Turn()
                if end == "gone":
                    if self._settled() or time.monotonic() >= self._until:
                        return Turn()
                    if missing[0] != number or time.monotonic() - began > POLL:
                        missing = number, time.monotonic()
                    time.sleep(POLL)  # a store may say for long that there is one, and that there is none
                    gone, number = number, self._newest()
                    if time.monotonic() - missing[1] >= DEAD:
                        number = max(number, gone)  # somebody's link to nothing has its place
                    elif number >= 0:
                        old = number < gone  # else somebody has led meanwhile, and perhaps ended already
                        continue
                elif isinstance(end, Lease):
                    log.warning("%s reports: %s", end.node, end.message)
                    if end.state == "unshared":
                        self._settled()  # perhaps because there is a result by now
                        return Turn()
                    failures = max(failures + 1, end.failures)
                    if failures >= FAILURES:
                        log.warning("it failed on %d nodes in a row; this one %s by itself", FAILURES, self._work)
                        return Turn()
            number, old = number + 1, False
            lead = Lead(self._store, self._folder, number, self._node, failures)
            if not lead.take():
                continue
            with contextlib.ExitStack() as stack:
                stack.enter_context(lead)
                if (newest := self._newest()) > number:  # an old listing, and that number was removed meanwhile
                    number, old = newest, True
                    continue
                if self._settled():
                    return Turn()
                stack.pop_all()
                return Turn(lead, dead)

    def _newest(self) -> int:
        return max(_numbers(self._store, self._folder), default=-1)

    def _watch(self, number: int, old: bool) -> Lease | Literal["gone", "dead", "late", "old"]:
        """Wait for the end of a lease: what it says of itself, or that it is ``gone``, its node ``dead``, or this one
        too ``late``; or that an ``old`` one had ended before. Raises what the store did, when it has not answered for
        `DEAD` seconds."""
        with contextlib.ExitStack() as shown:
            seen, waiting, since = b"", False, time.monotonic()
            answered, lease = since, None
            while True:
                now = time.monotonic()
                try:
                    data = self._store.get(_key(self._folder, number), most=_MAX_BYTES)
                except NotFoundError:
                    return "gone"
                except (BootseerError, OSError) as exc:
                    if now - answered >= DEAD:
                        raise
                    log.info("cannot see whether the lease is renewed: %s", exc)
                    since = time.monotonic()  # its node may not reach the store either
                else:
                    answered = time.monotonic()
                    if data != seen:
                        seen, since, lease = data, answered, _decoded(data)
                    if lease and lease.state != "held":
                        return lease if waiting or not old else "old"
                    if now - since >= DEAD:
                        log.warning("%s %s and renews its lease no more", _who(lease), self._work)
                        return "dead"
                if lease and lease.progress and not self._waits(lease.progress):
                    log.warning("what %s made is still on its way; this node %s by itself", _who(lease), self._work)
                    return "late"
                if now >= self._until:
                    log.warning("%s still %s; waiting no longer", _who(lease), self._work)
                    return "late"
                if not waiting:
                    waiting, left = True, self._until - now
                    log.warning("waiting for %s, which %s, at most %.0f s", _who(lease), self._work, left)
                    shown.enter_context(emit.span("wait", node=_who(lease), work=self._work))
                time.sleep(min(POLL, max(0.0, self._until - now)))


def this_node() -> str:
    """This node's name, as other nodes are told it."""
    return os.environ.get("BOOTSEER_NODE") or socket.gethostname()


def _key(folder: str, number: int) -> str:
    return f"{folder}/{number}"


def _numbers(store: Store, folder: str) -> list[int]:
    names = (info.key.removeprefix(f"{folder}/") for info in store.list(folder))
    return [int(name) for name in names if re.fullmatch("0|[1-9][0-9]{0,8}", name)]


def _who(lease: Lease | None) -> str:
    return (lease and lease.node) or "another node"


def _line(text: str) -> str:
    return emit.redact("message", one_line(" ".join(text.split())))[:_LONGEST]


def _decoded(data: bytes) -> Lease | None:
    try:
        return json_as(data, Lease)
    except ValueError:
        return None
