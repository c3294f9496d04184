"""The snapshot manifest: one JSON object, ``env/<key>.json``; written last, so it means that all the rest is there."""

from __future__ import annotations

import json
import re

import msgspec

from bootseer.env._json import canonical, sha256_of
from bootseer.env.key import KeyDocument, document_from
from bootseer.errors import ConfigError, DataError

_HEX = re.compile(r"[0-9a-f]{64}")
_DIGEST = re.compile(r"[0-9a-f]{32,128}")


class SnapshotManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """See ``docs/internals/snapshot.md``. Sizes in bytes, ``created`` in Unix seconds."""

    magic: str = "bootseer-env"
    version: int = 1
    key: str
    document: KeyDocument
    tree: str
    size: int
    stored: int
    inventory: str
    entries: int
    base: list[str]
    result: list[str]
    created: int
    node: str = ""
    seconds: float = 0.0
    """How long the command ran."""

    def encode(self) -> bytes:
        fields = msgspec.to_builtins(self)
        return canonical({**fields, "sum": sha256_of(fields)})


def manifest_key(key: str) -> str:
    """Name of the manifest in the store. Raises `ConfigError` when ``key`` is not 64 hex digits."""
    if not _HEX.fullmatch(key):
        raise ConfigError(f"{key!r} is not a snapshot key", hint="bootseer env ls prints keys of 64 hex digits")
    return f"env/{key}.json"


def inventory_key(digest: str) -> str:
    return f"env/lists/{digest}.zst"


def index_prefix(document: KeyDocument) -> str:
    return f"env/index/{document.lineage}"


def decode(data: bytes, key: str) -> SnapshotManifest:
    """The manifest stored under ``key``. Raises `DataError` for damage, another key, or targets that are not plain."""
    try:
        fields = json.loads(data)
        check = fields.pop("sum", None) if isinstance(fields, dict) else None
        if check is None or check != sha256_of(fields):
            raise DataError(f"manifest of snapshot {key[:12]} has the wrong checksum")
        found = msgspec.convert(fields, SnapshotManifest)
    except (ValueError, msgspec.ValidationError, RecursionError) as exc:
        raise DataError(f"cannot read the manifest of snapshot {key[:12]}: {exc}") from None
    if found.magic != "bootseer-env" or found.version != 1:
        raise DataError(f"snapshot {key[:12]} has the unknown format {found.magic!r} version {found.version}")
    document_from(msgspec.to_builtins(found.document))
    if found.key != key or found.document.key != key:
        raise DataError(f"manifest of snapshot {key[:12]} belongs to another key")
    targets = found.document.targets
    for path in targets:
        parts = path.split("/")
        if not path.startswith("/") or "\0" in path or any(part in (".", "..") for part in parts):
            raise DataError(f"snapshot {key[:12]} has the bad target {path!r}", hint="it is not used")
    if not _DIGEST.fullmatch(found.tree) or not _HEX.fullmatch(found.inventory):
        raise DataError(f"snapshot {key[:12]} names a bad digest", hint="it is not used")
    if not targets or len(found.base) != len(targets) or len(found.result) != len(targets) or found.size < 0:
        raise DataError(f"manifest of snapshot {key[:12]} contradicts itself", hint="it is not used")
    return found
