"""Blocks that other folders of the node cache have: only what changed comes from the store, and nothing there is
believed."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bootseer import erofs
from bootseer.blocks import tree
from bootseer.blocks.fetch.fetcher import Fetcher
from bootseer.blocks.fetch.figures import Fetched
from bootseer.blocks.fetch.source import StoreSource
from bootseer.blocks.fetch.stream import HotStream
from bootseer.blocks.metadata import LocalTree, localize
from bootseer.blocks.publish.dedup import KnownBlocks
from bootseer.blocks.publish.tree import TreeWriter
from bootseer.chunks import eviction
from bootseer.chunks.cachefile import CacheFile
from bootseer.chunks.locks import READING, maintain, take_lock
from bootseer.chunks.nodeblocks import NodeBlocks
from bootseer.kernel import beneath
from bootseer.objects.folder import FolderStore
from support.stores import FlakyStore
from support.waits import until

BLOCK = 64 << 10
COUNT, CHANGED = 24, 3
"""Files of one block each, and how many of them the second build has anew."""


class Site:
    """Two builds in a store; a node that has the first."""

    def __init__(self, base: Path, folder: Path) -> None:
        shutil.copytree(base / "store", folder / "store")
        self.store = FlakyStore(FolderStore(folder / "store"))
        self.cache_dir = folder / "cache"
        self.cache_dir.mkdir(mode=0o700)
        self.data = (base / "data-2").read_bytes()
        first, second = (base / "digests").read_text().split()
        self.old: LocalTree = localize(self.store, first, self.cache_dir)
        self.new: LocalTree = localize(self.store, second, self.cache_dir)
        self.fill(base, [*range(self.old.map.count)])
        old = {self.old.map.hash_of(block) for block in range(self.old.map.count)}
        self.changed = [block for block in range(self.new.map.count) if self.new.map.hash_of(block) not in old]
        self.same = [block for block in range(self.new.map.count) if block not in self.changed]
        assert 0 < len(self.changed) <= CHANGED + 1
        self.cache = CacheFile.open(self.new.cache, self.new.map, self.new.map_digest)
        self.fetchers: list[Fetcher] = []

    def fill(self, base: Path, blocks: list[int]) -> None:
        data = (base / "data-1").read_bytes()
        with CacheFile.open(self.old.cache, self.old.map, self.old.map_digest) as cache:
            for block in blocks:
                cache.write(block, data[block * BLOCK : (block + 1) * BLOCK])

    def stored(self, blocks: list[int]) -> int:
        return sum(self.new.map.lengths[block] for block in blocks)

    def fetcher(self) -> Fetcher:
        fetcher = Fetcher(self.cache, StoreSource(self.store, self.new.map), window=1 << 20, deadline=20.0, quiet=0.0)
        self.fetchers.append(fetcher)
        return fetcher

    def find(self) -> NodeBlocks:
        return NodeBlocks.find(self.new.cache, self.new.map, self.cache.ready)

    def close(self) -> None:
        for fetcher in self.fetchers:
            fetcher.close()
        self.cache.close()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("builds")
    rand = random.Random(5)
    (folder / "tree").mkdir()
    store = FolderStore(folder / "store")
    digests: list[str] = []
    for build in (1, 2):
        for number in range(COUNT):
            if build == 1 or number % (COUNT // CHANGED) == 1:
                (folder / "tree" / f"{number:02}").write_bytes(rand.randbytes(BLOCK))
        erofs.build(folder / "tree", folder / f"meta-{build}", folder / f"data-{build}")
        known = KnownBlocks.of_trees(store, digests, BLOCK)
        with TreeWriter(store, folder, block_size=BLOCK, known=known) as out:
            out.packs.write((folder / f"data-{build}").read_bytes())
            digests.append(out.seal((folder / f"meta-{build}").read_bytes()).digest)
    (folder / "digests").write_text(" ".join(digests))
    return folder


@pytest.fixture
def site(base: Path, tmp_path: Path) -> Iterator[Site]:
    site = Site(base, tmp_path)
    yield site
    site.close()


def streamed(site: Site, fetcher: Fetcher) -> None:
    """All as a hot pack of three blocks a frame; its bytes are of no use, so that it is seen when they are read."""
    order = list(range(site.new.map.count))
    lengths = [1000] * -(-len(order) // 3)
    site.store.inner.put("profiles/pack", b"x" * sum(lengths))
    fetcher.stream(HotStream(order, lengths, 0, StoreSource(site.store, "profiles/pack"), 3))


WAYS: dict[str, Callable[[Site, Fetcher], object]] = {
    "demand": lambda site, fetcher: [fetcher.demand(block, block) for block in range(site.new.map.count)],
    "hot": lambda site, fetcher: fetcher.hot([*range(site.new.map.count)]),
    "stream": streamed,
    "background": lambda site, fetcher: fetcher.background(),
}


@pytest.mark.parametrize("way", WAYS)
def test_only_what_changed_comes_from_the_store(site: Site, way: str) -> None:
    fetcher = site.fetcher()
    fetcher.known_here(site.find())
    WAYS[way](site, fetcher)
    assert fetcher.wait(20)
    fetcher.demand(0, site.new.map.count - 1)
    assert site.cache.read(0, site.new.map.size) == site.data
    stats = fetcher.stats
    came = stats[Fetched.BYTES_DEMAND] + stats[Fetched.BYTES_HOT] + stats[Fetched.BYTES_BACKGROUND]
    assert site.stored(site.changed) <= came <= 2 * site.stored(site.changed)
    assert stats[Fetched.BYTES_COPIED] == site.stored(site.same)
    assert not stats[Fetched.BAD_BLOCKS]


def test_of_a_tree_that_shares_nothing_the_map_is_not_read(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red before: of up to 256 trees with maps of some MB each all was read, and the prefetch waited for that."""
    with TreeWriter(site.store.inner, site.cache_dir, block_size=BLOCK) as out:
        out.packs.write(os.urandom(4 * BLOCK))
        other = localize(site.store, out.seal((site.old.meta).read_bytes()).digest, site.cache_dir)
    whole: list[str] = []
    read = beneath.read_regular

    def noted(path: str, most: int, *, root: int | None = None) -> bytes:
        whole.append(path)
        return read(path, most, root=root)

    monkeypatch.setattr(beneath, "read_regular", noted)
    assert site.find().here.count(1) == len(site.same)
    assert f"trees/{site.old.digest}/map" in whole
    assert f"trees/{other.digest}/map" not in whole


