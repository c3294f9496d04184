"""The snapshot manifest: one JSON object, ``env/snapshots/<key>/<inputs>.json``, written last: all the rest is
there."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import msgspec

from bootseer.env import leads
from bootseer.env.canonical import canonical, sha256_of
from bootseer.env.inputs import Observed, check_names
from bootseer.env.key import KeyDocument, document_from
from bootseer.errors import ConfigError, DataError
from bootseer.objects import signature

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from bootseer.wiretypes import known, loaded

FOLDER = "env/snapshots"
MAX_STORED = 8 << 20
"""Bytes of a manifest: 10,000 observed files and their digests take two, and key files few more."""
_HEX = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[0-9a-f]{64}/[0-9a-f]{64}")
_DIGEST = re.compile(r"[0-9a-f]{32,128}")


class SnapshotManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """See ``docs/internals/snapshot.md``. Sizes in bytes, ``created`` in Unix seconds."""

    magic: str = "bootseer-env"
    version: int = 2
    key: str
    document: KeyDocument
    inputs: Observed
    tree: str
    size: int
    stored: int
    inventory: str
    entries: int
    base: list[str]
    result: list[str]
    created: Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
    node: Annotated[str, msgspec.Meta(pattern=r"^[^\x00-\x1f\x7f-\x9f\ud800-\udfff]*\Z", max_length=255)] = ""
    seconds: Annotated[float, msgspec.Meta(ge=0, le=1e9)] = 0.0
    """How long the command ran."""
    signature: str = ""
    """Of `content`, in base64; absent from the object when there is none."""

    def encode(self) -> bytes:
        fields = self._fields()
        return canonical({**fields, "sum": sha256_of(fields)})

    @property
    def content(self) -> bytes:
        """What is signed."""
        return canonical({**self._fields(), "signature": None})

    def _fields(self) -> dict[str, object]:
        fields = msgspec.to_builtins(self)
        if not self.signature:
            del fields["signature"]
        for absent in ("variables", "names"):
            if not fields["inputs"][absent]:
                del fields["inputs"][absent]
        return fields  # type: ignore[no-any-return]

    @property
    def name(self) -> str:
        return name_of(self.key, self.inputs, self.base)

    @property
    def shown(self) -> str:
        """The name for people; commands take it."""
        return "/".join((self.key[:12], self.name.partition("/")[2][:8]))


def name_of(key: str, inputs: Observed, base: list[str]) -> str:
    """Of all snapshots of a key each has observed inputs, and targets that held something before, of its own."""
    return f"{key}/{sha256_of([inputs.name, base]) if any(base) else inputs.name}"


def manifest_key(name: str) -> str:
    """Where the manifest called ``name`` (`SnapshotManifest.name`) is in the store. Raises `ConfigError`."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is not a snapshot", hint="bootseer store ls prints keys")
    return f"{FOLDER}/{name}.json"


def inventory_key(digest: str) -> str:
    return f"env/lists/{digest}.zst"


def index_prefix(document: KeyDocument) -> str:
    return f"env/index/{document.lineage}"


def index_key(found: SnapshotManifest) -> str:
    return f"{index_prefix(found.document)}/{found.created:012d}-{found.name.replace('/', '-')}"


def decode(data: bytes, name: str) -> SnapshotManifest:
    """The manifest called ``name`` (see `manifest_key`). Raises `DataError` for damage, another name, or targets that
    are not plain."""
    key = name.partition("/")[0]
    try:
        fields = loaded(json.loads, data)
        check = fields.pop("sum", None) if isinstance(fields, dict) else None
        if check is None or check != loaded(sha256_of, fields):
            raise DataError(f"manifest of snapshot {key[:12]} has the wrong checksum")
        found = msgspec.convert(fields, known(SnapshotManifest))
    except ValueError as exc:
        raise DataError(f"cannot read the manifest of snapshot {key[:12]}: {exc}") from None
    if found.magic != "bootseer-env" or found.version != 2:
        raise DataError(f"snapshot {key[:12]} has the unknown format {found.magic!r} version {found.version}")
    document_from(msgspec.to_builtins(found.document))
    try:
        named = found.name
    except ValueError:  # half a surrogate pair
        named = ""
    if found.document.key != found.key or named != name:
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
    try:
        check_names(found.inputs)
        leads.check(found.inputs)
    except DataError as exc:
        raise DataError(f"snapshot {key[:12]} is not used: {exc.message}") from None
    return found


def check_signed(found: SnapshotManifest, keys: Sequence[Ed25519PublicKey]) -> None:
    """Raise `UnsignedError` when there are ``keys`` and none of them signed the snapshot."""
    if keys:
        hint = "set sign_key on nodes that run set-up commands, and look who published it"
        signature.verify(keys, found.content, found.signature.encode(), f"snapshot {found.shown}", hint=hint)
