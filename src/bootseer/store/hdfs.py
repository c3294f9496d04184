"""A store in an HDFS folder.

Publication writes a temporary file beside the target and renames it without overwriting, one atomic operation of the
NameNode, so the first publication wins; replacing renames with overwriting. Temporary names start with ``.tmp-``.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from pathlib import Path

from bootseer import faults, hdfs
from bootseer.errors import BootseerError, DataError, NotFoundError, NotWritableError, from_os_error
from bootseer.store.base import ObjectInfo, RangeReader, Store, check_key

_TMP = ".tmp-"
_PIECE = 4 << 20
"""One write call: long enough to keep a pipeline busy, short enough for the deadline of one call."""


class _Reader(RangeReader):
    def __init__(self, reader: hdfs.HdfsReader) -> None:
        self._reader = reader
        self.size = reader.size

    def read(self, offset: int, length: int) -> bytes:
        return self._reader.read(offset, length)

    def close(self) -> None:
        self._reader.close()


class HdfsStore(Store):
    """Objects as files below ``hdfs://host:port/base``. The folder is made by the first publication."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        _, base = hdfs.split(self.url)
        self._base = base.rstrip("/")
        self._client = hdfs.connect(self.url)

    def _path(self, key: str) -> str:
        return f"{self._base}/{check_key(key)}"

    def _missing(self, key: str) -> NotFoundError:
        return NotFoundError(f"no object {key} in store {self.url}")

    def _refused(self, key: str, exc: BootseerError) -> BootseerError:
        """Below a file there is nothing; the NameNode calls that a lack of permission, and only its text says which."""
        return self._missing(key) if isinstance(exc, NotFoundError) or "is not a directory" in str(exc) else exc

    def get(self, key: str) -> bytes:
        with self.open(key) as reader:
            pieces = range(0, reader.size, _PIECE)
            return b"".join(reader.read(offset, min(_PIECE, reader.size - offset)) for offset in pieces)

    def open(self, key: str) -> RangeReader:
        try:
            return _Reader(self._client.open(self._path(key)))
        except (NotFoundError, NotWritableError) as exc:
            raise self._refused(key, exc) from None

    def stat(self, key: str) -> ObjectInfo:
        try:
            info = self._client.info(self._path(key))
        except (NotFoundError, NotWritableError) as exc:
            raise self._refused(key, exc) from None
        if info.is_dir:
            raise self._missing(key)
        return ObjectInfo(key, info.size)

    def put(self, key: str, data: bytes | Path, *, overwrite: bool = False) -> bool:
        target = self._path(key)
        if not overwrite and self._client.exists(target):
            return False
        tmp = f"{target.rsplit('/', 1)[0]}/{_TMP}{uuid.uuid4().hex}"
        published = False
        try:
            size = self._write(tmp, data)
            faults.point("store.put.before-publish")
            if (seen := self._client.info(tmp).size) != size:
                raise DataError(f"{key} has {seen} bytes in store {self.url} after writing {size}")
            self._client.rename(tmp, target, overwrite=overwrite)
            published = True
            return True
        except FileExistsError:
            if overwrite or not self._client.exists(target):
                raise NotWritableError(f"cannot write {key} to store {self.url}: a folder is in the way") from None
            return False
        except OSError as exc:
            raise from_os_error(exc, f"write {key} to store {self.url}") from exc
        finally:
            if not published:
                with contextlib.suppress(BootseerError):
                    self._client.delete(tmp)

    def _write(self, path: str, data: bytes | Path) -> int:
        size = 0
        with self._client.create(path) as out:
            if isinstance(data, Path):
                with open(data, "rb") as src:
                    while piece := src.read(_PIECE):
                        out.write(piece)
                        size += len(piece)
            else:
                for offset in range(0, len(data), _PIECE):
                    out.write(data[offset : offset + _PIECE])
                size = len(data)
        return size

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        base = self._path(prefix.strip("/")) if prefix.strip("/") else self._base or "/"
        for info in hdfs.walk(self._client, base):
            key = info.path.removeprefix(self._base).lstrip("/")
            if not key.rsplit("/", 1)[-1].startswith(_TMP):
                yield ObjectInfo(key, info.size)

    def delete(self, key: str) -> None:
        self._client.delete(self._path(key))
