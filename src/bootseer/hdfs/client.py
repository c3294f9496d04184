"""Bytes of files that are erasure-coded or encrypted, through ``hdfs-native``, with this project's errors. It has no
timeouts: a read from a frozen DataNode hangs beside a healthy replica. So each call runs under
`bootseer.hdfs.deadline`. Every object here may be used from any thread, except `HdfsWriter`, which has one user at a
time."""

from __future__ import annotations

import ctypes
import os
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar, cast
from urllib.parse import urlsplit

from bootseer.errors import BootseerError, DataError, UnavailableError, UnsupportedError, extra
from bootseer.hdfs.deadline import Workers
from bootseer.hdfs.dial import dial
from bootseer.hdfs.errors import REACH, translate
from bootseer.hdfs.namenode import caller
from bootseer.hdfs.nameservice import split as split
from bootseer.hdfs.newfile import NewFile

if TYPE_CHECKING:
    from hdfs_native import Client, FileReader, FileWriter

T = TypeVar("T")

DEADLINE = 30.0
"""Seconds a call may take: one NameNode operation, or one read or write of at most a few MiB."""

_PIECE = 4 << 20
"""One write: long enough to keep a pipeline busy, short enough for the deadline of one call."""

_workers = Workers()
_clients: dict[tuple[str, ...], HdfsClient] = {}
_all: weakref.WeakSet[HdfsClient | HdfsWriter] = weakref.WeakSet()


def _forget_clients() -> None:
    """The runtime threads of hdfs-native do not survive a fork, and what waits for them waits for ever."""
    for each in list(_all):
        each.forget()
    _clients.clear()


os.register_at_fork(after_in_child=_forget_clients)


