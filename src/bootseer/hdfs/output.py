"""`FileOutput`: a new HDFS file, written in order over pipelines of our own (`bootseer.hdfs.pipeline`).

Against ``hdfs-native`` it has deadlines (a frozen DataNode costs seconds, not the write), chooses the size of the
checksummed chunks, and sends the caller's bytes without a copy.

Concurrency: one user at a time, any thread; the thread that renews leases may say something in between, hence the lock.
Data is sent by the thread that calls `write`, which returns as soon as at most `blockwriter.WINDOW` bytes are
unacknowledged. A forked child has no part in its parent's file: giving up there touches neither the file nor the lock.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import TracebackType

from bootseer import faults
from bootseer.errors import BootseerError, ConfigError, UnavailableError, UnsupportedError
from bootseer.hdfs import blockwriter, lease, placement
from bootseer.hdfs.blockwriter import BlockWriter
from bootseer.hdfs.errors import RemoteError, earlier_failure, foreign_file
from bootseer.hdfs.namenode import FileStatus, NameNode
from bootseer.hdfs.pieces import cut, kept
from bootseer.hdfs.pipeline import Broken, Terms
from bootseer.hdfs.placement import Placement
from bootseer.hdfs.records import Block, DataNode, Located

_log = logging.getLogger(__name__)

BYTES_PER_CHECKSUM = 1 << 20
PACKET = 1 << 20
"""Bytes of data in one packet, at least. DataNodes refuse packets of more than 16 MiB."""
HEARTBEAT = 20.0
"""Seconds after which an idle pipeline gets a packet without data; DataNodes wait for 60."""
_SETUPS = 6
_EARLY = 4  # times that a file leaves slow DataNodes: a wrong guess costs a short block
_MIN_CHECKSUM, _MAX_CHECKSUM = 512, 8 << 20
_GATHER = 256
_ABANDON = 10.0


class FileOutput:
    """A new file at ``path``, open for writing; missing parent folders are made. One that exists is not replaced.

    ``replication`` and ``block_size`` (bytes): the cluster's own when None. ``bytes_per_checksum``: halved until it
    divides the block size, `ConfigError` when that takes less than 512. ``placement``: shared by files written
    together.

    Errors, also of `write` and `close`: `FileExistsError`, `NotWritableError` (permission, folder in the way, another
    writer took the file over), `FullError`, `UnavailableError` (`BlockLost`: every DataNode of a block failed), and
    `UnsupportedError` in an encryption zone and below an erasure coding policy (then there is no file). After one, only
    `abandon` makes sense. As a context manager it closes the file, or abandons it on an exception. In a forked child
    `write` and `close` raise `BootseerError`, and the end of the context does nothing.
    """

    def __init__(
        self,
        namenode: NameNode,
        path: str,
        *,
        replication: int | None = None,
        block_size: int | None = None,
        bytes_per_checksum: int = BYTES_PER_CHECKSUM,
        placement: Placement | None = None,
    ) -> None:
        if not 1 <= bytes_per_checksum <= _MAX_CHECKSUM:
            raise ValueError(f"{bytes_per_checksum} bytes per checksum")
        self.namenode, self.path, self.length = namenode, path, 0
        self._placement = placement
        self._lock, self._process = threading.Lock(), os.getpid()
        self._open = False
        self._failure: BaseException | None = None
        self._pieces: list[memoryview] = []
        self._held = self._small = self._early = 0
        self._block: BlockWriter | None = None
        self._previous: Block | None = None
        faults.point("hdfs.output.create")
        info = namenode.create(path, replication=replication, block_size=block_size, deadline=blockwriter.PATIENCE)
        self.file_id = info.file_id
        self._open = True
        lease.hold(self)
        try:
            self._examine(info, bytes_per_checksum)
        except BaseException:
            self.abandon()
            raise

    def _examine(self, info: FileStatus, bytes_per_checksum: int) -> None:
        if info.encrypted:
            raise UnsupportedError(f"cannot write {self.path}: it is in an encryption zone", hint="use hdfs-native")
        if info.erasure:
            raise UnsupportedError(
                f"cannot write {self.path}: its folder is erasure-coded ({info.erasure})", hint="use hdfs-native"
            )
        while info.block_size % bytes_per_checksum:
            bytes_per_checksum //= 2
            if bytes_per_checksum < _MIN_CHECKSUM:
                raise ConfigError(
                    f"cannot write {self.path}: its blocks of {info.block_size} bytes are no multiple of"
                    f" {_MIN_CHECKSUM} bytes",
                    hint="change the block size",
                )
        self.replication, self.block_size = info.replication, info.block_size
        self.bytes_per_checksum = bytes_per_checksum
        self._packet = min(-(-PACKET // bytes_per_checksum) * bytes_per_checksum, self.block_size)
        self._terms = Terms(self.namenode.client_name, self.block_size, bytes_per_checksum)

    # -- writing --------------------------------------------------------------------------------------------------

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Append ``data``; returns its length in bytes. `bytes`, and views of them, are not copied."""
        view = kept(data)
        length = len(view)
        self._check_process()
        with self._lock:
            if not self._open:
                raise ValueError(f"write to {self.path}, which is closed")
            with self._final():
                self.length += length
                while view:
                    room = self._packet - self._held
                    self._hold(view[:room])
                    view = view[room:]
                    if self._held == self._packet:
                        self._flush()
        return length

    @contextlib.contextmanager
    def _final(self) -> Iterator[None]:
        """An error inside is the end of the file: some of its bytes are lost, and whoever goes on must not succeed."""
        if self._failure is not None:
            raise earlier_failure(self.path, self._failure) from self._failure
        try:
            yield
        except BaseException as exc:
            self._failure = exc
            raise

    @property
    def _foreign(self) -> bool:
        """In a process that was forked from the writer's."""
        return os.getpid() != self._process

    def _check_process(self) -> None:
        if self._foreign:
            raise foreign_file(self.path)

    def _hold(self, piece: memoryview) -> None:
        self._pieces.append(piece)
        self._held += len(piece)
        self._small += 1
        if self._small == _GATHER:  # many small writes: one system call takes at most 1024 pieces
            self._pieces[-_GATHER:] = [memoryview(b"".join(self._pieces[-_GATHER:]))]
            self._small = 0

    def _flush(self) -> None:
        """Send what is held, as one packet or, at the end of a block, two."""
        pieces, length = self._pieces, self._held
        self._pieces, self._held, self._small = [], 0, 0
        while length:
            if self._block is None:
                self._block = self._begin()
            take = min(length, self.block_size - self._block.length)
            now, pieces = cut(pieces, take)
            self._block.write(now, take)
            length -= take
            if self._block.length == self.block_size or self._ends_early(self._block):
                self._end()

    def _ends_early(self, block: BlockWriter) -> bool:
        """Whether another block had better take the rest: one more failure would lose this one, or it is slow."""
        if block.degraded or self._placement is None or self._early == _EARLY:
            return block.degraded
        slow = self._placement.slow(id(self), block.run())
        if slow:
            self._early += 1
            placement.shun(slow)
            names = ", ".join(node.address for node in slow)
            _log.warning("%s goes on in another block, without %s, which held up its writer", self.path, names)
        return bool(slow)

    def _begin(self) -> BlockWriter:
        """A new block with a pipeline; DataNodes that fail to set it up are left out of the next one."""
        until = time.monotonic() + blockwriter.PATIENCE
        bad: dict[str, DataNode] = {}
        for attempt in range(1, _SETUPS + 1):
            located = self._allocate(list(bad.values()), until)
            try:
                return BlockWriter(self.namenode, self.path, located, self._terms)
            except BaseException as exc:
                if self._placement:
                    self._placement.end(located.nodes)
                if not isinstance(exc, Broken):
                    raise
                reason, failed = exc.reason, [located.nodes[i] for i in exc.bad]
            placement.shun(failed)
            bad |= {node.uuid: node for node in failed}
            _log.warning("a block of %s goes elsewhere (attempt %d): %s", self.path, attempt, reason)
            faults.point("hdfs.output.abandon-block")
            self.namenode.abandon_block(located.block, self.path, self.file_id, deadline=blockwriter.PATIENCE)
            if time.monotonic() >= until:
                break
        raise UnavailableError(
            f"cannot write {self.path}: no pipeline after {attempt} attempts ({reason})",
            hint="check that the DataNodes run and are reachable from here",
        )

    def _allocate(self, bad: list[DataNode], until: float) -> Located:
        """A new block with at least one DataNode. Rather one that failed before than none."""
        avoided = [*bad, *(node for node in placement.shunned() if node not in bad)]
        if self._placement is None:
            return self._ask(bad, avoided, (), until)
        return self._placement.place(
            self.namenode, self.replication, lambda wished: self._ask(bad, avoided, wished, until)
        )

    def _ask(self, bad: list[DataNode], avoided: list[DataNode], wished: Sequence[DataNode], until: float) -> Located:
        favoured = [node.address for node in wished]
        while True:
            for exclude in (avoided, bad, []) if avoided else ([],):
                left = max(until - time.monotonic(), 1.0)
                try:
                    located = self.namenode.add_block(
                        self.path, self.file_id, self._previous, exclude, favoured, deadline=left
                    )
                except UnavailableError as exc:
                    if not isinstance(exc.__cause__, RemoteError) or time.monotonic() >= until:
                        raise  # the NameNode itself was asked for as long as there was time
                    problem = exc
                else:
                    faults.point("hdfs.output.add-block")
                    if len(located.nodes) < min(blockwriter.ENOUGH, self.replication) and len(exclude) > len(bad):
                        # we avoid too many: a replica where something failed lately is better than only one
                        self.namenode.abandon_block(located.block, self.path, self.file_id, deadline=left)
                        continue
                    return located
            _log.warning("%s waits for DataNodes: %s", self.path, problem.message)
            time.sleep(min(1.0, max(until - time.monotonic(), 0.0)))

    def _end(self) -> None:
        block, self._block = self._block, None
        if block is None:
            return
        try:
            self._previous = block.finish()
        finally:
            block.close()
            if self._placement:
                self._placement.end(block.placed, id(self))

    # -- the end --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Finish: every byte is on the DataNodes of its block, and the NameNode knows the length."""
        self._check_process()
        with self._lock:
            if not self._open:
                return
            with self._final():
                self._flush()
                self._end()
                faults.point("hdfs.output.complete")
                self._complete()
            self._open = False
            self._leave()

    def _complete(self) -> None:
        seconds, pause = blockwriter.PATIENCE, 0.005
        until = time.monotonic() + seconds
        while not self.namenode.complete(self.path, self.file_id, self._previous, deadline=seconds):
            if time.monotonic() >= until:
                raise UnavailableError(
                    f"{self.path} is not complete after {seconds:.0f} s: its DataNodes have not told the NameNode of"
                    " the last block",
                    hint="check that they reach the NameNode",
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.5)

    def _leave(self) -> None:
        lease.release(self)
        self._failure = None  # its frames hold what was being written

    def abandon(self) -> None:
        """Stop writing and remove the unfinished file, as far as the NameNode answers. Never raises.

        In a forked child the file is left alone; its copies of the descriptors were closed by the fork.
        """
        if self._foreign:
            return
        with self._lock:
            if not self._open:
                return
            self._open = False
            self._leave()
            if self._block is not None:
                self._block.close()
                if self._placement:
                    self._placement.end(self._block.placed, id(self))
                self._block = None
            self._pieces = []
            try:
                self._remove()
            except BootseerError as exc:
                _log.warning("the unfinished %s is left behind: %s", self.path, exc)

    def _remove(self) -> None:
        """Delete this very file, by its id: between a look at the path and a deletion of it others may rename.

        Behind a router of several NameNodes an id may stand for another one's file. There, and where ids cannot be
        asked for, the path is deleted; in that window of two calls another writer's file could be met.
        """
        info = self.namenode.info(self.path, deadline=_ABANDON)
        if info is None or info.file_id != self.file_id:
            return  # it is another writer's by now
        by_id = f"/.reserved/.inodes/{self.file_id}"
        try:
            same = self.namenode.info(by_id, deadline=_ABANDON)
        except UnavailableError:
            raise
        except BootseerError:
            same = None
        sure = same is not None and replace(same, path=self.path) == info
        self.namenode.delete(by_id if sure else self.path, deadline=_ABANDON)

    def keep_alive(self) -> None:
        """For `bootseer.hdfs.lease`: keep the pipeline open while nothing is written."""
        if self._lock.acquire(blocking=False):  # else it is being written
            try:
                if self._block and self._failure is None and time.monotonic() - self._block.idle_since > HEARTBEAT:
                    with self._final():
                        self._block.heartbeat()
            finally:
                self._lock.release()

    @property
    def nodes(self) -> tuple[DataNode, ...]:
        """The DataNodes of the block that is being written, in the order of the pipeline."""
        block = self._block
        return block.nodes if block else ()

    def __enter__(self) -> FileOutput:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        try:
            if kind is None and not self._foreign:
                self.close()
        finally:
            self.abandon()  # nothing, once it is closed
