"""A store in a folder."""

from __future__ import annotations

from pathlib import Path

from bootseer.storage.folder import FolderBackend
from bootseer.store.objects import ObjectStore


class FolderStore(ObjectStore):
    """Objects as files under ``root``."""

    def __init__(self, root: Path) -> None:
        super().__init__(str(root), FolderBackend(root))
        self.root = root
