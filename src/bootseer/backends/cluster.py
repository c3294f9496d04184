"""Storage on an HDFS cluster: names are the NameNode's matter, bytes come from DataNodes and go to them. Files that are
erasure-coded or encrypted go through ``hdfs-native``."""

from __future__ import annotations

import builtins
import contextlib
import errno
import logging
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Unpack

from bootseer.backends.hdfs_direct import DirectSource, read_directly
from bootseer.backends.hdfs_native import NativeSource
from bootseer.backends.hdfs_rights import group_name, permissions, user_name
from bootseer.backends.interface import (
    FILE_MODE,
    Attributes,
    Backend,
    Entry,
    Page,
    Piece,
    Sink,
    Source,
    Writers,
    clean,
    refuse_long,
)
from bootseer.backends.pool import read_each
from bootseer.errors import (
    BootseerError,
    ConfigError,
    DataError,
    NotFoundError,
    NotWritableError,
    UnavailableError,
    UnsupportedError,
)
from bootseer.hdfs import client as hdfs
from bootseer.hdfs import datanode  # noqa: F401  a child forked while a thread imports never gets it
from bootseer.hdfs.namenode import NameNode
from bootseer.hdfs.output import FileOutput
from bootseer.hdfs.placement import Placement

if TYPE_CHECKING:
    from bootseer.hdfs.records import FileBlocks, FileStatus

_log = logging.getLogger(__name__)

_OPEN_TRIES = 5
_CHECKED = 4 << 10
"""Bytes for each checksum of HDFS in a file that is no stripe: DataNodes send such pieces whole, and of an object
ranges of any length are read. Stripes are read in chunks, and have larger ones."""


