"""The hit decision: is there a snapshot of this key that this node may use, and if not, why not."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from bootseer.config import Config
from bootseer.env import explain, guards, key, manifest
from bootseer.env.key import KeyDocument
from bootseer.env.manifest import SnapshotManifest
from bootseer.env.spec import EnvSpec
from bootseer.errors import BootseerError, DataError, NotFoundError
from bootseer.store import Store, open_store

log = logging.getLogger(__name__)

_COMPARED = 16


class Lookup(msgspec.Struct, kw_only=True):
    """``found`` is set on a hit, else ``reason`` says why there is none. ``replace``: a publication may overwrite."""

    document: KeyDocument
    found: SnapshotManifest | None = None
    reason: str = ""
    replace: bool = False
    store: Store | None = None

    @property
    def key(self) -> str:
        return self.document.key


def document(spec: EnvSpec, config: Config) -> KeyDocument:
    """The key document of ``spec`` on this node. Raises `ConfigError` for unusable key files and interpreters."""
    return key.build(spec, python_cache=Path(config.cache_dir, "env-pythons.json"))


def look(spec: EnvSpec, inputs: KeyDocument, store_url: str, config: Config, *, unpacking: bool) -> Lookup:
    """Decide. Trouble with the store or its content is a miss with a reason and a log line, never an error."""
    out = Lookup(document=inputs)
    try:
        out.store = open_store(store_url)
        name = manifest.manifest_key(inputs.key)
        try:
            found = manifest.decode(out.store.get(name), inputs.key)
        except NotFoundError:
            out.reason = _explained(out.store, inputs)
            return out
        if reason := guards.failed(spec, found, config, unpacking=unpacking):
            out.reason = f"missed because {reason}"
            out.replace = guards.expired(spec, found)
            return out
        out.found = found
    except DataError as exc:
        log.warning("%s; running the command", exc)
        out.reason, out.replace = f"missed because its manifest is damaged: {exc.message}", True
    except (BootseerError, OSError) as exc:
        log.warning("%s; running the command", exc)
        out.reason = f"missed because the store did not answer: {exc}"
        out.store = None
    return out


def _explained(store: Store, inputs: KeyDocument) -> str:
    try:
        names = [info.key for info in store.list(manifest.index_prefix(inputs))][-_COMPARED:]
        earlier = []
        for name in names:
            try:
                earlier.append(key.document_from(msgspec.json.decode(store.get(name))))
            except (BootseerError, msgspec.DecodeError) as exc:
                log.info("not compared with %s: %s", name, exc)
        return explain.explain(inputs, earlier)
    except (BootseerError, OSError) as exc:
        log.info("cannot explain the miss: %s", exc)
        return "missed because there is no such snapshot"
