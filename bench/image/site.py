"""The data centre of the image benches: a registry and a store behind one shaped link, and a longer way to both."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from bench.image import hdfs as image_hdfs
from bench.image import parts as image_parts
from bench.image.hdfs import Hdfs
from bootseer.demo import workplace
from bootseer.errors import BootseerError, FullError, UnsupportedError
from support.latency import LatencyProxy
from support.netns import Node, ShapedNetwork
from support.registry import DockerRegistry, without_tls

SUBNET = "10.78.0.0/24"
STORES = ("registry", "hdfs")


class Site:
    """Addresses as the node sees them. ``far``: through the proxy that adds ``rtt`` seconds. ``in_hdfs``: whether the
    stores of all starts are in ``hdfs``."""

    def __init__(self, node: Node, near: str, far: str, hdfs: Hdfs | None, in_hdfs: bool) -> None:
        self.node, self._near, self._far, self.hdfs, self._in_hdfs = node, near, far, hdfs, in_hdfs

    def registry(self, far: bool = False) -> str:
        return self._far if far else self._near

    def ref(self, far: bool = False, build: int = 1) -> str:
        """The image."""
        return f"{self.registry(far)}/{image_parts.REPOSITORY}:{build}"

    def store(self, far: bool = False, suffix: str = "") -> str:
        """URL of the store with the converted image, or of another one whose name ends in ``suffix``. Raises
        `UnsupportedError` where it cannot be reached through the proxy."""
        if self._in_hdfs and far:
            raise UnsupportedError("the store cannot be reached through the latency proxy")
        if self._in_hdfs and self.hdfs is not None:
            return f"{self.hdfs.url}{suffix}"
        return f"registry+http://{self.registry(far)}/{image_parts.REPOSITORY}{suffix}"


def options(parser: argparse.ArgumentParser) -> None:
    """Add what the image benches have in common."""
    parser.add_argument("--rate", type=float, default=1000, help="Mbit/s of the link")
    parser.add_argument("--rtt", type=float, default=0.01, help="seconds of the -10ms variants' round trip")
    parser.add_argument("--store", choices=STORES, default="registry", help="where converted images go")


@contextlib.contextmanager
def prepared(
    parts: image_parts.Parts, given: argparse.Namespace, *, nydus: bool = False, hdfs: bool = False
) -> Iterator[tuple[Path, Site]]:
    """The parts, made where they are missing; then a work folder and the site. One bench at a time: they share names
    of network devices."""
    parts.folder.mkdir(parents=True, exist_ok=True)

    def prepare() -> None:
        try:
            parts.prepare(nydus=nydus)
        except BootseerError as exc:
            if not nydus or isinstance(exc, FullError):
                raise
            parts.say(f"no nydus: {exc}")
            parts.prepare(nydus=False)

    with (
        workplace.session(parts.folder, prepare) as work,
        site(parts, work, rate_mbit=given.rate, rtt=given.rtt, store=given.store, hdfs=hdfs) as made,
    ):
        yield work, made


@contextlib.contextmanager
def site(
    parts: image_parts.Parts, work: Path, *, rate_mbit: float, rtt: float, store: str, hdfs: bool
) -> Iterator[Site]:
    """Start everything; the registry works on hard links to the cached one, so what a bench adds goes with ``work``.
    With ``hdfs`` there is one, whatever ``store`` says."""
    nodes = 1 + (image_hdfs.DATANODES if hdfs or store == "hdfs" else 0)
    root = work / "registry"
    shutil.copytree(parts.registry, root, copy_function=os.link)
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(
            ShapedNetwork(workplace.prefix(parts.folder), nodes=nodes, rate_mbit=rate_mbit, subnet=SUBNET)
        )
        registry = stack.enter_context(DockerRegistry(host=network.host, root=root))
        proxy = stack.enter_context(LatencyProxy(registry.address, rtt=rtt, host=network.host))
        stack.enter_context(without_tls(registry.address, proxy.address))
        made = stack.enter_context(image_hdfs.running(network, work / "hdfs")) if nodes > 1 else None
        yield Site(network.nodes[0], registry.address, proxy.address, made, store == "hdfs")
