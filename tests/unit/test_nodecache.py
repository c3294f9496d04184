"""The node cache: what it lists, what it gives back and in which order, what a crash at any step leaves, damage."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bootseer.blocks import without_mount
from bootseer.blocks.fetch.prefetch import fetch_all
from bootseer.blocks.metadata import localize
from bootseer.blocks.publish.tree import publish
from bootseer.chunks import bitmap, check, eviction, inventory, locks
from bootseer.chunks.cachefile import CacheFile
from bootseer.chunks.eviction import Limits
from bootseer.chunks.inventory import Part
from bootseer.chunks.locks import Hold, maintain
from bootseer.cli.cache import app
from bootseer.errors import ConfigError, DataError, NotFoundError, UnavailableError
from bootseer.objects.folder import FolderStore
from support import forked

BLOCK = 16 << 10
COUNT = 40


class Node:
    """A cache with whole trees in it, the longest unused first; block 3 of each is all zero, the last one short."""

    def __init__(self, base: Path, trees: int = 3) -> None:
        self.store = FolderStore(base / "store")
        self.cache = base / "cache"
        self.trees: list[str] = []
        self.data: dict[str, bytes] = {}
        for number in range(trees):
            data = bytearray(random.Random(number).randbytes((COUNT - 1) * BLOCK + 100))
            data[3 * BLOCK : 4 * BLOCK] = bytes(BLOCK)
            (base / "meta").write_bytes(b"meta %d" % number)
            (base / "data").write_bytes(data)
            digest = publish(self.store, base / "meta", base / "data", block_size=BLOCK).digest
            self.trees.append(digest)
            self.data[digest] = bytes(data)
            self.fill(digest)
            self.last_use(digest, time.time() - 1000 + number)

    def fill(self, digest: str) -> None:
        without_mount.prefetch(self.store.url, digest, cache_dir=self.cache)

    def last_use(self, digest: str, when: float) -> None:
        os.utime(self.folder(digest) / "lock", (when, when))
        os.utime(self.cache / "trees" / digest, (when, when))

    def folder(self, digest: str) -> Path:
        manifest = inventory.manifest_of(self.cache, digest)
        assert manifest is not None
        return self.cache / "blocks" / manifest.map.digest

    def hot(self, digest: str, blocks: range) -> None:
        folder = self.folder(digest)
        inventory.keep_hot(folder, bytes.fromhex(folder.name), COUNT, blocks)

    def part(self, digest: str) -> Part:
        (found,) = [part for part in inventory.parts(self.cache) if digest in part.trees]
        return found

    def open(self, digest: str) -> CacheFile:
        tree = localize(self.store, digest, self.cache)
        return CacheFile.open(tree.cache, tree.map, tree.map_digest)

    def ready(self, digest: str, *, alone: bool = True) -> list[int]:
        """Blocks that a mount would believe now; they must be right. Not ``alone``: another process evicts some."""
        tree = localize(self.store, digest, self.cache)
        promised = bitmap.read(tree.cache / "bitmap", bitmap.READY, tree.map_digest)
        with CacheFile.open(tree.cache, tree.map, tree.map_digest) as cache:
            found = [block for block in range(COUNT) if cache.is_ready(block, block)]
            assert not alone or promised is None or promised.count(1) <= len(found), "the bitmap names holes"
            for block in found:
                data = cache.read(block * BLOCK, tree.map.length_of(block))
                assert data == self.data[digest][block * BLOCK : (block + 1) * BLOCK], f"block {block} is wrong"
        return found

    def call(self, *args: str, **environ: str) -> str:
        environ = {"BOOTSEER_CACHE_DIR": str(self.cache), **environ}
        done = CliRunner().invoke(app, args, env=environ, catch_exceptions=True)
        if done.exception is not None:
            raise done.exception
        return done.stdout

    def damage(self, digest: str, *blocks: int) -> None:
        with open(self.folder(digest) / "data", "r+b") as file:
            for block in blocks:
                file.seek(block * BLOCK + 50)
                file.write(b"damage")


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_what_is_there(node: Node) -> None:
    node.hot(node.trees[1], range(10))
    found = inventory.parts(node.cache)
    assert [part.trees for part in found] == [[tree] for tree in node.trees]
    assert [(part.blocks_ready, part.blocks_total) for part in found] == [(COUNT, COUNT)] * 3
    assert [part.hot_total for part in found] == [None, 10, None]
    assert all(part.disk_bytes >= (COUNT - 2) * BLOCK and not part.in_use for part in found)
    assert sum(part.disk_bytes for part in found) == pytest.approx(inventory.used(node.cache), abs=1 << 16)
    with CacheFile.open(node.folder(node.trees[2]), localize(node.store, node.trees[2], node.cache).map, b"x" * 32):
        assert node.part(node.trees[2]).owner == os.getpid()
        assert str(os.getpid()) in node.call("ls")
    assert inventory.parts(node.cache / "nothing") == []
    rows = json.loads(node.call("ls", "--json"))
    assert [row["trees"] for row in rows] == [[tree] for tree in node.trees]
    assert rows[1]["hot_ready"] == 10


def test_looking_takes_no_lock_and_counts_as_no_use(node: Node) -> None:
    before = node.part(node.trees[0]).last_use
    node.call("ls")
    node.call("verify")
    eviction.collect(node.cache, 1, dry_run=True)
    assert node.part(node.trees[0]).last_use == before
    node.ready(node.trees[0])
    assert node.part(node.trees[0]).last_use > before + 500


def test_cold_blocks_of_the_longest_unused_go_first(node: Node) -> None:
    old, middle, new = node.trees
    node.hot(middle, range(10))
    node.hot(new, range(5))
    done = eviction.collect(node.cache, 8 * BLOCK)
    (gone,) = done.gone
    assert (gone.trees, gone.whole, gone.blocks) == ([middle], False, 9)
    assert gone.bytes >= 8 * BLOCK
    assert node.part(middle).disk_bytes < node.part(old).disk_bytes - 7 * BLOCK
    assert node.ready(middle) == list(range(COUNT - 9))
    assert len(node.ready(old)) == len(node.ready(new)) == COUNT


def test_then_whole_trees_and_never_more_than_needed(node: Node) -> None:
    old, middle, new = node.trees
    node.hot(new, range(38))
    size = node.part(old).disk_bytes
    done = eviction.collect(node.cache, size)
    assert [(one.trees, one.whole) for one in done.gone] == [([new], False), ([old], True)]
    assert not (node.cache / "trees" / old).exists()
    assert len(list((node.cache / "blocks").iterdir())) == 2
    assert len(node.ready(middle)) == COUNT
    assert node.ready(new) == list(range(38))
    node.fill(old)
    assert len(node.ready(old)) == COUNT


def test_a_dry_run_says_the_same_and_does_nothing(node: Node) -> None:
    node.hot(node.trees[1], range(10))
    need = 100 * BLOCK
    would = eviction.collect(node.cache, need, dry_run=True)
    assert inventory.used(node.cache) > 100 * BLOCK
    did = eviction.collect(node.cache, need)
    assert [(one.trees, one.whole, one.blocks) for one in would.gone] == [
        (one.trees, one.whole, one.blocks) for one in did.gone
    ]
    assert would.bytes == pytest.approx(did.bytes, abs=BLOCK)


@pytest.mark.parametrize("use", ["lock", "data", "meta", "hold"])
def test_what_is_in_use_stays(node: Node, use: str) -> None:
    tree = node.trees[0]
    folder = node.folder(tree)
    node.hot(tree, range(10))
    with maintain(folder) as quiet:
        assert quiet is not None
    kept: object
    if use == "lock":
        kept = node.open(tree)
    elif use == "hold":
        kept = Hold(node.cache / "trees" / tree)
    else:
        # As a mount without any process has it.
        path = folder / "data" if use == "data" else node.cache / "trees" / tree / "meta"
        kept = path.open("rb")
    before = node.part(tree)
    done = eviction.collect(node.cache, 1 << 40)
    gone = [one.trees for one in done.gone if one.whole]
    assert gone == [[one] for one in (node.trees if use == "meta" else node.trees[1:])]
    if use != "meta":
        assert node.part(tree).blocks_ready == before.blocks_ready == COUNT
    assert (node.cache / "trees" / tree / "meta").exists()
    if not isinstance(kept, Hold):
        kept.close()  # type: ignore[attr-defined]
    del kept
    eviction.collect(node.cache, 1 << 40)
    assert not (node.cache / "trees" / tree).exists()
    assert not folder.exists()


def test_who_comes_during_maintenance_waits_and_finds_its_way(node: Node) -> None:
    tree = localize(node.store, node.trees[0], node.cache)
    command = [sys.executable, "-c", _OPEN, str(tree.cache)]
    with maintain(tree.cache) as quiet:
        assert quiet is not None
        waiting = forked.Popen(command, stdout=subprocess.PIPE, text=True)
        time.sleep(0.5)
        assert waiting.poll() is None
        eviction.remove_blocks(quiet)
    assert waiting.communicate(timeout=10)[0] == "in its place\n"
    fd = os.open(tree.cache / "lock", os.O_RDWR)
    os.close(fd)
    with CacheFile.open(tree.cache, tree.map, tree.map_digest) as cache, maintain(tree.cache) as quiet:
        assert quiet is None
        with pytest.raises(UnavailableError, match="in use by process"):
            CacheFile.open(tree.cache, tree.map, tree.map_digest)
        assert bytes(cache.ready[:]).count(1) == 1


@pytest.mark.parametrize("use", [lambda folder: os.close(locks.take_lock(folder)), Hold], ids=["lock", "hold"])
def test_a_folder_that_goes_while_it_is_made_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use: Callable[[Path], object]
) -> None:
    folder, made = tmp_path / "blocks", Path.mkdir
    seen: list[Path] = []

    def mkdir(path: Path, *arguments: Any, **more: Any) -> None:
        seen.append(path)
        if len(seen) == 1:
            raise FileExistsError  # what pathlib says when the folder has gone before its second look
        made(path, *arguments, **more)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    use(folder)
    assert folder.is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError):
        use(tmp_path / "file")


def test_a_lock_that_was_removed_meanwhile_is_worth_nothing(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = node.folder(node.trees[0])
    real = locks.lock
    left = [1]

    def lock(fd: int, patience: float = 0.0) -> bool:
        while left:
            left.pop()
            (folder / "lock").unlink()
        return real(fd)

    monkeypatch.setattr(locks, "lock", lock)
    fd = locks.take_lock(folder)
    assert locks.is_at(fd, folder / "lock")
    left.append(1)
    with maintain(folder) as quiet:
        assert quiet is None
    os.close(fd)


_OPEN = """
import sys
from pathlib import Path
from bootseer.chunks.locks import is_at, take_lock
fd = take_lock(Path(sys.argv[1]))
print("in its place" if is_at(fd, Path(sys.argv[1]) / "lock") else "an orphan")
"""

_COLLECT = """
import sys
from pathlib import Path
from bootseer.chunks import eviction
eviction.collect(Path(sys.argv[1]), int(sys.argv[2]))
"""

POINTS = [
    "before-bitmap",
    "bitmap.write",
    "bitmap.fsync",
    "bitmap.folder",
    "bitmap.before-rename",
    "before-punch",
    "punched",
    "bitmap-gone",
    "file-gone",
    "file-gone@2",
    "file-gone@3",
    "file-gone@5",
    "lock-gone",
]


@pytest.mark.parametrize("action", ["kill", "eio"])
@pytest.mark.parametrize("point", POINTS)
def test_a_collection_that_dies_or_fails_leaves_no_wrong_byte(tmp_path: Path, point: str, action: str) -> None:
    node = Node(tmp_path, trees=1)
    (tree,) = node.trees
    node.hot(tree, range(0, COUNT, 3))
    name, _, nth = point.partition("@")
    fault = f"blocks.evict.{name}={action}{'@' + nth if nth else ''}"
    done = forked.run("-c", _COLLECT, node.cache, 1 << 40, env={**os.environ, "BOOTSEER_FAULTS": fault})
    assert done.returncode == (-9 if action == "kill" else 0)
    ready = node.ready(tree)
    assert 3 in ready
    for _ in range(2):
        node.fill(tree)
        assert len(node.ready(tree)) == COUNT
        assert not any(check.damaged for check in checked(node))
        eviction.collect(node.cache, 1 << 40)
        assert not list((node.cache / "blocks").iterdir())
        assert not list((node.cache / "trees").iterdir())


_COLLECT_ALWAYS = """
import random, sys, time
from pathlib import Path
from bootseer.chunks import eviction
end = time.monotonic() + float(sys.argv[2])
count = 0
while time.monotonic() < end:
    count += len(eviction.collect(Path(sys.argv[1]), random.choice([100_000, 1 << 40])).gone)
    time.sleep(random.random() / 50)
