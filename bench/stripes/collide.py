"""Files whose blocks all have a replica on one DataNode, and the other replicas on the others in turn.

A client beside that DataNode is told of it first for every block. HDFS places blocks at random, so these are written
with their DataNodes named, and looked at again before each run that reads them.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence

from bench.common.invocation import say
from bench.stripes.runner import HEARTBEAT
from bootseer.backends.cluster import HdfsBackend
from bootseer.backends.interface import FILE_MODE, Sink
from bootseer.errors import BootseerError
from bootseer.hdfs import client as hdfs
from bootseer.hdfs.namenode import NameNode
from bootseer.hdfs.output import FileOutput
from bootseer.hdfs.placement import Choice, Placement
from bootseer.hdfs.records import DataNode
from bootseer.stripefs import StripeFS
from support.hadoop import HadoopCluster
from support.replicas import Replicas, datanodes

FOLDER, PLAIN, STRIPED = "/collide", "plain", "striped"
FIRST, OTHERS = 0, (1, 2, 3)
"""DataNodes: who has a replica of every block, and who have the second ones."""
_STOCK_CHECKSUM = 512
"""Bytes for each checksum, as Hadoop's own clients write: the plain file is the vanilla one."""
_TRIES = 5


class Chosen(Placement):
    """Every new block on the first of ``nodes`` and the next of ``others``."""

    def __init__(self, nodes: Sequence[DataNode], others: Iterator[DataNode]) -> None:
        super().__init__()
        self._nodes, self._others = nodes, others

    def choose(self, file: int, cluster: str, replicas: int) -> Choice:
        return Choice([self._nodes[0], next(self._others)], [])


class _Backend(HdfsBackend):
    """Stripe ``i`` goes to ``nodes[0]`` and to one of the rest in turn."""

    def __init__(self, url: str, nodes: Sequence[DataNode]) -> None:
        super().__init__(url)
        self._nodes = nodes

    def create(self, path: str, *, siblings: object = None, mode: int = FILE_MODE) -> Sink:
        if siblings is not None:  # a stripe
            others = self._nodes[1:]
            stripe = int(path.rpartition(".")[2])
            siblings = Chosen(self._nodes, itertools.repeat(others[stripe % len(others)]))
        return super().create(path, siblings=siblings, mode=mode)


class Collision:
    """The colliding files of ``cluster``, whose default replication is 2."""

    def __init__(self, cluster: HadoopCluster) -> None:
        self._cluster, self._replicas = cluster, Replicas(cluster)

    def write(self, content: bytes) -> None:
        """Both files; says it when HDFS has put one elsewhere again and again."""
        for name, write in ((PLAIN, self._write_plain), (STRIPED, self._write_striped)):
            for attempt in range(1, _TRIES + 1):
                write(content)
                if not (why := misplaced(name, self._holders(name))):
                    break
                say(f"{FOLDER}/{name} does not collide, attempt {attempt} of {_TRIES}: {why}")
                time.sleep(HEARTBEAT)

    def _nodes(self) -> list[DataNode]:
        found = datanodes(self._cluster)
        return [found[index] for index in (FIRST, *OTHERS)]

    def _write_plain(self, content: bytes) -> None:
        nodes = self._nodes()
        namenode, path = NameNode.connect(self._cluster.url), f"{FOLDER}/{PLAIN}"
        namenode.delete(path)
        placement = Chosen(nodes, itertools.cycle(nodes[1:]))
        with FileOutput(namenode, path, bytes_per_checksum=_STOCK_CHECKSUM, placement=placement) as out:
            out.write(content)

    def _write_striped(self, content: bytes) -> None:
        fs = StripeFS(_Backend(f"{self._cluster.url}{FOLDER}", self._nodes()))
        with fs.create(STRIPED, striped=True) as out:
            out.write(content)

    def _holders(self, name: str) -> list[list[int]]:
        """The DataNodes of each block."""
        paths = [f"{FOLDER}/{PLAIN}"]
        if name == STRIPED:
            paths = [entry.path for entry in hdfs.connect(self._cluster.url).list(f"{FOLDER}/.bsx")]
        return [self._replicas.holders(b) for path in paths for b in self._replicas.blocks(path, replicas=2)]

    def look(self, named_first: str) -> dict[str, object]:
        """What a report says of the stripes. ``named_first``: note of a ``first-holders`` client beside the DataNode.

        Raises `BootseerError` when the files do not lie as they should: a figure would be one of something else.
        """
        for name in (PLAIN, STRIPED):
            if why := misplaced(name, holders := self._holders(name)):
                raise BootseerError(f"{FOLDER}/{name} does not collide as it should: {why}")
        if named_first != (wanted := f"{self._cluster.addresses[FIRST]} for {len(holders)} of {len(holders)} blocks"):
            raise BootseerError(f"the NameNode names {named_first} first, not {wanted}")
        return {"named_first": named_first, "replicas_on": len({index for block in holders for index in block})}


def misplaced(name: str, blocks: Sequence[Sequence[int]]) -> str:
    """What is wrong with where the blocks of a file are, "" when nothing is; ``blocks``: the DataNodes of each.

    The links of the DataNodes that have replicas of the stripes bound a read of them, so these must be all.
    """
    on, wanted = sorted({index for block in blocks for index in block}), [FIRST, *OTHERS]
    if missing := sum(FIRST not in block for block in blocks):
        return f"{missing} of {len(blocks)} blocks have no replica on DataNode {FIRST}"
    if name == STRIPED and on != wanted:
        return f"its replicas are on DataNodes {on}, not on {wanted}"
    return ""
