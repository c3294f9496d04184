"""A store on anything fsspec reaches (``s3://``, ``gs://``, ``memory://``), for sites without a shared folder or HDFS.

Publication: object stores make an object visible when its upload ends, so there is nothing to rename. "First wins" is
asked of the backend (``mode="create"``, If-None-Match on S3) and, where a backend ignores it, is a check before the
upload: two publishers of one key then race, harmless because keys of this project name their content.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, cast

from bootseer.errors import BootseerError, DataError, NotFoundError, UnavailableError, UnsupportedError, from_os_error
from bootseer.store.base import ObjectInfo, RangeReader, Store, check_key

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem


_TMP = ".tmp-"
WHOLE = frozenset(
    ("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "oci", "obs", "cos", "tos", "r2", "b2", "memory")
)
"""Protocols whose objects are there whole or not at all; on others one is written beside and renamed."""
_PASSWORD = re.compile(r"://[^/?#]*@")


def shown(url: str) -> str:
    """``url`` without the login in it, for messages."""
    return _PASSWORD.sub("://***@", url)


@contextlib.contextmanager
def translated(doing: str) -> Iterator[None]:
    """Any error of an fsspec file system met while ``doing`` (a phrase), in this project's classes, without secrets."""
    try:
        yield
    except BootseerError:
        raise
    except FileNotFoundError:
        raise NotFoundError(f"cannot {doing}: no such object") from None
    except OSError as exc:
        # Its text is not ours to trust with secrets, and the exception it came from has it as well.
        code = exc.errno or 0
        plain = OSError(code, os.strerror(code) if code > 0 else type(exc).__name__)
        raise from_os_error(plain, doing) from None
    except Exception as exc:  # every fsspec backend has error classes of its own
        raise UnavailableError(f"cannot {doing}: {type(exc).__name__}: {_PASSWORD.sub('://***@', str(exc))}") from None


class _Reader(RangeReader):
    def __init__(self, fs: AbstractFileSystem, path: str, size: int) -> None:
        self._fs, self._path, self.size = fs, path, size

    def read(self, offset: int, length: int) -> bytes:
        with translated(f"read {self._path}"):
            data = cast(bytes, self._fs.cat_file(self._path, start=offset, end=offset + length))
        if len(data) != length:
            raise DataError(f"{self._path}: wanted {length} bytes at {offset}, got {len(data)}")
        return data

    def close(self) -> None:
        """Nothing is held open between reads."""


class FsspecStore(Store):
    """Objects below an fsspec URL. Raises `UnsupportedError` when the protocol's package is not installed."""

    def __init__(self, url: str) -> None:
        import fsspec

        self.url = url.rstrip("/")
        self._shown = shown(self.url)
        self._lock = threading.Lock()
        self._opened: tuple[AbstractFileSystem, str] | None = None
        self._protocol = self.url.partition("://")[0]
        try:
            fsspec.get_filesystem_class(self._protocol.partition("::")[0])
        except (ImportError, ValueError) as exc:
            raise UnsupportedError(
                f"cannot open store {self._shown}: {exc}", hint="for s3:// install bootseer[s3]"
            ) from None

    def _open(self) -> tuple[AbstractFileSystem, str]:
        # Some backends connect when they are made: not before the first operation, whose errors are translated.
        import fsspec

        with self._lock:
            if self._opened is None:
                with translated(f"open store {self._shown}"):
                    self._opened = fsspec.core.url_to_fs(self.url)
            return self._opened

    @property
    def _fs(self) -> AbstractFileSystem:
        return self._open()[0]

    @property
    def _base(self) -> str:
        return self._open()[1]

    def _path(self, key: str) -> str:
        return f"{self._base}/{check_key(key)}"

    def get(self, key: str) -> bytes:
        with translated(f"read {key} from store {self._shown}"):
            return cast(bytes, self._fs.cat_file(self._path(key)))

    def open(self, key: str) -> RangeReader:
        return _Reader(self._fs, self._path(key), self.stat(key).size)

    def stat(self, key: str) -> ObjectInfo:
        with translated(f"look up {key} in store {self._shown}"):
            return ObjectInfo(key, int(self._fs.info(self._path(key))["size"]))

    def put(self, key: str, data: bytes | Path, *, overwrite: bool = False) -> bool:
        if not overwrite and self.exists(key):
            return False
        path = self._path(key)
        with translated(f"write {key} to store {self._shown}"):
            self._fs.makedirs(path.rsplit("/", 1)[0], exist_ok=True)
            try:
                if self._protocol in WHOLE:
                    self._write(path, data, "overwrite" if overwrite else "create")
                else:
                    self._write_beside(path, data)
            except FileExistsError:
                return False
        return True

    def _write(self, path: str, data: bytes | Path, mode: str) -> None:
        if isinstance(data, Path):
            self._fs.put_file(str(data), path, mode=mode)
        else:
            self._fs.pipe_file(path, data, mode=mode)

    def _write_beside(self, path: str, data: bytes | Path) -> None:
        from fsspec import AbstractFileSystem

        if type(self._fs).mv is AbstractFileSystem.mv:  # copies, then removes
            raise UnsupportedError(
                f"cannot write to store {self._shown}: {self._protocol}:// cannot publish an object at once",
                hint="use a folder, an object store or a registry",
            )
        folder, _, _ = path.rpartition("/")
        tmp = f"{folder}/{_TMP}{uuid.uuid4().hex}"
        try:
            self._write(tmp, data, "overwrite")
            self._fs.mv(tmp, path)
        except BaseException:
            with contextlib.suppress(Exception):
                self._fs.rm_file(tmp)
            raise

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        base = self._path(prefix.rstrip("/")) if prefix.strip("/") else self._base
        with translated(f"list {prefix} in store {self._shown}"):
            try:
                found = self._fs.find(base, detail=True)
            except FileNotFoundError:
                return
        for path in sorted(found):
            if path.rpartition("/")[2].startswith(_TMP):
                continue
            yield ObjectInfo(path.removeprefix(self._base).lstrip("/"), int(found[path]["size"]))

    def delete(self, key: str) -> None:
        with translated(f"delete {key} from store {self._shown}"), contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._path(key))
