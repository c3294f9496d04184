"""A store in a folder: the embedded default, and what a site with NFS, Lustre or GPFS uses."""

from __future__ import annotations

import contextlib
from pathlib import Path

from bootseer.backends.folder import FolderBackend
from bootseer.backends.interface import TEMPORARY
from bootseer.errors import BootseerError, NotFoundError, UnsupportedError
from bootseer.objects.on_backend import ObjectStore

_ABANDONED = 86400.0
"""Seconds without a write after which a temporary file has no writer: no single object takes a day."""


class FolderStore(ObjectStore):
    """Objects as files under ``root``. A publication removes what killed writers of its user left there long ago."""

    def __init__(self, root: Path) -> None:
        self._folder = FolderBackend(root, common=True)
        super().__init__(str(root), self._folder)
        self.root = root
        self._swept: set[str] = set()

    def check_listed(self) -> None:
        super().check_listed()
        names = ["images", "published", "trees", "uses", "env", "env/snapshots"]
        with contextlib.suppress(NotFoundError):
            names += [f"env/snapshots/{one.name}" for one in self._folder.list("env/snapshots")]
        for name in names:
            if self._folder.is_link(name):
                raise UnsupportedError(
                    f"{name} in store {self.shown} is a link: what lies there is not listed",
                    hint="mount that place there (mount --bind), or move it back",
                )

    def share(self, gid: int) -> None:
        """See `FolderBackend.share`."""
        self._folder.share(gid)

    def put(self, key: str, data: bytes | Path, *, overwrite: bool = False) -> bool:
        published = super().put(key, data, overwrite=overwrite)
        folder = key.rpartition("/")[0]
        if published and folder not in self._swept:
            self._swept.add(folder)
            with contextlib.suppress(BootseerError):
                self._folder.sweep(folder, TEMPORARY, _ABANDONED)
        return published
