"""A store in a folder that keeps modes, as HDFS does."""

from __future__ import annotations

import os
import stat
from typing import Any

from bootseer.backends.folder import FolderBackend
from bootseer.backends.interface import FILE_MODE, Entry, Permissions


class KeepsModes(FolderBackend):
    """``made``: paths of the files that were made, with the modes that they had at once. ``owners``: names, by inode;
    others are of us."""

    def __init__(self, root: Any) -> None:
        super().__init__(root)
        self.made: list[tuple[str, int]] = []
        self.owners: dict[int, tuple[str, str]] = {}

    def create(self, path: str, *, mode: int = FILE_MODE, **more: Any) -> Any:
        sink = super().create(path, **more)
        self._path(path).chmod(mode)
        self.owners.pop(self._path(path).stat().st_ino, None)
        self.made.append((path, mode))
        return sink

    def stat(self, path: str) -> Entry:
        told, found = super().stat(path), self._path(path).stat()
        owner = self.owners.get(found.st_ino, ("us", "us"))
        mode = stat.S_IMODE(found.st_mode)
        return told._replace(permissions=Permissions(os.geteuid(), os.getegid(), mode, mode, owner))

    def change(self, path: str, *, mode: int | None = None, owner: tuple[str, str] | None = None, **more: Any) -> None:
        if mode is not None:
            self._path(path).chmod(mode)
        if owner is not None:
            self.owners[self._path(path).stat().st_ino] = owner
        super().change(path, **more)

    def rights(self, folder: str = "") -> set[tuple[int, tuple[str, str]]]:
        """Of all files below a folder."""
        told = [self.stat(path).permissions for path, _ in self.walk(folder)]
        return {(found.mode, found.owner or ("", "")) for found in told if found is not None}