print(count)
"""


def test_use_and_collection_at_the_same_time(node: Node) -> None:
    command = [sys.executable, "-c", _COLLECT_ALWAYS, str(node.cache), "3"]
    other = forked.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    rounds = 0
    while other.poll() is None:
        for tree in node.trees:
            node.fill(tree)
            rounds += 1
            with contextlib.suppress(AssertionError):  # gone already
                node.hot(tree, range(10))
            found = node.ready(tree, alone=False)
            assert 3 in found
    out, err = other.communicate()
    assert int(out) > 5, (out, err)
    assert rounds > 5


def test_the_control_a_hole_before_the_bitmap_is_seen(node: Node) -> None:
    tree = node.trees[0]
    with maintain(node.folder(tree)) as quiet:
        assert quiet is not None
        eviction.libc.punch_hole(quiet.data_fd, 5 * BLOCK, BLOCK)
    assert [check.bad for check in checked(node)] == [[5], [], []]
    with pytest.raises(AssertionError, match="the bitmap names holes"):
        node.ready(tree)


def test_the_limits(node: Node) -> None:
    used = inventory.used(node.cache)
    disk = os.statvfs(node.cache)
    free = disk.f_bavail * disk.f_frsize
    assert Limits(0, 0).excess(node.cache) == 0
    assert Limits(used + 1000, 0).excess(node.cache) == 0
    assert Limits(used - 1000, 0).excess(node.cache) == pytest.approx(0.1 * used + 1000, abs=2000)
    assert Limits(used + 1000, 0).excess(node.cache, 2000) > 0
    assert Limits(0, free + (100 << 20)).excess(node.cache) > 100 << 20
    assert Limits(0, 0.999999).excess(node.cache) > 0
    assert Limits(0, 0).excess(node.cache, free + (100 << 20)) == pytest.approx(100 << 20, abs=50 << 20)
    assert Limits(1, 0).excess(node.cache) == 0
    assert Limits().excess(node.cache / "nothing") == 0
    keep = node.folder(node.trees[0]).name
    eviction.make_room(node.cache, Limits(BLOCK, 0), keep=keep)
    assert [part.trees for part in inventory.parts(node.cache)] == [[node.trees[0]]]
    assert not eviction.free(node.cache, 1, keep=keep)


def test_one_collection_at_a_time(node: Node) -> None:
    fd = os.open(node.cache / "blocks", os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        assert eviction.collect(node.cache, 1 << 40, patience=0.05).busy
    finally:
        os.close(fd)
    assert len(inventory.parts(node.cache)) == 3


def test_damaged_parts_are_listed_and_go_too(node: Node) -> None:
    one, two, three = node.trees
    (node.cache / "trees" / one / "manifest.json").write_text("{}")
    folder = node.folder(two)
    (folder / "bitmap").write_bytes(b"BSBITMAP")
    (node.cache / "trees" / three / "map").write_bytes(b"x")
    (node.cache / "trees" / "README").write_text("not ours")
    node.hot(three, range(3))
    found = inventory.parts(node.cache)
    assert sorted(map(len, (part.trees for part in found))) == [0, 1, 1, 1]
    assert node.part(two).blocks_total == 0
    eviction.collect(node.cache, 1 << 40)
    assert not list((node.cache / "blocks").iterdir())
    assert [path.name for path in (node.cache / "trees").iterdir()] == ["README"]


def checked(node: Node, *, repair: bool = False, store: bool = False) -> list[check.Check]:
    found = sorted(inventory.parts(node.cache), key=lambda part: [node.trees.index(tree) for tree in part.trees])
    fetch = partial(fetch_all, node.store, streams=4) if store else None
    return [check.check(node.cache, part, repair=repair, fetch=fetch) for part in found]


@pytest.mark.parametrize("store", [False, True])
def test_damage_is_found_dropped_and_fetched_again(node: Node, store: bool) -> None:
    tree = node.trees[1]
    node.damage(tree, 0, 3, 20, COUNT - 1)
    (node.cache / "trees" / tree / "meta").write_bytes(b"meta x")
    with pytest.raises(DataError, match="4 blocks and 1 file in the cache") as caught:
        node.call("verify", tree[:10])
    assert caught.value.exit_code == 65
    _, found, _ = checked(node)
    assert (found.checked, found.bad, found.dropped, found.damaged) == (COUNT, [0, 3, 20, COUNT - 1], 0, True)
    args = ["--store", node.store.url] if store else []
    text = node.call("verify", "--repair", *args)
    assert "4 damaged, 4 dropped" in text
    assert f"{4 if store else 0} fetched again" in text
    assert node.ready(tree) == [block for block in range(COUNT) if store or block not in (0, 20, COUNT - 1)]
    node.call("verify")
    node.fill(tree)
    assert len(node.ready(tree)) == COUNT


def test_damage_in_what_is_in_use_is_left(node: Node) -> None:
    tree = node.trees[0]
    node.damage(tree, 7)
    with open(node.folder(tree) / "data", "rb"):
        (found, *_) = checked(node, repair=True)
        assert (found.in_use, found.bad, found.trouble) == (True, [], "it is in use, but not mounted here")
    (found, *_) = checked(node, repair=True)
    assert (found.in_use, found.bad, found.dropped) == (False, [7], 1)


def test_missing_blocks_are_no_damage(node: Node) -> None:
    tree = node.trees[0]
    node.hot(tree, range(20))
    eviction.collect(node.cache, 10 * BLOCK)
    (found, *_) = checked(node)
    assert found.bad == []
    assert found.checked == len(node.ready(tree)) < COUNT


def test_the_commands(node: Node) -> None:
    before = inventory.used(node.cache)
    assert "gave back 0 B" in node.call("gc", BOOTSEER_CACHE_LIMIT="0", BOOTSEER_CACHE_KEEP_FREE="0")
    assert "would give back" in node.call("gc", "--to", "700k", "--dry-run")
    assert inventory.used(node.cache) == before
    assert "gave back" in node.call("gc", BOOTSEER_CACHE_LIMIT="1900000", BOOTSEER_CACHE_KEEP_FREE="0")
    assert len(inventory.parts(node.cache)) == 2
    found = json.loads(node.call("gc", "--to", "0.7M", "--json"))
    assert [one["whole"] for one in found["removed"]] == [True]
    node.call("gc", "--all")
    assert inventory.parts(node.cache) == []
    assert "gave back 0 B" in node.call("gc", "--all")
    for args, kind in ((("gc", "--to", "x"), SystemExit), (("gc", "--to", "1", "--all"), ConfigError)):
        with pytest.raises(kind):
            node.call(*args)
    with pytest.raises(NotFoundError, match="no tree abc"):
        node.call("verify", "abc")


def test_bitmaps_are_whole_or_nothing() -> None:
    flags = bytearray(random.Random(2).choices((0, 1), k=77))
    raw = bitmap.encode(bitmap.READY, b"d" * 32, flags)
    assert bitmap.decode(raw, bitmap.READY, b"d" * 32) == flags
    assert bitmap.decode(raw, bitmap.READY, b"d" * 32, 77) == flags
    assert bitmap.decode(raw, bitmap.READY, b"d" * 32, 78) is None
    assert bitmap.decode(raw, bitmap.HOT, b"d" * 32) is None
    assert bitmap.decode(raw, bitmap.READY, b"e" * 32) is None
    for at in range(len(raw)):
        assert bitmap.decode(raw[:at], bitmap.READY, b"d" * 32) is None
        assert bitmap.decode(raw[:at] + bytes([raw[at] ^ 4]) + raw[at + 1 :], bitmap.READY, b"d" * 32) is None
    assert bitmap.decode(bitmap.encode(bitmap.READY, b"d" * 32, b""), bitmap.READY, b"d" * 32) == bytearray()


def test_a_folder_in_a_cache_folder_goes_with_it(tmp_path: Path) -> None:
    folder = tmp_path / ("ab" * 32)
    (folder / ".left-x").mkdir(parents=True)
    (folder / ".left-x" / "data").touch()
    for name in ("lock", "data", "bitmap"):
        (folder / name).touch()
    eviction.remove_blocks(locks.OwnedFolder(folder, -1))
    assert not folder.exists()
