"""The cache file: a sparse local copy of a data file and the record of which of its blocks are ready.

A folder per block map, or per chunk list of a striped file: ``data`` (sparse, full length), ``bitmap`` (which blocks
are on disk for sure) and ``lock`` (held by the one process that writes). In memory there is one byte per block, set
after the block's verified bytes were written; the bitmap on disk is replaced only behind an ``fdatasync`` of the data,
with the state from before it, so that it never promises more than the disk holds. Whether who reads believes a set bit
(images) or compares the block once more (striped files) is said in docs/internals/nodecache.md, "What is believed".

After one failed ``fdatasync`` the cache is broken for good: the kernel counts the pages it could not write as clean,
so the next one would succeed without them. Blocks since the last good one are not ready any more, nothing is added."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from bootseer import faults
from bootseer.chunks import bitmap, hashing
from bootseer.chunks.bitmap import Ready
from bootseer.chunks.blockmap import Blocks
from bootseer.chunks.locks import DATA, lease, take_lock
from bootseer.closing import Closing
from bootseer.errors import UnavailableError, doing, logged

log = logging.getLogger(__name__)

Map = TypeVar("Map", bound=Blocks)


class ReadyBlocks(Closing, Generic[Map]):
    """The blocks of ``map`` that were ``ready`` (one byte per block) when this was made, read through the descriptor
    ``fd``, which belongs to this object now. Each is compared with the map: the data file may have changed since."""

    def __init__(self, folder: Path, fd: int, ready: Ready, map: Map) -> None:
        self.folder = folder
        self.map = map
        self.ready = ready
        self._fd = fd

    def is_ready(self, first: int, last: int) -> bool:
        """Whether all blocks from ``first`` to ``last`` (inclusive) are ready."""
        return self.ready.find(b"\0", first, last + 1) < 0

    def read(self, offset: int, length: int) -> bytes:
        data = bytearray(length)
        self.readinto(offset, memoryview(data))
        return bytes(data)

    def readinto(self, offset: int, view: memoryview) -> None:
        """Raises `OSError` (EIO), also when the file is shorter."""
        if os.preadv(self._fd, [view], offset) != len(view):
            raise OSError(errno.EIO, f"block cache {self.folder} was cut short")

    def close(self) -> None:
        """Closing twice is allowed."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class CacheFile(ReadyBlocks[Map]):
    """Blocks of one data file on this node. `open` it; reads and writes may come from any thread. ``ready`` may be
    tested without a lock: its byte of a block turns 1 only after the data is in the file, and 0 again only when the
    cache breaks (``broken``: the disk lost data, blocks are not kept any more)."""

    def __init__(self, folder: Path, blocks: Map, digest: bytes, lock_fd: int, ready: Ready | None) -> None:
        super().__init__(folder, -1, bytearray(blocks.count) if ready is None else ready, blocks)
        self.digest = digest
        self._lock_fd = lock_fd
        self._lock = threading.Lock()
        """Held while blocks become ready, or the cache breaks."""
        self._sync_lock = threading.Lock()
        self._durable = bytes(blocks.count)
        """The ready bytes that the bitmap on disk has."""
        self._broke: Callable[[], None] = lambda: None
        self.broken = self._failing = False

    @classmethod
    def open(cls, folder: Path, blocks: Map, digest: bytes, *, ready: Ready | None = None) -> CacheFile[Map]:
        """Open or begin the cache of ``blocks`` (whose encoded form hashes to ``digest``) in ``folder``. ``ready``: the
        ready bytes to use, all zero. Raises `UnavailableError` when another process owns it, `FullError` and kin."""
        with contextlib.ExitStack() as undo:
            with doing(f"open block cache {folder}"):
                lock_fd = take_lock(folder)
                undo.callback(os.close, lock_fd)
                self = cls(folder, blocks, digest, lock_fd, ready)
                undo.callback(super(CacheFile, self).close)
                self._load()
            undo.pop_all()
        return self

    def resume(self, *, broken: bool, broke: Callable[[], None]) -> None:
        """In a forked child: go on where another child, which had ``ready`` in common with this one, wrote until it
        died. ``broken``: what `broken` was there; ``broke`` is called first of all when the disk loses data here."""
        self._broke = broke
        bits = self._read_bitmap()
        if bits is not None:
            self._durable = bytes(bits)
        if broken:
            self._lose()

    def _load(self) -> None:
        blocks = self.map
        self._fd = os.open(self.folder / DATA, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        bits = self._read_bitmap() if os.fstat(self._fd).st_size == blocks.size else None
        if bits is None or self._lost(bits):
            # Truncate to nothing first: blocks without a frame are served from holes, so there must be holes. But
            # not under a mount that may use the file by itself, without a process: that would turn its bytes to zeros.
            if os.fstat(self._fd).st_size and in_use(self._fd):
                raise UnavailableError(
                    f"block cache {self.folder} must be begun anew but its data file is in use",
                    hint="unmount what uses it, or use another cache folder",
                )
            faults.point("chunks.begin")
            if (self.folder / "bitmap").exists():
                # It must not come back after a power failure, beside a data file that is whole again but empty.
                (self.folder / "bitmap").unlink(missing_ok=True)
                bitmap.sync_folder(self.folder)
            faults.point("chunks.truncate")
            os.ftruncate(self._fd, 0)
            faults.point("chunks.extend")
            os.ftruncate(self._fd, blocks.size)
        else:
            self.ready[:] = self._durable = bytes(bits)
        for block in blocks.zeros:
            self.ready[block] = 1

    def _read_bitmap(self) -> bytearray | None:
        """One byte per block, or None when there is no trustworthy bitmap."""
        path = self.folder / "bitmap"
        flags = bitmap.read(path, bitmap.READY, self.digest, self.map.count)
        if flags is None and path.exists():
            log.warning("bitmap of block cache %s is damaged; starting over", self.folder)
        return flags

    def _lost(self, bits: bytearray) -> bool:
        """Whether the data file has a hole where a block that is ready by ``bits`` has more than zeros: the copy of a
        folder that was interrupted, a file system that lost what it had confirmed. Other blocks may be lost, too."""
        blocks, at = self.map, 0
        while at < blocks.size:
            hole = os.lseek(self._fd, at, os.SEEK_HOLE)
            try:
                at = os.lseek(self._fd, hole, os.SEEK_DATA)
            except OSError as exc:
                if exc.errno != errno.ENXIO:  # no data up to the end
                    raise
                at = blocks.size
            for block in range(hole // blocks.block_size, -(-at // blocks.block_size)):
                if bits[block] and not blocks.is_zero(block):
                    offset = block * blocks.block_size
                    if not blocks.matches(block, os.pread(self._fd, blocks.length_of(block), offset)):
                        log.warning("block cache %s has holes where blocks were; starting over", self.folder)
                        return True
        return False

    @property
    def complete(self) -> bool:
        return self.ready.find(b"\0") < 0

    @property
    def lock_fd(self) -> int:
        """The descriptor that holds the lock, to be handed to who must hold it too."""
        return self._lock_fd

    def fileno(self) -> int:
        """The data file, for reading ready blocks; valid until `close`."""
        return self._fd

    def readinto(self, offset: int, view: memoryview) -> None:
        """Of ready blocks. Raises `OSError` (EIO) when the file is shorter, or lost them in this moment."""
        super().readinto(offset, view)
        unit, last = self.map.block_size, max(offset, offset + len(view) - 1)
        if self.broken and not self.is_ready(offset // unit, last // unit):
            raise OSError(errno.EIO, f"block cache {self.folder} lost data")

    def blocks_now(self) -> ReadyBlocks[Map]:
        """What is ready now, for reading also after `close`."""
        return ReadyBlocks(self.folder, os.dup(self._fd), bytearray(self.ready[:]), self.map)

    def write(self, block: int, data: hashing.Buffer) -> None:
        """Store the verified bytes of ``block``, or of several from there on, and mark them ready. Raises `OSError`
        (ENOSPC, EIO when broken); then none becomes ready."""
        self._refuse_broken()
        faults.point("chunks.write")
        offset = block * self.map.block_size
        view = memoryview(data)
        count = -(-len(view) // self.map.block_size)
        while view:
            done = os.pwrite(self._fd, view, offset)
            view = view[done:]
            offset += done
        with self._lock:
            self._refuse_broken()
            self.ready[block : block + count] = b"\1" * count

    @property
    def durable(self) -> bytes:
        """The ready bytes that the bitmap on disk has: what a crash leaves."""
        return self._durable

    def drop(self, block: int) -> None:
        """Take back that ``block`` is ready: it turned out to be damaged. Not while others read it."""
        with self._sync_lock, self._lock:
            self.ready[block] = 0
            self._durable = self._durable[:block] + b"\0" + self._durable[block + 1 :]

    def sync(self) -> None:
        """Make what is ready now survive a crash; nothing when broken. After an `OSError` the old bitmap stays, which
        is right, except when the data itself could not be written."""
        with self._sync_lock:
            snapshot = bytes(self.ready[:])
            if self.broken or snapshot == self._durable:
                return
            try:
                faults.point("chunks.fdatasync")
                os.fdatasync(self._fd)
            except OSError as exc:
                self._break(exc)
                raise
            faults.point("chunks.bitmap")
            raw = bitmap.encode(bitmap.READY, self.digest, snapshot)
            bitmap.replace(self.folder / "bitmap", raw, "chunks.bitmap")
            self._durable = snapshot

    def persist(self) -> None:
        """`sync`, whose trouble is logged once until it is over: what is not synced is fetched again after a crash."""
        try:
            self.sync()
            self._failing = False
        except OSError as exc:
            if not self._failing and not self.broken:
                log.warning("cannot persist the bitmap of block cache %s: %s", self.folder, exc)
            self._failing = True

    def _break(self, exc: OSError) -> None:
        self._broke()
        with self._lock:
            self._lose()
        log.error("block cache %s lost data (%s): nothing is kept in it from now on", self.folder, exc.strerror)
        with logged(log.warning, "cannot remove the bitmap of block cache %s", self.folder, kinds=OSError):
            (self.folder / "bitmap").unlink(missing_ok=True)

    def _lose(self) -> None:
        """Only what is in the bitmap on disk is ready from now on, and nothing is added."""
        self.broken = True
        for block in range(self.map.count):
            self.ready[block] = 1 if self._durable[block] or self.map.is_zero(block) else 0

    def _refuse_broken(self) -> None:
        if self.broken:
            raise OSError(errno.EIO, f"block cache {self.folder} lost data before")

    def close(self) -> None:
        """Sync and give up ownership. Closing twice is allowed; a failed sync is logged (blocks are fetched again)."""
        if self._fd >= 0:
            self.persist()
        super().close()
        if self._lock_fd >= 0:
            with contextlib.suppress(OSError):
                os.utime(self._lock_fd)  # the time of last use
            os.close(self._lock_fd)
            self._lock_fd = -1

    def leave(self) -> None:
        """Close the descriptors and nothing else: for a forked child, whose parent goes on and owns the folder."""
        super().close()
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


def in_use(fd: int) -> bool:
    """Whether the file behind ``fd`` is open anywhere else: in another process, or in the kernel under a mount.
    Descriptors shared by fork or over a socket do not count. True on a file system without leases."""
    if not lease(fd):
        return True
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False
