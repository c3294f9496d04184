"""A shaped network on one machine: a bridge on the host, one network namespace per node, links limited with ``tc tbf``.

The host side of the bridge plays the data centre (registry, index, HDFS); each namespace is a node. Only the network is
separate, so mounts and processes of a node stay visible here. Needs root and iproute2.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from bootseer.demo.programs import run
from bootseer.errors import BootseerError, PrivilegeError


def _ip(*args: str, tool: str = "ip") -> str:
    return run([tool, *args], deadline=20.0)


def _shape(rate_mbit: float) -> tuple[str, ...]:
    # burst: one 64 KiB GSO packet must fit several times over, or tbf drops it and TCP never reaches the rate
    return ("root", "tbf", "rate", f"{rate_mbit}mbit", "burst", "1mb", "latency", "50ms")


class Node:
    """One node: a network namespace with one shaped link to the bridge."""

    def __init__(self, name: str, link: str, address: str) -> None:
        self.name, self.link, self.address = name, link, address

    def argv(self, command: Sequence[str]) -> list[str]:
        """``command`` as run on this node (its network namespace; mounts are the host's)."""
        return ["nsenter", f"--net=/run/netns/{self.name}", "--", *command]

    def limit(self, rate_mbit: float) -> None:
        """Limit the link to so many Mbit/s in each direction, from now on; what is queued already still goes out."""
        for prefix, device in (((), self.link), (("-n", self.name), "eth0")):
            _ip(*prefix, "qdisc", "replace", "dev", device, *_shape(rate_mbit), tool="tc")

    def bytes_received(self) -> int:
        """Bytes that crossed the link towards the node since it was made (the kernel's own counter)."""
        return int(Path("/sys/class/net", self.link, "statistics/tx_bytes").read_text())

    def bytes_sent(self) -> int:
        """Bytes that crossed the link from the node since it was made."""
        return int(Path("/sys/class/net", self.link, "statistics/rx_bytes").read_text())


class ShapedNetwork:
    """Context manager that makes a bridge and ``nodes`` namespaces, and removes them.

    ``rate_mbit``: limit of each link, both directions, in Mbit/s. ``prefix``: names start with it; what an interrupted
    run of the same prefix left is removed first. ``subnet``: a /24 that is free on this machine. ``clients``: so many
    more namespaces, whose links have no limit.
    """

    def __init__(
        self,
        prefix: str,
        *,
        nodes: int = 1,
        rate_mbit: float = 1000,
        subnet: str = "10.77.0.0/24",
        clients: int = 0,
    ) -> None:
        if len(prefix) > 8:
            raise BootseerError(f"network prefix {prefix!r} is longer than 8 letters")
        self.prefix, self.rate_mbit = prefix, rate_mbit
        try:
            self.net = ipaddress.IPv4Network(subnet)
        except ValueError:
            raise BootseerError(f"{subnet} is no network", hint="such as 10.77.0.0/24") from None
        self.host = str(self.net[1])
        made = [Node(f"{prefix}-n{i}", f"{prefix}-v{i}", str(self.net[10 + i])) for i in range(nodes + clients)]
        self.nodes, self.clients = made[:nodes], made[nodes:]

    def __enter__(self) -> ShapedNetwork:
        if os.geteuid() != 0:
            raise PrivilegeError("network namespaces need root", hint="run with sudo")
        self.remove()
        try:
            self._make()
        except BaseException:
            self.remove()
            raise
        return self

    def _make(self) -> None:
        bridge = f"{self.prefix}-br"
        for address in json.loads(_ip("-j", "addr")):
            for info in address.get("addr_info", ()):
                if info["family"] == "inet" and ipaddress.ip_address(info["local"]) in self.net:
                    raise BootseerError(f"network {self.net} is in use by {address['ifname']}", hint="choose another")
        _ip("link", "add", bridge, "type", "bridge")
        _ip("addr", "add", f"{self.host}/{self.net.prefixlen}", "dev", bridge)
        _ip("link", "set", bridge, "up")
        for node in (*self.nodes, *self.clients):
            _ip("netns", "add", node.name)
            _ip("link", "add", node.link, "type", "veth", "peer", "name", "eth0", "netns", node.name)
            _ip("link", "set", node.link, "master", bridge, "up")
            _ip("-n", node.name, "addr", "add", f"{node.address}/{self.net.prefixlen}", "dev", "eth0")
            _ip("-n", node.name, "link", "set", "eth0", "up")
            _ip("-n", node.name, "link", "set", "lo", "up")
            if node not in self.clients:
                node.limit(self.rate_mbit)

    def remove(self) -> None:
        """Remove everything of this prefix; no error when nothing is there."""
        if not shutil.which("ip"):
            return
        for name in _ip("netns", "list").split("\n"):
            if name.split(" ")[0].startswith(f"{self.prefix}-n"):
                with contextlib.suppress(BootseerError):
                    _ip("netns", "del", name.split(" ")[0])
        for link in Path("/sys/class/net").glob(f"{self.prefix}-*"):
            with contextlib.suppress(BootseerError):
                _ip("link", "del", link.name)

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.remove()
