"""Which striped store a file system of fsspec has, which path of it a URL names (``bsx+hdfs://host:8020/ckpt/x``: the
striped file ``hdfs://host:8020/ckpt/x``), and its errors as OSError."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Callable, Iterator
from typing import Any, cast

from fsspec import AbstractFileSystem
from fsspec.utils import stringify_path

from bootseer.backends.fsspec import FsspecBackend
from bootseer.backends.interface import Backend
from bootseer.backends.open import PREFIX, Location, absolute, is_url, locate, open_storage
from bootseer.errors import (
    BootseerError,
    ConfigError,
    FullError,
    NameTooLongError,
    NotFoundError,
    NotWritableError,
    UnavailableError,
    UnsupportedError,
)
from bootseer.stripefs import layout
from bootseer.stripefs.checkpoint.commit import is_hidden
from bootseer.stripefs.files.reader import ChunkFile
from bootseer.stripefs.local import Load
from bootseer.stripefs.store import StripeFS

PROTOCOL = "bsx"
PROTOCOLS = (PROTOCOL, *(PREFIX + scheme for scheme in ("file", "hdfs", "memory", "s3", "gs", "az", "sftp")))
"""The names under which pyproject.toml registers the file system."""


def split(url: str) -> Location:
    """As `locate`, but the paths are those of fsspec's own file systems: ("s3://", "/bucket/x"). Raises ValueError,
    also for a URL that does not end with the path it names; ImportError when fsspec lacks a package."""
    url = re.sub(rf"^(?:{re.escape(PREFIX)})?local://", "file://", url)
    try:
        found = locate(url)
    except ConfigError as exc:
        raise ValueError(str(exc)) from exc
    if found.root.startswith(("file://", "hdfs://")):
        return found
    url = url.removeprefix(PREFIX)
    scheme, _, rest = url.partition("://")
    if scheme == "memory":
        return Location("memory://", absolute(rest))
    from fsspec import get_filesystem_class

    key = cast(str, get_filesystem_class(scheme)._strip_protocol(url)).strip("/")
    trimmed = url.rstrip("/")
    if key and not trimmed.endswith(key):
        raise ValueError(f"cannot tell store and path of {url!r} apart; pass url= and the options of {scheme}://")
    root = trimmed[: len(trimmed) - len(key)].rstrip("/") if key else trimmed
    return Location(f"{root}//" if root.endswith(":") else root, absolute(key))


@contextlib.contextmanager
def doing(path: str) -> Iterator[None]:
    """Errors of the store, met at ``path``, as those of Python's own files."""
    try:
        yield
    except BootseerError as exc:
        raise os_error(exc, path) from exc


def os_error(exc: BootseerError, path: str) -> Exception:
    if isinstance(exc, NameTooLongError):
        return OSError(errno.ENAMETOOLONG, str(exc), path)
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


_OWN = ("use_listings_cache", "listings_expiry_time", "max_paths", "asynchronous", "loop")
"""Options of every file system of fsspec."""


class StripePaths(AbstractFileSystem):  # type: ignore[misc]
    """What `StripeFileSystem` knows of stores and paths. The class has no store: it strips the storage from a URL. An
    instance also strips its own base folder, and refuses the URL of another store, whose file of the same name would be
    read."""

    protocol = PROTOCOLS
    root_marker = "/"

    def __init__(
        self,
        url: str | None = None,
        *,
        width: int = layout.WIDTH,
        unit: int = layout.UNIT,
        **options: object,
    ) -> None:
        super().__init__(**{name: options.pop(name) for name in _OWN if name in options})
        layout.check_shape(width, unit)
        self.width, self.unit = width, unit
        if not url:
            raise ValueError("no striped store: pass url=, or a URL such as bsx+hdfs://host:8020/path")
        self._location = split(stringify_path(url))
        self._make: Callable[[], Backend] = lambda: open_storage(self._location.url)
        if not self._location.root.startswith(("file://", "hdfs://")):
            self._make = lambda: FsspecBackend(self._location.url, options)
        elif options:
            raise TypeError(f"a striped store over {self._location.root} has no option {', '.join(options)}")
        self.url = self._location.url
        self.protocol = (PREFIX + self.url.partition("://")[0], PROTOCOL)
        self._opened: dict[int, StripeFS] = {}  # by process
        self._loads: dict[int, Load] = {}
        self._strip_protocol = self._within  # type: ignore[method-assign]
        with doing(self.url):
            self.store  # noqa: B018  an option that nobody knows is an error here and not later

    @property
    def store(self) -> StripeFS:
        """The striped store itself; another one in a forked child, which has none of its parent's connections."""
        process = os.getpid()
        if process not in self._opened:
            self._opened.setdefault(process, StripeFS(self._make()))
        return self._opened[process]

    @property
    def load(self) -> Load:
        """All reads of this process."""
        process = os.getpid()
        if process not in self._loads:
            self._loads.setdefault(process, Load(self.store.url))
        return self._loads[process]

    def reader(self, path: str) -> ChunkFile:
        """The file at ``path`` of the store, read by way of the node cache. Errors of `StripeFS.open`."""
        return self.load.use(self.store.open(path))

    @property
    def fsid(self) -> str:
        return PREFIX + self.url

    @classmethod
    def _strip_protocol(cls, path: object) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(item) for item in path]
        text = stringify_path(path).removeprefix(f"{PROTOCOL}://")
        return split(text).path if is_url(text) else absolute(text)

    def _within(self, path: object) -> Any:
        if isinstance(path, list):
            return [self._within(item) for item in path]
        text = stringify_path(path)
        if not is_url(text):
            return type(self)._strip_protocol(text)
        place, base = split(text), self._location.path.rstrip("/")
        if place.root != self._location.root or not f"{place.path}/".startswith(f"{base}/"):
            raise ValueError(f"{text} is not in the striped store {self.url}")
        return absolute(place.path[len(base) :])

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, str]:
        if path.startswith(PREFIX) and "://" in path:
            return {"url": split(path)._replace(path="/").url}
        return {}

    def unstrip_protocol(self, name: str) -> str:
        inside = Location(self._location.root, absolute(f"{self._location.path}/{self._key(name)}"))
        return PREFIX + inside.url

    def _key(self, path: object) -> str:
        """``path`` as `StripeFS` takes it."""
        return cast(str, self._strip_protocol(path)).strip("/")

    def _new_key(self, path: object) -> str:
        key = self._key(path)
        if any(is_hidden(part) for part in key.split("/")):
            raise PermissionError(errno.EACCES, "the store keeps names like this for itself", f"/{key}")
        return key