class HdfsBackend(Backend):
    """Files below the folder that ``url`` names. Nothing touches the network before the first operation."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._base = hdfs.split(url)[1].rstrip("/")
        self._asked, self._said = False, set[str]()
        self.writers = _Leases(self)

    def namenode(self) -> NameNode:
        found = NameNode.connect(self.url)  # anew: objects do not survive a fork
        if not self._asked:  # how DataNodes are talked to: no read is to wait for a NameNode that is away
            _log.info("%s: %s", found.url, found.way())
            self._asked = True
        return found

    def full(self, path: str) -> str:
        """``path`` as HDFS knows it."""
        return f"{self._base}/{path}" if path else self._base or "/"

    def whole(self) -> tuple[Backend, str]:
        base = clean(self._base)
        if not base:
            return self, ""
        return HdfsBackend(hdfs.split(self.url)[0]), base

    def space(self) -> tuple[int, int]:
        return self.namenode().space()

    def _status(self, path: str) -> FileStatus:
        names, full = self.namenode(), self.full(path)
        if (status := names.info(full)) is None:
            raise NotFoundError(f"cannot look up {full} on {names.url}: no such file or folder")
        return status

    def stat(self, path: str) -> Entry:
        return _entry(self._status(path))

    def list(self, path: str) -> builtins.list[Entry]:
        names, full = self.namenode(), self.full(path)
        found = names.list(full)
        if [status.path for status in found if not status.is_dir] == [full]:
            raise NotFoundError(f"cannot list {full} on {names.url}: it is a file")
        return sorted(map(_entry, found))

    def pages(self, path: str) -> Iterator[Page]:
        """The NameNode tells the blocks of files with their names."""
        namenode, full, after = self.namenode(), self.full(path), b""

        def source(status: FileStatus, blocks: FileBlocks | None) -> Source | None:
            if blocks is None or status.is_dir or _only_native(blocks):
                return None
            with contextlib.suppress(DataError):  # who opens it finds out
                return DirectSource(self.url, status.path, blocks, None)
            return None

        for page in namenode.pages(full, located=True):
            entries = [(_entry(status), source(status, blocks)) for status, blocks in page]
            yield Page(entries, lambda after=after: [_entry(status) for status, _ in next(namenode.pages(full, after))])  # type: ignore[misc]
            after = page[-1][0].path.rpartition("/")[2].encode("utf-8", "surrogateescape") if page else after

    def rename(self, src: str, dst: str, *, overwrite: bool) -> None:
        self.namenode().rename(self.full(src), self.full(dst), overwrite=overwrite)

    def check_new(self, path: str) -> None:
        full = self.full(path)
        refuse_long(full, 255, 8000)
        for part in full.split("/"):
            if ":" in part or part == ".snapshot" or full.startswith("/.reserved"):
                raise ConfigError(f"HDFS has no such name: {full!r}", hint="leave out ':', .snapshot and /.reserved")

    def delete(self, path: str) -> None:
        self.namenode().delete(self.full(path), recursive=False)

    def make_folder(self, path: str) -> None:
        self.namenode().mkdirs(self.full(path))

    def remove_folder(self, path: str, *, first: Sequence[str] = ()) -> None:
        self.namenode().delete(self.full(path), recursive=True)

    def remove_empty_folder(self, path: str) -> None:
        try:
            self.delete(path)
        except NotWritableError:
            if self.list(path):
                raise FileExistsError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path) from None
            raise

    def change(self, path: str, **to: Unpack[Attributes]) -> None:
        full, names = self.full(path), self.namenode()
        uid, gid = to.get("uid"), to.get("gid")
        if (owner := to.get("owner")) is not None:
            names.set_owner(full, *owner)
        if uid is not None or gid is not None:
            names.set_owner(full, user_name(uid), group_name(gid))
        if (mode := to.get("mode")) is not None:
            names.set_permission(full, mode)
        if (mtime_ns := to.get("mtime_ns")) is not None:
            names.set_times(full, max(mtime_ns, 0) // 1_000_000)  # HDFS has no earlier ones

    def replicate(self, path: str, copies: int) -> None:
        if self._status(path).replication < copies:
            self.namenode().set_replication(self.full(path), copies)

    def open(self, path: str, *, pinned: bool = False) -> Source:
        full = self.full(path)
        look = (lambda: self._status(path).version) if pinned else None
        for _ in range(_OPEN_TRIES):
            status = self._status(path) if pinned else None
            blocks = self.namenode().blocks(full)
            if why := _only_native(blocks):
                self._say_native(full, why)
                return NativeSource(hdfs.connect(self.url), full, look, unfinished=blocks.under_construction)
            if status is None or status == self._status(path):
                return DirectSource(self.url, full, blocks, status)
        raise DataError(f"{full} changes all the time", hint="wait until its writer has finished")

    def read_many(self, pieces: Sequence[Piece]) -> None:
        read_directly(pieces)
        read_each([piece for piece in pieces if not isinstance(piece.source, DirectSource)])

    def siblings(self) -> Placement:
        return Placement()

    def create(self, path: str, *, siblings: object = None, mode: int = FILE_MODE) -> Sink:
        full = self.full(path)
        try:
            if isinstance(siblings, Placement):
                return FileOutput(self.namenode(), full, placement=siblings, mode=mode)
            return FileOutput(self.namenode(), full, bytes_per_checksum=_CHECKED, mode=mode)
        except UnsupportedError as exc:
            self._say_native(full, str(exc))
        return hdfs.connect(self.url).create(full, mode=mode)

    def _say_native(self, full: str, why: str) -> None:
        if why not in self._said:
            self._said.add(why)
            _log.info("%s goes through hdfs-native: %s (said once)", full, why)


class _Leases(Writers):
    """Whose lease a file is under, by the NameNode."""

    def __init__(self, backend: HdfsBackend) -> None:
        self._backend = backend

    def has_open(self, path: str) -> bool:
        # asked by trying to make it: the NameNode then says whether the lease is alive, and ends it when it is not
        try:
            sink = self._backend.create(path)
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

    def may_have_open(self, path: str) -> str:
        try:
            blocks = self._backend.namenode().blocks(self._backend.full(path))
        except NotFoundError:
            return ""
        return "it may be open: its writer has not closed it" if blocks.under_construction else ""

    def end(self, path: str) -> None:
        full = self._backend.full(path)
        _log.info("taking the lease of %s from its writer", full)
        self._backend.namenode().recover_lease(full)


def _entry(status: FileStatus) -> Entry:
    name = status.path.rpartition("/")[2]
    return Entry(name, status.size, status.is_dir, status.mtime_ms / 1000, status.version, permissions(status))


def _only_native(blocks: FileBlocks) -> str:
    """Why a file cannot be read directly, "" when it can."""
    if blocks.erasure:
        return f"it is erasure-coded ({blocks.erasure})"
    return "it is encrypted" if blocks.encrypted else ""


def _is_leased(message: str) -> bool:
    return "AlreadyBeingCreated" in message or "lease is currently owned" in message
