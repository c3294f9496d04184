"""A store whose objects are files of a storage: a folder, HDFS, or whatever fsspec reaches."""

from __future__ import annotations

import builtins
import contextlib
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path

from bootseer import faults
from bootseer.backends.interface import TEMPORARY, Backend, Source, clean
from bootseer.errors import BootseerError, NotFoundError, NotWritableError, UnsupportedError, from_os_error
from bootseer.objects import withdrawn
from bootseer.objects.base import ObjectInfo, Store, check_key, check_size, no_store

log = logging.getLogger(__name__)


class ObjectStore(Store):
    """Objects as files below ``url``, in ``backend``. The folder is made by the first publication. Messages name the
    store as ``backend`` does: without the login that may be in ``url``."""

    def __init__(self, url: str, backend: Backend) -> None:
        self.url, self._backend = url.rstrip("/") or url, backend

    @property
    def exclusive(self) -> bool:
        return self._backend.exclusive

    @property
    def dated(self) -> bool:
        return True

    @property
    def shown(self) -> str:
        return self._backend.url

    @contextlib.contextmanager
    def _missing(self, key: str) -> Iterator[None]:
        try:
            yield
        except (NotFoundError, NotWritableError) as exc:
            # below a file there is nothing; a NameNode calls that a lack of permission, and only its text says which
            if isinstance(exc, NotFoundError) or "is not a directory" in str(exc):
                raise NotFoundError(f"no object {key} in store {self._backend.url}") from None
            raise

    def get(self, key: str, *, most: int) -> bytes:
        with self.open(key) as reader:
            check_size(reader.size, most, key, self.shown)
            return reader.read(0, reader.size)

    def open(self, key: str) -> Source:
        try:
            return self._opened(key)
        except NotFoundError:
            if not withdrawn.may_go(key):
                raise
        for place in self._places(key):
            with contextlib.suppress(NotFoundError):
                return self._opened(place)
        return self._opened(key)  # where it was put back meanwhile

    def _opened(self, path: str) -> Source:
        with self._missing(path):
            return self._backend.open(check_key(path))

    def _places(self, key: str) -> builtins.list[str]:
        """Where ``key`` may lie when it was withdrawn."""
        if not withdrawn.may_go(key):
            return []
        try:
            runs = self._backend.list(withdrawn.FOLDER)
        except BootseerError as exc:
            if not isinstance(exc, NotFoundError):
                log.info("what was withdrawn from store %s is not seen: %s", self.shown, exc)
            return []
        return [withdrawn.place_of(run.name, key) for run in runs if run.is_dir]

    def withdraw(self, keys: Iterable[str], run: str) -> None:
        with contextlib.suppress(NotFoundError):
            for old in self._backend.list(withdrawn.FOLDER):
                with contextlib.suppress(BootseerError, FileExistsError):
                    self._backend.remove_empty_folder(f"{withdrawn.FOLDER}/{old.name}")
        self._backend.make_folder(f"{withdrawn.FOLDER}/{run}")
        for key in keys:
            faults.point("store.withdraw")
            with contextlib.suppress(NotFoundError), self._missing(key):
                self._backend.rename(key, withdrawn.place_of(run, key), overwrite=True)

    def put_back(self, key: str) -> bool:
        for place in self._places(key):
            with contextlib.suppress(NotFoundError, NotWritableError), self._missing(key):
                self._backend.rename(place, key, overwrite=True)
        return self.exists(key)

    def stat(self, key: str) -> ObjectInfo:
        with self._missing(key):
            found = self._backend.stat(check_key(key))
            if found.is_dir:
                raise NotFoundError("it is a folder")
            return ObjectInfo(key, found.size, found.mtime)

    def put(self, key: str, data: bytes | Path, *, overwrite: bool = False) -> bool:
        doing = f"write {check_key(key)} to store {self._backend.url}"
        try:
            self._backend.put(key, data, overwrite=overwrite)
        except FileExistsError:
            if overwrite:
                raise NotWritableError(f"cannot {doing}: a folder is in the way") from None
            return False
        except OSError as exc:
            raise from_os_error(exc, doing) from exc
        return True

    def check_there(self) -> None:
        try:
            with self._missing(""):
                there = self._backend.is_there()
        except NotFoundError:
            there = False
        except NotWritableError:
            return  # who wants to read there hears of that
        if not there:
            raise no_store(self.shown)

    def check_listed(self) -> None:
        self.check_there()
        if getattr(self._backend, "protocols", frozenset()) & {"sftp", "ssh"}:
            raise UnsupportedError(f"store {self.shown} is on sftp, whose lists pass over folders that cannot be read")

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        found = self._backend.walk(clean(prefix))
        yield from sorted(
            (
                ObjectInfo(key, entry.size, entry.mtime)
                for key, entry in found
                if not key.rpartition("/")[2].startswith(TEMPORARY)
            ),
            key=lambda info: info.key,
        )

    def delete(self, key: str) -> None:
        self._backend.delete(check_key(key))

    def replicate(self, key: str, copies: int) -> None:
        self._backend.replicate(check_key(key), copies)
