"""A lazy tree whose store is in HDFS: what a frozen DataNode costs it."""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer import erofs
from bootseer.blocks import tree
from bootseer.config import Config
from bootseer.objects import open_store
from support.hadoop import HadoopCluster

pytestmark = [pytest.mark.hdfs, pytest.mark.root]

SIZE, FILES = 3 << 20, 8
SECONDS = 15.0
"""For the whole tree. One read of hdfs-native from a frozen DataNode takes 20 s to fail, and it asks no other."""


class Site:
    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder = url, folder
        source = folder / "tree"
        source.mkdir()
        self.files = {f"f{index}": random.Random(index).randbytes(SIZE) for index in range(FILES)}
        for name, data in self.files.items():
            (source / name).write_bytes(data)
        erofs.build(source, folder / "meta", folder / "data")
        self.digest = tree.publish(open_store(url), folder / "meta", folder / "data", block_size=64 << 10).digest
        self.mounted: list[tree.TreeMount] = []

    def mount(self, name: str) -> Path:
        config = Config(background_fill=False)
        places = {"cache_dir": self.folder / f"{name}-cache", "state_dir": self.folder / f"{name}-state"}
        made = tree.mount(self.url, self.digest, self.folder / name, config=config, **places)  # type: ignore[arg-type]
        self.mounted.append(made)
        return made.target

    def right(self, target: Path) -> bool:
        return all((target / name).read_bytes() == data for name, data in self.files.items())


@pytest.fixture
def site(cluster: HadoopCluster, tmp_path: Path) -> Iterator[Site]:
    site = Site(f"{cluster.url}/{uuid.uuid4().hex}", tmp_path)
    yield site
    for made in site.mounted:
        made.unmount()


def test_a_frozen_datanode_hangs_no_reader_of_a_tree(site: Site, cluster: HadoopCluster) -> None:
    # nodes with a cache of their own each
    for index in range(4):
        with cluster.frozen(index):
            began = time.monotonic()
            assert site.right(site.mount(f"frozen{index}"))
            assert time.monotonic() - began < SECONDS
