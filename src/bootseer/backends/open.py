"""Which storage a URL names."""

from __future__ import annotations

import os
from pathlib import Path

from bootseer.backends.folder import FolderBackend
from bootseer.backends.interface import Backend
from bootseer.errors import ConfigError, extra


def open_storage(url: str, *, shown: bool = False) -> Backend:
    """A path, ``file://...``, ``hdfs://...``, or what fsspec reaches (``s3://...``). Opening touches no storage.

    ``shown``: what is read is shown to others than this user; in a folder fewer links are followed then.
    """
    scheme, sep, rest = url.partition("://")
    if not sep or scheme == "file":
        return FolderBackend(Path(os.path.abspath(rest if sep else url)), shown=shown)
    if scheme == "hdfs":
        with extra("hdfs", "HDFS"):
            from bootseer.backends.cluster import HdfsBackend

        return HdfsBackend(url)
    from bootseer.backends.fsspec import FsspecBackend

    return FsspecBackend(url)


def split_url(url: str) -> tuple[str, str]:
    """A file's URL as (URL of its folder, name): ``hdfs://n:8020/a/b`` is (``hdfs://n:8020/a``, ``b``)."""
    scheme, sep, rest = url.rpartition("://")
    if not sep:
        rest = os.path.abspath(rest)
    parent, slash, name = rest.rstrip("/").rpartition("/")
    if not slash or not name:
        raise ConfigError(f"{url!r} names no file")
    return f"{scheme}{sep}{parent or ('/' if scheme in ('', 'file') else '')}", name
