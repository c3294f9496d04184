"""Chunks of store files kept on the node's disk: one sparse file per content, read by the kernel from its page cache.

The kernel reads a chunk from the file only when the disk has confirmed it (fdatasync, which a thread calls every 2 s
while there is news); until then each read checks its CRC again. What an earlier mount left is read from the disk, not
from the page cache, and must have the CRC that the store's footer says. Holes read as zeros and fail that check, so
no record of what is present is needed, and a torn write after a crash cannot be believed. A plain file has no CRCs in
the store; its cache file starts empty and is removed at the end.

The kernel says once, in fdatasync, that it lost what the page cache held. After that nothing since the last success is
believed any more, here or by a later mount, nothing is added to that file, and it is not synced again: a second
fdatasync would succeed.

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
_UNKNOWN, _READY, _MISSING, _WRITTEN = 0, 1, 2, 3
"""State of a chunk: perhaps left by an earlier mount; confirmed by the disk; not there; written, not yet confirmed."""
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
        self._crcs: dict[int, int] = {}  # of chunks that are written and not yet confirmed
        self._lock = threading.Lock()
        self._broken = False
        if found and self._striped:
            self._sync()  # an error that nobody has met yet is of an earlier mount
            # one that a dead process met is not told again: what is checked must come from the disk
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def ready(self, chunk: int) -> bool:
        """Whether ``chunk`` may be read from ``fd``. Checks what an earlier mount left, once."""
        if self._state[chunk] == _UNKNOWN:
            assert isinstance(self._file, StripedFile)
            state = _READY if crc32c(self._pread(chunk)) == self._file.chunk_crc(chunk) else _MISSING
            with self._lock:
                if self._state[chunk] == _UNKNOWN:
                    self._state[chunk] = state
        return self._state[chunk] == _READY

    def has(self, chunk: int) -> bool:
        """Whether ``chunk`` is there: it is `ready`, or `load` gives it."""
        return self.ready(chunk) or self._state[chunk] == _WRITTEN

    def load(self, chunk: int) -> memoryview | None:
        """The bytes of a chunk that is not `ready` yet; None when they are not there, or not right any more."""
        with self._lock:
            crc = self._crcs.get(chunk)
            confirmed = self._state[chunk] == _READY
        data = self._pread(chunk)
        return memoryview(data) if confirmed or crc == crc32c(data) else None

    def _pread(self, chunk: int) -> bytes:
        try:
            return os.pread(self.fd, self._file.geometry.chunk_length(chunk), chunk * self._file.unit)
        except OSError as exc:  # it fails its check
            _log.warning("%s: cannot read chunk %d from the node cache: %s", self._file.path, chunk, exc.strerror)
            return b""

    def store(self, chunk: int, data: memoryview) -> bool:
        """Keep a checked chunk; False (with one log line) when the disk does not take it."""
        if self._broken:
            return False
        offset, crc = chunk * self._file.unit, crc32c(data)
        try:
            while data:
                count = os.pwrite(self.fd, data, offset)
                data, offset = data[count:], offset + count
        except OSError as exc:
            self._broken = True
            _log.warning("%s: not caching on disk any more: %s", self._file.path, exc.strerror)
            return False
        with self._lock:
            if not self._broken:
                self._state[chunk], self._crcs[chunk] = _WRITTEN, crc
            return not self._broken

    def sync(self) -> None:
        """Have the disk confirm what was written; what it lost is missing from now on. One thread at a time."""
        if self._crcs and not self._broken:
            self._sync()

    def _sync(self) -> None:
        with self._lock:
            written = list(self._crcs)
        try:
            faults.point("stripefs.cache.fdatasync")
            os.fdatasync(self.fd)
        except OSError as exc:
            self._lose(exc)
            return
        with self._lock:
            for chunk in written:
                self._state[chunk] = _READY
                del self._crcs[chunk]

    def _lose(self, exc: OSError) -> None:
        with self._lock:
            self._broken = True
            self._state[:] = bytes(_READY if state == _READY else _MISSING for state in self._state)
            self._crcs.clear()
        _log.error("%s: the node cache lost data (%s): not caching on disk any more", self._file.path, exc.strerror)
        if self._striped:
            with contextlib.suppress(OSError):
                self.path.unlink()

    def close(self) -> None:
        self.sync()
        fd, self.fd = self.fd, -1  # a thread that is late must not read another file
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
                file.sync()

    def close(self) -> None:
        self._closing.set()
        if self._syncing is not None:
            self._syncing.join()
        with self._lock:
            files, self._files = self._files, {}
        for file in files.values():
            file.close()
