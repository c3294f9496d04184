"""Publication: the tree, then the inventory, then the manifest, so that a snapshot is there whole or not at all."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from bootseer import erofs, faults
from bootseer.blocks import tree
from bootseer.env import inventory
from bootseer.env.canonical import canonical
from bootseer.env.inputs import Observed
from bootseer.env.inventory import Entry
from bootseer.env.layer import check_unchanged
from bootseer.env.lookup import Lookup
from bootseer.env.manifest import MAX_STORED, SnapshotManifest, index_key, inventory_key, manifest_key
from bootseer.errors import BootseerError, DataError
from bootseer.objects import Store, lease, signature

log = logging.getLogger(__name__)


def publish(
    store: Store,
    look: Lookup,
    inputs: Observed,
    layers: Path,
    entries: list[Entry],
    *,
    work: Path,
    base: list[str],
    result: list[str],
    seconds: float,
    sign_key: str,
    cancelled: Callable[[], bool],
) -> bool:
    """Publish the layers in ``layers`` as the snapshot of ``look.document`` and ``inputs``. False: another was first.

    ``work`` gets the EROFS files (as large as the layers). With ``look.replace`` the snapshot of this name that
    ``look`` saw, expired or damaged, is replaced if it is still that one, and what is damaged of the objects of both.
    Raises `FullError`, `NotWritableError`, `UnavailableError`, `OSError`, `DataError` when the layers have changed
    since ``entries`` were read, `BootseerError` once ``cancelled`` says so; nothing half-published is visible then.
    """
    document, snapshot = look.document, f"{look.key}/{inputs.name}"
    name = manifest_key(snapshot)
    old = look.seen.get(snapshot) if look.replace else None
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
    store.put(inventory_key(digest), stored, overwrite=look.replace)
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
        node=lease.this_node(),
        seconds=round(seconds, 3),
    )
    faults.point("env.publish.before-manifest")
    check_unchanged(layers, entries)
    _go_on(cancelled)
    if sign_key:
        key = signature.signing_key(Path(sign_key))
        signed = signature.sign(key, manifest.content).decode()
        manifest = msgspec.structs.replace(manifest, signature=signed)
    raw = manifest.encode()
    if len(raw) > MAX_STORED:
        raise DataError(f"its manifest would have {len(raw)} bytes, more than {MAX_STORED}")
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
