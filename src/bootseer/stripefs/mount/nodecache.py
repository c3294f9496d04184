"""Chunks of store files kept on the node's disk: one sparse file per content, read by the kernel from its page cache.

A chunk is used only after its bytes were checked in this process: either it came from the store through a checking
read, or it was found in a file of an earlier mount and has the CRC that the store's footer says. Holes read as zeros
and fail that check, so no record of what is present is needed, and a torn write after a crash cannot be believed.
A plain file has no CRCs; its cache file starts empty and is removed at the end.

What a page cache holds may still be lost on its way to the disk, and the kernel says so once, in fdatasync: a thread
asks every 2 s while there is news. After a failure nothing since the last success is believed any more, here or by a
later mount, nothing is added to that file, and a CRC that fits now proves nothing: the good page may be dropped later.

Concurrency: any thread may call anything. Two mounts of one node may share a file: both write the same bytes, and each
trusts only what it has checked itself.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from pathlib import Path

from crc32c import crc32c

from bootseer import faults
from bootseer.stripefs.files.reader import ChunkFile, StripedFile

_log = logging.getLogger(__name__)
_UNKNOWN, _READY, _MISSING = 0, 1, 2
_SYNC_SECONDS = 2.0


class NodeFile:
    """The cached chunks of one content. Raises `OSError` when the cache file cannot be made."""

    def __init__(self, folder: Path, file: ChunkFile) -> None:
        self._striped = isinstance(file, StripedFile)
        self._file = file
        self.path = folder / file.identity if self._striped else folder / f"{file.identity}-{os.getpid()}-{id(self)}"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = self.path.exists()
        self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if not self._striped:
            self.path.unlink()
        os.ftruncate(self.fd, file.size)
        os.utime(self.fd)
        self._state = bytearray([_UNKNOWN if found and self._striped else _MISSING]) * file.geometry.chunks
        self._durable = bytes(len(self._state))
        self._lock = threading.Lock()
        self._news = False
        self._broken = False
        if found and self._striped:
            self.sync()  # an error that nobody has met yet is of an earlier mount

    def ready(self, chunk: int) -> bool:
        """Whether ``chunk`` may be read from ``fd``. Checks what an earlier mount left, once."""
        state = self._state[chunk]
        if state == _UNKNOWN:
            state = self._settle(chunk, self._check(chunk))
        return state == _READY

    def _check(self, chunk: int) -> int:
        assert isinstance(self._file, StripedFile)
        data = os.pread(self.fd, self._file.geometry.chunk_length(chunk), chunk * self._file.unit)
        return _READY if crc32c(data) == self._file.chunk_crc(chunk) else _MISSING

    def store(self, chunk: int, data: memoryview) -> bool:
        """Keep a checked chunk; False (with one log line) when the disk does not take it."""
        if self._broken:
            return False
        offset = chunk * self._file.unit
        try:
            while data:
                count = os.pwrite(self.fd, data, offset)
                data, offset = data[count:], offset + count
        except OSError as exc:
            self._broken = True
            _log.warning("%s: not caching on disk any more: %s", self._file.path, exc.strerror)
            return False
        return self._settle(chunk, _READY) == _READY

    def _settle(self, chunk: int, state: int) -> int:
        """``state`` for the chunk, unless the disk lost data meanwhile."""
        with self._lock:
            if not self._broken:
                self._state[chunk] = state
                self._news = True
            return self._state[chunk]

    def sync(self) -> None:
        """Have the disk confirm what is there; what it lost is missing from now on. One thread at a time."""
        with self._lock:
            if self.fd < 0:
                return
            state, self._news = bytes(self._state), False
        try:
            faults.point("stripefs.cache.fdatasync")
            os.fdatasync(self.fd)
        except OSError as exc:
            self._lose(exc)
        else:
            self._durable = state

    def _lose(self, exc: OSError) -> None:
        with self._lock:
            self._broken = True
            self._state[:] = bytes(_READY if state == _READY else _MISSING for state in self._durable)
        _log.error("%s: the node cache lost data (%s): not caching on disk any more", self._file.path, exc.strerror)
        if self._striped:
            with contextlib.suppress(OSError):
                self.path.unlink()

    @property
    def has_news(self) -> bool:
        return self._news and not self._broken

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class NodeCache:
    """The folder of cache files. ``budget``: bytes it may hold; the files unused for longest are removed first."""

    def __init__(self, folder: Path, budget: int) -> None:
        self._folder, self._budget = folder, budget
        self._lock = threading.Lock()
        self._files: dict[str, NodeFile] = {}
        self._taken = 0
        self._closing = threading.Event()
        self._syncing: threading.Thread | None = None

    def add(self, file: ChunkFile) -> NodeFile | None:
        """Cache ``file`` from now on; None (with a log line) when it does not fit or the disk does not allow it."""
        with self._lock:
            if (found := self._files.get(file.identity)) is not None:
                return found
            if self._taken + file.size > self._budget:
                _log.warning("%s (%d bytes) does not fit in the node cache %s", file.path, file.size, self._folder)
                return None
            try:
                self._make_room(file)
                made = NodeFile(self._folder, file)
            except OSError as exc:
                _log.warning("cannot cache %s in %s: %s", file.path, self._folder, exc.strerror)
                return None
            self._taken += file.size
            self._files[file.identity] = made
            if self._syncing is None:
                self._syncing = threading.Thread(target=self._sync, name="bootseer-cache-sync", daemon=True)
                self._syncing.start()
            return made

    def find(self, identity: str) -> NodeFile | None:
        return self._files.get(identity)

    def _make_room(self, file: ChunkFile) -> None:
        if not self._folder.is_dir():
            return
        seen = []
        for path in self._folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if path.name != file.identity and path.name not in self._files:
                    info = path.stat()
                    seen.append((info.st_mtime, info.st_blocks * 512, path))
        room = self._budget - self._taken - file.size
        used = sum(size for _, size, _ in seen)
        for _, size, path in sorted(seen):
            if used <= room:
                break
            path.unlink(missing_ok=True)  # another mount that has it open keeps it until it ends
            used -= size

    def _sync(self) -> None:
        while not self._closing.wait(_SYNC_SECONDS):
            for file in list(self._files.values()):
                if file.has_news:
                    file.sync()

    def close(self) -> None:
        self._closing.set()
        if self._syncing is not None:
            self._syncing.join()
        with self._lock:
            files, self._files = self._files, {}
        for file in files.values():
            if file.has_news:
                file.sync()
            file.close()
