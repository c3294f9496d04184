"""The data centre of bench/image: a registry and a store behind one shaped link, and a second, longer way to both."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import _parts
from bootseer.testing.hadoop import HadoopCluster
from bootseer.testing.latency import LatencyProxy
from bootseer.testing.netns import Node, ShapedNetwork
from bootseer.testing.registry import DockerRegistry

PREFIX, SUBNET = "bsimg", "10.78.0.0/24"
STORES = ("registry", "hdfs")


class Site:
    """Addresses as the node sees them. ``far``: through the proxy that adds ``rtt`` seconds."""

    def __init__(self, node: Node, near: str, far: str, hdfs: str) -> None:
        self.node, self._near, self._far, self._hdfs = node, near, far, hdfs

    def registry(self, far: bool = False) -> str:
        return self._far if far else self._near

    def ref(self, far: bool = False) -> str:
        """The image."""
        return f"{self.registry(far)}/{_parts.REPOSITORY}:1"

    def store(self, far: bool = False) -> str | None:
        """URL of the store with the converted image; None where it cannot be reached through the proxy."""
        if self._hdfs:
            return None if far else self._hdfs
        return f"registry+http://{self.registry(far)}/{_parts.REPOSITORY}"


def default_store() -> str:
    """The registry itself where this version can use one as a store, else HDFS."""
    return "registry" if importlib.util.find_spec("bootseer.store.registry") else "hdfs"


@contextlib.contextmanager
def site(parts: _parts.Parts, work: Path, *, rate_mbit: float, rtt: float, store: str) -> Iterator[Site]:
    """Start everything; the registry works on hard links to the cached one, so what a bench adds goes with ``work``."""
    root = work / "registry"
    shutil.copytree(parts.registry, root, copy_function=os.link)
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(ShapedNetwork(PREFIX, rate_mbit=rate_mbit, subnet=SUBNET))
        registry = stack.enter_context(DockerRegistry(host=network.host, root=root))
        proxy = stack.enter_context(LatencyProxy(registry.address, rtt=rtt, host=network.host))
        hdfs = ""
        if store == "hdfs":
            # one replica: all DataNodes share this machine's disk
            cluster = HadoopCluster(work / "hdfs", bind=network.host, settings={"dfs.replication": "1"})
            hdfs = f"{stack.enter_context(cluster).url}/bootseer"
        yield Site(network.nodes[0], registry.address, proxy.address, hdfs)
