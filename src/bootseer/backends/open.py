"""Which storage a URL names."""

from __future__ import annotations

import os
from pathlib import Path

from bootseer.backends.folder import FolderBackend
from bootseer.backends.interface import Backend
from bootseer.errors import extra


def open_storage(url: str) -> Backend:
    """A path, ``file://...``, ``hdfs://...``, or what fsspec reaches (``s3://...``). Opening touches no storage."""
    scheme, sep, rest = url.partition("://")
    if not sep or scheme == "file":
        return FolderBackend(Path(os.path.abspath(rest if sep else url)))
    if scheme == "hdfs":
        with extra("hdfs", "HDFS"):
            from bootseer.backends.hdfs_native import NativeBackend

        return NativeBackend(url)
    from bootseer.backends.fsspec import FsspecBackend

    return FsspecBackend(url)
