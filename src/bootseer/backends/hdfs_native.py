"""A file in HDFS that is read through ``hdfs-native``: one that is erasure-coded or encrypted."""

from __future__ import annotations

import threading
from collections.abc import Callable

from bootseer.backends.interface import DEADLINE, SLOWEST, Source
from bootseer.errors import DataError
from bootseer.hdfs.client import HdfsClient, HdfsReader

READERS = 4


class NativeSource(Source):
    """One file through several readers in turn.

    A reader stays with the first replica of each block, and the NameNode shuffles these for each: ranges are spread
    over the DataNodes. A reader does not tell which version it has: a pinned file is looked up (``look`` gives its
    version) after each opening, and before the first. ``unfinished``: its writer had not closed it when it was
    opened."""

    def __init__(self, client: HdfsClient, path: str, look: Callable[[], str] | None, *, unfinished: bool) -> None:
        self._client, self._path, self._look, self.unfinished = client, path, look, unfinished
        self._lock, self._turn = threading.Lock(), 0
        self.version = look() if look is not None else ""
        self._readers = [client.open(path)]
        self.size = self._readers[0].size
        self._check(self._readers[0])

    def _check(self, reader: HdfsReader) -> None:
        if reader.size != self.size or (self._look is not None and self._look() != self.version):
            raise DataError(f"{self._path} was replaced while it was read", hint="open it again")

    def _reader(self) -> HdfsReader:
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

    def read(self, offset: int, length: int) -> bytes:
        return self._reader().read(offset, length, deadline=DEADLINE + length / SLOWEST)

    def close(self) -> None:
        for reader in self._readers:
            reader.close()
