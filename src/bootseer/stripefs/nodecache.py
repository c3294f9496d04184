"""Chunks of striped files kept on the node's disk, in the node cache that images use too (`bootseer.chunks`).

A file is a cache folder, named after its chunk list, in which is also where the file lies: a checksum tells damage, and
not what somebody made to have it. docs/internals/nodecache.md says what is kept and believed. A chunk is *sound* when
this process fetched it or compared it with its checksum, once, or an earlier one did since the machine started, and
its bytes are on the disk for sure; only then may the kernel read it from the file. Until then each read checks it
again.

Concurrency: any thread may call anything. Who opened a `NodeFile` may use it until `NodeFile.close`; one thread
syncs, and closes those that nobody uses."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from blake3 import blake3

from bootseer import faults
from bootseer.backends.pool import parallel
from bootseer.chunks import bitmap
from bootseer.chunks.cachefile import CacheFile, ReadyBlocks
from bootseer.chunks.chunklist import ChunkList
from bootseer.chunks.eviction import Limits
from bootseer.chunks.inventory import CHUNKS, COMPARED, ORIGIN
from bootseer.chunks.keeping import Allowance, Room, keep_synced, make_room
from bootseer.chunks.locks import DATA
from bootseer.errors import BootseerError, NotWritableError, UnavailableError
from bootseer.kernel.mount import boot_id
from bootseer.stripefs.files.reader import ChunkFile, Local
from bootseer.stripefs.files.striped import StripedFile

_log = logging.getLogger(__name__)
_PENDING = 256 << 20
"""Bytes that wait for the writing thread at most."""
_SIDE_BY_SIDE = 4
"""Threads that read for one request."""
_AT_ONCE = 4
"""Chunks for which another thread is not worth it."""
_CHECKERS = 4
_TURN = 8
"""Chunks of one file that a thread compares before it is the next file's turn."""


class _Comparison:
    """Of chunks with their checksums, by `_CHECKERS` threads in turns. ``ended``: nothing is left of it."""

    def __init__(self, chunks: Sequence[int]) -> None:
        self.left = iter(chunks)
        self.threads = _CHECKERS
        self.ended = threading.Event()


