"""Published snapshots as a whole: find one by the start of its key, read its inventory, verify it."""

from __future__ import annotations

import re
from pathlib import Path

from bootseer.blocks import tree
from bootseer.env import inventory, manifest
from bootseer.env.inventory import Entry
from bootseer.env.manifest import SnapshotManifest, inventory_key
from bootseer.env.unpack import verify_stage
from bootseer.errors import ConfigError, NotFoundError
from bootseer.store import Store


def names(store: Store, key: str = "") -> list[str]:
    """The names (`SnapshotManifest.name`) of all snapshots in ``store``, or of those of ``key``."""
    found = store.list(f"{manifest.FOLDER}/{key}".rstrip("/"))
    return [info.key.removeprefix(f"{manifest.FOLDER}/").removesuffix(".json") for info in found]


def load(store: Store, start: str) -> SnapshotManifest:
    """The manifest of the one snapshot whose key begins with ``start``; ``KEY/INPUTS`` tells those of one key apart.

    Raises `NotFoundError` for none, `ConfigError` for several, `DataError`, `UnavailableError`.
    """
    if not re.fullmatch(r"[0-9a-f]{1,64}(/[0-9a-f]{0,64})?", start):
        raise ConfigError(f"{start!r} is not a snapshot key", hint="bootseer env ls prints keys")
    key, _, inputs = start.partition("/")
    listed = names(store, key if len(key) == 64 else "")
    found = [name for name in listed if name.startswith(key) and name.partition("/")[2].startswith(inputs)]
    if not found:
        raise NotFoundError(f"no snapshot {start} in store {store.shown}", hint="bootseer env ls prints keys")
    if len(found) > 1:
        raise ConfigError(f"{len(found)} snapshots begin with {start}", hint="give more digits of KEY/INPUTS")
    return manifest.decode(store.get(manifest.manifest_key(found[0])), found[0])


def entries(store: Store, found: SnapshotManifest) -> list[Entry]:
    """The inventory of ``found``, checked. Raises `DataError`, `NotFoundError`, `UnavailableError`."""
    stored = store.get(inventory_key(found.inventory))
    return inventory.decode(stored, targets=len(found.document.targets), expect=found.inventory)


def verify(store: Store, found: SnapshotManifest, work: Path) -> int:
    """Fetch all of ``found`` into the empty folder ``work`` and check it; returns the number of entries.

    Raises `DataError` for the first thing that is wrong.
    """
    listed = entries(store, found)
    tree.extract(store, found.tree, work / "tree")
    verify_stage(work / "tree", listed)
    return len(listed)
