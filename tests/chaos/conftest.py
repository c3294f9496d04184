"""What the chaos suites read: an image with everything hard in it, converted once and unpacked once."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support import torture
from support.node import Node
from support.torture import Site


def made(entries: int, bulk: int) -> Iterator[Site]:
    folder = Path(tempfile.mkdtemp(prefix="bootseer-pytest-chaos-", dir="/var/tmp"))
    try:
        yield torture.prepare(torture.write(folder / "layout", entries=entries, bulk=bulk), folder)
    finally:
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def site() -> Iterator[Site]:
    """The whole torture image, 18 MB stored."""
    yield from made(20_000, 10)


@pytest.fixture(scope="session")
def small() -> Iterator[Site]:
    """With fewer files and less bulk, 7 MB stored."""
    yield from made(200, 2)


@pytest.fixture
def node_of(place: Path) -> Iterator[Callable[..., Node]]:
    """Makes nodes, and ends them: ``node_of(site, rate=...)``. ``copy``: with a store of its own."""
    nodes: list[Node] = []

    def new(site: Site, *, rate: float = 0.0, copy: bool = False) -> Node:
        folder = place / f"node{len(nodes)}"
        store = site.store
        if copy:
            store = Path(shutil.copytree(site.store, folder / "store"))
        nodes.append(Node(folder, str(store), site.tree, rate=rate))
        return nodes[-1]

    yield new
    for node in nodes:
        node.close()


@pytest.fixture
def neighbour_seconds(request: pytest.FixtureRequest) -> float:
    """How long a neighbour races in each folder."""
    return 30.0 if request.config.getoption("soak") else 3.0
