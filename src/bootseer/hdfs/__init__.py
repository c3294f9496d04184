"""HDFS: transfers of our own, and a typed client with deadlines over ``hdfs-native``. Formats and protocols, no policy.

`bootseer.hdfs.access` says which of the two a cluster needs. Most modules need the extra ``hdfs`` (`extra`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from bootseer.errors import UnsupportedError


@contextlib.contextmanager
def extra() -> Iterator[None]:
    """An import inside that fails because the extra ``hdfs`` is not installed is an `UnsupportedError`."""
    try:
        yield
    except ImportError as exc:
        raise UnsupportedError(f"HDFS needs more packages: {exc}", hint="pip install 'bootseer[hdfs]'") from None
