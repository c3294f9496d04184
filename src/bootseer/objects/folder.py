"""A store in a folder: the embedded default, and what a site with NFS, Lustre or GPFS uses."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

from bootseer.backends.folder import FolderBackend
from bootseer.backends.interface import TEMPORARY
from bootseer.objects.on_backend import ObjectStore

log = logging.getLogger(__name__)

_ABANDONED = 86400.0
"""Seconds without a write after which a temporary file has no writer: no single object takes a day."""


class FolderStore(ObjectStore):
    """Objects as files under ``root``. A publication removes what killed writers left in its folder long ago."""

    def __init__(self, root: Path) -> None:
        super().__init__(str(root), FolderBackend(root))
        self.root = root
        self._swept: set[Path] = set()

    def put(self, key: str, data: bytes | Path, *, overwrite: bool = False) -> bool:
        published = super().put(key, data, overwrite=overwrite)
        folder = (self.root / key).parent
        if published and folder not in self._swept:
            self._swept.add(folder)
            with contextlib.suppress(OSError):
                _sweep(folder, now=(self.root / key).stat().st_mtime)
        return published


def _sweep(folder: Path, now: float) -> None:
    """``now`` is by the clock of the folder's server."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(TEMPORARY) and entry.is_file() and entry.stat().st_mtime < now - _ABANDONED:
                log.info("removing %s: its writer is gone", entry.path)
                os.unlink(entry.path)
