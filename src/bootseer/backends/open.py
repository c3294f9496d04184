"""Which storage a user means, and which path in it: by a path or a URL, as text or as a path of Python."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from bootseer.backends.folder import FolderBackend
from bootseer.backends.interface import Backend
from bootseer.errors import ConfigError, extra

PREFIX = "bsx+"
"""What a URL may begin with: that of a striped store as fsspec has it."""
_URL = re.compile(r"[A-Za-z][\w+.:-]*://")
_KNOWN = (
    r"bsx\+\w+|(?:web)?hdfs|file|local|s3[an]?|gs|gcs|az|adl|abfss?|oss|oci|obs|cos|tos|r2|b2|memory|sftp|ssh"
    r"|registry(?:\+https?)?"
)
_CUT = re.compile(
    rf"(?s)[A-Za-z][\w+.:-]*:(?:/|\Z)|(?!\./)(?:.*/)?(?:{_KNOWN}):(?:/|\Z)"
    r"|(?!/).*://|(?:bsx\+)?(?:(?:web)?hdfs|s3[an]?|gs)(?::|//)"
)
"""What `pathlib` and `os.path` make of a URL: one slash is gone, and a folder may be before it. Or it is misspelt."""

Given = str | os.PathLike[str]
"""A file or folder as users pass it: a path, or a URL as of `locate`."""


class Location(NamedTuple):
    """A file or folder as its storage and the absolute path in it: ("hdfs://host:8020", "/ckpt/x"), ("file://", "/x").
    The path is "/" for the storage itself, and has no slash at its end otherwise."""

    root: str
    path: str

    @property
    def url(self) -> str:
        """What `locate` understands."""
        if self.root.endswith("://") and not self.root.endswith(("file://", "local://")):
            return self.root + self.path.lstrip("/")
        return self.root + self.path

    @property
    def parent(self) -> Location:
        """The folder above; the storage itself has none, and is its own."""
        return self._replace(path=self.path.rpartition("/")[0] or "/")

    @property
    def name(self) -> str:
        """Last part of the path; "" for the storage itself."""
        return self.path.rpartition("/")[2]


def is_url(text: str) -> bool:
    """Whether this is a URL, or was one, which `locate` refuses; an absolute path is neither."""
    return not text.startswith("/") and bool(_URL.match(text) or _CUT.match(text))


def absolute(path: str) -> str:
    """One slash at the beginning, none at the end, none twice."""
    return "/" + re.sub(r"/{2,}", "/", path).strip("/")


def locate(given: Given) -> Location:
    """What ``given`` names: a local path, ``file://...``, ``hdfs://...`` or another URL of fsspec; also with ``bsx+``.
    Nothing in a URL is encoded: ``#``, ``?`` and ``%`` are characters of the name. `ConfigError` for what is no such
    thing, and for a URL that is misspelt or was made a `pathlib.Path`: it would name a folder here."""
    text = os.fsdecode(given)
    if _URL.match(text) or _CUT.match(text):  # else a folder has such a name
        text = re.sub(rf"\A(?:{re.escape(PREFIX)})+", "", text, flags=re.IGNORECASE)
    if text in ("", "file://") or "\0" in text:
        raise ConfigError("an empty URL names no store", hint="name a folder or hdfs://host:port/path")
    if not (url := _URL.match(text)):
        if _CUT.match(text):
            raise ConfigError(
                f"{text!r} is a URL that was misspelt or made a path",
                hint="pass a str that begins like hdfs://; write file:// before a folder",
            )
        if text == "~" or text.startswith("~/"):  # a shell leaves it so in --store=~/x
            text = os.path.expanduser(text)
            if not os.path.isabs(text):
                raise ConfigError(f"{os.fsdecode(given)!r}: no home folder is known here", hint="begin it with /")
        return Location("file://", os.path.abspath(text))
    text = url[0].lower() + text[url.end() :]
    scheme, _, rest = text.rpartition("://")
    if text.startswith("file://"):
        return Location("file://", os.path.abspath(text[7:]))
    if text.startswith("hdfs://"):
        from bootseer.hdfs.nameservice import split

        return Location(*split(text))
    host, _, path = rest.partition("/")
    return Location(f"{scheme}://{host}", f"/{path.strip('/')}")


def open_storage(given: Given, *, shown: bool = False) -> Backend:
    """The storage at ``given``, as of `locate`. Opening touches no storage. ``shown``: what is read is shown to others
    than this user; in a folder fewer links are followed then."""
    found = locate(given)
    if found.root == "file://":
        return FolderBackend(Path(found.path), shown=shown)
    if found.root.startswith("hdfs://"):
        with extra("hdfs", "HDFS"):
            from bootseer.backends.cluster import HdfsBackend

        return HdfsBackend(found.url)
    from bootseer.backends.fsspec import FsspecBackend

    return FsspecBackend(found.url)
