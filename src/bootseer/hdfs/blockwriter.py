"""One block being written: its pipeline, and another one with fewer DataNodes each time one of them fails.

    add_block -> Pipeline(create) -> packets -> last packet -> done
                      |  a DataNode fails
                      v
    update_block_for_pipeline (new generation) -> Pipeline(recover, those left) -> update_pipeline -> what was not
    acknowledged, again

The new generation is what makes the replica of the failed DataNode stale, should it come back. What was acknowledged is
on every DataNode that is left; what was not is still in memory. A failure at the end of a block is repaired with the
stage `pipeline.CLOSE`, in which the DataNodes finish the block at once.

Concurrency: as `bootseer.hdfs.pipeline`: one thread at a time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from bootseer import faults
from bootseer.errors import BootseerError, UnavailableError
from bootseer.hdfs import checksum, pipeline, placement, probe
from bootseer.hdfs.namenode import NameNode
from bootseer.hdfs.pipeline import Broken, Packet, Pipeline, Setup, Terms
from bootseer.hdfs.records import Block, DataNode, Located

_log = logging.getLogger(__name__)

WINDOW = 8 << 20
"""Bytes of a file that may be unacknowledged."""
PATIENCE = 60.0
"""Seconds that each question to the NameNode may take, restarts and fail-overs of it included."""
SPARE = 5.0
"""Seconds that the NameNode has to tell of another DataNode for a block; without one it goes on."""
RECOVERIES = 5
"""Pipelines in a row that may fail without that anything more was acknowledged."""
ENOUGH = 2
"""Replicas with which a block goes on: the NameNode makes more of it later."""


class BlockLost(UnavailableError):
    """No DataNode is left that has all of a block that was being written."""


class BlockWriter:
    """The block ``located`` of the file ``path``, with a pipeline that is set up. `pipeline.Broken` when that fails.
    `write` and `finish` raise `BlockLost`, and errors of the NameNode. ``slow``: which of the DataNodes the block had
    better leave; it is told which share of the time the pipeline was waited for. ``took``: called with DataNodes that
    have so many bytes more."""

    def __init__(
        self,
        namenode: NameNode,
        path: str,
        located: Located,
        terms: Terms,
        slow: Callable[[Sequence[DataNode], float | None], list[DataNode]] = lambda nodes, waited: [],
        took: Callable[[Sequence[DataNode], int], None] = lambda nodes, length: None,
    ) -> None:
        self._namenode, self._path, self._terms, self._slow, self._took = namenode, path, terms, slow, took
        self._located, self._began_with = located, len(located.nodes)
        self.length = 0
        self._number = self._failures = 0
        self._acked, self._hopeless = -1, False
        self._broken: Broken | None = None
        self._run_began: tuple[float, float] | None = None
        self._pipeline = Pipeline(located, terms, Setup(), self._watch, took)

    def _run(self) -> float | None:
        """The share that the pipeline was waited for of the last `placement.ENOUGH` seconds, once in so many; else
        None. `placement.ANEW` at the beginning of a pipeline, and where nothing was on its way."""
        pipe, before, now = self._pipeline, self._run_began, time.monotonic()
        if before and now - before[0] < placement.ENOUGH:
            return None
        self._run_began = now, pipe.waited
        return (pipe.waited - before[1]) / (now - before[0]) if before and pipe.in_flight else placement.ANEW

    def _watch(self) -> None:
        """Leave DataNodes that hold the block up, as after a failure. What they have not acknowledged is sent to the
        others again, which takes less time than to wait for them."""
        slow = [] if self._hopeless else self._slow(self.nodes, self._run())
        if not slow:
            return
        names = ", ".join(node.address for node in slow)
        left = [node for node in self.nodes if node not in slow]
        placement.shun(slow, slow=True)
        if len(left) >= ENOUGH or self._spare(left):
            bad = [i for i, node in enumerate(self.nodes) if node in slow]
            raise Broken(f"{names} held up what is written", bad, slow=True)
        # nobody else has what they acknowledged, and nobody can get it: they end the block
        _log.warning("%s goes on in another block, without %s, which held it up", self._path, names)
        self._hopeless = True

    @property
    def ends_early(self) -> bool:
        """Whether another block had better take the rest: one more failure would lose this one, or it is held up. Not
        where the NameNode found only one DataNode: another block has no more."""
        return self._hopeless or len(self.nodes) < min(ENOUGH, self._began_with)

    def idle(self) -> bool:
        """Whether its DataNodes were given something and have acknowledged it all."""
        if self._broken is None:
            try:
                self._pipeline.collect()
            except Broken as exc:
                self._broken = exc
        return self._broken is None and not self._pipeline.in_flight and self._pipeline.acked > 0

    @property
    def nodes(self) -> tuple[DataNode, ...]:
        """The DataNodes that take part, in the order of the pipeline."""
        return self._located.nodes

    @property
    def idle_since(self) -> float:
        """When something was last sent, by the monotonic clock."""
        return self._pipeline.used

    def write(self, parts: Sequence[memoryview], length: int) -> None:
        """Append ``parts``, ``length`` bytes together, whose memory must not change until `finish` has returned; waits
        while more than `WINDOW` bytes are unacknowledged."""
        sums = checksum.of(parts, self._terms.bytes_per_checksum)
        packet = Packet(self._number, self.length, length, sums, tuple(parts))
        self._number += 1
        self.length += length
        faults.point("hdfs.output.packet")
        self._drain(max(WINDOW - length, 0))
        try:
            self._pipeline.send(packet)
        except Broken as exc:
            self._recover(exc, pipeline.RECOVER)  # the packet is one of those that were not acknowledged

    def finish(self) -> Block:
        """Wait until everything is on every DataNode, end the block, and return it with its length."""
        self._drain(0)
        faults.point("hdfs.output.block-end")
        self._hopeless = True  # each of them has all of it: whoever is left now takes a replica away
        last = Packet(self._number, self.length, 0, b"", (), last=True)
        try:
            self._pipeline.send(last)
            self._pipeline.drain(0)
        except Broken as exc:
            self._recover(exc, pipeline.CLOSE)
        self._pipeline.close()
        return self._block(self.length)

    def heartbeat(self) -> None:
        """Keep the idle pipeline alive. One that is broken is recovered by the next `write` or `finish`, as that takes
        time, which the thread that calls this has not."""
        if self._broken is None:
            try:
                self._pipeline.heartbeat()
            except Broken as exc:
                self._broken = exc
                _log.info("the next write of %s recovers its pipeline: %s", self._path, exc.reason)

    def close(self) -> None:
        """Leave the block as it is."""
        self._pipeline.close()

    def _block(self, length: int) -> Block:
        return self._located.block._replace(length=length)

    def _drain(self, left: int) -> None:
        """Wait until at most ``left`` bytes are unacknowledged, whatever pipelines that takes."""
        while True:
            try:
                if (broken := self._broken) is not None:
                    self._broken = None
                    raise broken
                self._watch()
                return self._pipeline.drain(left)
            except Broken as exc:
                self._recover(exc, pipeline.RECOVER)

    def _recover(self, broken: Broken, stage: int) -> None:
        """Another pipeline without the DataNodes at fault; what was not acknowledged is sent over it again."""
        pending = [packet for packet in self._pipeline.unacked if not packet.last]
        while True:
            self._pipeline.close()
            acked = self._pipeline.acked
            self._failures = 1 if acked > self._acked else self._failures + 1
            self._acked = acked
            pending = [packet for packet in pending if packet.offset + packet.length > acked]
            self._drop(broken)
            try:
                self._pipeline, self._run_began = self._replace(stage, acked), None
                if stage == pipeline.RECOVER:
                    for packet in pending:
                        self._pipeline.send(packet)
                return
            except Broken as exc:
                broken = exc

    def _drop(self, broken: Broken) -> None:
        nodes = self._located.nodes
        bad = [nodes[i] for i in broken.bad]
        placement.shun(bad, slow=broken.slow)
        keep = [i for i in range(len(nodes)) if i not in broken.bad]
        if not keep:  # better one that failed once than none
            silent = probe.silent(nodes, self._located.block.pool)
            keep = [i for i in range(len(nodes)) if i not in silent]
        if not keep or self._failures > RECOVERIES:
            raise BlockLost(
                f"cannot write {self._path}: no DataNode is left that has all of block {self._located.block.id}"
                f" ({broken.reason})",
                hint="check that its DataNodes run and are reachable from here",
            )
        _log.warning("writing %s goes on with %d of %d DataNodes: %s", self._path, len(keep), len(nodes), broken.reason)
        self._located = self._located.picked(keep)

    def _spare(self, left: Sequence[DataNode]) -> Located | None:
        """The block with another DataNode behind those that are ``left``, if they are too few and there is one."""
        if not left or not self._pipeline.acked or len(left) >= min(ENOUGH, self._began_with):
            return None
        try:
            found = self._namenode.additional_datanode(
                self._block(self._pipeline.acked), self._path, left, placement.shunned(), deadline=SPARE
            )
        except BootseerError as exc:
            _log.info("no other DataNode for a block of %s: %s", self._path, exc)
            return None
        new = [node for node in found.nodes if node not in left]
        return replace(found, nodes=(*left, *new)) if new else None

    def copy(self) -> Pipeline | None:
        """Where hardly a DataNode has the block, which is whole, it copies it to another one while the next block is
        written: one more failure would lose it, and HDFS copies it when its file is closed. Nobody waits for it."""
        if (spare := self._spare(self.nodes)) is None:
            return None
        try:
            return Pipeline(spare.picked([0]), self._terms, Setup(acked=self.length, copy_to=spare.nodes[-1]))
        except (Broken, BootseerError) as exc:
            _log.warning("%s has a block of one replica until HDFS copies it: %s", self._path, exc)
            return None

    def _replace(self, stage: int, acked: int) -> Pipeline:
        old = self._block(acked)
        renewed = self._namenode.update_block_for_pipeline(old, self._path, deadline=PATIENCE)
        located = replace(self._located, token=renewed.token)
        new = old._replace(generation=renewed.block.generation)
        made = Pipeline(located, self._terms, Setup(stage, new.generation, acked, self.length), self._watch, self._took)
        try:
            faults.point("hdfs.output.recover")
            self._namenode.update_pipeline(old, new, located.nodes, self._path, deadline=PATIENCE)
        except BaseException:
            made.close()
            raise
        self._located = replace(located, block=new)
        return made
