"""Which store a URL names."""

from __future__ import annotations

from bootseer.backends.folder import FolderBackend
from bootseer.backends.open import open_storage
from bootseer.errors import ConfigError
from bootseer.objects.base import Store
from bootseer.objects.folder import FolderStore
from bootseer.objects.on_backend import ObjectStore


def open_store(url: str) -> Store:
    """Open the store at ``url``: a path, ``file://``, ``hdfs://host:port/base``, ``registry://host/name``, or any
    fsspec URL (``s3://...``).

    Opening touches no network; the first operation does.
    """
    if not url:
        raise ConfigError("no store given", hint="pass --store or set BOOTSEER_STORE")
    if url.startswith(("registry://", "registry+http://", "registry+https://")):
        from bootseer.objects.registry import RegistryStore

        return RegistryStore(url)
    backend = open_storage(url)
    return FolderStore(backend.root) if isinstance(backend, FolderBackend) else ObjectStore(url, backend)
