"""A file in HDFS that is read through ``hdfs-native``, and whether its writer still has it open."""

from __future__ import annotations

import threading
from collections.abc import Callable

from bootseer.backends.interface import DEADLINE, SLOWEST, Source
from bootseer.errors import BootseerError, DataError, NotFoundError, UnavailableError
from bootseer.hdfs.client import HdfsClient, HdfsReader

READERS = 4
_LOOKS = 3


class NativeSource(Source):
    """One file through several readers in turn.

    A reader stays with the first replica of each block, and the NameNode shuffles the replicas for each that is opened:
    ranges spread over several readers are spread over the DataNodes. A reader does not tell which version it has: so a
    pinned file is looked up (``look`` gives its version) after each opening, and before the first.

    ``unfinished``: its writer had not closed it when it was opened, as far as the opener knows.
    """

    def __init__(
        self, client: HdfsClient, path: str, look: Callable[[], str] | None, *, unfinished: bool = False
    ) -> None:
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


def still_written(client: HdfsClient, path: str, size: int) -> bool | None:
    """Whether a writer has a block of the file under construction; None when that cannot be told.

    ``size``: bytes of its complete blocks, which is the length that a reader has. Costs two NameNode operations,
    and two more each time (at most twice) that the length has changed since.

    hdfs-native hands out neither the state of a file nor of its blocks. But the space that the NameNode accounts for a
    file has a block under construction as a whole one (INodeFile.storagespaceConsumedContiguous), and its length has
    not: so the space of a closed file is its length times its replicas, and that of an open one a block more. An open
    file with no such block, which its writer has just begun or left at the end of a block, looks like a closed one.
    Erasure-coded files say that they have one replica, and parity may take as much as a block: of what has one replica
    it cannot be told.
    """
    info = client.info(path)
    for left in reversed(range(_LOOKS)):
        try:
            space = client.consumed(path)
        except (NotFoundError, UnavailableError):
            raise
        except BootseerError:  # an authorizer may allow reads and not this
            return None
        if space == info.replication * size:
            return False
        if info.replication < 2:
            return None
        if space == info.replication * (size + info.block_size):
            return True
        if left:
            size = client.open(path).size  # it has grown meanwhile, or old blocks of it are kept by a snapshot
    return None
