"""Which storage of a striped store a URL names."""

from __future__ import annotations

import os

from bootseer.backends.interface import Backend
from bootseer.backends.open import open_storage
from bootseer.errors import ConfigError, extra


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
    if url.startswith("hdfs://"):
        with extra("hdfs", "HDFS"):
            from bootseer.backends.hdfs_direct import HdfsBackend

        return HdfsBackend(url)
    return open_storage(url)
