"""Where a file system of fsspec has its striped store, and which path of it a URL names."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping
from typing import Any, cast

from fsspec import AbstractFileSystem
from fsspec.utils import stringify_path

from bootseer.stripefs import layout
from bootseer.stripefs.adapter.fsspec_urls import PREFIX, PROTOCOL, PROTOCOLS, Place, absolute, split
from bootseer.stripefs.checkpoint.commit import is_hidden
from bootseer.stripefs.fs import StripeFS
from bootseer.stripefs.storage.backend import Backend, open_backend
from bootseer.stripefs.storage.fsspec_backend import FsspecBackend
from bootseer.stripefs.storage.oserrors import os_errors

_OWN = ("use_listings_cache", "listings_expiry_time", "max_paths", "asynchronous", "loop")
"""Options of every file system of fsspec."""


class StripePaths(AbstractFileSystem):  # type: ignore[misc]
    """The part of `bootseer.stripefs.adapter.fsspec_fs.StripeFileSystem` that knows stores and paths.

    The class has no store: it strips the storage from a URL. An instance also strips its own base folder, and refuses
    the URL of another store, whose file of the same name would be read in its place.
    """

    protocol = PROTOCOLS
    root_marker = "/"

    def __init__(
        self,
        url: str | None = None,
        *,
        width: int = layout.WIDTH,
        unit: int = layout.UNIT,
        fo: str = "",
        target_protocol: str = "",
        target_options: Mapping[str, object] | None = None,
        **options: object,
    ) -> None:
        super().__init__(**{name: options.pop(name) for name in _OWN if name in options})
        layout.check_shape(width, unit)
        self.width, self.unit = width, unit
        self._make: Callable[[], Backend]
        if target_protocol in ("file", "local", "hdfs"):  # ours are better than those of fsspec
            host, port = (dict(target_options or {}).get(key) for key in ("host", "port"))
            server = f"{host}:{port}" if port else str(host or "")
            url = f"{target_protocol}://{server if target_protocol == 'hdfs' else ''}{absolute(fo)}"
        elif target_protocol:
            self._make = lambda: FsspecBackend(fo, target_options, protocol=target_protocol)
            url = f"{target_protocol}://{fo.lstrip('/')}"
            self._place = Place(f"{target_protocol}://", absolute(fo))
        if not target_protocol or target_protocol in ("file", "local", "hdfs"):
            if not url:
                raise ValueError("no striped store: pass url=, or a URL such as bsx+hdfs://host:8020/path")
            self._place = split(stringify_path(url))
            native = self._place.root == "file://" or self._place.root.startswith("hdfs://")
            if native and options:
                raise TypeError(f"a striped store over {self._place.root} has no option {', '.join(options)}")
            self._make = (
                (lambda: open_backend(self._place.url)) if native else (lambda: FsspecBackend(self._place.url, options))
            )
        self.url = self._place.url
        self.protocol = (PREFIX + self.url.partition("://")[0], PROTOCOL)
        self._opened: dict[int, StripeFS] = {}  # by process
        self._strip_protocol = self._within  # type: ignore[method-assign]
        with os_errors(self.url):
            self.store  # noqa: B018  an option that nobody knows is an error here and not later

    @property
    def store(self) -> StripeFS:
        """The striped store itself; another one in a forked child, which has none of its parent's connections."""
        process = os.getpid()
        if process not in self._opened:
            self._opened.setdefault(process, StripeFS(self._make()))
        return self._opened[process]

    @property
    def fsid(self) -> str:
        return PREFIX + self.url

    @classmethod
    def _strip_protocol(cls, path: object) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(item) for item in path]
        text = stringify_path(path)
        if text.startswith(PREFIX) and "://" in text:
            return split(text).path
        return absolute(text.removeprefix(f"{PROTOCOL}://"))

    def _within(self, path: object) -> Any:
        if isinstance(path, list):
            return [self._within(item) for item in path]
        text = stringify_path(path)
        if not (text.startswith(PREFIX) and "://" in text):
            return type(self)._strip_protocol(text)
        place, base = split(text), self._place.path.rstrip("/")
        if place.root != self._place.root or not f"{place.path}/".startswith(f"{base}/"):
            raise ValueError(f"{text} is not in the striped store {self.url}")
        return absolute(place.path[len(base) :])

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, str]:
        if path.startswith(PREFIX) and "://" in path:
            return {"url": split(path)._replace(path="/").url}
        return {}

    def unstrip_protocol(self, name: str) -> str:
        inside = Place(self._place.root, absolute(f"{self._place.path}/{self._key(name)}"))
        return PREFIX + inside.url

    def _key(self, path: object) -> str:
        """``path`` as `StripeFS` takes it."""
        return cast(str, self._strip_protocol(path)).strip("/")

    def _new_key(self, path: object) -> str:
        key = self._key(path)
        if any(is_hidden(part) for part in key.split("/")):
            raise PermissionError(errno.EACCES, "the store keeps names like this for itself", f"/{key}")
        return key
