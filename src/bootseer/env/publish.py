"""Publication: the tree, then the inventory, then the manifest, so that a snapshot is there whole or not at all."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from bootseer import erofs, faults
from bootseer.blocks import tree
from bootseer.env import inventory
from bootseer.env._json import canonical
from bootseer.env.inputs import Observed
from bootseer.env.inventory import Entry
from bootseer.env.key import KeyDocument
from bootseer.env.layer import check_unchanged
from bootseer.env.manifest import SnapshotManifest, index_key, inventory_key, manifest_key
from bootseer.errors import BootseerError
from bootseer.store import Store

log = logging.getLogger(__name__)


def publish(
    store: Store,
    document: KeyDocument,
    inputs: Observed,
    layers: Path,
    entries: list[Entry],
    *,
    work: Path,
    base: list[str],
    result: list[str],
    node: str,
    seconds: float,
    replaced: Mapping[str, bytes],
    cancelled: Callable[[], bool],
) -> bool:
    """Publish the layers in ``layers`` as the snapshot of ``document`` and ``inputs``. False: another was first.

    ``work`` gets the EROFS files (as large as the layers). ``replaced``: snapshots that are expired or damaged, name ->
    manifest; the one of this name is replaced if it is still that one, and what is damaged of the objects of both.
    Raises `FullError`, `NotWritableError`, `UnavailableError`, `OSError`, `DataError` when the layers have changed
    since ``entries`` were read, `BootseerError` once ``cancelled`` says so; nothing half-published is visible then.
    """
    name = manifest_key(f"{document.key}/{inputs.name}")
    old = replaced.get(f"{document.key}/{inputs.name}")
    if old is None and store.exists(name):
        return False
    meta, data = work / "meta", work / "data"
    try:
        faults.point("env.publish.before-build")
        _go_on(cancelled)
        erofs.build(layers, meta, data)
        faults.point("env.publish.before-tree")
        _go_on(cancelled)
        ref = tree.publish(store, meta, data)
    finally:
        for path in (meta, data):
            path.unlink(missing_ok=True)
    faults.point("env.publish.before-inventory")
    stored = inventory.encode(entries)
    digest = inventory.digest(stored)
    store.put(inventory_key(digest), stored, overwrite=bool(replaced))
    manifest = SnapshotManifest(
        key=document.key,
        document=document,
        inputs=inputs,
        tree=ref.digest,
        size=ref.size,
        stored=ref.stored + len(stored),
        inventory=digest,
        entries=len(entries),
        base=base,
        result=result,
        created=int(time.time()),
        node=node,
        seconds=round(seconds, 3),
    )
    faults.point("env.publish.before-manifest")
    check_unchanged(layers, entries)
    _go_on(cancelled)
    raw = manifest.encode()
    if not (store.put(name, raw) if old is None else store.replace(name, raw, old=old)):
        return False
    faults.point("env.publish.after-manifest")
    try:
        store.put(index_key(manifest), canonical(msgspec.to_builtins(document)))
    except BootseerError as exc:
        log.warning("%s; later misses will be explained less well", exc)
    return True


def _go_on(cancelled: Callable[[], bool]) -> None:
    if cancelled():
        raise BootseerError("the publication was cancelled")