def test_a_collection_of_this_process_is_waited_for_once(site: Site) -> None:
    """Red before: for each run of blocks again, while a start waited."""
    here, began = site.find(), time.monotonic()
    with READING:
        assert list(here.read(site.same[::2])) == []
    assert time.monotonic() - began < 3
    assert sum(count for _, count, _ in here.read(site.same[::2])) == len(site.same[::2])


def flip(site: Site) -> None:
    with open(site.old.cache / "data", "r+b") as file:
        file.seek(3 * BLOCK + 7)
        file.write(b"?")


def cut(site: Site) -> None:
    os.truncate(site.old.cache / "data", 5 * BLOCK)


def evict(site: Site) -> None:
    with maintain(site.old.cache) as owned:
        assert owned is not None
        eviction.remove_blocks(owned)


def plant(site: Site) -> None:
    """A link in place of the folder, to what somebody else wrote."""
    moved = site.old.cache.rename(site.cache_dir / "elsewhere")
    site.old.cache.symlink_to(moved)


def pipe(site: Site) -> None:
    (site.old.cache / "data").unlink()
    os.mkfifo(site.old.cache / "data")


def give(site: Site) -> None:
    os.chown(site.old.cache / "data", 65534, 65534)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    "harm", [flip, cut, evict, plant, pipe, pytest.param(give, marks=pytest.mark.root)], ids=lambda harm: harm.__name__
)
def test_what_is_not_right_there_comes_from_the_store(
    site: Site, harm: Callable[[Site], None], when: str, caplog: pytest.LogCaptureFixture
) -> None:
    fetcher = site.fetcher()
    here = site.find() if when == "after" else None
    harm(site)
    fetcher.known_here(here or site.find())
    fetcher.demand(0, 0)
    fetcher.background()
    assert fetcher.wait(20)
    assert site.cache.read(0, site.new.map.size) == site.data
    copied = fetcher.stats[Fetched.BYTES_COPIED]
    assert copied < site.stored(site.same)
    assert bool(copied) == (harm in (flip, cut))
    assert not fetcher.stats[Fetched.BAD_BLOCKS]


def test_what_another_folder_has_not_is_not_looked_for_there(base: Path, site: Site) -> None:
    evict(site)
    some = [block for block in range(site.old.map.count) if block % 2]
    site.fill(base, some)
    lock = take_lock(site.old.cache)  # as the server of the first build has it
    fetcher = site.fetcher()
    here = site.find()
    fetcher.known_here(here)
    fetcher.background()
    assert fetcher.wait(20)
    os.close(lock)
    assert site.cache.read(0, site.new.map.size) == site.data
    had = {site.old.map.hash_of(block) for block in some}
    assert fetcher.stats[Fetched.BYTES_COPIED] == site.stored(
        [block for block in site.same if site.new.map.hash_of(block) in had]
    )


def test_a_folder_is_evicted_also_while_it_is_copied_from(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """What holds it open for a moment would count as a user of it."""
    here, read = site.find(), os.pread
    monkeypatch.setattr(os, "pread", lambda *where: time.sleep(0.005) or read(*where))
    site.old.hold.release()
    with ThreadPoolExecutor(1) as beside:
        copying = beside.submit(lambda: [len(list(here.read(site.same))) for _ in range(30)])
        until(lambda: copying.running() or copying.done())
        gone = eviction.collect(site.cache_dir, 1, keep=site.new.cache.name, whole=True).gone
        assert 0 in copying.result()
        assert any(copying.result())
    assert [one.map for one in gone] == [site.old.cache.name]
    assert list(here.read(site.same)) == []


def test_one_that_is_being_tidied_is_left_alone(site: Site) -> None:
    here = site.find()
    with maintain(site.old.cache):
        assert list(here.read(site.same)) == []
    assert sum(count for _, count, _ in here.read(site.same)) == len(site.same)


def test_trees_without_a_pack_in_common_are_not_read(site: Site, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_bytes(os.urandom(3 * BLOCK))
    erofs.build(tmp_path / "other", tmp_path / "meta", tmp_path / "data")
    found = tree.publish(site.store.inner, tmp_path / "meta", tmp_path / "data", block_size=BLOCK)
    other = localize(site.store, found.digest, site.cache_dir)
    with contextlib.closing(CacheFile.open(other.cache, other.map, other.map_digest)) as cache:
        assert NodeBlocks.find(other.cache, other.map, cache.ready).here.count(1) == 0
