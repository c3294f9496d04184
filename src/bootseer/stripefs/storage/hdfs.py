"""The striped store over HDFS: read and written directly by this package, or through ``hdfs-native``.

`bootseer.hdfs.access` decides which, per cluster, at the first operation and for the life of the backend. In a cluster
that is read directly, files that are erasure-coded or encrypted still go through ``hdfs-native``.
"""

from __future__ import annotations

import builtins
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bootseer import hdfs
from bootseer.errors import BootseerError, DataError, NotFoundError, UnavailableError, UnsupportedError
from bootseer.hdfs import access
from bootseer.hdfs.namenode import NameNode
from bootseer.hdfs.records import FileBlocks, FileStatus, Located
from bootseer.stripefs.scheduler import threads
from bootseer.stripefs.scheduler.blockfile import BlockFile
from bootseer.stripefs.scheduler.model import SLOWEST
from bootseer.stripefs.storage.interface import DEADLINE, Backend, Entry, Piece, Sink, Source, clean
from bootseer.stripefs.storage.pool import read_each

if TYPE_CHECKING:
    from bootseer.hdfs.placement import Placement

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


_log = logging.getLogger(__name__)

__all__ = ["READERS", "DirectSource", "HdfsBackend"]

_OPEN_TRIES = 5


@dataclass(frozen=True, slots=True)
class _Files:
    """The NameNode, as `BlockFile` asks it. It is found anew for each question: objects do not survive a fork."""

    url: str

    def blocks(self, path: str) -> FileBlocks:
        return NameNode.connect(self.url).blocks(path)

    def report(self, replica: Located) -> None:
        NameNode.connect(self.url).report_bad_blocks([replica])


class DirectSource:
    """A file whose blocks this process reads from DataNodes itself. ``status``: with which it was pinned, if it was."""

    def __init__(self, file: BlockFile, files: _Files, status: FileStatus | None) -> None:
        self.file, self.size, self.unfinished = file, file.size, file.unfinished
        self.version = _version(status) if status is not None else ""
        self._files, self._status = files, status

    def readinto(self, offset: int, parts: Sequence[memoryview]) -> None:
        threads.shared().read([(self.file, Piece(self, offset, parts, name=self.file.path))])
        self.check()

    def check(self) -> None:
        """`DataError` when bytes that were just read may be of another version than `version`.

        A file that was removed or replaced keeps its own blocks as long as they can be read; only one that was changed
        in place (truncated, appended to) may have given bytes of two versions.
        """
        if self._status is not None:
            now = NameNode.connect(self._files.url).info(self.file.path)
            if now is not None and now.file_id == self._status.file_id and _version(now) != self.version:
                raise DataError(f"{self.file.path} was replaced while it was read", hint="open it again")

    def close(self) -> None:
        """Nothing is held open between reads."""


def _version(status: FileStatus) -> str:
    return f"{status.file_id}-{status.size}-{status.mtime_ms}"


def _native_version(info: FileStatus) -> str:
    # hdfs-native does not tell a file's id
    return f"{info.size}-{info.mtime_ms}"


