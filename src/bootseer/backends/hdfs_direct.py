"""The striped store over HDFS: read and written directly by this package, or through ``hdfs-native``.

`bootseer.hdfs.access` decides which, per cluster, at the first operation and for the life of the backend. In a cluster
that is read directly, files that are erasure-coded or encrypted still go through ``hdfs-native``.
"""

from __future__ import annotations

import builtins
import functools
import grp
import logging
import pwd
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bootseer.backends.engine import engine
from bootseer.backends.engine.transport import BlockFile
from bootseer.backends.hdfs_native import NativeBackend, NativeSource
from bootseer.backends.interface import FILE_MODE, Backend, Entry, Permissions, Piece, Sink, Source
from bootseer.backends.pool import read_each
from bootseer.errors import DataError, NotFoundError, UnsupportedError
from bootseer.hdfs import access
from bootseer.hdfs.namenode import NameNode
from bootseer.hdfs.records import FileBlocks, FileStatus, Located

if TYPE_CHECKING:
    from bootseer.hdfs.client import HdfsClient
    from bootseer.hdfs.placement import Placement

_log = logging.getLogger(__name__)

_OPEN_TRIES = 5


@dataclass(frozen=True, slots=True)
class _Files:
    """The NameNode, as `BlockFile` asks it. It is found anew for each question: objects do not survive a fork."""

    url: str

    def blocks(self, path: str) -> FileBlocks:
        return NameNode.connect(self.url).blocks(path)

    def report(self, replica: Located) -> None:
        NameNode.connect(self.url).report_bad_blocks([replica])


class DirectSource(Source):
    """A file whose blocks this process reads from DataNodes itself. ``status``: with which it was pinned, if it was."""

    def __init__(self, file: BlockFile, files: _Files, status: FileStatus | None) -> None:
        self.file, self.size, self.unfinished = file, file.size, file.unfinished
        self.version = _version(status) if status is not None else ""
        self._files, self._status = files, status

    def readinto(self, offset: int, parts: Sequence[memoryview]) -> None:
        engine.shared().read([(self.file, Piece(self, offset, parts, name=self.file.path))])
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


def _version(status: FileStatus) -> str:
    return f"{status.file_id}-{status.size}-{status.mtime_ms}"


class HdfsBackend(NativeBackend):
    """As `NativeBackend`; a cluster that allows it is read, written and asked directly."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._files = _Files(url)
        self._access: access.Access | None = None
        self._lock = threading.Lock()

    @property
    def access(self) -> access.Access:
        """How the cluster is reached, and why."""
        if self._access is None:
            found = access.choose(self.url)
            with self._lock:
                self._access = self._access or found
        return self._access

    def _namenode(self) -> NameNode | None:
        return NameNode.connect(self.url) if self.access.kind == "direct" else None

    def stat(self, path: str) -> Entry:
        if (namenode := self._namenode()) is None:
            return super().stat(path)
        return _entry(self._status(namenode, path))

    def _status(self, namenode: NameNode, path: str) -> FileStatus:
        if (status := namenode.info(self.full(path))) is None:
            raise NotFoundError(f"cannot look up {self.full(path)} on {namenode.url}: no such file or folder")
        return status

    def list(self, path: str) -> builtins.list[Entry]:
        if (namenode := self._namenode()) is None:
            return super().list(path)
        return sorted(map(_entry, namenode.list(self.full(path))))

    def open(self, path: str, *, pinned: bool = False) -> Source:
        if (namenode := self._namenode()) is None:
            return super().open(path, pinned=pinned)
        full = self.full(path)
        for _ in range(_OPEN_TRIES):
            status = self._status(namenode, path) if pinned else None
            blocks = namenode.blocks(full)
            if why := _only_native(blocks):
                self.say_native(full, why)
                look = (lambda: _version(self._status(namenode, path))) if pinned else None
                return NativeSource(self._client, full, look, unfinished=blocks.under_construction)
            if status is None or status == self._status(namenode, path):
                return DirectSource(BlockFile(self._files, full, blocks), self._files, status)
        raise DataError(f"{full} changes all the time", hint="wait until its writer has finished")

    def may_be_open(self, path: str) -> str:
        if (namenode := self._namenode()) is None:
            return super().may_be_open(path)
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
            engine.shared().read(direct)
            for source in sources.values():
                source.check()
        if others:
            read_each(others)

    def create(self, path: str, *, placement: Placement | None = None, mode: int = FILE_MODE) -> Sink:
        if (namenode := self._namenode()) is not None:
            from bootseer.hdfs.output import FileOutput

            try:
                return FileOutput(namenode, self.full(path), placement=placement, mode=mode)
            except UnsupportedError as exc:
                self.say_native(self.full(path), str(exc))
        return super().create(path, mode=mode)

    def space(self) -> tuple[int, int]:
        namenode = self._namenode()
        return super().space() if namenode is None else namenode.space()

    def whole(self) -> tuple[Backend, str]:
        whole, base = super().whole()
        if isinstance(whole, HdfsBackend):
            whole._access = self._access  # a cluster is asked once how it is reached
        return whole, base

    def _names(self) -> HdfsClient | NameNode:
        return self._namenode() or super()._names()


def _entry(status: FileStatus) -> Entry:
    name = status.path.rpartition("/")[2]
    return Entry(name, status.size, status.is_dir, status.mtime_ms / 1000, _version(status), permissions(status))


def permissions(status: FileStatus) -> Permissions:
    """Those of HDFS, or fewer: none for an owner or group that this node does not know, none but the owner's beside an
    access control list, none for others that the group has not (the NameNode may know more members of it), and none at
    all in an encryption zone, whose keys have permissions of their own."""
    uid, gid = _uid(status.owner), _gid(status.group)
    mode = status.mode & (0o1770 | (status.mode >> 3 & 0o007))
    if status.acl:
        mode &= 0o1700
    if status.encrypted:
        mode = 0
    if uid is None:
        mode &= 0o1077
    if gid is None:
        mode &= 0o1707
    # beside an access control list the bits of the group are not what the group may
    kept = mode if status.acl else status.mode & 0o1777
    return Permissions(uid or 0, gid or 0, mode, kept, (status.owner, status.group))


@functools.lru_cache(4096)
def _uid(name: str) -> int | None:
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        return None


@functools.lru_cache(4096)
def _gid(name: str) -> int | None:
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        return None


def _only_native(blocks: FileBlocks) -> str:
    """Why a file cannot be read directly, "" when it can."""
    if blocks.erasure:
        return f"it is erasure-coded ({blocks.erasure})"
    return "it is encrypted" if blocks.encrypted else ""
