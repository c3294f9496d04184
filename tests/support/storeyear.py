"""A year of a site's store, with a clock of its own: images and environments change daily, jobs start, `store gc` runs
weekly. What it says: bytes stored to bytes in use, starts that failed or had to run their set-up command again, and
loads of a checkpoint that `fs gc --keep` took away."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from bootseer.backends.interface import Entry
from bootseer.blocks.publish.dedup import KnownBlocks
from bootseer.blocks.publish.tree import TreeWriter
from bootseer.chunks.blockmap import BlockMap
from bootseer.chunks.manifest import MAX_MANIFEST, TreeManifest, tree_key
from bootseer.env import manifest, snapshots
from bootseer.env.inputs import Observed
from bootseer.env.key import KeyDocument
from bootseer.errors import NotFoundError
from bootseer.image import record
from bootseer.objects import Store, uses
from bootseer.objects.on_backend import ObjectStore
from bootseer.stripefs import open_fs
from bootseer.stripefs.checkpoint import commit
from bootseer.stripefs.maintenance import collect
from bootseer.upkeep import collection
from support.records import record_of
from support.steppedstore import SteppedBackend

DAY = 86_400.0
BLOCK, BLOCKS = 4096, 24
IMAGES, ENVIRONMENTS = 60, 200
JOBS, SAVES = 10, 0.035
"""Of a job in six hours: 500 in a year."""
AGE, SELDOM = 30 * DAY, 21
"""Environments that nobody has used for so long are removed; days after which each is started again at the latest."""
MOST = 1 << 30


class Figures(msgspec.Struct, kw_only=True):
    days: int
    images: int
    environments: int
    starts: int = 0
    failed: int = 0
    """Starts of a tree that was not whole."""
    again: int = 0
    """Starts that ran a set-up command again, although its environment had been published."""
    removed: int = 0
    published: int = 0
    stored_at_end: int = 0
    in_use_at_end: int = 0
    checkpoints: int = 0
    checkpoints_left: int = 0
    loads: int = 0
    loads_lost: int = 0
    """Loads of a checkpoint that was removed before they had ended."""
    worst: float = 0.0
    """The largest share of bytes stored to bytes in use after a collection, from the tenth week on."""


class Backend(SteppedBackend):
    """Lists fast: a year has thousands of objects."""

    def __init__(self) -> None:
        super().__init__()
        self._folders: dict[str, dict[str, Entry]] = {}
        self._of: object = None

    def list(self, path: str) -> list[Entry]:
        state = (len(self.files), self.changes)
        if self._of != state:
            self._folders, self._of = {}, state
            for name, (data, mtime) in self.files.items():
                above, _, last = name.rpartition("/")
                self._folders.setdefault(above, {})[last] = Entry(last, len(data), False, mtime)
                while above:
                    above, _, last = above.rpartition("/")
                    if last in self._folders.setdefault(above, {}):
                        break
                    self._folders[above][last] = Entry(last, 0, True, mtime)
        return sorted(self._folders.get(path, {}).values())

    changes = 0

    def put(self, path: str, data: bytes | Path, *, overwrite: bool) -> None:
        self.changes += 1
        super().put(path, data, overwrite=overwrite)

    def rename(self, src: str, dst: str, *, overwrite: bool) -> None:
        self.changes += 1
        super().rename(src, dst, overwrite=overwrite)

    def delete(self, path: str) -> None:
        self.changes += 1
        super().delete(path)


class Thing(NamedTuple):
    """An image or environment that jobs start; ``name`` is its record's."""

    name: str
    tree: str
    blocks: tuple[int, ...]


