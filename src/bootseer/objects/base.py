"""What a store is: the interface, and what its keys may be."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from bootseer.backends.interface import Source
from bootseer.errors import ConfigError, DataError, NotFoundError, UnsupportedError

if TYPE_CHECKING:
    from bootseer.oci.spec import Descriptor


class ObjectInfo(msgspec.Struct, frozen=True):
    """Key and size in bytes of one stored object; ``mtime``: when it was written, by the clock of the store, in seconds
    since 1970. 0 where that is not told."""

    key: str
    size: int
    mtime: float = 0.0


class Store(abc.ABC):
    """Immutable objects under keys such as ``blobs/ab/abcd...``. Every method may be called from any thread. Errors:
    `NotFoundError` (no such key), `NotWritableError`, `FullError`, `UnavailableError`."""

    url: str

    @property
    def exclusive(self) -> bool:
        """Whether of nodes that put one new key at one moment only one is told that it was first."""
        return False

    @property
    def dated(self) -> bool:
        """Whether the store tells when an object was written, so that what nothing needs can be collected there."""
        return False

    @property
    def shown(self) -> str:
        """The URL as messages and logs have it: without a login that may be in ``url``."""
        return self.url

    @abc.abstractmethod
    def get(self, key: str, *, most: int) -> bytes:
        """The whole object. `DataError` for one with more than ``most`` bytes, of which none is read then: who makes it
        pays nothing for its size, and who reads it would pay with memory."""

    @abc.abstractmethod
    def open(self, key: str) -> Source:
        """A reader for ranges of the object."""

    @abc.abstractmethod
    def stat(self, key: str) -> ObjectInfo: ...

    @abc.abstractmethod
    def put(self, key: str, data: bytes | Path, *, overwrite: bool = False) -> bool:
        """Publish ``data`` (bytes, or the content of a local file) atomically. Returns False, and changes nothing, when
        the key exists and ``overwrite`` is false (first publish wins)."""

    def replace(self, key: str, data: bytes, *, old: bytes) -> bool:
        """Publish ``data`` in place of ``old``. False, and nothing has changed, when the object is another one by now.
        For a moment there is no such object, so that who is late by any time replaces nothing that another node has
        published since. A store that is not `exclusive` replaces what is there when it is written."""
        try:
            if self.stat(key).size != len(old) or self.get(key, most=len(old)) != old:
                return False
            if self.exclusive:
                self.delete(key)
        except NotFoundError:
            pass
        return self.put(key, data, overwrite=not self.exclusive)

    @abc.abstractmethod
    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Objects below the folder ``prefix`` (recursively), in key order; half-published ones are unseen."""

    def some(self, prefix: str) -> Iterator[ObjectInfo]:
        """As `list`, in any order, for who needs a few: where each object costs a request, the others cost none."""
        return self.list(prefix)

    @abc.abstractmethod
    def check_there(self) -> None:
        """Raise `NotFoundError` where there is no such store: nothing was ever put there, or its name is misspelt."""

    def check_listed(self) -> None:  # noqa: B027 - most stores list all
        """Raise `UnsupportedError` where `list` passes over what readers find, `NotFoundError` for no store at all."""

    @abc.abstractmethod
    def delete(self, key: str) -> None:
        """Remove the object; no error when it is gone already."""

    def withdraw(self, keys: Iterable[str], run: str) -> None:
        """Put the objects ``keys`` where readers still find them, and `put_back` too; see `bootseer.objects.withdrawn`.
        What is gone already is passed over."""
        raise UnsupportedError(f"store {self.shown} withdraws nothing")

    def put_back(self, key: str) -> bool:
        """Have the object ``key``, which was withdrawn, in its place again. False when it is not there any more."""
        return False

    @contextlib.contextmanager
    def batch(self, *, subject: Descriptor | None = None) -> Iterator[None]:
        """Puts meanwhile belong together and to the image manifest ``subject``: a registry keeps them as one artifact,
        which others see when the block ends; on an exception, never. Elsewhere nothing changes."""
        yield

    def keep(self, key: str) -> None:  # noqa: B027 - most stores have nothing to do
        """Inside `batch`: what is put needs the stored object ``key`` as well, so they should live and move together. A
        registry lists it in the batch's artifact too; elsewhere nothing happens."""

    def replicate(self, key: str, copies: int) -> None:  # noqa: B027 - most stores have nothing to do
        """Many nodes will read the object at once: have at least ``copies`` copies of it, where a store counts them."""

    def exists(self, key: str) -> bool:
        try:
            self.stat(key)
        except NotFoundError:
            return False
        return True


def no_store(shown: str) -> NotFoundError:
    hint = "check its name and that it is mounted; bootseer image convert and bootseer env run make a new one"
    return NotFoundError(f"there is no store {shown}", hint=hint)


def check_size(size: int, most: int, key: str, store: str) -> None:
    """`DataError` for an object of ``size`` bytes that is larger than what `Store.get` may read."""
    if size > most:
        raise DataError(f"{key} in store {store} has {size} bytes, more than the {most} that one of its kind may have")


def check_key(key: str) -> str:
    """Return ``key`` when it is a plain relative path; `ConfigError` for ``..``, empty parts, a leading slash."""
    parts = key.split("/")
    if not key or any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise ConfigError(f"bad store key {key!r}")
    return key