class NodeFile(Local):
    """The cached chunks of one content, as `NodeCache.open` gives it to each who has it open."""

    def __init__(self, cache: NodeCache, file: StripedFile, blocks: ReadyBlocks[ChunkList], fd: int) -> None:
        self._cache, self._blocks, self.fd = cache, blocks, fd
        self._own = blocks if isinstance(blocks, CacheFile) else None
        self.path, self._map = file.path, blocks.map
        self.users = 0
        self._compared = blocks.folder / COMPARED
        self._begun = self._state()
        self._noted = self._is_compared()
        self._good = bytearray([self._noted]) * blocks.map.count  # compared with its checksum
        self._room = Room(partial(make_room, blocks.folder), lambda size: cache.allowance.allow(size, blocks.folder))
        self._broken = False
        self.comparison: _Comparison | None = None

    def _state(self) -> bytes:
        """Another one after each write to the data file, and each start of the machine; empty when nobody says."""
        with contextlib.suppress(OSError):
            data = os.fstat(self.fd)
            return f"{boot_id()} {data.st_dev} {data.st_ino} {data.st_ctime_ns}".encode()
        return b""

    def _is_compared(self) -> bool:
        """Whether a process that this one believes has compared all chunks of the data file as it is."""
        with contextlib.suppress(OSError):
            return self._compared.read_bytes() == self._begun != b""
        return False

    def _note(self) -> None:
        """Spare those after this process the comparison, when it has been made of all chunks, and the disk has them."""
        if self._own is None or self._noted or 0 in self._good or 0 in self._own.durable:
            return
        self._noted, state = True, self._state()
        if not state or self._begun not in (b"", state):  # somebody else has written meanwhile
            return
        with contextlib.suppress(OSError):  # then they compare
            bitmap.replace(self._compared, state, f"stripefs.cache.{COMPARED}")
            if 0 in self._good:  # found damaged meanwhile
                self._compared.unlink()

    def fd_of(self, first: int, last: int) -> int | None:
        if self._blocks.ready.find(b"\0", first, last) >= 0:
            return None
        if self._good.find(b"\0", first, last) >= 0 and self._cache.hold(self):
            try:
                self.compare(range(first, last))
            finally:
                self.close()
        return self._sound(first, last)

    def fd_of_all(self, seconds: float) -> int | None:
        """What this process has not compared yet is compared, on several cores; when that takes longer than ``seconds``
        it goes on, and the answer is no."""
        if self._blocks.ready.find(b"\0") >= 0:
            return None
        if unknown := [chunk for chunk in range(self._map.count) if not self._good[chunk]]:
            self._cache.compare(self, unknown).wait(seconds)
        return self._sound(0, self._map.count)

    def _sound(self, first: int, last: int) -> int | None:
        durable = self._own.durable if self._own else self._blocks.ready
        sound = self.users and self._good.find(b"\0", first, last) < 0 and durable.find(b"\0", first, last) < 0
        return self.fd if sound else None

    def has(self, chunk: int) -> bool:
        return self._blocks.ready[chunk] > 0

    def fill(self, wanted: Mapping[int, memoryview]) -> Mapping[int, memoryview]:
        chunks = [chunk for chunk in wanted if self._blocks.ready[chunk]]
        if not chunks or not self._cache.hold(self):
            return wanted
        step = max(_AT_ONCE, -(-len(chunks) // _SIDE_BY_SIDE))

        def read(some: Sequence[int]) -> list[int]:
            return [chunk for chunk in some if self._read(chunk, wanted[chunk])]

        try:
            found = parallel(read, [chunks[start : start + step] for start in range(0, len(chunks), step)])
        finally:
            self.close()
        filled = {chunk for some in found for chunk in some}
        return {chunk: view for chunk, view in wanted.items() if chunk not in filled}

    def compare(self, chunks: Iterable[int]) -> None:
        """Compare those of ``chunks`` with their checksums that are here and that this process has not compared yet."""
        scratch = memoryview(bytearray(self._map.block_size))
        for chunk in chunks:
            if self._blocks.ready[chunk] and not self._good[chunk]:
                self._read(chunk, scratch[: self._map.length_of(chunk)])

    def _read(self, chunk: int, view: memoryview) -> bool:
        """Whether ``view`` has ``chunk`` now; else that is not there any more."""
        try:
            self._blocks.readinto(chunk * self._map.block_size, view)
            if self._map.matches(chunk, view):
                self._good[chunk] = 1
                return True
        except OSError as exc:
            _log.warning("%s: cannot read chunk %d from the node cache: %s", self.path, chunk, exc.strerror)
        self._good[chunk], self._noted = 0, False
        with contextlib.suppress(OSError):
            self._compared.unlink()
        _log.warning("%s: chunk %d in the node cache is damaged; it is fetched again", self.path, chunk)
        if self._own:
            self._own.drop(chunk)
        else:
            self._blocks.ready[chunk] = 0
        return False

    def store(self, chunk: int, data: memoryview) -> bool:
        """False (with one log line for a file) when the disk does not take it."""
        if self._blocks.ready[chunk]:
            return True
        if self._own is None or self._broken or self._own.broken:
            return False
        try:
            self._begun = b""
            self._room.write(self._own.write, chunk, data)
        except OSError as exc:
            self._broken = True
            _log.warning("%s: not kept in the node cache any more: %s", self.path, exc.strerror)
            return False
        self._good[chunk] = 1
        return True

    def keep(self, chunk: int, data: Sequence[memoryview], *, steady: bool = False) -> None:
        """`store` it soon, unless too much waits for that already."""
        if self._own is None or self._broken or self._blocks.ready[chunk]:
            return
        size = self._map.length_of(chunk)
        self._cache.later(self, chunk, size, lambda: data[0] if steady else memoryview(b"".join(data)))

    def sync(self) -> None:
        """Make what was stored sound; in a folder of another process, look what that has synced. One thread."""
        if self._own is None:
            with contextlib.suppress(OSError):
                path = self._blocks.folder / "bitmap"
                found = bitmap.read(path, bitmap.READY, _digest(self._map), self._map.count)
                if found is not None:
                    self._blocks.ready[:] = found
            return
        self._own.persist()
        self._note()

    def close(self) -> None:
        """One user less, of those who have it open."""
        self._cache.release(self)

    def end(self) -> None:
        """Nobody uses it."""
        if self._own is not None:
            self.sync()
        self._blocks.close()

    def leave(self) -> None:
        """In a forked child: the parent goes on."""
        if self._own is not None:
            self._own.leave()
        else:
            self._blocks.close()


class NodeCache:
    """The node cache in ``cache_dir``, a folder that only its owner can write to, for striped files."""

    def __init__(self, cache_dir: Path, limits: Limits | None = None) -> None:
        self._dir, self._limits = cache_dir, limits or Limits()
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        self._files: dict[str, NodeFile] = {}
        self._pending = 0
        self.allowance = Allowance(cache_dir, self._limits)
        self._closing = threading.Event()
        self._checking = ThreadPoolExecutor(_CHECKERS, thread_name_prefix="bootseer-cache-check")
        self._writing = ThreadPoolExecutor(1, thread_name_prefix="bootseer-cache-write")
        self._syncing = threading.Thread(
            target=keep_synced, args=(self.sync, self._closing), name="bootseer-cache-sync"
        )
        self._syncing.daemon = True
        self._syncing.start()

    def open(self, file: ChunkFile, origin: str = "") -> NodeFile | None:
        """Use the cached chunks of ``file`` until `NodeFile.close`; None for a plain file, and (with a log line)
        where the disk does not allow it. ``origin``: what the inventory calls it."""
        if not isinstance(file, StripedFile):
            return None
        with self._opening:  # taking a folder may wait for others on the node
            with self._lock:
                found = self._files.get(file.identity)
                if found is not None:
                    found.users += 1
                    return found
            try:
                made = self._made(file, origin)
            except (OSError, BootseerError) as exc:
                _log.warning("%s is not kept in the node cache: %s", file.path, exc)
                return None
            made.users = 1
            with self._lock:
                self.allowance = Allowance(self._dir, self._limits)  # something may be unused by now
                self._files[file.identity] = made
            return made

    def find(self, identity: str) -> NodeFile | None:
        """What somebody has open."""
        return self._files.get(identity)

    def _made(self, file: StripedFile, origin: str) -> NodeFile:
        chunks = file.geometry.chunks
        shape = ChunkList(
            blake3(file.identity.encode()).digest(), file.size, file.unit, map(file.chunk_crc, range(chunks))
        )
        digest = _digest(shape)
        folder = self._dir / "blocks" / digest.hex()
        try:
            own = CacheFile.open(folder, shape, digest)
        except (NotWritableError, UnavailableError) as exc:
            _log.info("%s: %s; its chunks are read, and none added", file.path, exc.message)
            fd = os.open(folder / DATA, os.O_RDONLY | os.O_CLOEXEC)
            shared = NodeFile(self, file, ReadyBlocks(folder, fd, bytearray(chunks), shape), fd)
            shared.sync()
            return shared
        try:
            for name, raw in ((CHUNKS, shape.encode()), (ORIGIN, origin.encode(errors="replace"))):
                path = folder / name
                if not path.exists() or path.read_bytes() != raw:
                    bitmap.replace(path, raw, f"stripefs.cache.{name}")
        except BaseException:
            own.close()
            raise
        return NodeFile(self, file, own, own.fileno())

    def hold(self, file: NodeFile) -> bool:
        """One more user until `release`; False when there is none any more."""
        with self._lock:
            file.users += bool(file.users)
            return file.users > 0

    def release(self, file: NodeFile) -> None:
        with self._lock:
            file.users -= 1

    def later(self, file: NodeFile, chunk: int, size: int, data: Callable[[], memoryview]) -> None:
        """Have the writing thread store ``data``, which is called only where not too much waits already."""
        with self._lock:
            if self._closing.is_set() or not file.users or self._pending + size > _PENDING:
                return
            self._pending += size
            file.users += 1
        try:
            self._writing.submit(self._store, file, chunk, data())
        except BaseException as exc:
            self._written(file, size)
            if not isinstance(exc, RuntimeError):  # of an interpreter that ends
                raise

    def _store(self, file: NodeFile, chunk: int, data: memoryview) -> None:
        try:
            file.store(chunk, data)
        finally:
            self._written(file, len(data))

    def _written(self, file: NodeFile, size: int) -> None:
        with self._lock:
            self._pending -= size
            file.users -= 1

    def compare(self, file: NodeFile, chunks: Sequence[int]) -> threading.Event:
        """Compare ``chunks`` of ``file``, or go on with what is being compared of it; set when that has ended."""
        with self._lock:
            if file.comparison is None:
                file.comparison = _Comparison(chunks)
                file.users += 1
                if not self._closing.is_set():
                    for _ in range(_CHECKERS):
                        self._checking.submit(self._compare, file, file.comparison)
            return file.comparison.ended

    def _compare(self, file: NodeFile, comparison: _Comparison) -> None:
        """One turn of a thread; the next one comes behind those of other files."""
        more = False
        try:
            turn = list(itertools.islice(comparison.left, _TURN))
            for chunk in turn:
                faults.point("stripefs.cache.compare")
                if not self._closing.is_set():
                    file.compare((chunk,))
            more = bool(turn)
        finally:
            with self._lock:
                if more and not self._closing.is_set():
                    self._checking.submit(self._compare, file, comparison)
                else:
                    comparison.threads -= 1
                if not comparison.threads:
                    file.comparison = None
                    file.users -= 1
                    comparison.ended.set()

    def sync(self) -> None:
        """Make what was stored survive a crash, and close what nobody uses."""
        for identity, file in list(self._files.items()):
            file.sync()
            with self._opening:
                with self._lock:
                    if file.users or self._files.get(identity) is not file:
                        continue
                    del self._files[identity]
                file.end()

    def close(self) -> None:
        """Write what waits, sync and close. Not while anybody reads."""
        with self._lock:
            self._closing.set()
        self._writing.shutdown(wait=True)
        self._checking.shutdown(wait=True, cancel_futures=True)
        self._syncing.join()
        with self._lock:
            files, self._files = self._files, {}
        for file in files.values():
            file.end()

    def leave(self) -> None:
        """In a forked child, which has none of the threads: keep no folder owned. It is of no use after that."""
        for file in self._files.values():
            file.leave()


def _digest(shape: ChunkList) -> bytes:
    return blake3(shape.encode()).digest()
