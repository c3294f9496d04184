"""Which store a URL names."""

from __future__ import annotations

import os
from pathlib import Path

from bootseer.errors import ConfigError
from bootseer.store.base import Store
from bootseer.store.folder import FolderStore


def open_store(url: str) -> Store:
    """Open the store at ``url``: a path, ``file://``, ``hdfs://host:port/base``, ``registry://host/name``, or any
    fsspec URL (``s3://...``).

    Opening touches no network; the first operation does.
    """
    if not url:
        raise ConfigError("no store given", hint="pass --store or set BOOTSEER_STORE")
    scheme, sep, _ = url.partition("://")
    if not sep or scheme == "file":
        return FolderStore(Path(os.path.abspath(url.removeprefix("file://"))))
    if scheme == "hdfs":
        from bootseer.store.hdfs import HdfsStore

        return HdfsStore(url)
    if scheme in ("registry", "registry+http", "registry+https"):
        from bootseer.store.registry import RegistryStore

        return RegistryStore(url)
    from bootseer.store.fsspec import FsspecStore

    return FsspecStore(url)
