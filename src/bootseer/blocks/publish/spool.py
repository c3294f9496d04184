"""The pack table of a tree in the making, and the packs that are being written and put. The caller's thread alone
writes; two more threads hand finished packs to the store."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from io import FileIO
from pathlib import Path

from bootseer import faults
from bootseer.chunks import hashing
from bootseer.chunks.blockmap import MAX_PACKS, ObjectRef
from bootseer.errors import DataError, doing

PACK_LIMIT = 512 << 20
"""A pack ends here, so that the first packs of a large layer are put while the rest is made."""
_PUTTERS = 2
_PACKS_HELD = 4
"""Full packs in ``folder``, the one being written included, whatever the store's speed."""
_SHARE = 4
"""Of a pack that is handed over before it is full; smaller ones would be many."""
FOLDER_BYTES = _PACKS_HELD * PACK_LIMIT
"""What `PackSpool` takes of its folder at most: 2 GiB."""

Entry = tuple[int, int, int]
"""Where a frame lies: pack (by its place in the table), offset and length in bytes."""


class PackSpool:
    """Frames go to packs of at most ``limit`` bytes in ``folder``, which ``put(path, ref)`` stores from other threads.
    Raises `FullError` and kin for ``folder``; what ``put`` raises comes out of a later call, `drain` at the latest."""

    def __init__(self, folder: Path, put: Callable[[Path, ObjectRef], None], limit: int) -> None:
        self._folder = folder
        self._put = put
        self._limit = limit
        self.packs: list[ObjectRef | None] = []
        """In order of first use; None for the one being written."""
        self.foreign: dict[ObjectRef, int] = {}
        """Packs of other trees, and their places in the table."""
        self.stored = 0
        """Bytes of the packs that were ended."""
        self._putters = ThreadPoolExecutor(_PUTTERS, "pack-put")
        self._puts: deque[tuple[Future[None], int]] = deque()
        self._out: FileIO | None = None
        self._frames: list[bytes] = []
        self._index = self._size = 0
        self._hash = hashing.hasher()

    def add(self, frame: bytes) -> Entry:
        """The entry of a frame that goes to the current pack with the next `flush`."""
        if self._out is not None and self._size + len(frame) > self._limit:
            self.end_pack()
        if self._out is None:
            path = self._folder / f"pack-{len(self.packs)}"
            with doing(f"write a pack to {self._folder}"):
                self._out = open(path, "xb", 0)  # noqa: SIM115 - closed by end_pack
            self._index, self._size, self._hash = self._new_index(None), 0, hashing.hasher()
        self._frames.append(frame)
        offset, self._size = self._size, self._size + len(frame)
        return self._index, offset, len(frame)

    def index_of(self, pack: ObjectRef) -> int:
        """The place of another tree's pack in the table."""
        index = self.foreign.get(pack)
        if index is None:
            index = self.foreign[pack] = self._new_index(pack)
        return index

    def flush(self) -> None:
        """Write the frames of a batch: one call each to hash and file, as every call that gives up the interpreter
        lock may wait for it afterwards."""
        self._await(_PACKS_HELD * self._limit)
        if self._out is None or not self._frames:
            return
        piece = b"".join(self._frames)
        self._frames.clear()
        self._hash.update(piece)
        with doing(f"write a pack to {self._folder}"):
            view = memoryview(piece)
            while view:
                view = view[self._out.write(view) :]

    def end_pack(self) -> None:
        """Close the pack being written, if any, and have it put."""
        if self._out is None:
            return
        self.flush()
        out, self._out = self._out, None
        path = Path(out.name)
        with doing(f"write a pack to {self._folder}"):
            out.close()
            faults.point("pack.end")
        ref = self.packs[self._index] = ObjectRef(self._hash.hexdigest(), self._size)
        self.stored += ref.size
        # This one and the next, which is written while these wait, are the other two that the folder holds.
        self._await((_PACKS_HELD - 2) * self._limit)
        self._puts.append((self._putters.submit(self._store, path, ref), ref.size))

    def hand_over(self) -> None:
        """End the pack being written, if it is no small one, when no other one is on its way."""
        self._await(_PACKS_HELD * self._limit)
        if not self._puts and self._size >= self._limit // _SHARE:
            self.end_pack()

    def drain(self) -> None:
        """Return when everything is put."""
        self.end_pack()
        self._await(0)

    def close(self) -> None:
        """Stop the threads. Waits for the (at most two) puts under way, as they read files of ``folder``: as long as
        the store's own deadlines let them take."""
        self._putters.shutdown(wait=True, cancel_futures=True)
        self._puts.clear()
        self._put = lambda path, ref: None  # a method of who holds this, often: nothing waits for garbage collection
        if self._out is not None:
            self._out.close()
            self._out = None

    def _new_index(self, pack: ObjectRef | None) -> int:
        if len(self.packs) == MAX_PACKS:
            raise DataError(f"the data needs more than {MAX_PACKS} packs")
        self.packs.append(pack)
        return len(self.packs) - 1

    def _await(self, allowed: int) -> None:
        """Wait until at most ``allowed`` bytes wait for the store; raise what a put has raised."""
        waiting = sum(size for _, size in self._puts)
        while self._puts and (waiting > allowed or self._puts[0][0].done()):
            future, size = self._puts.popleft()
            try:
                future.result()
            finally:
                del future  # its error would hold this frame, and the frame it
            waiting -= size

    def _store(self, path: Path, ref: ObjectRef) -> None:
        self._put(path, ref)
        path.unlink(missing_ok=True)
