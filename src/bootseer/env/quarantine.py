"""Quarantine: published snapshots that turned out damaged on this node, which it uses no more, or of which a check
failed on any node, which none uses that believes its mark in the store. A snapshot is named by a hash of its manifest,
so the one that the next successful run publishes in its place is free."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from bootseer.config import Config
from bootseer.env.canonical import canonical
from bootseer.env.manifest import SnapshotManifest, manifest_key
from bootseer.errors import BootseerError, logged
from bootseer.objects import Store, signature
from bootseer.units import one_line
from bootseer.wiretypes import json_as

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

log = logging.getLogger(__name__)

_MOST, _LONGEST = 64 << 10, 500


class _Said(msgspec.Struct):
    """The mark in the store."""

    snapshot: str
    why: str
    signature: str = ""

    @property
    def content(self) -> bytes:
        return canonical([self.snapshot, self.why])


def mark_of(found: SnapshotManifest) -> str:
    """The name under which this very snapshot would be quarantined."""
    return hashlib.sha256(found.encode()).hexdigest()[:32]


def reason(cache_dir: Path, mark: str) -> str:
    """Why this node refuses the snapshot; empty when it does not."""
    try:
        return _file(cache_dir, mark).read_text(errors="replace").strip() or "it was damaged"
    except OSError:
        return ""


def put(cache_dir: Path, mark: str, why: str) -> None:
    """Never use the snapshot on this node again. A failure to remember that is only logged."""
    path = _file(cache_dir, mark)
    with logged(log.warning, "cannot remember that a snapshot is damaged", kinds=OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(why + "\n")


def lift(cache_dir: Path, mark: str) -> None:
    """Use the snapshot again. Raises `OSError`."""
    _file(cache_dir, mark).unlink(missing_ok=True)


def shared_key(found: SnapshotManifest) -> str:
    """Where in a store all nodes are told not to use the snapshot: beside its manifest."""
    return f"{manifest_key(found.name).removesuffix('.json')}.{mark_of(found)}.refused"


def tell(store: Store, found: SnapshotManifest, why: str, config: Config) -> None:
    """Tell all nodes, when this one may publish. Trouble is only logged."""
    if not config.sign_key and (config.verify_key or config.require_signature):
        return
    with logged(log.warning, "cannot tell other nodes that snapshot %s is of no use", found.shown):
        said = _Said(mark_of(found), one_line(why)[:_LONGEST])
        if config.sign_key:
            said.signature = signature.sign(signature.signing_key(Path(config.sign_key)), said.content).decode()
        store.put(shared_key(found), canonical(msgspec.to_builtins(said)))


def told(store: Store, found: SnapshotManifest, keys: Sequence[Ed25519PublicKey]) -> str:
    """Why a node told all not to use the snapshot, whose mark was listed; empty when that is not to be believed."""
    try:
        said = json_as(store.get(shared_key(found), most=_MOST), _Said)
        if keys:
            signature.verify(
                keys, said.content, said.signature.encode(), f"the mark of snapshot {found.shown}", hint="set sign_key"
            )
        return one_line(said.why)[:_LONGEST] if said.snapshot == mark_of(found) else ""
    except (BootseerError, ValueError) as exc:
        log.warning("%s; that mark is not believed", exc)
        return ""


def _file(cache_dir: Path, mark: str) -> Path:
    return cache_dir / "env-quarantine" / mark
