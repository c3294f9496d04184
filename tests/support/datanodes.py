"""DataNodes and a NameNode in memory, for the read engine: rates, freezes, deaths, lost and damaged replicas.

`FakeHdfs` has a `read` and is a `Files` (`bootseer.backends.engine.transport`). Its transfers
write into the caller's memory piece by piece, as real ones do.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from bootseer.backends.engine.transport import BlockFile
from bootseer.errors import NotFoundError, UnavailableError
from bootseer.hdfs.connection import Transfer
from bootseer.hdfs.proto import hdfs_pb2 as wire
from bootseer.hdfs.records import Block, DataNode, FileBlocks, Located
from bootseer.hdfs.replica_errors import Cancelled, CorruptReplica, StaleReplica, UncheckedReplica

_PIECE = 64 << 10


@dataclass
class FakeNode:
    """``rate`` in bytes a second for all its transfers together, 0 without limit; ``latency`` in seconds before each
    transfer. While ``frozen`` nothing comes; while ``dead`` it refuses."""

    rate: float = 0.0
    latency: float = 0.0
    frozen: bool = False
    dead: bool = False


def _sleep(transfer: Transfer, seconds: float) -> None:
    """Sleep, unless cancelled."""
    until = time.monotonic() + seconds
    while not transfer.cancelled and (left := until - time.monotonic()) > 0:
        time.sleep(min(left, 0.002))
    if transfer.cancelled:
        raise Cancelled("the read was cancelled")


class FakeHdfs:
    """Nodes by name. ``gone``, ``corrupt``, ``bare`` (no checksums): (node, block id) pairs; ``reported``: told."""

    def __init__(self, *names: str) -> None:
        self.nodes = {name: FakeNode() for name in names}
        self.gone: set[tuple[str, int]] = set()
        self.corrupt: set[tuple[str, int]] = set()
        self.without_checksums: set[tuple[str, int]] = set()
        self.reported: set[tuple[str, int]] = set()
        self.linger = 0.0
        """Seconds after which a cancelled transfer writes once more, before it ends."""
        self.located = 0
        self.served: dict[str, int] = dict.fromkeys(names, 0)
        self._files: dict[str, tuple[FileBlocks, bytes]] = {}
        self._data: dict[int, bytes] = {}
        self._lock = threading.Lock()
        self._free_at: dict[str, float] = dict.fromkeys(names, 0.0)

    def put(self, path: str, data: bytes, replicas: Sequence[str], *, block_size: int = 128 << 20) -> None:
        """A file at ``path``; block ``i`` is on the nodes that ``replicas[i % len(replicas)]`` spells."""
        blocks = []
        for index, offset in enumerate(range(0, len(data), block_size)):
            piece = data[offset : offset + block_size]
            block = Block("pool", len(self._data) + 1, 1, len(piece))
            self._data[block.id] = piece
            blocks.append(Located(block, offset, self._named(replicas[index % len(replicas)]), wire.Token()))
        self._files[path] = FileBlocks(len(data), tuple(blocks)), data

    def _named(self, names: str) -> tuple[DataNode, ...]:
        return tuple(DataNode(name, name, 1) for name in names)

    def move(self, path: str, index: int, replicas: str) -> None:
        """Block ``index`` of ``path`` is on other nodes now, and gone from those it was on."""
        found, data = self._files[path]
        old = found.blocks[index]
        self.gone |= {(node.uuid, old.block.id) for node in old.nodes if node.uuid not in replicas}
        blocks = list(found.blocks)
        blocks[index] = Located(old.block, old.offset, self._named(replicas), wire.Token())
        self._files[path] = FileBlocks(found.length, tuple(blocks)), data

    def open(self, path: str) -> BlockFile:
        return BlockFile(self, path, self.blocks(path))

    # -- Files ----------------------------------------------------------------------------------------------------

    def blocks(self, path: str) -> FileBlocks:
        self.located += 1
        if path not in self._files:
            raise NotFoundError(f"no file {path}")
        return self._files[path][0]

    def report(self, replica: Located) -> None:
        self.reported |= {(node.uuid, replica.block.id) for node in replica.nodes}

    # -- transfers ------------------------------------------------------------------------------------------------

    def read(
        self,
        node: DataNode,
        located: Located,
        offset: int,
        parts: Sequence[memoryview],
        *,
        deadline: float,
        verify: bool,
        transfer: Transfer,
    ) -> None:
        state, until = self.nodes[node.uuid], time.monotonic() + deadline
        if state.dead:
            raise UnavailableError(f"{node.uuid} refuses")
        _sleep(transfer, state.latency)
        if (node.uuid, located.block.id) in self.gone:
            raise StaleReplica(f"{node.uuid} has no block {located.block.id}")
        if verify and (node.uuid, located.block.id) in self.without_checksums:
            raise UncheckedReplica(f"{node.uuid} has no checksums of block {located.block.id}")
        data = self._data[located.block.id]
        damaged = (node.uuid, located.block.id) in self.corrupt
        if damaged and verify:
            raise CorruptReplica(f"block {located.block.id} on {node.uuid} is damaged")
        for part in parts:
            for start in range(0, len(part), _PIECE):
                view = part[start : start + _PIECE]
                try:
                    self._wait(node.uuid, state, transfer, until)
                except Cancelled:
                    if self.linger:
                        time.sleep(self.linger)
                        view[:] = b"?" * len(view)
                    raise
                view[:] = data[offset : offset + len(view)]
                if damaged:
                    view[0] ^= 1
                offset += len(view)
                transfer.received += len(view)
                self._pace(node.uuid, state, len(view), transfer)
        with self._lock:
            self.served[node.uuid] += transfer.received

    def _wait(self, name: str, state: FakeNode, transfer: Transfer, until: float) -> None:
        while state.frozen:
            _sleep(transfer, 0.002)
            if time.monotonic() > until:
                raise UnavailableError(f"no answer from {name} in time")
        _sleep(transfer, 0)
        if state.dead:
            raise UnavailableError(f"{name} broke off")

    def _pace(self, name: str, state: FakeNode, count: int, transfer: Transfer) -> None:
        if not state.rate:
            return
        with self._lock:
            begin = max(self._free_at[name], time.monotonic() - 0.01)
            self._free_at[name] = free_at = begin + count / state.rate
        if (ahead := free_at - time.monotonic()) > 0.002:
            _sleep(transfer, ahead)
