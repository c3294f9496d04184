"""Publication: the tree and the inventory, then the manifest, so that a snapshot is there whole or not at all."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from bootseer import faults
from bootseer.chunks.manifest import TreeRef
from bootseer.env import inventory
from bootseer.env.canonical import canonical
from bootseer.env.inputs import Observed
from bootseer.env.inventory import Entry
from bootseer.env.key import KeyDocument
from bootseer.env.manifest import MAX_STORED, SnapshotManifest, index_key, inventory_key, manifest_key, name_of
from bootseer.errors import BootseerError, DataError
from bootseer.objects import Store, lease, signature

log = logging.getLogger(__name__)


class Made(NamedTuple):
    """What the command made. ``seal``: puts the rest of its tree, and calls what it is given meanwhile; ``base`` and
    ``result``: fingerprints of the targets; ``seconds``: how long it ran."""

    inputs: Observed
    seal: Callable[[Callable[[], None]], TreeRef]
    entries: list[Entry]
    base: list[str]
    result: list[str]
    seconds: float


def publish(
    store: Store,
    document: KeyDocument,
    made: Made,
    replaces: Mapping[str, bytes] | None,
    check: Callable[[], None],
    sign_key: str,
) -> TreeRef | None:
    """Publish the snapshot of ``document`` and ``made.inputs``, and return its tree. None: another was first. With
    ``replaces`` (manifests by name) the one of this name, expired or damaged, is replaced if it is still that one, and
    what is damaged of its objects. ``check``: raises when what was read has changed meanwhile. Raises `FullError`,
    `NotWritableError`, `UnavailableError`, `OSError`, and what ``check`` does; nothing half-published is visible
    then."""
    snapshot = name_of(document.key, made.inputs, made.base)
    name, old = manifest_key(snapshot), (replaces or {}).get(snapshot)
    if old is None and store.exists(name):
        return None
    faults.point("env.publish.before-inventory")
    stored = inventory.encode(made.entries)
    digest = inventory.digest(stored)

    def put_inventory() -> None:
        store.put(inventory_key(digest), stored, overwrite=replaces is not None)

    tree = made.seal(put_inventory)
    manifest = SnapshotManifest(
        key=document.key,
        document=document,
        inputs=made.inputs,
        tree=tree.digest,
        size=tree.size,
        stored=tree.stored + len(stored),
        inventory=digest,
        entries=len(made.entries),
        base=made.base,
        result=made.result,
        created=int(time.time()),
        node=lease.this_node(),
        seconds=round(made.seconds, 3),
    )
    faults.point("env.publish.before-manifest")
    check()
    if sign_key:
        key = signature.signing_key(Path(sign_key))
        signed = signature.sign(key, manifest.content).decode()
        manifest = msgspec.structs.replace(manifest, signature=signed)
    raw = manifest.encode()
    if len(raw) > MAX_STORED:
        raise DataError(f"its manifest would have {len(raw)} bytes, more than {MAX_STORED}")
    if not (store.put(name, raw) if old is None else store.replace(name, raw, old=old)):
        return None
    faults.point("env.publish.after-manifest")
    if store.dated:
        store.put(inventory_key(digest), stored)  # where a collection took it away before it saw the manifest
    try:
        store.put(index_key(manifest), canonical(msgspec.to_builtins(document)))
    except BootseerError as exc:
        log.warning("%s; later misses will be explained less well", exc)
    return tree
