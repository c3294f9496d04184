"""A store on anything fsspec reaches (``s3://``, ``gs://``, ``memory://``), for sites without a shared folder or HDFS.

Publication: object stores make an object visible when its upload ends, so there is nothing to rename. "First wins" is
asked of the backend (``mode="create"``, If-None-Match on S3) and, where a backend ignores it, is a check before the
upload: two publishers of one key then race, harmless because keys of this project name their content.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, cast

from bootseer.errors import BootseerError, DataError, NotFoundError, UnavailableError, UnsupportedError, from_os_error
from bootseer.store.base import ObjectInfo, RangeReader, Store, check_key

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem


@contextlib.contextmanager
def _translated(doing: str) -> Iterator[None]:
    try:
        yield
    except BootseerError:
        raise
    except FileNotFoundError:
        raise NotFoundError(f"cannot {doing}: no such object") from None
    except OSError as exc:
        raise from_os_error(exc, doing) from exc
    except Exception as exc:  # every fsspec backend has error classes of its own
        raise UnavailableError(f"cannot {doing}: {type(exc).__name__}: {exc}") from exc


class _Reader(RangeReader):
    def __init__(self, fs: AbstractFileSystem, path: str, size: int) -> None:
        self._fs, self._path, self.size = fs, path, size

    def read(self, offset: int, length: int) -> bytes:
        with _translated(f"read {self._path}"):
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
        try:
            self._fs, self._base = fsspec.core.url_to_fs(self.url)
        except (ImportError, ValueError) as exc:
            raise UnsupportedError(f"cannot open store {url}: {exc}", hint="for s3:// install bootseer[s3]") from None

    def _path(self, key: str) -> str:
        return f"{self._base}/{check_key(key)}"

    def get(self, key: str) -> bytes:
        with _translated(f"read {key} from store {self.url}"):
            return cast(bytes, self._fs.cat_file(self._path(key)))

    def open(self, key: str) -> RangeReader:
        return _Reader(self._fs, self._path(key), self.stat(key).size)

    def stat(self, key: str) -> ObjectInfo:
        with _translated(f"look up {key} in store {self.url}"):
            return ObjectInfo(key, int(self._fs.info(self._path(key))["size"]))

    def put(self, key: str, data: bytes | Path, *, overwrite: bool = False) -> bool:
        if not overwrite and self.exists(key):
            return False
        path = self._path(key)
        with _translated(f"write {key} to store {self.url}"):
            self._fs.makedirs(path.rsplit("/", 1)[0], exist_ok=True)
            try:
                if isinstance(data, Path):
                    self._fs.put_file(str(data), path, mode="overwrite" if overwrite else "create")
                else:
                    self._fs.pipe_file(path, data, mode="overwrite" if overwrite else "create")
            except FileExistsError:
                return False
        return True

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        base = self._path(prefix.rstrip("/")) if prefix.strip("/") else self._base
        with _translated(f"list {prefix} in store {self.url}"):
            try:
                found = self._fs.find(base, detail=True)
            except FileNotFoundError:
                return
        for path in sorted(found):
            yield ObjectInfo(path.removeprefix(self._base).lstrip("/"), int(found[path]["size"]))

    def delete(self, key: str) -> None:
        with _translated(f"delete {key} from store {self.url}"), contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._path(key))
