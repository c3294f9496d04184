"""Which storage a URL names."""

from __future__ import annotations

import os
from pathlib import Path

from bootseer.errors import extra
from bootseer.storage.folder import FolderBackend
from bootseer.storage.interface import Backend


def open_storage(url: str) -> Backend:
    """A path, ``file://...``, ``hdfs://...``, or what fsspec reaches (``s3://...``). Opening touches no storage."""
    scheme, sep, rest = url.partition("://")
    if not sep or scheme == "file":
        return FolderBackend(Path(os.path.abspath(rest if sep else url)))
    if scheme == "hdfs":
        with extra("hdfs", "HDFS"):
            from bootseer.storage.hdfs import NativeBackend

        return NativeBackend(url)
    from bootseer.storage.fsspec import FsspecBackend

    return FsspecBackend(url)
