"""Published snapshots as a whole: find one by the start of its key, read its inventory, verify it, remove some."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bootseer.blocks import tree
from bootseer.env import inventory, manifest
from bootseer.env.inventory import Entry
from bootseer.env.key import KeyDocument
from bootseer.env.manifest import SnapshotManifest, inventory_key
from bootseer.env.unpack import verify_stage
from bootseer.errors import BootseerError, ConfigError, DataError, NotFoundError, UnavailableError, logged
from bootseer.objects import Store

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

log = logging.getLogger(__name__)


def names(store: Store, key: str = "") -> list[str]:
    """The names (`SnapshotManifest.name`) of all snapshots in ``store``, or of those of ``key``."""
    return names_and_marks(store, key)[0]


def names_and_marks(store: Store, key: str) -> tuple[list[str], set[str]]:
    """The same, and what else is beside them: the marks of `quarantine`."""
    found = [info.key for info in store.list(f"{manifest.FOLDER}/{key}".rstrip("/"))]
    names = [path for path in found if path.endswith(".json")]
    return [name.removeprefix(f"{manifest.FOLDER}/").removesuffix(".json") for name in names], {*found} - {*names}


def load(store: Store, start: str) -> SnapshotManifest:
    """The manifest of the one snapshot that `resolve` finds. Raises as that does, and `DataError`."""
    name = resolve(store, start)
    return manifest.decode(store.get(manifest.manifest_key(name), most=manifest.MAX_STORED), name)


def resolve(store: Store, start: str) -> str:
    """The name of the one snapshot whose key begins with ``start``; ``KEY/INPUTS`` tells those of one key apart. Raises
    `NotFoundError` for none, `ConfigError` for several, `UnavailableError`."""
    if not re.fullmatch(r"[0-9a-f]{1,64}(/[0-9a-f]{0,64})?", start):
        raise ConfigError(f"{start!r} is not a snapshot key", hint="bootseer store ls prints keys")
    key, _, inputs = start.partition("/")
    listed = names(store, key if len(key) == 64 else "")
    found = [name for name in listed if name.startswith(key) and name.partition("/")[2].startswith(inputs)]
    if not found:
        raise NotFoundError(f"no snapshot {start} in store {store.shown}", hint="bootseer store ls prints keys")
    if len(found) > 1:
        raise ConfigError(f"{len(found)} snapshots begin with {start}", hint="give more digits of KEY/INPUTS")
    return found[0]


def everything(store: Store) -> list[SnapshotManifest]:
    """The manifests of all snapshots, newest first; a damaged one is left out, with a log line."""
    found = []
    for name in names(store):
        try:
            found.append(manifest.decode(store.get(manifest.manifest_key(name), most=manifest.MAX_STORED), name))
        except UnavailableError:
            raise
        except BootseerError as exc:
            log.warning("%s", exc)
    return sorted(found, key=lambda item: -item.created)


def newest_trees(store: Store, document: KeyDocument, keys: Sequence[Ed25519PublicKey], most: int = 4) -> list[str]:
    """Digests of the trees of the newest snapshots of these targets, as far as they can be had and one of ``keys`` has
    signed them."""
    trees = []
    with logged(log.info, "blocks of other snapshots are not shared", kinds=BootseerError):
        for info in reversed([*store.list(manifest.index_prefix(document))][-most:]):
            name = "/".join(info.key.split("-")[-2:])
            found = manifest.decode(store.get(manifest.manifest_key(name), most=manifest.MAX_STORED), name)
            manifest.check_signed(found, keys)
            trees.append(found.tree)
    return trees


def summary(found: SnapshotManifest) -> dict[str, object]:
    """What ``--json`` says of one of many."""
    names = ("key", "name", "created", "node", "size", "stored", "entries", "seconds")
    return {name: getattr(found, name) for name in names} | {
        "targets": found.document.targets,
        "command": found.document.command,
    }


def remove(store: Store, names: Iterable[str]) -> None:
    """Remove snapshots, damaged or not: no node restores them from now on; mounts of them go on. Their blocks and
    inventories, which a publication may just count on, are left to the collection of the store. Raises
    `NotWritableError`, `UnavailableError`."""
    for name in names:
        path = manifest.manifest_key(name)
        for info in store.list(path.rpartition("/")[0]):
            if info.key.startswith(path.removesuffix("json")) and info.key != path:
                store.delete(info.key)  # the marks of `quarantine`
        try:
            found = manifest.decode(store.get(path, most=manifest.MAX_STORED), name)
        except (DataError, NotFoundError) as exc:
            log.info("%s", exc)
            store.delete(path)
            continue
        store.delete(path)
        store.delete(manifest.index_key(found))


def entries(store: Store, found: SnapshotManifest) -> list[Entry]:
    """The inventory of ``found``, checked. Raises `DataError`, `NotFoundError`, `UnavailableError`."""
    stored = store.get(inventory_key(found.inventory), most=inventory.MAX_STORED)
    return inventory.decode(stored, targets=len(found.document.targets), expect=found.inventory)


def verify(store: Store, found: SnapshotManifest, work: Path) -> int:
    """Fetch all of ``found`` into the empty folder ``work`` and check it; returns the number of entries. Raises
    `DataError` for the first thing that is wrong."""
    listed = entries(store, found)
    tree.extract(store, found.tree, work / "tree", seen=False)
    verify_stage(work / "tree", listed)
    return len(listed)
