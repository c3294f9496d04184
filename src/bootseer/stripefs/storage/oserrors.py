"""Errors of the store as those of Python's own files, for clients that know only these."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from bootseer.errors import (
    BootseerError,
    ConfigError,
    FullError,
    NotFoundError,
    NotWritableError,
    UnavailableError,
    UnsupportedError,
)


@contextlib.contextmanager
def os_errors(path: str) -> Iterator[None]:
    """Errors of the store, met at ``path``, as those of Python's own files."""
    try:
        yield
    except BootseerError as exc:
        raise os_error(exc, path) from exc


def os_error(exc: BootseerError, path: str) -> Exception:
    if isinstance(exc, ConfigError):
        return ValueError(str(exc))
    for kind, number in (
        (NotFoundError, errno.ENOENT),
        (NotWritableError, errno.EACCES),
        (FullError, errno.ENOSPC),
        (UnavailableError, errno.ETIMEDOUT),
        (UnsupportedError, errno.EOPNOTSUPP),
    ):
        if isinstance(exc, kind):
            return OSError(number, str(exc), path)  # Python picks the subclass
    return OSError(errno.EIO, str(exc), path)
