"""An HDFS of four DataNodes for the image benches, each behind a link as wide as the node's, with three replicas."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from support.hadoop import HadoopCluster
from support.netns import Node, ShapedNetwork

DATANODES = 4
STARTS = {"hdfs": "", "hdfs-frozen": "frozen", "hdfs-slow": "slow"}
"""Starts whose store is here, and what one DataNode is from their beginning to their end."""
RECORD = "hdfs-record"
SLOW = 0.05
"""Share of its link that a slow DataNode has."""


class Hdfs:
    """``url``: of the folder of stores."""

    def __init__(self, cluster: HadoopCluster, nodes: list[Node], rate_mbit: float) -> None:
        self.url = f"{cluster.url}/bootseer"
        self._cluster, self._nodes, self._rate = cluster, nodes, rate_mbit

    @contextlib.contextmanager
    def trouble(self, kind: str, number: int) -> Iterator[None]:
        """One DataNode, by ``number`` another each time, is ``frozen`` or ``slow`` inside; all are well for ""."""
        index = number % DATANODES
        self._nodes[index].limit(self._rate * (SLOW if kind == "slow" else 1))
        try:
            with self._cluster.frozen(index) if kind == "frozen" else contextlib.nullcontext():
                yield
        finally:
            self._nodes[index].limit(self._rate)


@contextlib.contextmanager
def running(network: ShapedNetwork, folder: Path) -> Iterator[Hdfs]:
    """The last nodes of ``network`` are its DataNodes; the NameNode is on the host."""
    nodes = network.nodes[-DATANODES:]
    cluster = HadoopCluster(
        folder,
        bind=network.host,
        datanode_hosts=[node.address for node in nodes],
        wrap=lambda index: nodes[index].argv([]),
        racks={node.address: f"/r{index}" for index, node in enumerate(network.nodes)},
    )
    with cluster:
        yield Hdfs(cluster, nodes, network.rate_mbit)
