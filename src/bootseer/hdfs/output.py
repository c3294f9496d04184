"""`FileOutput`: a new HDFS file, written in order over pipelines of our own (`bootseer.hdfs.pipeline`).

Against ``hdfs-native`` it has deadlines (a frozen DataNode costs seconds, not the write), chooses the size of the
checksummed chunks, and sends the caller's bytes without a copy.

Concurrency: one user at a time, any thread; the thread that renews leases may say something in between, hence the lock.
Data is sent by the thread that calls `write`, which returns as soon as at most `blockwriter.WINDOW` bytes are
unacknowledged.
"""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace

from bootseer import faults
from bootseer.errors import BootseerError, ConfigError, DataError, UnavailableError, UnsupportedError
from bootseer.hdfs import blockwriter, lease, placement
from bootseer.hdfs.blockwriter import BlockWriter
from bootseer.hdfs.errors import RemoteError
from bootseer.hdfs.namenode import NameNode
from bootseer.hdfs.newfile import NewFile
from bootseer.hdfs.pieces import kept
from bootseer.hdfs.pipeline import Broken, Pipeline, Terms
from bootseer.hdfs.placement import Placement
from bootseer.hdfs.records import Block, DataNode, FileStatus, Located

_log = logging.getLogger(__name__)

BYTES_PER_CHECKSUM = 1 << 20
PACKET = 1 << 20
"""Bytes of data in one packet, at least. DataNodes refuse packets of more than 16 MiB."""
HEARTBEAT = 20.0
"""Seconds after which an idle pipeline gets a packet without data; DataNodes wait for 60."""
_SETUPS = 16
_EARLY = 4  # times that a file leaves slow DataNodes: a wrong guess costs a short block
_MIN_CHECKSUM, _MAX_CHECKSUM = 512, 8 << 20
_MANY = 512
"""Pieces of one packet that are kept apart: more, of tiny writes, would take more memory than their bytes."""
_ABANDON = 10.0


class _TooFew(Exception):
    """The NameNode has no block on enough DataNodes; ``nodes``: those that it has."""

    def __init__(self, nodes: Sequence[DataNode], why: str) -> None:
        self.nodes, self.why = nodes, why


