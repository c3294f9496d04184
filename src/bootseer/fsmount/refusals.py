"""Errors of the store as the numbers that a mount answers with."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Iterator

from bootseer.errors import (
    BootseerError,
    ConfigError,
    FullError,
    NameTooLongError,
    NotFoundError,
    NotWritableError,
    UnsupportedError,
)

_log = logging.getLogger(__name__)


def refusal(code: int, path: str = "") -> OSError:
    return OSError(code, os.strerror(code), path)


@contextlib.contextmanager
def numbered(path: str) -> Iterator[None]:
    """Errors of the store as numbers, with a log line where the number does not say it all."""
    try:
        yield
    except FileExistsError:
        raise refusal(errno.EEXIST, path) from None
    except NotFoundError:
        raise refusal(errno.ENOENT, path) from None
    except BootseerError as exc:
        _log.warning("%s: %s", path or "/", exc)
        for kind, code in (
            (NotWritableError, errno.EACCES),
            (FullError, errno.ENOSPC),
            (NameTooLongError, errno.ENAMETOOLONG),
            (ConfigError, errno.EINVAL),
            (UnsupportedError, errno.EOPNOTSUPP),
        ):
            if isinstance(exc, kind):
                raise refusal(code, path) from None
        raise refusal(errno.EIO, path) from None
