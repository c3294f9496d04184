"""The hit decision: is there a snapshot of this key that this node may use, and if not, why not. Guards are what must
hold on this node for a snapshot to be used, beside its key; a failed one is a miss."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from bootseer.config import Config
from bootseer.env import key, leads, manifest, place, quarantine, remembered, scan, snapshots
from bootseer.env.inputs import Digests
from bootseer.env.key import KeyDocument
from bootseer.env.manifest import SnapshotManifest
from bootseer.env.spec import EnvSpec
from bootseer.errors import BootseerError, ConfigError, DataError, NotFoundError, logged
from bootseer.objects import Store, open_store, signature
from bootseer.units import age_text, one_line
from bootseer.wiretypes import json_as

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

log = logging.getLogger(__name__)

_COMPARED = 16
_CANDIDATES = 32
"""Snapshots of one key that are compared, the newest first."""
_LONGEST = 2000
"""Characters of an explanation: what others wrote is in it."""
_SLACK = 64 << 20
"""Bytes that stay free on the disk of the cache or of the targets."""


class Lookup(msgspec.Struct, kw_only=True):
    """``found`` is set on a hit, else ``reason`` says why there is none. ``absent``: the store has no snapshot of this
    key and these inputs; ``replace``: it has one of no use to any node, which a publication may replace."""

    document: KeyDocument
    found: SnapshotManifest | None = None
    nearest: SnapshotManifest | None = None
    """Without a hit: the snapshot of this key that ``reason`` is about."""
    reason: str = ""
    absent: bool = False
    replace: bool = False
    store: Store | None = None
    seen: dict[str, bytes] = {}
    """Name -> manifest of the snapshots of this key, as they were read."""
    refused: set[str] = set()
    """Marks (`quarantine.shared_key`) of this key that the store has."""

    @property
    def key(self) -> str:
        return self.document.key


def look(
    spec: EnvSpec, inputs: KeyDocument, store_url: str, config: Config, held: place.Held, *, unpacking: bool
) -> Lookup:
    """Decide. Trouble with the store or its content is a miss with a reason and a log line, never an error."""
    out = Lookup(document=inputs)
    try:
        out.store = open_store(store_url)
        with remembered.at_hand(config):
            _choose(out, spec, config, out.store, held, unpacking=unpacking)
    except (BootseerError, OSError) as exc:
        log.warning("%s; running the command", exc)
        out.reason = f"missed because the store did not answer: {exc}"
        out.store = None
    except Exception as exc:  # others wrote what is in the store
        log.warning("cannot look for a snapshot: %r; running the command", exc)
        out.reason = f"missed because the store holds what cannot be read: {type(exc).__name__}"
        out.store = None
    return out


def _choose(out: Lookup, spec: EnvSpec, config: Config, store: Store, held: place.Held, *, unpacking: bool) -> None:
    digests, keys = Digests(spec, config), signature.trusted_keys(config)
    out.absent = True
    for found in _candidates(out, store, keys):
        if found.inputs.unobserved and out.nearest:
            break  # others of this key, whose inputs are known, do not fit: this one need not either
        bad = _quarantined(out, spec, found, config, keys)
        try:
            reason = leads.difference(spec, digests, found.inputs)
            if not reason:
                if not (reason := bad or _failed_guard(spec, found, config, held, unpacking=unpacking)):
                    out.found, out.nearest, out.reason, out.absent = found, None, "", False
                    return
                out.absent = False
        except (BootseerError, OSError):
            raise
        except Exception as exc:
            reason = f"it cannot be compared: {exc!r}"
            log.warning("snapshot %s is quarantined on this node: %s", found.shown, reason)
            quarantine.put(Path(config.cache_dir), quarantine.mark_of(found), reason)
        out.replace = out.replace or _expired(spec, found) or bool(bad)
        if out.nearest is None:
            out.nearest, out.reason = found, f"missed because {reason}"
    out.reason = out.reason or explained(store, out.document)


def _candidates(out: Lookup, store: Store, keys: Sequence[Ed25519PublicKey]) -> list[SnapshotManifest]:
    """The snapshots of the key: those with known inputs first, the newest first."""
    names, out.refused = snapshots.names_and_marks(store, out.key)
    if len(names) > _CANDIDATES:  # the index tells their age without a look into each
        order = [info.key.rpartition(f"{out.key}-")[2] for info in store.list(manifest.index_prefix(out.document))]
        age = {inputs: number for number, inputs in enumerate(order)}
        names = sorted(names, key=lambda name: -age.get(name.rpartition("/")[2], -1))[:_CANDIDATES]
    found = []
    for name in names:
        try:
            out.seen[name] = store.get(manifest.manifest_key(name), most=manifest.MAX_STORED)
            one = manifest.decode(out.seen[name], name)
            manifest.check_signed(one, keys)
            found.append(one)
        except NotFoundError:
            continue  # removed meanwhile
        except signature.UnsignedError as exc:
            log.warning("%s", exc)
            out.reason, out.replace = f"missed because {exc.message}", True
        except (DataError, ConfigError) as exc:
            log.warning("%s", exc)
            out.reason, out.replace = f"missed because its manifest is damaged: {exc.message}", True
    return sorted(found, key=lambda item: (bool(item.inputs.unobserved), -item.created))


def _failed_guard(spec: EnvSpec, found: SnapshotManifest, config: Config, held: place.Held, *, unpacking: bool) -> str:
    """Why the snapshot cannot be used on this node; empty when it can. Costly checks come last."""
    if found.created < int(spec.since):
        return "a new snapshot was asked for"
    if _expired(spec, found):
        age = age_text(time.time() - found.created)
        return f"the snapshot is {age} old, the maximum is {age_text(spec.max_age or 0)}"
    disk = spec.targets[0].host if unpacking else Path(config.cache_dir)
    need = (2 * found.size + found.stored if unpacking else 0) + _SLACK
    free = shutil.disk_usage(next(each for each in (disk, *disk.parents) if each.exists())).free
    if free < need:
        return f"{disk} has {free >> 20} MiB free, the snapshot needs {need >> 20} MiB"
    for number, target in enumerate(spec.targets):
        if spec.in_image(target):
            continue
        holds = scan.fingerprint(held.of(target) if found.base[number] else place.rows(target))
        if holds not in (found.base[number], found.result[number]):
            return f"{target.host} holds other files than when the snapshot was made"
    return ""


def _expired(spec: EnvSpec, found: SnapshotManifest) -> bool:
    too_old = spec.max_age is not None and time.time() - found.created > spec.max_age
    return too_old or found.created < int(spec.since)


def _quarantined(
    out: Lookup, spec: EnvSpec, found: SnapshotManifest, config: Config, keys: Sequence[Ed25519PublicKey]
) -> str:
    """Why nobody is to use the snapshot here; what another node says never ends a start that may not run the command
    (`EnvSpec.frozen`)."""
    if reason := quarantine.reason(Path(config.cache_dir), quarantine.mark_of(found)):
        return f"the snapshot is quarantined on this node: {reason}"
    listed = quarantine.shared_key(found) in out.refused and not spec.frozen
    reason = quarantine.told(out.store, found, keys) if out.store and listed else ""
    return reason and f"the snapshot is quarantined for all nodes: {reason}"


def explained(store: Store, inputs: KeyDocument) -> str:
    """Why the store has nothing of these inputs: in what they differ from the nearest of the same targets."""
    from bootseer.env import explain  # a hit needs none

    try:
        names = [info.key for info in store.list(manifest.index_prefix(inputs))][-_COMPARED:]
        earlier = []
        for name in names:
            with logged(log.info, "not compared with %s", name, kinds=(BootseerError, ValueError)):
                earlier.append(key.document_from(json_as(store.get(name, most=manifest.MAX_STORED), object)))
        return one_line(explain.explain(inputs, earlier))[:_LONGEST]
    except Exception as exc:
        log.info("cannot explain the miss: %s", exc)
        return "missed because there is no such snapshot"
