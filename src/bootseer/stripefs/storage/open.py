"""Which storage a URL names."""

from __future__ import annotations

import os
from pathlib import Path

from bootseer.errors import ConfigError
from bootseer.stripefs.storage.folder import FolderBackend
from bootseer.stripefs.storage.interface import Backend


def split_url(url: str) -> tuple[str, str]:
    """A file's URL as (URL of its folder, name): ``hdfs://n:8020/a/b`` is (``hdfs://n:8020/a``, ``b``)."""
    scheme, sep, rest = url.rpartition("://")
    if not sep:
        rest = os.path.abspath(rest)
    parent, slash, name = rest.rstrip("/").rpartition("/")
    if not slash or not name:
        raise ConfigError(f"{url!r} names no file")
    return f"{scheme}{sep}{parent or ('/' if scheme in ('', 'file') else '')}", name


def open_backend(url: str) -> Backend:
    """A path, ``file://...``, ``hdfs://...``, or what fsspec reaches (``s3://...``). Opening touches no storage."""
    if not url:
        raise ConfigError("no striped store given", hint="name a folder or hdfs://host:port/path")
    scheme, sep, rest = url.partition("://")
    if not sep or scheme == "file":
        return FolderBackend(Path(os.path.abspath(rest if sep else url)))
    if scheme == "hdfs":
        from bootseer.stripefs.storage.hdfs import HdfsBackend  # loads the HDFS client

        return HdfsBackend(url)
    from bootseer.stripefs.storage.fsspec import FsspecBackend

    return FsspecBackend(url)
