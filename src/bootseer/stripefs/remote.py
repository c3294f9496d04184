"""The striped store over HDFS, through `bootseer.hdfs`.

Secured, encrypted and erasure-coded clusters work as far as ``hdfs-native`` has them.
"""

from __future__ import annotations

import builtins
import threading
from collections.abc import Sequence

from bootseer import hdfs
from bootseer.errors import DataError
from bootseer.stripefs.backend import DEADLINE, Entry

_PIECE = 4 << 20
READERS = 4


class _Source:
    """One file through several readers in turn.

    A reader stays with the first replica of each block, and the NameNode shuffles the replicas for each that is opened:
    ranges spread over several readers are spread over the DataNodes. Opening one costs one NameNode operation.
    """

    def __init__(self, client: hdfs.HdfsClient, path: str) -> None:
        self._client, self._path = client, path
        self._lock, self._turn = threading.Lock(), 0
        self._readers = [client.open(path)]
        self.size = self._readers[0].size

    def _reader(self) -> hdfs.HdfsReader:
        with self._lock:
            turn, self._turn = self._turn, self._turn + 1
            if len(self._readers) > turn % READERS:
                return self._readers[turn % READERS]
        made = self._client.open(self._path)
        if made.size != self.size:
            raise DataError(f"{self._path} has {made.size} bytes now, it had {self.size}", hint="open it again")
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
        return Entry(path.rpartition("/")[2], info.size, info.is_dir, info.mtime)

    def list(self, path: str) -> builtins.list[Entry]:
        found = self._client.list(self._path(path))
        return [Entry(info.path.rpartition("/")[2], info.size, info.is_dir, info.mtime) for info in found]

    def open(self, path: str) -> _Source:
        return _Source(self._client, self._path(path))

    def create(self, path: str) -> _Sink:
        return _Sink(self._client.create(self._path(path)))

    def rename(self, src: str, dst: str, *, overwrite: bool) -> None:
        self._client.rename(self._path(src), self._path(dst), overwrite=overwrite)

    def delete(self, path: str) -> None:
        self._client.delete(self._path(path))
