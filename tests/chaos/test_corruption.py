"""Damage to everything that is stored: found before a byte of it is believed, mended from elsewhere, else an error.

Whatever is damaged, and however: no reader may see a wrong byte.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bootseer import oci
from bootseer.blocks.fetch.prefetch import fetch_all
from bootseer.blocks.tree import ProfileKey, TreeMount
from bootseer.chunks.blockmap import BlockMap
from bootseer.chunks.check import Check, check
from bootseer.chunks.inventory import parts
from bootseer.chunks.manifest import TreeManifest, tree_key
from bootseer.errors import DataError
from bootseer.image import record as records
from bootseer.objects import open_store
from support.crowd import Crowd, Tally, files_of
from support.node import Node, damage
from support.torture import Site
from support.waits import until
from support.weather import Weather

pytestmark = pytest.mark.root

NodeOf = Callable[..., Node]
KEY = ProfileKey("test")
HOW = ["flip", "truncate", "duplicate", "swap"]

each_way = pytest.mark.parametrize("how", HOW)


def read_all(site: Site, made: TreeMount, *, passes: int = 1) -> Tally:
    """Every file by four readers; ``errors`` may be, wrong bytes and hangs not."""
    folder = made.target.with_name(f"crowd-{time.monotonic_ns()}")
    with Crowd(
        made.target, site.reference, folder, files=files_of(site.reference), readers=4, drop=0.5, passes=passes
    ) as crowd:
        found = crowd.join(100)
    assert (found.mismatches, found.zeros, found.hangs) == (0, 0, 0), crowd.findings
    return found


def manifest(node: Node) -> TreeManifest:
    return TreeManifest.decode(open_store(node.store_url).get(tree_key(node.digest), most=1 << 20), node.digest)


def packs(node: Node) -> list[Path]:
    blocks = BlockMap.decode(open_store(node.store_url).get(manifest(node).map.key, most=1 << 20))
    return [Path(node.store_url, pack.key) for pack in blocks.packs]


def healed(site: Site, node: Node) -> None:
    """The store is right again, in place."""
    shutil.copytree(site.store, node.store_url, dirs_exist_ok=True)


# -- the store -------------------------------------------------------------------------------------------------------


@each_way
def test_packs(small: Site, node_of: NodeOf, how: str) -> None:
    node = node_of(small, copy=True)
    rand = random.Random(how)
    for pack in packs(node):
        for _ in range(1 if how == "truncate" else 6):
            damage(pack, how, rand)
    made = node.mount(demand_deadline=1.0)
    assert read_all(small, made).errors > 0
    status = made.status()
    assert status.failed_reads > 0
    assert status.bad_blocks > 0
    healed(small, node)
    assert read_all(small, made).errors == 0


def test_damage_on_the_way_is_fetched_again(small: Site, node_of: NodeOf) -> None:
    node = node_of(small)
    Weather(flip=0.25, cut=0.1, stale=0.1).make(node.weather)
    for _ in range(20):  # a damaged small part refuses the mount; those that came right are kept
        with contextlib.suppress(DataError):
            made = node.mount()
            break
    found = read_all(small, made)
    assert found.errors < found.files / 5  # a block that came wrong twice
    assert made.status().bad_blocks > 0
    Weather().make(node.weather)
    time.sleep(0.5)
    assert read_all(small, made).errors == 0


@each_way
def test_the_record_of_an_image(small: Site, place: Path, how: str) -> None:
    """What is read from a damaged record is what was written, or nothing."""
    store = open_store(str(shutil.copytree(small.store, place / "store")))
    platform = oci.host_platform()
    want = records.load(store, small.image, platform)
    path = place / "store" / records.key_of(small.image, platform)
    raw = path.read_bytes()
    refused = 0
    for seed in range(200):
        damage(path, how, random.Random(seed), unit=16)
        try:
            assert records.load(store, small.image, platform) == want
        except DataError:
            refused += 1
        path.write_bytes(raw)
    assert refused > 190


# -- profiles --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def profiled(small: Site, tmp_path_factory: pytest.TempPathFactory) -> Site:
    """The store with a trace, a hot pack and a page list of one start."""
    folder = tmp_path_factory.mktemp("pytest-profiled")
    shutil.copytree(small.store, folder / "store")
    node = Node(folder / "node", str(folder / "store"), small.tree)
    try:
        made = node.mount(profile=KEY)
        read_all(small, made)
        made.ready()
        made.unmount()
    finally:
        node.close()
    profiles = open_store(str(folder / "store"))
    made_of_it = {"race", "pack", "ages"}
    until(lambda: {info.key[-4:] for info in profiles.list("profiles")} == made_of_it, 20.0, "what a start leaves")
    return small._replace(store=folder / "store")


@each_way
@pytest.mark.parametrize("part", ["trace", "pack"])
def test_profiles(profiled: Site, node_of: NodeOf, part: str, how: str) -> None:
    """They are advice: without them the start is slower, and nothing else."""
    node = node_of(profiled, copy=True)
    rand = random.Random(how)
    for path in Path(node.store_url, "profiles").rglob(f"*.{part}"):
        for _ in range(5 if how == "flip" else 1):
            damage(path, how, rand)
    made = node.mount(profile=KEY)
    assert read_all(profiled, made).errors == 0
    assert made.status().failed_reads == 0


# -- the node --------------------------------------------------------------------------------------------------------


@each_way
def test_a_damaged_data_file(small: Site, node_of: NodeOf, how: str) -> None:
    """Ready blocks are believed, as hashing them at each start would cost what the cache saves: a disk that lies is
    found by ``cache verify``, and mended by its ``--repair``."""
    node = node_of(small)
    read = files_of(small.reference)
    made = node.mount()
    for name in read:
        (made.target / name).read_bytes() if "huge" not in name else b""
    made.unmount()
    size = (node.data / "data").stat().st_size
    damage(node.data / "data", how, random.Random(3), unit=1 << 16)
    if how == "truncate":
        os.truncate(node.data / "data", size)

    def look(**more: Any) -> Check:
        """A process that makes a hot pack behind the unmount may have the cache for moments, and says that it is."""
        (part,) = parts(node.cache)
        found: list[Check] = []
        until(lambda: found.append(check(node.cache, part, **more)) or not found[-1].in_use, 30)
        return found[-1]

    assert look().damaged
    mended = look(repair=True, fetch=partial(fetch_all, open_store(node.store_url), streams=4))
    assert mended.fetched == len(mended.bad) > 0
    assert not look().damaged
    assert read_all(small, node.mount()).errors == 0
