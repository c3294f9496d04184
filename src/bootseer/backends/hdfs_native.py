"""Storage on HDFS through ``hdfs-native``."""

from __future__ import annotations

import builtins
import errno
import grp
import logging
import os
import pwd
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from bootseer.backends.interface import DEADLINE, FILE_MODE, SLOWEST, Backend, Entry, Piece, Sink, Source, clean
from bootseer.backends.pool import read_each
from bootseer.errors import BootseerError, DataError, NotFoundError, NotWritableError, UnavailableError
from bootseer.hdfs import client as hdfs

if TYPE_CHECKING:
    from bootseer.hdfs.client import HdfsClient
    from bootseer.hdfs.namenode import NameNode
    from bootseer.hdfs.placement import Placement
    from bootseer.hdfs.records import FileStatus

_log = logging.getLogger(__name__)

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

    def read(self, offset: int, length: int) -> bytes:
        return self._reader().read(offset, length, deadline=DEADLINE + length / SLOWEST)

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


def native_version(info: FileStatus) -> str:
    """As in `Source`. hdfs-native does not tell a file's id."""
    return f"{info.size}-{info.mtime_ms}"


class NativeBackend(Backend):
    """Files below the folder that ``url`` names. Nothing touches the network before the first operation."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.base = hdfs.split(url)[1].rstrip("/")
        self._client = hdfs.connect(url)
        self._said: set[str] = set()

    @property
    def access(self) -> tuple[str, str]:
        return "native", "the store is reached through hdfs-native"

    def full(self, path: str) -> str:
        """``path`` as HDFS knows it."""
        return f"{self.base}/{path}" if path else self.base or "/"

    def stat(self, path: str) -> Entry:
        info = self._client.info(self.full(path))
        return Entry(path.rpartition("/")[2], info.size, info.is_dir, info.mtime_ms / 1000, native_version(info))

    def list(self, path: str) -> builtins.list[Entry]:
        full = self.full(path)
        found = self._client.list(full)
        if [info.path for info in found if not info.is_dir] == [full]:
            raise NotFoundError(f"cannot list {full} on {self._client.url}: it is a file")
        return [
            Entry(info.path.rpartition("/")[2], info.size, info.is_dir, info.mtime_ms / 1000, native_version(info))
            for info in found
        ]

    def open(self, path: str, *, pinned: bool = False) -> Source:
        full = self.full(path)
        if not pinned:
            return NativeSource(self._client, full, None)
        source = NativeSource(self._client, full, lambda: native_version(self._client.info(full)))
        if (unfinished := still_written(self._client, full, source.size)) is None:
            self.say_native(full, "whether a file like this is still being written cannot be told")
        source.unfinished = unfinished is True
        return source

    def say_native(self, full: str, why: str) -> None:
        if why not in self._said:
            self._said.add(why)
            _log.info("%s goes through hdfs-native: %s (said once)", full, why)

    def whole(self) -> tuple[Backend, str]:
        whole, base = hdfs.split(self.url)
        base = clean(base)
        return (type(self)(whole), base) if base else (self, "")

    def read_many(self, pieces: Sequence[Piece]) -> None:
        read_each(pieces)

    def create(self, path: str, *, placement: Placement | None = None, mode: int = FILE_MODE) -> Sink:
        return self._client.create(self.full(path), mode=mode)

    def _names(self) -> HdfsClient | NameNode:
        """What changes names of files and folders."""
        return self._client

    def rename(self, src: str, dst: str, *, overwrite: bool) -> None:
        self._names().rename(self.full(src), self.full(dst), overwrite=overwrite)

    def delete(self, path: str) -> None:
        self._names().delete(self.full(path), recursive=False)

    def make_folder(self, path: str) -> None:
        self._names().mkdirs(self.full(path))

    def remove_folder(self, path: str, *, first: Sequence[str] = ()) -> None:
        self._names().delete(self.full(path), recursive=True)

    def remove_empty_folder(self, path: str) -> None:
        try:
            self.delete(path)
        except NotWritableError:
            if self.list(path):
                raise FileExistsError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path) from None
            raise

    def change(
        self,
        path: str,
        *,
        mode: int | None = None,
        uid: int | None = None,
        gid: int | None = None,
        owner: tuple[str, str] | None = None,
        mtime_ns: int | None = None,
    ) -> None:
        full, names = self.full(path), self._names()
        if owner is not None:
            names.set_owner(full, *owner)
        if uid is not None or gid is not None:
            names.set_owner(full, _user(uid), _group(gid))
        if mode is not None:
            names.set_permission(full, mode)
        if mtime_ns is not None:
            names.set_times(full, mtime_ns // 1_000_000)

    def replicate(self, path: str, copies: int) -> None:
        full = self.full(path)
        if self._client.info(full).replication < copies:
            self._client.set_replication(full, copies)

    def is_open(self, path: str) -> bool:
        # asked by trying to make it: the NameNode then says whether the lease is alive, and ends it when it is not
        try:
            sink = self.create(path)
        except FileExistsError as exc:
            return _is_leased(str(exc))
        except UnavailableError as exc:
            if "RecoveryInProgress" in str(exc):
                return True
            raise
        except BootseerError as exc:
            if _is_leased(str(exc)):
                return True
            raise
        sink.abandon()  # it was gone
        return False

    def may_be_open(self, path: str) -> str:
        return "it may be open: only a run that removes can tell"


def _user(uid: int | None) -> str | None:
    try:
        return None if uid is None else pwd.getpwuid(uid).pw_name
    except KeyError:
        raise NotWritableError(f"user {uid} has no name here, which HDFS wants to know") from None


def _group(gid: int | None) -> str | None:
    try:
        return None if gid is None else grp.getgrgid(gid).gr_name
    except KeyError:
        raise NotWritableError(f"group {gid} has no name here, which HDFS wants to know") from None


def _is_leased(message: str) -> bool:
    return "AlreadyBeingCreated" in message or "lease is currently owned" in message