class Site:
    """``notes``: whether starts note what they use."""

    def __init__(self, seed: int, folder: Path, *, notes: bool = True) -> None:
        self.chance, self.folder, self.notes = random.Random(seed), folder / "work", notes
        self.place = Backend()
        self.store: Store = ObjectStore("memory", self.place)
        self._fresh = 0
        self.images = {f"{number:03x}": self.image(f"{number:03x}", self.new()) for number in range(IMAGES)}
        self.environments = [self.environment(self.new(), ()) for _ in range(ENVIRONMENTS)]
        self.started: dict[str, int] = {}
        """When each was started last."""
        self.mounted: dict[str, int] = {}
        """Tree -> day until which a job has it mounted."""

    def new(self, blocks: Sequence[int] = (), changed: int = BLOCKS) -> tuple[int, ...]:
        """Blocks, ``changed`` of which nobody has yet."""
        found = list(blocks) or [0] * BLOCKS
        for at in self.chance.sample(range(BLOCKS), changed):
            self._fresh += 1
            found[at] = self._fresh
        return tuple(found)

    def publish(self, blocks: Sequence[int], near: Sequence[str]) -> str:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        known = KnownBlocks.of_trees(self.store, list(near), BLOCK) if near else None
        with TreeWriter(self.store, self.folder, block_size=BLOCK, known=known) as out:
            for block in blocks:
                out.packs.next_pack()
                out.packs.write(random.Random(block).randbytes(BLOCK))
            return out.seal(b"meta of " + json.dumps(list(blocks)).encode()).digest

    def image(self, name: str, blocks: tuple[int, ...], near: Sequence[str] = ()) -> Thing:
        tree = self.publish(blocks, near)
        found = msgspec.structs.replace(
            record_of("0", tree), image=f"sha256:{tree}", reference=f"localhost/{name}:1", converted=int(self.place.now)
        )
        record.save(self.store, found, overwrite=True)
        return Thing(found.image, tree, blocks)

    def environment(self, blocks: tuple[int, ...], near: Sequence[str]) -> Thing:
        tree = self.publish(blocks, near)
        document = KeyDocument(targets=["/opt/env"], command=["pip", "install", *map(str, blocks)])
        found = manifest.SnapshotManifest(
            key=document.key, document=document, inputs=Observed(), tree=tree, size=BLOCK * BLOCKS, stored=BLOCK,
            inventory=tree[::-1], entries=1, base=[""], result=["ef"], created=int(self.place.now), node="n",
        )  # fmt: skip
        self.store.put(manifest.inventory_key(found.inventory), b"an inventory", overwrite=True)
        self.store.put(manifest.index_key(found), b"", overwrite=True)
        self.store.put(manifest.manifest_key(found.name), found.encode(), overwrite=True)
        return Thing(found.name, tree, blocks)

    def keys_of(self, tree: str) -> list[str]:
        found = TreeManifest.decode(self.store.get(tree_key(tree), most=MAX_MANIFEST), tree)
        packs = BlockMap.decode(self.store.get(found.map.key, most=MOST)).packs
        return [tree_key(tree), found.map.key, found.meta_stored.key, *(pack.key for pack in packs)]

    def start(self, thing: Thing, figures: Figures, *, day: int) -> None:
        """A job on one node."""
        figures.starts += 1
        self.started[thing.name] = day
        if "/" in thing.name:
            try:
                manifest.decode(self.store.get(manifest.manifest_key(thing.name), most=MOST), thing.name)
            except NotFoundError:
                figures.again += 1
                return
        try:
            for key in self.keys_of(thing.tree):
                self.store.stat(key)
        except NotFoundError:
            figures.failed += 1
        self.mounted[thing.tree] = max(self.mounted.get(thing.tree, 0), day + self.chance.choice((0, 0, 1, 14)))

    def note(self) -> None:
        for tree in self.mounted if self.notes else ():
            uses.note(self.store, tree)

    def day(self, day: int, figures: Figures) -> None:
        chance = self.chance
        for _ in range(2):  # what the teams change
            name = chance.choice(list(self.images))
            old = self.images[name]
            self.images[name] = self.image(name, self.new(old.blocks, 4), [old.tree])
            with contextlib.suppress(NotFoundError):
                listed = [one for one in record.listing(self.store) if one.image == old.name]
                record.remove(self.store, listed)
        for _ in range(3):
            at = chance.randrange(ENVIRONMENTS)
            old = self.environments[at]
            self.environments[at] = self.environment(self.new(old.blocks, 2), [old.tree])
        figures.published += 5
        for thing in [*self.images.values(), *self.environments]:
            if chance.random() < 0.15 or day - self.started.setdefault(thing.name, day) >= SELDOM:
                self.start(thing, figures, day=day)
        self.mounted = {tree: until for tree, until in self.mounted.items() if until >= day}
        for _ in range(2):
            self.note()
            self.place.now += DAY / 2

    def collect(self, figures: Figures) -> None:
        names = [root.name for root in collection.unused(self.store, AGE)]
        snapshots.remove(self.store, names)
        figures.removed += len(names)
        collection.collect(self.store, settle=0.0)

    def bytes(self) -> tuple[int, int]:
        """Stored, and in use by what jobs start or have mounted."""
        stored = {name: len(data) for name, (data, _) in self.place.files.items() if "/" in name}
        trees = {one.tree for one in [*self.images.values(), *self.environments]} | self.mounted.keys()
        used = {key for tree in trees if tree_key(tree) in stored for key in self.keys_of(tree)}
        whole = sum(
            size for name, size in stored.items() if name.startswith(("blobs/", "trees/", "collection/withdrawn/"))
        )
        return whole, sum(stored.get(key, 0) for key in used)


