"""A file system of fsspec, made once for each process and place, and calls of it with deadlines and errors of ours, in
worker threads of `bootseer.hdfs.deadline`, so that one that never returns holds up nobody."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, TypeVar

from bootseer.backends.interface import DEADLINE
from bootseer.errors import (
    BootseerError,
    ConfigError,
    DataError,
    NotFoundError,
    UnavailableError,
    UnsupportedError,
    from_os_error,
)
from bootseer.hdfs.deadline import Workers

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_log = logging.getLogger(__name__)
T = TypeVar("T")

WHOLE = frozenset(
    ("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "oci", "obs", "cos", "tos", "r2", "b2", "memory")
)
"""Protocols whose objects are there whole or not at all; on others one is written beside and renamed."""
RENAMING = frozenset(("file", "local", "sftp", "ssh"))
"""Protocols of file systems whose fsspec ``mv`` is one rename that replaces: rename(2), posix-rename of OpenSSH."""
_NO_LOGIN = frozenset(("NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError"))
_LOGIN = "give them as for any fsspec store, such as FSSPEC_S3_KEY and FSSPEC_S3_SECRET, or as the provider's tools do"
_REACH = "check that the store is reachable from here"
_WRITE = "write it like hdfs://host:port/path, s3://bucket/path or file:///path"
_PASSWORD = re.compile(r"://[^/?#]*@")
_IN_TEXT = re.compile(r"(?:(?<=://)|(?<![^\s/\"'])[^\s/\"':]+:)[^\s/\"']*@")
"""Such a login where a library tells of it, as S3's does of a bucket of that name."""

_workers = Workers("fsspec")
_opened: dict[tuple[int, str], tuple[AbstractFileSystem, str]] = {}
"""By process and place: a client of S3 takes a third of a second of CPU to make."""


@contextlib.contextmanager
def _translated(doing: str) -> Iterator[None]:
    """Any error of an fsspec file system met while ``doing`` (a phrase), but FileExistsError, in this project's
    classes, without secrets."""
    try:
        yield
    except BootseerError:
        raise
    except FileExistsError:
        raise FileExistsError(errno.EEXIST, f"cannot {doing}: it exists") from None
    except FileNotFoundError as exc:
        # HTTP's is one of these for whatever went wrong
        if isinstance(why := exc.__cause__, OSError) and not isinstance(why, FileNotFoundError):
            raise UnavailableError(f"cannot {doing}: {type(why).__name__}", hint=_REACH) from None
        raise NotFoundError(f"cannot {doing}: no such object") from None
    except (NotADirectoryError, IsADirectoryError) as exc:
        raise NotFoundError(f"cannot {doing}: {exc.strerror or 'a file or folder is in the way'}") from None
    except TimeoutError:
        raise UnavailableError(f"cannot {doing}: it timed out", hint=_REACH) from None
    except OSError as exc:
        # Its text is not ours to trust with secrets, and the exception it came from has it as well.
        if not (code := exc.errno or 0) > 0:
            raise UnavailableError(f"cannot {doing}: {type(exc).__name__}", hint=_REACH) from None
        raise from_os_error(OSError(code, os.strerror(code)), doing) from None
    except Exception as exc:  # every fsspec backend has error classes of its own
        if type(exc).__name__ in _NO_LOGIN:
            raise ConfigError(f"cannot {doing}: no credentials were found", hint=_LOGIN) from None
        raise UnavailableError(f"cannot {doing}: {type(exc).__name__}: {_IN_TEXT.sub('***@', str(exc))}") from None


class FsspecPlace:
    """Files below ``url``. ``options``: what its fsspec class takes (credentials, ``endpoint_url``). Raises
    `UnsupportedError` when the package for that protocol is not installed. Touches no storage yet."""

    def __init__(self, url: str, options: Mapping[str, object] | None = None) -> None:
        import fsspec

        self._location, self._options = url, dict(options or {})
        self.url = _PASSWORD.sub("://***@", url)
        self._protocol = url.partition("://")[0].partition("::")[0]
        self._rooted: str | None = None  # the base, when it is not that of the URL
        self._token = fsspec.utils.tokenize(url, self._options)
        self._names: frozenset[str] = frozenset()
        self._said: set[str] = set()
        try:
            fsspec.get_filesystem_class(self._protocol)
        except (ImportError, ValueError) as exc:
            hint = "for s3:// install bootseer[s3]" if isinstance(exc, ImportError) else _WRITE
            raise UnsupportedError(f"cannot open store {self.url}: {exc}", hint=hint) from None

    def _filesystem(self) -> tuple[AbstractFileSystem, str]:
        """The file system and the base in it: one for all backends of that place, but not the one that users of fsspec
        get, whose transactions would hold our files back. A forked child, without that event loop, makes it afresh."""
        import fsspec

        key = os.getpid(), self._token
        if key not in _opened:
            options = {**self._options, "skip_instance_cache": True}
            fs, base = fsspec.core.url_to_fs(self._location, **options)
            _opened.setdefault(key, (fs, base.rstrip("/")))  # another thread may have been faster
        fs, base = _opened[key]
        return fs, base if self._rooted is None else self._rooted

    def call(self, doing: str, function: Callable[[AbstractFileSystem], T], seconds: float = DEADLINE) -> T:
        """``function(file system)`` under a deadline, its errors translated; ``doing`` is a phrase for messages."""

        def run() -> T:
            with _translated(doing):
                return function(self._filesystem()[0])

        try:
            return _workers.call(run, seconds)
        except TimeoutError:
            raise UnavailableError(f"cannot {doing}: no answer within {seconds:.0f} s", hint=_REACH) from None

    def name(self, path: str) -> str:
        """``path`` for messages."""
        base = self.url if self.url.endswith("://") else f"{self.url.rstrip('/')}/"
        return base + path if path else self.url

    def full(self, path: str) -> str:
        """``path`` in the file system below."""
        fs, base = self._filesystem()
        full = f"{base}/{path}" if base and path else base or f"{fs.root_marker}{path}"
        if "?versionId=" in full or any(sign in full and fs._strip_protocol(full) != full for sign in "?#"):
            raise ConfigError(f"{self.name(path)}: {self._protocol}:// cannot tell this name from another")
        return full

    def replaced(self, path: str) -> DataError:
        return DataError(f"{self.name(path)} was replaced while it was read", hint="open it again")

    def say_once(self, what: str) -> None:
        if what not in self._said:
            self._said.add(what)
            _log.warning("store %s: %s", self.url, what)

    @property
    def protocols(self) -> frozenset[str]:
        """Names of the file system that stores, under any ``dir::``."""
        if not self._names:
            from fsspec.implementations.dirfs import DirFileSystem

            fs = self.call(f"open store {self.url}", lambda fs: fs)
            while isinstance(fs, DirFileSystem):
                fs = fs.fs
            self._names = frozenset((fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol)
        return self._names

    def objects(self) -> bool:
        """Whether a PUT publishes; else a rename does. `UnsupportedError` when neither does."""
        if self.protocols & WHOLE:
            return True
        if self.protocols & RENAMING:
            return False
        raise UnsupportedError(
            f"cannot write to store {self.url}: {self._protocol}:// cannot publish a file at once",
            hint="use a folder, HDFS or an object store",
        )

    @property
    def memory(self) -> bool:
        """Whether the objects are this process's own."""
        return "memory" in self.protocols
