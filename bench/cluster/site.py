"""The data centre of bench/cluster: nodes, registry, package index and DataNodes, each behind a link of its own.

The links have a limit in both directions. The NameNode answers without one: it moves no data.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from bench.common import peers
from bench.common.debian import Workload
from bench.demo.full import Addresses, stored
from bench.demo.ingredients import Ingredients
from bench.demo.strongest import Strongest, uv_index
from bootseer.demo.programs import BOOTSEER, run
from bootseer.demo.starts import read_all
from support import devcache
from support.netns import Node
from support.registry import DockerRegistry, without_tls
from support.registrycache import RegistryCache
from support.shapedhdfs import ShapedHadoop

WORKLOAD = Workload(
    name="cluster",
    job=Path(__file__).parent / "job",
    packages=("numpy", "sympy", "scipy==1.17.1", "scikit-learn==1.9.1", "pandas==3.1.1"),
    disk_gib=12.0,
)
DATANODES = 4
Say = Callable[[str], None]
_MBIT = 1e6 / 8
_UNLIMITED = 20_000


def cache() -> Path:
    """Where image, index and checkpoint are kept."""
    return devcache.folder("bench/cluster")


class Cluster:
    """Context manager: everything runs, the image is converted and the checkpoint stored in both forms.

    ``rate``: of each link in Mbit/s. ``nodes`` are the job's; ``containerds`` their sockets. ``compared``: the variants
    that are started.
    """

    def __init__(
        self,
        parts: Ingredients,
        work: Path,
        prefix: str,
        subnet: str,
        *,
        nodes: int,
        rate: float,
        compared: Collection[str],
        say: Say,
    ) -> None:
        self.parts, self.work, self.rate, self.say, self._compared = parts, work, rate, say, compared
        self.hadoop = ShapedHadoop(
            work / "hdfs", prefix, subnet, datanodes=DATANODES, mib_per_s=rate * _MBIT / 2**20, clients=nodes + 3
        )
        *self.nodes, self._registry, self._mirror, self._index = self.hadoop.network.clients
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Cluster:
        with self._stack as stack:
            self._start(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def _start(self, stack: contextlib.ExitStack) -> None:
        parts = self.parts
        stack.enter_context(self.hadoop)
        for node in self.hadoop.network.nodes:
            node.limit(_UNLIMITED)  # until all is prepared
        root = self.work / "registry"
        shutil.copytree(parts.registry, root, copy_function=os.link)  # what is pushed here goes with the work folder
        registry = DockerRegistry(host=self._registry.address, root=root, prefix=self._registry.argv([]))
        stack.enter_context(registry)
        mirror = RegistryCache(registry.address, host=self._mirror.address, prefix=self._mirror.argv([]))
        stack.enter_context(mirror)
        stack.enter_context(without_tls(registry.address, mirror.address))
        self.registry, self.mirror = registry.address, mirror.address
        index = peers.file_server(
            uv_index(parts.index, self.work), self._index.address, self.work, self._index.argv([])
        )
        address = stack.enter_context(index)
        self.containerds = [
            stack.enter_context(peers.containerd(self.work / f"ctr{i}", node.argv([]), built=False))[-1]
            for i, node in enumerate(self.nodes)
        ]
        self.site = Addresses(
            ref=f"{registry.address}/{parts.repository}:1",
            index_url=f"{address}/simple",
            **stored(self.hadoop.cluster, parts.checkpoint),
        )
        for store in (self.site.store, self.store("registry")):
            run([*BOOTSEER, "image", "convert", self.site.ref, "--store", store, "--json"])
        self.mix = self._strongest()
        for folder in (parts.registry, parts.index, parts.job_env, parts.checkpoint):
            read_all(folder)  # servers are warm
        for node in (*self.nodes, *self.hadoop.network.nodes, self._registry, self._mirror, self._index):
            node.limit(self.rate)

    def store(self, way: str) -> str:
        """URL of the store of a scenario whose ``store`` is ``way``."""
        return self.site.store if way == "hdfs" else f"registry://{self.registry}/store"

    def mirrors(self, way: str) -> str:
        """Setting of the nodes in such a scenario."""
        return f"{self.registry}={self.mirror}" if way == "mirror" else ""

    def _strongest(self) -> Strongest:
        local, requirements = self.site.job(local=self.parts), WORKLOAD.job / "requirements.txt"
        made = Strongest(self.work, self.site.ref, self.site.index_url, local, requirements)
        for variant in self._compared:
            made.fill(variant, self.say)
        return made

    @property
    def strongest(self) -> str:
        """What the strongest mix is made of."""
        return self.mix.tools if "strongest" in self._compared else "not compared"

    def moved(self) -> dict[str, int]:
        """Bytes that have left the servers so far, and requests that the index has answered."""
        return {
            "registry": self._registry.bytes_sent(),
            "mirror": self._mirror.bytes_sent(),
            "mirrored": self._mirror.bytes_received(),
            "index": self._index.bytes_sent(),
            "datanodes": sum(node.bytes_sent() for node in self.hadoop.network.nodes),
            "index_requests": (self.work / "index.log").read_bytes().count(b'"GET '),
        }

    def bound(self, moved: dict[str, int], ready: list[int]) -> float:
        """Seconds that the links need at least. ``ready``: what each node had received at its first step; what did not
        come from registry, mirror or index came from the DataNodes."""
        direct = moved["registry"] - moved["mirrored"]
        stored = max(0, sum(ready) - direct - moved["mirror"] - moved["index"]) / DATANODES
        return max(*ready, moved["registry"], moved["mirror"], moved["index"], stored) / (self.rate * _MBIT)

    @contextlib.contextmanager
    def slow_node(self, share: float) -> Iterator[None]:
        """The link of the first node carries ``share`` of what it should."""
        self._limit(self.nodes[0], share)
        try:
            yield
        finally:
            self._limit(self.nodes[0], 1.0)

    def _limit(self, node: Node, share: float) -> None:
        node.limit(self.rate * share)
