"""URLs of striped stores for fsspec: ``bsx+hdfs://host:8020/ckpt/x`` is the striped file ``hdfs://host:8020/ckpt/x``."""

from __future__ import annotations

import os
import re
from typing import NamedTuple, cast
from urllib.parse import urlsplit

PROTOCOL = "bsx"
PREFIX = "bsx+"
PROTOCOLS = (PROTOCOL, *(PREFIX + scheme for scheme in ("file", "hdfs", "memory", "s3", "gs", "az", "sftp")))
"""The names under which pyproject.toml registers the file system."""


class Place(NamedTuple):
    """A file or folder as its storage and the absolute path in it: ("hdfs://host:8020", "/ckpt/x"), ("s3://", "/b/x").

    The path is "/" for the storage itself, and has no slash at its end otherwise.
    """

    root: str
    path: str

    @property
    def url(self) -> str:
        """What `bootseer.stripefs.storage.backend.open_backend` understands."""
        if self.root.endswith("://") and self.root != "file://":
            return self.root + self.path.lstrip("/")
        return self.root + self.path


def absolute(path: str) -> str:
    """One slash at the beginning, none at the end, none twice."""
    return "/" + re.sub(r"/{2,}", "/", path).strip("/")


def split(url: str) -> Place:
    """``url`` is a local path or a URL, with or without ``bsx+``.

    Raises ValueError for one that does not end with the path it names, ImportError when fsspec lacks a package.
    """
    url = url.removeprefix(PREFIX)
    scheme, sep, rest = url.partition("://")
    if not sep or scheme in ("file", "local"):
        return Place("file://", os.path.abspath(rest if sep else url))
    if scheme == "hdfs":
        parts = urlsplit(url)
        return Place(f"hdfs://{parts.netloc}", absolute(parts.path))
    if scheme == "memory":
        return Place("memory://", absolute(rest))
    from fsspec import get_filesystem_class

    key = cast(str, get_filesystem_class(scheme)._strip_protocol(url)).strip("/")
    trimmed = url.rstrip("/")
    if key and not trimmed.endswith(key):
        raise ValueError(f"cannot tell store and path of {url!r} apart; pass url= and the options of {scheme}://")
    root = trimmed[: len(trimmed) - len(key)].rstrip("/") if key else trimmed
    return Place(f"{root}//" if root.endswith(":") else root, absolute(key))
