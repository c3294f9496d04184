"""An HDFS whose DataNodes each have a link of their own that can be made slower while it is in use. Needs root."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import TracebackType

from support.hadoop import HadoopCluster
from support.netns import ShapedNetwork


class ShapedHadoop:
    """Context manager: NameNode on this host, each DataNode in a network namespace whose link carries ``mib_per_s``.

    ``prefix`` and ``subnet``: of the `ShapedNetwork`. Each DataNode is a rack of its own, so that all are equally far
    from a client. ``clients``: so many namespaces for clients, without limits. ``settings`` and ``later``: of the
    `HadoopCluster`.
    """

    def __init__(
        self,
        root: Path,
        prefix: str,
        subnet: str,
        *,
        datanodes: int = 4,
        mib_per_s: float = 60.0,
        clients: int = 0,
        settings: Mapping[str, str] | None = None,
        later: Collection[int] = (),
    ) -> None:
        self.mib_per_s = mib_per_s
        self.network = ShapedNetwork(
            prefix, nodes=datanodes, clients=clients, rate_mbit=_mbit(mib_per_s), subnet=subnet
        )
        nodes = self.network.nodes
        racks = {node.address: f"/r{i}" for i, node in enumerate(nodes)}
        self.cluster = HadoopCluster(
            root,
            bind=self.network.host,
            datanode_hosts=[node.address for node in nodes],
            wrap=lambda i: nodes[i].argv([]),
            settings=settings,
            racks=racks,
            later=later,
        )
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> ShapedHadoop:
        with self._stack as stack:
            stack.enter_context(self.network)
            stack.enter_context(self.cluster)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self._stack.close()

    def slow(self, index: int, share: float) -> None:
        """From now on the link of DataNode ``index`` carries ``share`` of what it should; 1 makes it whole again."""
        self.network.nodes[index].limit(_mbit(self.mib_per_s * share))

    @contextlib.contextmanager
    def slowed(self, index: int, share: float = 0.1) -> Iterator[None]:
        self.slow(index, share)
        try:
            yield
        finally:
            self.slow(index, 1)


def _mbit(mib_per_s: float) -> float:
    return mib_per_s * 2**20 * 8 / 1e6
