"""Guards: what must hold on this node for a snapshot to be used, beside its key; a failed one is a miss."""

from __future__ import annotations

import os
import time
from pathlib import Path

from bootseer.config import Config
from bootseer.env import quarantine, scan
from bootseer.env.manifest import SnapshotManifest
from bootseer.env.spec import EnvSpec

_SLACK = 64 << 20


def failed(spec: EnvSpec, found: SnapshotManifest, config: Config, *, unpacking: bool) -> str:
    """Why the snapshot cannot be used here; empty when it can. Ages first, costly checks last."""
    age = time.time() - found.created
    if spec.max_age is not None and age > spec.max_age:
        return f"the snapshot is {_age(age)} old, the maximum is {_age(spec.max_age)}"
    if reason := quarantine.reason(Path(config.cache_dir), quarantine.mark_of(found)):
        return f"the snapshot is quarantined on this node: {reason}"
    if found.document.targets != [target.path for target in spec.targets]:
        return "the snapshot was made for other paths"
    place = spec.targets[0].host if unpacking else Path(config.cache_dir)
    need = (2 * found.size + found.stored if unpacking else 0) + _SLACK
    free = _free(place)
    if free < need:
        return f"{place} has {free >> 20} MiB free, the snapshot needs {need >> 20} MiB"
    if not spec.image_digest:  # with one, what the targets hold before the command follows from the key
        for number, target in enumerate(spec.targets):
            if scan.fingerprint(target.host) not in (found.base[number], found.result[number]):
                return f"{target.host} holds other files than when the snapshot was made"
    return ""


def expired(spec: EnvSpec, found: SnapshotManifest) -> bool:
    return spec.max_age is not None and time.time() - found.created > spec.max_age


def _free(path: Path) -> int:
    while not path.exists():
        path = path.parent
    info = os.statvfs(path)
    return info.f_bavail * info.f_frsize


def _age(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"