def _keep_for_ever(native: object) -> None:
    """Its destructor waits for threads that are not in this process; so it never runs, not even at the exit."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(native))


def connect(url: str) -> HdfsClient:
    """The client for the NameNode (or name service) of ``url``; one per process and `caller`. Touches no network."""
    base = split(url)[0]
    key = (base, *caller())
    return _clients.get(key) or _clients.setdefault(key, HdfsClient(base))


class HdfsClient:
    """Files of one HDFS, by absolute paths. Errors: `NotFoundError`, `NotWritableError`, `FullError`,
    `UnavailableError` (also when the deadline passes); a name that exists already is `FileExistsError`."""

    def __init__(self, url: str, *, deadline: float = DEADLINE) -> None:
        self.url, self.deadline = url, deadline
        self._client: Client | None = None
        _all.add(self)

    def forget(self) -> None:
        """In a forked child: go on with a native client of its own."""
        if self._client is not None:
            _keep_for_ever(self._client)
        self._client = None

    def _native(self) -> Client:
        if self._client is None:
            with extra("hdfs", "HDFS"):
                import hdfs_native

            # hdfs-native tries a refused connection again for minutes; a wrong port or host name should fail at once
            parts = urlsplit(self.url)
            if parts.port is not None:  # else a name service, whose addresses only hdfs-native knows
                dial(parts.hostname or "", parts.port, time.monotonic() + min(self.deadline, 10.0)).close()
            self._client = hdfs_native.Client(self.url)  # two threads may both make one: the second one stays
        return self._client

    def call(self, function: Callable[[Client], T], doing: str, *, deadline: float | None = None) -> T:
        """``function(native client)`` under the deadline; ``doing`` is a phrase such as ``"read /a"``."""
        seconds = self.deadline if deadline is None else deadline
        try:
            return _workers.call(lambda: function(self._native()), seconds)
        except TimeoutError:
            raise UnavailableError(
                f"cannot {doing} on {self.url}: no answer within {seconds:.0f} s", hint=REACH
            ) from None
        except (BootseerError, FileExistsError):
            raise
        except Exception as exc:
            raise translate(exc, f"{doing} on {self.url}") from exc

    def open(self, path: str) -> HdfsReader:
        reader = self.call(lambda client: client.read(path), f"open {path}")
        return HdfsReader(self, path, reader)

    def read(self, path: str) -> bytes:
        """The whole of a small file."""
        reader = self.open(path)
        return reader.read(0, reader.size)

    def create(
        self,
        path: str,
        *,
        overwrite: bool = False,
        replication: int | None = None,
        block_size: int | None = None,
        mode: int | None = None,
    ) -> HdfsWriter:
        """A new file, open for writing; missing parent folders are made. `FileExistsError` when it exists."""

        def make(client: Client) -> FileWriter:
            import hdfs_native

            options = hdfs_native.WriteOptions(
                block_size=block_size,
                replication=replication,
                permission=mode,
                overwrite=overwrite,
                create_parent=True,
            )
            return client.create(path, options)

        return HdfsWriter(self, path, self.call(make, f"create {path}"))

    def delete(self, path: str, recursive: bool = False) -> bool:
        """Remove a file or folder; False when there was none."""
        return self.call(lambda client: bool(client.delete(path, recursive)), f"delete {path}")


class HdfsReader:
    """Range reads of one file; safe from several threads at once. ``size`` is its length when it was opened."""

    def __init__(self, client: HdfsClient, path: str, reader: FileReader) -> None:
        self._client, self._path, self._reader = client, path, reader
        self.size = len(reader)

    def read(self, offset: int, length: int, *, deadline: float | None = None) -> bytes:
        """Exactly ``length`` bytes. Raises `DataError` past the end, `UnavailableError` after ``deadline`` seconds."""
        if offset + length > self.size:
            raise DataError(f"{self._path} ends at {self.size}, wanted {offset + length}")
        if not length:
            return b""
        seconds = self._client.deadline if deadline is None else deadline
        until = time.monotonic() + seconds
        try:
            data = self._range(offset, length, seconds)
        except UnsupportedError as exc:
            if "codec: " not in exc.message:
                raise
            # A DataNode failed or was late, and what it has would be computed from others, which hdfs-native cannot
            # for XOR codes. Asked again, it may give it.
            try:
                data = self._range(offset, length, max(until - time.monotonic(), 1.0))
            except UnsupportedError as again:
                raise UnavailableError(again.message, hint=REACH) from None
        if len(data) != length:
            raise DataError(f"{self._path}: wanted {length} bytes at {offset}, got {len(data)}")
        return data

    def _range(self, offset: int, length: int, seconds: float) -> bytes:
        data: bytes = self._client.call(
            lambda client: self._reader.read_range(offset, length), f"read {self._path}", deadline=seconds
        )
        return data

    def close(self) -> None:
        """Nothing is held open between reads."""


class HdfsWriter(NewFile):
    """Sequential writes to one new file. Removed by its path when it is abandoned, as ``hdfs-native`` does not tell a
    file's id: where another writer moved its own file there meanwhile, that one is removed."""

    def __init__(self, client: HdfsClient, path: str, writer: FileWriter) -> None:
        super().__init__(path)
        self._client = client
        self._writer: FileWriter | None = writer
        _all.add(self)

    def forget(self) -> None:
        """In a forked child: the file is its parent's."""
        if self._writer is not None:
            _keep_for_ever(self._writer)
        self._writer = None

    def _write(self, data: bytes | bytearray | memoryview) -> int:
        writer = cast("FileWriter", self._writer)
        whole = data if isinstance(data, bytes) else memoryview(data).cast("B")
        for offset in range(0, len(whole), _PIECE):
            # hdfs-native takes any buffer, but all except bytes are copied element by element
            piece = bytes(whole[offset : offset + _PIECE])
            self._client.call(lambda client, piece=piece: writer.write(piece), f"write {self.path}")  # type: ignore[misc]
        return len(whole)

    def _finish(self) -> None:
        writer = cast("FileWriter", self._writer)
        self._client.call(lambda client: writer.close(), f"close {self.path}")
        self._writer = None

    def _remove(self) -> None:
        self._writer = None
        self._client.delete(self.path)
