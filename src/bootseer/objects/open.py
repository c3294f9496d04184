"""Which store a URL names."""

from __future__ import annotations

import os

from bootseer.backends.folder import FolderBackend
from bootseer.backends.open import Given, locate, open_storage
from bootseer.errors import ConfigError
from bootseer.objects.base import Store
from bootseer.objects.folder import FolderStore
from bootseer.objects.on_backend import ObjectStore


def open_store(given: Given) -> Store:
    """Open the store at ``given``: ``registry://host/name``, or a path or URL as of `bootseer.backends.open.locate`.
    Opening touches no network; the first operation does."""
    url = os.fsdecode(given)
    if not url:
        raise ConfigError("no store given", hint="pass --store or set BOOTSEER_STORE")
    if url.startswith(("registry://", "registry+http://", "registry+https://")):
        from bootseer.objects.registry import RegistryStore

        return RegistryStore(url)
    backend = open_storage(url)
    return FolderStore(backend.root) if isinstance(backend, FolderBackend) else ObjectStore(locate(url).url, backend)