class Jobs:
    """They save checkpoints, and load the newest; ``age`` and ``keep`` as of `fs gc`."""

    def __init__(self, seed: int, folder: Path, keep: int, age: float) -> None:
        self.fs, self.keep, self.age = open_fs(str(folder / "checkpoints")), keep, age
        self.chance, self.now = random.Random(seed), 1e9
        self.loading: list[tuple[str, float]] = []
        """What a start loads, and until when."""

    def hours(self, figures: Figures, hours: float) -> None:
        """``hours`` pass."""
        self.now += hours * 3600
        for number in range(JOBS):
            if self.chance.random() < SAVES:
                figures.checkpoints += 1
                name = f"job-{number}/step-{figures.checkpoints}"
                with self.fs.create(f"{name}/weights") as out:
                    out.write(b"weights")
                self.fs.commit(name)
                os.utime(Path(self.fs.url, name, commit.NAME), (self.now, self.now))
            if self.chance.random() < 0.3:
                with contextlib.suppress(NotFoundError):
                    self.loading.append((self.fs.latest(f"job-{number}"), self.now + self.chance.uniform(0, 20) * 3600))
                    figures.loads += 1
        lost = {name for name, _ in self.loading if not Path(self.fs.url, name, "weights").exists()}
        figures.loads_lost += len(lost)
        self.loading = [(name, until) for name, until in self.loading if until > self.now and name not in lost]

    def collect(self) -> None:
        for number in range(JOBS):
            with contextlib.suppress(NotFoundError):
                collect.gc(self.fs.backend, f"job-{number}", keep=self.keep, age=self.age, now=lambda: self.now)


def year_of_checkpoints(
    seed: int, folder: Path, figures: Figures, *, keep: int = 3, age: float = DAY, days: int = 365
) -> Figures:
    jobs = Jobs(seed, folder, keep, age)
    for day in range(days):
        for _ in range(4):
            jobs.hours(figures, 6)
        if day % 7 == 6:
            jobs.collect()
            jobs.hours(figures, 0)
    figures.checkpoints_left = sum(1 for _ in Path(jobs.fs.url).glob("job-*/step-*"))
    return figures


def year(seed: int, folder: Path, *, days: int = 365, notes: bool = True) -> Figures:
    site, figures = Site(seed, folder, notes=notes), Figures(days=days, images=IMAGES, environments=ENVIRONMENTS)
    for day in range(days):
        site.day(day, figures)
        if day % 7 == 6:
            site.collect(figures)
            if day >= 70:
                stored, used = site.bytes()
                figures.worst = max(figures.worst, round(stored / used, 3))
    figures.stored_at_end, figures.in_use_at_end = site.bytes()
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/chaos --year", description=__doc__)
    parser.add_argument("--days", type=int, default=365)
    parser.add_argument("--seed", type=int, default=1)
    found = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bootseer-year-") as folder:
        figures = year(found.seed, Path(folder), days=found.days)
        year_of_checkpoints(found.seed, Path(folder), figures, days=found.days)
    print(json.dumps(msgspec.to_builtins(figures), indent=1))
    return int(bool(figures.failed or figures.again or figures.loads_lost or figures.worst > 1.3))


if __name__ == "__main__":
    sys.exit(main())
