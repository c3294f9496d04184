"""One block being written: its pipeline, and another one with fewer DataNodes each time one of them fails.

    add_block -> Pipeline(create) -> packets -> last packet -> done
                      |  a DataNode fails
                      v
    update_block_for_pipeline (new generation) -> Pipeline(recover, those left) -> update_pipeline -> what was not
    acknowledged, again

The new generation is what makes the replica of the failed DataNode stale, should it come back. What was acknowledged is
on every DataNode that is left; what was not is still in memory. A failure during the end of a block is mended with the
stage `pipeline.CLOSE`, in which the DataNodes finish the block at once.

Concurrency: as `bootseer.hdfs.pipeline`: one thread at a time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from bootseer import faults
from bootseer.errors import UnavailableError
from bootseer.hdfs import pace, pipeline, placement, probe
from bootseer.hdfs.namenode import NameNode
from bootseer.hdfs.pace import Run
from bootseer.hdfs.pipeline import Broken, Packet, Pipeline, Setup, Terms
from bootseer.hdfs.placement import picked
from bootseer.hdfs.records import Block, DataNode, Located

_log = logging.getLogger(__name__)

RECOVERIES = 5
"""Pipelines in a row that may fail without that anything more was acknowledged."""


class BlockLost(UnavailableError):
    """No DataNode is left that has all of a block that was being written."""


class BlockWriter:
    """The block ``located`` of the file ``path``, with a pipeline that is set up. `pipeline.Broken` when that fails.

    ``placed``: the DataNodes it began with; ``replicas``: how many still take part. `write` and `finish` raise
    `BlockLost`, and errors of the NameNode.
    """

    def __init__(self, namenode: NameNode, path: str, located: Located, terms: Terms, *, patience: float) -> None:
        self._namenode, self._path, self._terms, self._patience = namenode, path, terms, patience
        self._located = located
        self.placed = located.nodes
        self.length = 0
        self._number = self._failures = 0
        self._acked = -1
        self._noted: Broken | None = None
        self._pipeline = Pipeline(located, terms, Setup())
        self._reset()

    def _reset(self) -> None:
        self._began, self._began_at, self._waited = time.monotonic(), self.length, 0.0

    def run(self, window: int) -> Run:
        """How the pipeline does, since it was set up or mended, or in the last seconds."""
        elapsed, length = time.monotonic() - self._began, self.length - self._began_at
        run = Run(self.nodes, elapsed, length, self._waited, self._pipeline.in_flight / window)
        if elapsed > 2 * pace.ENOUGH:
            self._reset()
        return run

    @property
    def replicas(self) -> int:
        return len(self._located.nodes)

    @property
    def nodes(self) -> tuple[DataNode, ...]:
        """The DataNodes that take part, in the order of the pipeline."""
        return self._located.nodes

    @property
    def idle_since(self) -> float:
        """When something was last sent, by the monotonic clock."""
        return self._pipeline.used

    def write(self, parts: Sequence[memoryview], length: int, *, window: int) -> None:
        """Append ``parts``, ``length`` bytes together; waits while more than ``window`` bytes are unacknowledged.

        The memory of ``parts`` must not change until `finish` has returned.
        """
        sums = pipeline.checksums(parts, self._terms.bytes_per_checksum)
        packet = Packet(self._number, self.length, length, sums, tuple(parts))
        self._number += 1
        self.length += length
        faults.point("hdfs.output.packet")
        begin = time.monotonic()
        self._try(lambda: self._pipeline.drain(max(window - length, 0)))
        try:
            self._pipeline.send(packet)
        except Broken as exc:
            self._mend(exc, pipeline.RECOVER)  # the packet is one of those that were not acknowledged
        self._waited += time.monotonic() - max(begin, self._began)

    def finish(self) -> Block:
        """Wait until everything is on every DataNode, end the block, and return it with its length."""
        self._try(lambda: self._pipeline.drain(0))
        faults.point("hdfs.output.block-end")
        last = Packet(self._number, self.length, 0, b"", (), last=True)
        try:
            self._pipeline.send(last)
            self._pipeline.drain(0)
        except Broken as exc:
            self._mend(exc, pipeline.CLOSE)
        self._pipeline.close()
        return self._block(self.length)

    def beat(self) -> None:
        """Keep the idle pipeline alive. One that is broken is mended by the next `write` or `finish`, as that takes
        time, which the thread that calls this has not."""
        if self._noted is None:
            try:
                self._pipeline.beat()
            except Broken as exc:
                self._noted = exc
                _log.info("the next write of %s mends its pipeline: %s", self._path, exc.reason)

    def close(self) -> None:
        """Leave the block as it is."""
        self._pipeline.close()

    def _block(self, length: int) -> Block:
        return self._located.block._replace(length=length)

    # -- recovery -------------------------------------------------------------------------------------------------

    def _try(self, step: Callable[[], None]) -> None:
        while True:
            try:
                if (noted := self._noted) is not None:
                    self._noted = None
                    raise noted
                return step()
            except Broken as exc:
                self._mend(exc, pipeline.RECOVER)

    def _mend(self, broken: Broken, stage: int) -> None:
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
                self._pipeline = self._again(stage, acked)
                if stage == pipeline.RECOVER:
                    for packet in pending:
                        self._pipeline.send(packet)
                return self._reset()
            except Broken as exc:
                broken = exc

    def _drop(self, broken: Broken) -> None:
        nodes = self._located.nodes
        bad = [nodes[i] for i in broken.bad]
        placement.shun(bad)
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
        self._located = picked(self._located, keep)

    def _again(self, stage: int, acked: int) -> Pipeline:
        old = self._block(acked)
        renewed = self._namenode.update_block_for_pipeline(old, self._path, deadline=self._patience)
        located = replace(self._located, token=renewed.token)
        new = old._replace(generation=renewed.block.generation)
        made = Pipeline(located, self._terms, Setup(stage, new.generation, acked, self.length))
        try:
            faults.point("hdfs.output.recover")
            self._namenode.update_pipeline(
                old, new, located.nodes, located.storage_ids, self._path, deadline=self._patience
            )
        except BaseException:
            made.close()
            raise
        self._located = replace(located, block=new)
        return made
