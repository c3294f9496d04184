"""Files of HDFS through ``hdfs-native``: for clusters and files that `bootseer.hdfs.access` does not read directly."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from bootseer import hdfs
from bootseer.errors import BootseerError, DataError, NotFoundError, UnavailableError
from bootseer.stripefs.engine.tuning import SLOWEST
from bootseer.stripefs.storage.backend import DEADLINE

_PIECE = 4 << 20
READERS = 4
_LOOKS = 3


class NativeSource:
    """One file through several readers in turn.

    A reader stays with the first replica of each block, and the NameNode shuffles the replicas for each that is opened:
    ranges spread over several readers are spread over the DataNodes. Opening one costs one NameNode operation, and
    when it is pinned one more (for the first: two more), because a reader does not tell which version it has: the file
    is looked up (``look``, which gives its version) after each opening, and before the first.

    ``unfinished``: its writer had not closed it when it was opened, as far as the opener knows.
    """

    def __init__(
        self, client: hdfs.HdfsClient, path: str, look: Callable[[], str] | None, *, unfinished: bool = False
    ) -> None:
        self._client, self._path, self._look, self.unfinished = client, path, look, unfinished
        self._lock, self._turn = threading.Lock(), 0
        self.version = look() if look is not None else ""
        self._readers = [client.open(path)]
        self.size = self._readers[0].size
        self._check(self._readers[0])

    def _check(self, reader: hdfs.HdfsReader) -> None:
        if reader.size != self.size or (self._look is not None and self._look() != self.version):
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
        size = sum(map(len, parts))
        data = memoryview(self._reader().read(offset, size, deadline=DEADLINE + size / SLOWEST))
        position = 0
        for part in parts:
            part[:] = data[position : position + len(part)]
            position += len(part)

    def close(self) -> None:
        for reader in self._readers:
            reader.close()


def still_written(client: hdfs.HdfsClient, path: str, size: int) -> bool | None:
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


class NativeSink:
    def __init__(self, writer: hdfs.HdfsWriter) -> None:
        self._writer = writer

    def write(self, data: bytes | memoryview) -> None:
        for offset in range(0, len(data), _PIECE):
            self._writer.write(data[offset : offset + _PIECE])

    def close(self) -> None:
        self._writer.close()

    def abandon(self) -> None:
        self._writer.abandon()
