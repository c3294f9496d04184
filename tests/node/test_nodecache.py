"""The node cache under real mounts: what is mounted stays, whoever died; a disk that is really full."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer import erofs
from bootseer.blocks import tree
from bootseer.blocks.tree import TreeMount
from bootseer.chunks import check, eviction, inventory
from bootseer.chunks.inventory import Part
from bootseer.config import Config
from bootseer.kernel import mount as mounts
from bootseer.objects.folder import FolderStore
from support.waits import until

pytestmark = pytest.mark.root

FILES = 24
SIZE = 300_000


class Site:
    """Two published trees of 7 MB, and a node whose cache is in ``base``."""

    def __init__(self, store: FolderStore, digests: list[str], base: Path) -> None:
        self.store, self.digests, self.base = store, digests, base
        self.cache = base / "cache"
        self.state = base / "state"
        self.mounted: list[TreeMount] = []

    def mount(self, number: int = 0, **set: object) -> TreeMount:
        values = {"background_fill": False, "demand_deadline": 10.0, "cache_keep_free": 0, **set}
        made = tree.mount(
            self.store.url,
            self.digests[number],
            self.base / f"mnt{number}",
            cache_dir=self.cache,
            state_dir=self.state,
            config=Config(**values),  # type: ignore[arg-type]
        )
        self.mounted.append(made)
        return made

    def part(self, number: int = 0) -> Part | None:
        found = [part for part in inventory.parts(self.cache) if self.digests[number] in part.trees]
        return found[0] if found else None

    def log(self, number: int) -> str:
        return (self.state / "trees" / f"{self.digests[number][:16]}.log").read_text()

    def complete(self, number: int = 0) -> TreeMount:
        """Mounted by nothing but the kernel."""
        made = self.mount(number, background_fill=True)
        made.ready()
        until(lambda: made.status().complete)
        made.unmount()
        made = self.mount(number)
        assert made.status().driver == "local"
        return made

    def close(self) -> None:
        for made in self.mounted:
            made.unmount()


def content(number: int, file: int) -> bytes:
    return random.Random(1000 * number + file).randbytes(SIZE)


def wrong_and_failed(made: TreeMount, number: int) -> tuple[list[int], list[int]]:
    """Files whose bytes are wrong, and files that cannot be read."""
    wrong, failed = [], []
    for file in range(FILES):
        try:
            if (made.target / f"f{file}").read_bytes() != content(number, file):
                wrong.append(file)
        except OSError as exc:
            if exc.errno != errno.EIO:
                raise
            failed.append(file)
    return wrong, failed


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[FolderStore, list[str]]:
    base = tmp_path_factory.mktemp("published")
    store, digests = FolderStore(base / "store"), []
    for number in range(2):
        folder = base / f"tree{number}"
        folder.mkdir()
        for file in range(FILES):
            (folder / f"f{file}").write_bytes(content(number, file))
        erofs.build(folder, base / "meta", base / "data")
        digests.append(tree.publish(store, base / "meta", base / "data").digest)
    return store, digests


@pytest.fixture
def site(published: tuple[FolderStore, list[str]], tmp_path: Path) -> Iterator[Site]:
    site = Site(*published, tmp_path)
    yield site
    site.close()


@pytest.fixture
def small(published: tuple[FolderStore, list[str]], tmp_path: Path) -> Iterator[Site]:
    """The cache is on an ext4 of its own, of 140 MB."""
    disk, place = tmp_path / "disk", tmp_path / "place"
    place.mkdir()
    with open(disk, "wb") as file:
        file.truncate(140 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", disk], check=True, timeout=30)
    subprocess.run(["mount", "-o", "loop", disk, place], check=True, timeout=30)
    site = Site(*published, place)
    site.state = tmp_path / "state"
    try:
        yield site
        site.close()
    finally:
        mounts.unmount(place)


def fill_up(folder: Path, leave: int) -> Path:
    """Leave ``leave`` bytes free on the disk of ``folder``."""
    disk = os.statvfs(folder)
    ballast = folder / "ballast"
    with open(ballast, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, disk.f_bavail * disk.f_frsize - leave)
        os.fsync(file.fileno())
    return ballast


@pytest.mark.file_mounts
def test_what_is_mounted_is_checked_beside_the_mount(site: Site) -> None:
    made = site.mount()
    for file in range(0, FILES, 2):
        (made.target / f"f{file}").read_bytes()
    before = made.status()
    until(lambda: (part := site.part()) is not None and part.blocks_ready == before.blocks_ready, 20, "the bitmap")
    part = site.part()
    assert part is not None
    found = check.check(site.cache, part, repair=True)
    assert (found.in_use, found.bad, found.trouble) == (True, [], "")
    assert 0 < found.checked <= before.blocks_ready
    assert made.status().blocks_ready == before.blocks_ready, "nothing missing was fetched for a check"
    assert eviction.collect(site.cache, 1 << 40).gone == []
    first = (made.target / "f0").read_bytes()
    with open(site.cache / "blocks" / part.map / "data", "r+b") as data:
        at = data.read().index(first[:4096])
        data.seek(at)
        data.write(b"damage")
    assert len(check.check(site.cache, part, repair=True).bad) == 1
    assert check.check(site.cache, part, repair=True).damaged
    made.unmount()
    until(lambda: check.check(site.cache, part, repair=True).dropped == 1)
    assert wrong_and_failed(site.mount(), 0) == ([], [])


def test_limits_hold_after_a_tree_ends(site: Site) -> None:
    old = site.mount(0)
    assert wrong_and_failed(old, 0) == ([], [])
    old.unmount()
    new = site.mount(1, cache_limit=10e6)
    part = site.part(0)
    assert part is None, "it would not fit beside the new one"
    assert wrong_and_failed(new, 1) == ([], [])
    new.unmount()
    again = site.mount(0)
    assert wrong_and_failed(again, 0) == ([], [])
    part = site.part(1)
    assert part is not None
    # It was not known to be hot, so only all of it can go, and only after the tree that pushes it out.
    again.unmount()
    third = site.mount(1, cache_limit=1e6)
    third.unmount()
    until(lambda: site.part(0) is None)


@pytest.mark.parametrize("limit", ["cache_limit", "cache_keep_free"])
def test_a_tree_larger_than_the_room_leaves_the_limits(small: Site, limit: str) -> None:
    def free() -> int:
        disk = os.statvfs(small.base)
        return disk.f_bavail * disk.f_frsize

    value = 4_000_000 if limit == "cache_limit" else free() - 4_000_000
    made = small.mount(0, background_fill=True, **{limit: value})
    assert wrong_and_failed(made, 0) == ([], [])
    until(lambda: made.status().cache_full)
    assert wrong_and_failed(made, 0) == ([], [])
    if limit == "cache_limit":
        assert inventory.used(small.cache) <= value
    else:
        assert free() > value - (256 << 10)  # ext4 takes some for itself
    assert inventory.used(small.cache) > 1_000_000
    assert small.log(0).count("serving reads from memory") == 1


@pytest.mark.parametrize("how", ["nearly", "wholly", "later"])
def test_a_full_disk_makes_room(small: Site, how: str) -> None:
    old = small.mount(0)
    assert wrong_and_failed(old, 0) == ([], [])
    old.unmount()
    if how == "later":
        new = small.mount(1)
        (new.target / "f0").read_bytes()
    fill_up(small.base, 2_000_000 if how == "later" else 4_000_000)
    with open(small.base / "more", "wb", buffering=0) as out, contextlib.suppress(OSError):
        while how == "wholly":
            out.write(bytes(4096))
    if how != "later":
        new = small.mount(1)
        assert small.part(0) is None
    assert wrong_and_failed(new, 1) == ([], [])
    assert small.part(0) is None
    assert not new.status().cache_full
    assert how != "later" or "given back" in small.log(1)


def test_a_full_disk_gives_right_bytes_or_an_error(small: Site) -> None:
    used = small.mount(0)
    assert wrong_and_failed(used, 0) == ([], [])
    new = small.mount(1)
    (new.target / "f0").read_bytes()
    ballast = fill_up(small.base, 2_000_000)
    wrong, failed = wrong_and_failed(new, 1)
    assert wrong == []
    assert failed == [], "what cannot be kept is served from memory"
    assert new.status().cache_full
    assert wrong_and_failed(used, 0) == ([], [])
    new.unmount()
    # On with what a full disk could keep.
    again = small.mount(1)
    assert wrong_and_failed(again, 1) == ([], [])
    again.unmount()
    ballast.unlink()
    last = small.mount(1)
    assert wrong_and_failed(last, 1) == ([], [])
    part = small.part(1)
    assert part is not None
    assert check.check(small.cache, part).bad == []