class FileOutput(NewFile):
    """A new file at ``path``, open for writing; missing parent folders are made. One that exists is not replaced.

    ``replication`` and ``block_size`` (bytes): the cluster's own when None. ``bytes_per_checksum``: less when it does
    not divide the block size, `ConfigError` when that takes less than 512. ``placement``: shared by files written
    together. ``mode``: 0644 when None.

    Errors, also of `write` and `close`: `FileExistsError`, `NotWritableError` (permission, folder in the way, another
    writer took the file over), `FullError`, `UnavailableError` (`BlockLost`: every DataNode of a block failed), and
    `UnsupportedError` in an encryption zone and below an erasure coding policy (then there is no file).
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
        mode: int | None = None,
    ) -> None:
        if not 1 <= bytes_per_checksum <= _MAX_CHECKSUM:
            raise ValueError(f"{bytes_per_checksum} bytes per checksum")
        super().__init__(path)
        self.namenode, self.length = namenode, 0
        self._placement = placement or Placement()
        self._pieces: list[memoryview] = []
        self._held = self._early = 0
        self._block: BlockWriter | None = None
        self._previous: Block | None = None
        self._copy: Pipeline | None = None
        faults.point("hdfs.output.create")
        info = namenode.create(
            path, replication=replication, block_size=block_size, mode=mode, deadline=blockwriter.PATIENCE
        )
        self.file_id = info.file_id
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
        if info.block_size < 1 or info.replication < 1:
            raise DataError(
                f"cannot write {self.path}: the NameNode tells of blocks of {info.block_size} bytes with"
                f" {info.replication} replicas"
            )
        step = math.gcd(info.block_size, bytes_per_checksum)
        if step < min(bytes_per_checksum, _MIN_CHECKSUM):
            raise ConfigError(
                f"cannot write {self.path}: its blocks of {info.block_size} bytes are no multiple of"
                f" {_MIN_CHECKSUM} bytes",
                hint="change the block size",
            )
        self.replication, self.block_size, self.bytes_per_checksum = info.replication, info.block_size, step
        self._packet = min(-(-PACKET // step) * step, self.block_size)
        self._terms = Terms(self.namenode.client_name, self.block_size, step)

    def _write(self, data: bytes | bytearray | memoryview) -> int:
        """`bytes`, and views of them, are not copied."""
        view = kept(data)
        length = len(view)
        self.length += length
        while view:
            done = self._block.length if self._block else 0
            packet = min(self._packet, self.block_size - done)
            piece = view[: packet - self._held]
            self._pieces.append(piece)
            if len(self._pieces) >= _MANY:
                self._pieces = [memoryview(b"".join(self._pieces))]
            self._held += len(piece)
            view = view[len(piece) :]
            if self._held == packet:
                self._flush()
        return length

    def _flush(self) -> None:
        """Send what is held, as one packet."""
        if not self._held:
            return
        if self._block is None:
            self._block = self._begin()
        pieces, length = self._pieces, self._held
        self._pieces, self._held = [], 0
        self._block.write(pieces, length)
        if self._block.length == self.block_size or self._block.ends_early:
            self._end()

    def _slow(self, nodes: Sequence[DataNode], waited: float | None) -> list[DataNode]:
        """Those of the block's ``nodes`` that it had better leave."""
        self._leave_copy(only_ended=True)
        slow = self._placement.slow(id(self), nodes, waited) if self._early < _EARLY else []
        self._early += bool(slow)
        return slow

    def _idle(self) -> bool:
        """Whether nothing of this file is on its way. Asked by files that are written together with it."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            return self._block is not None and self._failure is None and self._block.idle()
        finally:
            self._lock.release()

    def _begin(self) -> BlockWriter:
        """A new block with a pipeline; DataNodes that fail to set it up are left out of the next one."""
        until = time.monotonic() + blockwriter.PATIENCE
        bad: dict[str, DataNode] = {}
        reasons = set[str]()
        for attempt in range(1, _SETUPS + 1):
            located = self._allocate(list(bad.values()), until)
            try:
                block = BlockWriter(self.namenode, self.path, located, self._terms, self._slow, self._placement.took)
            except Broken as exc:
                reason, failed = exc.reason, [located.nodes[i] for i in exc.bad]
            else:
                return block
            placement.shun(failed)
            bad |= {node.uuid: node for node in failed}
            told = _log.debug if reason in reasons else _log.warning
            told("a block of %s goes elsewhere (attempt %d): %s", self.path, attempt, reason)
            reasons.add(reason)
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
        stages = [bad]
        for nodes in (placement.shunned(slow=False), placement.shunned()):  # rather a slow one than one that failed
            if more := [node for node in nodes if node not in stages[0]]:
                stages.insert(0, [*stages[0], *more])
        with self._placement.turn:
            located = self._apart(stages[0], until) or self._anywhere(stages, until)
            self._placement.begin(id(self), self.namenode.url, located.nodes, weakref.WeakMethod(self._idle))
            return located

    def _apart(self, left_out: list[DataNode], until: float) -> Located | None:
        """A new block on DataNodes that have few blocks of files written together; None where those are too few."""
        for _ in range(2):  # once they are too few, it may be known which there are
            choice = self._placement.choose(id(self), self.namenode.url, self.replication)
            exclude = list(dict.fromkeys([*left_out, *choice.left_out]))
            if not any(choice) or 0 < len(choice.wanted) < self.replication:
                break
            try:
                return self._ask(exclude, self.replication, until, choice.wanted)
            except _TooFew as exc:
                if not choice.left_out:
                    break
                placement.too_few(self.namenode.url, exclude, exc.nodes, exc.why)
        return None

    def _anywhere(self, stages: list[list[DataNode]], until: float) -> Located:
        """A new block without the DataNodes of the first of ``stages`` for which there are enough others."""
        *_, bad = stages
        problem = ""
        while True:
            for exclude in (*stages, []) if bad else stages:
                # where we avoid too many: a replica where something failed lately is better than only one
                enough = min(blockwriter.ENOUGH, self.replication) if len(exclude) > len(bad) else 1
                try:
                    return self._ask(exclude, enough, until)
                except _TooFew as exc:
                    problem = exc.why
            if (left := until - time.monotonic()) <= 0:
                raise UnavailableError(
                    f"cannot write {self.path}: the NameNode has no DataNode for a block ({problem})",
                    hint="check that DataNodes run and have room",
                )
            _log.warning("%s waits for DataNodes: %s", self.path, problem)
            time.sleep(min(1.0, left))

    def _ask(self, exclude: Sequence[DataNode], enough: int, until: float, wanted: Sequence[DataNode] = ()) -> Located:
        """A new block on at least ``enough`` DataNodes, those ``wanted`` first, none left out. Raises `_TooFew`."""
        left = max(until - time.monotonic(), 1.0)
        try:
            located = self.namenode.add_block(self.path, self.file_id, self._previous, exclude, wanted, deadline=left)
        except UnavailableError as exc:
            if not isinstance(exc.__cause__, RemoteError) or time.monotonic() >= until:
                raise  # the NameNode itself was asked for as long as there was time
            raise _TooFew((), exc.message) from exc
        faults.point("hdfs.output.add-block")
        if len(located.nodes) < enough:
            self.namenode.abandon_block(located.block, self.path, self.file_id, deadline=left)
            raise _TooFew(located.nodes, f"only {len(located.nodes)} are left")
        return located

    def _end(self) -> None:
        block, self._block = self._block, None
        if block is None:
            return
        try:
            self._previous = block.finish()
            self._placement.end(id(self))
            self._leave_copy()
            self._copy = block.copy()
            self._placement.copy(id(self), self._copy.copy_to if self._copy else None)
        except BaseException:
            self._placement.give_up(id(self))
            raise
        finally:
            block.close()

    def _finish(self) -> None:
        self._flush()
        self._end()
        faults.point("hdfs.output.complete")
        self._complete()
        lease.release(self)
        self._leave_copy()

    def _leave_copy(self, *, only_ended: bool = False) -> None:
        """One that is not done goes on without us; in place of one that failed HDFS makes another."""
        if (copy := self._copy) is None:
            return
        try:
            if not copy.look_after() and only_ended:
                return
        except Broken as exc:
            _log.warning("%s has a block of one replica until HDFS copies it: %s", self.path, exc.reason)
        self._copy = None
        self._placement.copy(id(self), None)
        copy.close()

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

    def _remove(self) -> None:
        """Delete this very file, by its id: between a look at the path and a deletion of it others may rename. Behind a
        router of several NameNodes an id may stand for another one's file. There, and where ids cannot be asked for,
        the path is deleted; in that window of two calls another writer's file could be met."""
        lease.release(self)
        self._pieces = []
        if self._block is not None:
            self._block.close()
            self._block = None
        self._placement.give_up(id(self))
        self._leave_copy()
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
