"""Notes of use: who mounts, restores or publishes a tree says so in its store, so that no collection takes it away, and
so that the store knows what was used last.

``uses/<tree>.<node>``: another one for each node and user, renewed while a mount stands, all in one folder that every
user may write to. It counts for `LIFE` by the clock of the store, and nothing is deleted because of one.
``published/<tree>`` stands for good: a tree that belongs to no image and no environment."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from bootseer.errors import BootseerError, UnavailableError, logged
from bootseer.objects.base import Store
from bootseer.objects.lease import this_node

log = logging.getLogger(__name__)

FOLDER = "uses"
_KEY = re.compile(rf"{FOLDER}/([0-9a-f]{{64}})\.[0-9a-f]{{16}}")
PUBLISHED = "published"
RENEWAL = 12 * 3600.0
"""Seconds after which a note is renewed."""
LIFE = 3 * 86_400.0
"""Seconds that a note counts."""
_AT_ONCE = 8
"""Objects that are looked for."""


def hold(store: Store, tree: str, keys: Iterable[str]) -> None:
    """Note the use of ``tree``, which has just been published, and see that its objects ``keys`` are in the store: a
    collection deletes none of them from now on. Raises `UnavailableError` when some are gone, and as `Store.put`.

    In this order: a collection withdraws an object, then looks at the notes, and deletes it when there is none. Either
    it sees the note, or it is seen here that the object was withdrawn."""
    if not store.dated:  # nothing is collected there
        return
    _put(store, tree)
    keys = [*keys]
    with ThreadPoolExecutor(_AT_ONCE, "uses") as pool:  # who waits for the tree waits for this
        there = [*pool.map(lambda key: store.exists(key) or store.put_back(key), keys)]
    if gone := [key for key, is_there in zip(keys, there, strict=True) if not is_there]:
        raise UnavailableError(
            f"a collection has just removed {len(gone)} objects that are needed from store {store.shown}, "
            f"such as {gone[0]}",
            hint="run it again: they are stored again",
        )


def note(store: Store, tree: str) -> None:
    """Say that this node uses ``tree``. Never raises: of a store that cannot be written there is a line in the log,
    and its trees are kept by their images and environments alone."""
    with logged(log.info, "no note of use of tree %s", tree[:12]):
        if store.dated:  # even where there is one: it may be a neighbour's, who takes it away again
            _put(store, tree)


def note_beside(store: Store, tree: str) -> None:
    """`note` in a thread that nobody waits for."""
    with logged(log.info, "no note of use of tree %s", tree[:12], kinds=RuntimeError):
        threading.Thread(target=note, args=(store, tree), name="uses", daemon=True).start()


def key_of(tree: str) -> str:
    name = hashlib.sha256(f"{this_node()} {os.geteuid()}".encode()).hexdigest()[:16]
    return f"{FOLDER}/{tree}.{name}"


def tree_of(key: str) -> str:
    """The tree of the note ``key``; "" for what is no note."""
    found = _KEY.fullmatch(key)
    return found[1] if found else ""


def _put(store: Store, tree: str) -> None:
    try:
        store.put(key_of(tree), b"", overwrite=True)
    except BootseerError:  # somebody else may have taken the name
        store.put(f"{FOLDER}/{tree}.{os.urandom(8).hex()}", b"")
