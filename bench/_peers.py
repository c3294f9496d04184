"""The programs of other projects that bench/image compares with, as ``scripts/bench-peers`` builds them."""

from __future__ import annotations

import os
from pathlib import Path

from bootseer.errors import UnsupportedError

NYDUS = "2.2.0"


def program(name: str) -> Path:
    """Path of ``name`` in the development cache. Raises `UnsupportedError` when it has not been built."""
    import _parts

    path = _parts.cache_dir() / "peers/bin" / name
    if not os.access(path, os.X_OK):
        raise UnsupportedError(f"{name} is not built", hint="run scripts/bench-peers")
    return path
