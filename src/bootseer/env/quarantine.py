"""Quarantine: published snapshots that turned out damaged on this node, which it uses no more.

A snapshot is named by a hash of its manifest, so the one that the next successful run publishes in its place is free.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

from bootseer.env.manifest import SnapshotManifest

log = logging.getLogger(__name__)


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
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(why + "\n")
    except OSError as exc:
        log.warning("cannot remember that a snapshot is damaged: %s", exc)


def lift(cache_dir: Path, mark: str) -> None:
    """Use the snapshot again. Raises `OSError`."""
    _file(cache_dir, mark).unlink(missing_ok=True)


def _file(cache_dir: Path, mark: str) -> Path:
    return cache_dir / "env-quarantine" / mark