class HdfsBackend(Backend):
    """Files below the folder that ``url`` names. Nothing touches the network before the first operation."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.base = hdfs.split(url)[1].rstrip("/")
        self._client = hdfs.connect(url)
        self._files = _Files(url)
        self._access: access.Access | None = None
        self._lock = threading.Lock()
        self._said: set[str] = set()

    @property
    def access(self) -> access.Access:
        """How the cluster is reached, and why."""
        if self._access is None:
            found = access.choose(self.url)
            with self._lock:
                self._access = self._access or found
        return self._access

    def full(self, path: str) -> str:
        """``path`` as HDFS knows it."""
        return f"{self.base}/{path}" if path else self.base or "/"

    def _namenode(self) -> NameNode | None:
        return NameNode.connect(self.url) if self.access.kind == "direct" else None

    def stat(self, path: str) -> Entry:
        if (namenode := self._namenode()) is not None:
            return self._entry(self._status(namenode, path), path.rpartition("/")[2])
        info = self._client.info(self.full(path))
        return Entry(path.rpartition("/")[2], info.size, info.is_dir, info.mtime_ms / 1000, _native_version(info))

    def _status(self, namenode: NameNode, path: str) -> FileStatus:
        if (status := namenode.info(self.full(path))) is None:
            raise NotFoundError(f"cannot look up {self.full(path)} on {namenode.url}: no such file or folder")
        return status

    def _entry(self, status: FileStatus, name: str) -> Entry:
        return Entry(name, status.size, status.is_dir, status.mtime_ms / 1000, _version(status))

    def list(self, path: str) -> builtins.list[Entry]:
        if (namenode := self._namenode()) is not None:
            statuses = namenode.list(self.full(path))
            return sorted(self._entry(status, status.path.rpartition("/")[2]) for status in statuses)
        found = self._client.list(self.full(path))
        return [
            Entry(info.path.rpartition("/")[2], info.size, info.is_dir, info.mtime_ms / 1000, _native_version(info))
            for info in found
        ]

    def open(self, path: str, *, pinned: bool = False) -> Source:
        full = self.full(path)
        if (namenode := self._namenode()) is None:
            source = NativeSource(self._client, full, (lambda: self._look(full)) if pinned else None)
            if pinned and (unfinished := still_written(self._client, full, source.size)) is not False:
                source.unfinished = unfinished is True
                if unfinished is None:
                    self._say_native(full, "whether a file like this is still being written cannot be told")
            return source
        for _ in range(_OPEN_TRIES):
            status = self._status(namenode, path) if pinned else None
            blocks = namenode.blocks(full)
            if why := _only_native(blocks):
                self._say_native(full, why)
                look = (lambda: _version(self._status(namenode, path))) if pinned else None
                return NativeSource(self._client, full, look, unfinished=blocks.under_construction)
            if status is None or status == self._status(namenode, path):
                return DirectSource(BlockFile(self._files, full, blocks), self._files, status)
        raise DataError(f"{full} changes all the time", hint="wait until its writer has finished")

    def _look(self, full: str) -> str:
        return _native_version(self._client.info(full))

    def _say_native(self, full: str, why: str) -> None:
        if why not in self._said:
            self._said.add(why)
            _log.info("%s goes through hdfs-native: %s (said once)", full, why)

    def whole(self) -> tuple[Backend, str]:
        whole, base = hdfs.split(self.url)
        base = clean(base)
        return (HdfsBackend(whole), base) if base else (self, "")

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
        if (namenode := self._namenode()) is None:
            return "it may be open: only a run that removes can tell"
        try:
            blocks = namenode.blocks(self.full(path))
        except NotFoundError:
            return ""
        return "it may be open: its writer has not closed it" if blocks.under_construction else ""

    def end_writer(self, path: str) -> None:
        _log.info("taking the lease of %s from its writer", self.full(path))
        if (namenode := self._namenode()) is not None:
            namenode.recover_lease(self.full(path))

    def read_many(self, pieces: Sequence[Piece]) -> None:
        direct: builtins.list[tuple[BlockFile, Piece]] = []
        sources: dict[int, DirectSource] = {}
        others: builtins.list[Piece] = []
        for piece in pieces:
            if isinstance(piece.source, DirectSource):
                direct.append((piece.source.file, piece))
                sources[id(piece.source)] = piece.source
            else:
                others.append(piece)
        if direct:
            threads.shared().read(direct)
            for source in sources.values():
                source.check()
        if others:
            read_each(others)

    def create(self, path: str, *, placement: Placement | None = None) -> Sink:
        if (namenode := self._namenode()) is not None:
            from bootseer.hdfs.output import FileOutput

            try:
                return FileOutput(namenode, self.full(path), placement=placement)
            except UnsupportedError as exc:
                self._say_native(self.full(path), str(exc))
        return NativeSink(self._client.create(self.full(path)))

    def rename(self, src: str, dst: str, *, overwrite: bool) -> None:
        if (namenode := self._namenode()) is not None:
            namenode.rename(self.full(src), self.full(dst), overwrite)
        else:
            self._client.rename(self.full(src), self.full(dst), overwrite=overwrite)

    def delete(self, path: str) -> None:
        self._delete(path, recursive=False)

    def _delete(self, path: str, *, recursive: bool) -> None:
        if (namenode := self._namenode()) is not None:
            namenode.delete(self.full(path), recursive)
        else:
            self._client.delete(self.full(path), recursive)

    def make_folder(self, path: str) -> None:
        if (namenode := self._namenode()) is not None:
            namenode.mkdirs(self.full(path))
        else:
            self._client.mkdirs(self.full(path))

    def remove_folder(self, path: str, *, first: Sequence[str] = ()) -> None:
        self._delete(path, recursive=True)


def _only_native(blocks: FileBlocks) -> str:
    """Why a file cannot be read directly, "" when it can."""
    if blocks.erasure:
        return f"it is erasure-coded ({blocks.erasure})"
    return "it is encrypted" if blocks.encrypted else ""


def _is_leased(message: str) -> bool:
    return "AlreadyBeingCreated" in message or "lease is currently owned" in message
