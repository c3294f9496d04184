"""The striped store over HDFS, through `bootseer.hdfs`.

Secured, encrypted and erasure-coded clusters work as far as ``hdfs-native`` has them.
"""

from __future__ import annotations

import builtins
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from bootseer import hdfs
from bootseer.errors import DataError
from bootseer.stripefs.backend import DEADLINE, Entry, Piece
from bootseer.stripefs.pieces import read_each

if TYPE_CHECKING:
    from bootseer.hdfs.placement import Placement

_PIECE = 4 << 20
READERS = 4


def _version(info: hdfs.FileInfo) -> str:
    # hdfs-native does not tell a file's id; HDFS keeps times in milliseconds
    return f"{info.size}-{round(info.mtime * 1000)}"


class _Source:
    """One file through several readers in turn.

    A reader stays with the first replica of each block, and the NameNode shuffles the replicas for each that is opened:
    ranges spread over several readers are spread over the DataNodes. Opening one costs one NameNode operation, and
    with ``pinned`` one more (for the first: two more), because a reader does not tell which version it has: the file
    is looked up after each opening, and before the first.
    """

    def __init__(self, client: hdfs.HdfsClient, path: str, pinned: bool) -> None:
        self._client, self._path = client, path
        self._lock, self._turn = threading.Lock(), 0
        self.version = _version(client.info(path)) if pinned else ""
        self._readers = [client.open(path)]
        self.size = self._readers[0].size
        self._check(self._readers[0])

    def _check(self, reader: hdfs.HdfsReader) -> None:
        if reader.size != self.size or (self.version and _version(self._client.info(self._path)) != self.version):
            raise DataError(f"{self._path} was replaced while it was read", hint="open it again")

    def _reader(self) -> hdfs.HdfsReader:
        with self._lock:
            turn, self._turn = self._turn, self._turn + 1
            if len(self._readers) > turn % READERS:
                return self._readers[turn % READERS]
        made = self._client.open(self._path)
        self._check(made)
        with self._lock:
            if len(self._readers) < READERS:
                self._readers.append(made)
        return made

    def readinto(self, offset: int, parts: Sequence[memoryview]) -> None:
        data = memoryview(self._reader().read(offset, sum(map(len, parts)), deadline=DEADLINE))
        position = 0
        for part in parts:
            part[:] = data[position : position + len(part)]
            position += len(part)

    def close(self) -> None:
        for reader in self._readers:
            reader.close()


class _Sink:
    def __init__(self, writer: hdfs.HdfsWriter) -> None:
        self._writer = writer

    def write(self, data: bytes | memoryview) -> None:
        for offset in range(0, len(data), _PIECE):
            self._writer.write(data[offset : offset + _PIECE])

    def close(self) -> None:
        self._writer.close()

    def abandon(self) -> None:
        self._writer.abandon()


class HdfsBackend:
    """Files below the folder that ``url`` names."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._base = hdfs.split(url)[1].rstrip("/")
        self._client = hdfs.connect(url)

    def _path(self, path: str) -> str:
        return f"{self._base}/{path}" if path else self._base or "/"

    def stat(self, path: str) -> Entry:
        info = self._client.info(self._path(path))
        return Entry(path.rpartition("/")[2], info.size, info.is_dir, info.mtime, _version(info))

    def list(self, path: str) -> builtins.list[Entry]:
        found = self._client.list(self._path(path))
        return [
            Entry(info.path.rpartition("/")[2], info.size, info.is_dir, info.mtime, _version(info)) for info in found
        ]

    def open(self, path: str, *, pinned: bool = False) -> _Source:
        return _Source(self._client, self._path(path), pinned)

    def read_many(self, pieces: Sequence[Piece]) -> None:
        read_each(pieces)

    def create(self, path: str, *, placement: Placement | None = None) -> _Sink:
        return _Sink(self._client.create(self._path(path)))

    def rename(self, src: str, dst: str, *, overwrite: bool) -> None:
        self._client.rename(self._path(src), self._path(dst), overwrite=overwrite)

    def delete(self, path: str) -> None:
        self._client.delete(self._path(path))

    def make_folder(self, path: str) -> None:
        self._client.mkdirs(self._path(path))

    def remove_folder(self, path: str) -> None:
        self._client.delete(self._path(path), recursive=True)
