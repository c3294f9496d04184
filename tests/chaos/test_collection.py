"""The collection of a store at any moment beside publications, mounts, kills and jumps of the clock: no block is lost
that something published or mounted needs. Controls without one of the means lose some."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path

import msgspec
import pytest
import zstandard

from bootseer.blocks.publish import spool
from bootseer.blocks.publish.dedup import KnownBlocks
from bootseer.blocks.publish.tree import TreeWriter
from bootseer.chunks.blockmap import BlockMap
from bootseer.chunks.manifest import MAX_MANIFEST, TreeManifest, tree_key
from bootseer.errors import DataError, NotFoundError, UnavailableError, UnsupportedError
from bootseer.image import record
from bootseer.objects import Store, open_store, uses, withdrawn
from bootseer.upkeep import collection
from support import forked
from support.records import record_of
from support.steppedstore import Stage, SteppedStore

BLOCK = 4096
HOUR = 3600.0
DAY = 24 * HOUR
MOST = 1 << 30
BLOCKS = [random.Random(number).randbytes(BLOCK) for number in range(6)]


_acting = threading.local()
_HOLD = uses.hold


def _hold(store: Store, tree: str, keys: Iterable[str]) -> None:
    """Who stands still for over three days between this note and the record is not asked for."""
    getattr(_acting, "begin", lambda: None)()
    _HOLD(store, tree, keys)


class _AtOnce:
    """An executor whose work is done by who submits it: the stage knows no threads but its actors."""

    def __init__(self, *args: object) -> None:
        pass

    def submit(self, what: Callable[..., None], *args: object) -> Future[None]:
        done = Future[None]()
        try:
            done.set_result(what(*args))
        except Exception as exc:
            done.set_exception(exc)
        return done

    map = staticmethod(map)

    def __enter__(self) -> _AtOnce:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def shutdown(self, **how: object) -> None:
        pass


def publish(store: Store, folder: Path, blocks: tuple[int, ...], known: KnownBlocks | None = None) -> str:
    """A tree of these blocks, each an object of its own that trees have in common."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    with TreeWriter(store, folder, block_size=BLOCK, known=known) as out:
        for block in blocks:
            out.packs.next_pack()
            out.packs.write(BLOCKS[block])
        return out.seal(b"meta of " + bytes(blocks)).digest


def keys_of(store: Store, tree: str) -> list[str]:
    """All objects of a tree, as a node finds them. Raises `NotFoundError`."""
    found = TreeManifest.decode(store.get(tree_key(tree), most=MAX_MANIFEST), tree)
    raw = store.get(found.map.key, most=MOST)
    return [tree_key(tree), found.map.key, found.meta_stored.key, *(pack.key for pack in BlockMap.decode(raw).packs)]


def lost(store: Store, tree: str) -> list[str]:
    """What cannot be read of a tree."""
    try:
        keys = keys_of(store, tree)
    except NotFoundError as exc:
        return [str(exc)]
    missing = []
    for key in keys:
        try:
            store.get(key, most=MOST)
        except NotFoundError:
            missing.append(key)
    return missing


class Round:
    """One store, some actors, one end."""

    def __init__(self, seed: int, folder: Path, grace: float) -> None:
        self.chance = random.Random(seed)
        self.store = SteppedStore(copies=bool(seed % 2))
        self.folder, self.grace = folder, grace
        self.stage = Stage(self.chance)
        self.mounted: set[str] = set()
        self.starting = 0
        self.since_start = 0.0
        self.lost: list[str] = []
        self.refused = 0
        self.removed: tuple[int, ...] = ()

    def again(self) -> tuple[int, ...]:
        """Often what an image had that was just removed."""
        return self.removed if self.chance.random() < 0.6 else self.pick()

    def pick(self) -> tuple[int, ...]:
        return tuple(sorted(self.chance.sample(range(6), self.chance.randint(1, 3))))

    def publisher(self, image: str, share: bool) -> None:
        with self.started() as _acting.begin:
            self.publish(image, share)

    def publish(self, image: str, share: bool) -> None:
        known = None
        if share:
            trees = [one.tree for one in record.listing(self.store)]
            known = KnownBlocks.of_trees(self.store, trees, BLOCK)
        try:
            tree = publish(self.store, self.folder / image, self.again(), known)
        except UnavailableError as exc:
            if "a collection has just removed" not in exc.message:
                raise
            self.refused += 1
            return
        self.lost += [f"published: {key}" for key in lost(self.store, tree)]
        record.save(self.store, record_of(image, tree), overwrite=True)

    @contextlib.contextmanager
    def started(self) -> Iterator[Callable[[], None]]:
        """After the call of what it gives, and until the end, the clock makes no leaps of more than half a day."""
        counted = False

        def begin() -> None:
            nonlocal counted
            if not self.starting:
                self.since_start = 0.0
            counted = True
            self.starting += 1

        try:
            yield begin
        finally:
            self.starting -= counted

    def reader(self) -> None:
        """A start: it reads a record, then the tree, notes its use, and reads blocks much later."""
        with self.started() as started:
            started()
            trees = [one.tree for one in record.listing(self.store)]
            if not trees:
                return
            tree = self.chance.choice(trees)
            try:
                keys = keys_of(self.store, tree)
                for _ in range(20):
                    self.stage.turn()
                uses.note(self.store, tree)
                self.mounted.add(tree)
            except NotFoundError as exc:
                self.lost.append(f"start: {exc}")
                return
        for _ in range(8):
            self.stage.turn()
            try:
                self.store.get(self.chance.choice(keys), most=MOST)
            except NotFoundError as exc:
                self.lost.append(f"mounted: {exc}")

    def remover(self) -> None:
        listed = list(record.listing(self.store))
        if listed:
            record.remove(self.store, [self.chance.choice(listed)])

    def collector(self) -> None:
        for _ in range(3):
            self.collect()
            self.stage.turn()

    def collect(self) -> None:
        try:
            collection.collect(self.store, grace=self.grace, settle=0.0)
        except DataError as exc:  # an image whose tree is not whole
            self.lost.append(str(exc))

    def clock(self) -> None:
        """Time goes on by leaps, as for one who stands still, and back and forth. A start that is under way, and a node
        that has a mount, do not sleep for days."""
        if self.chance.random() > 0.15:
            return
        leap = self.chance.choice((0.5 * HOUR, 5 * HOUR, -5 * HOUR, DAY, 4 * DAY, 9 * DAY))
        if self.starting or self.store.place.copying:
            leap = self.chance.choice((-5 * HOUR, 5 * HOUR))
            self.since_start += leap
            if abs(self.since_start) > 12 * HOUR:
                return
        self.go_on(leap)

    def go_on(self, seconds: float) -> None:
        """Nodes renew their notes meanwhile."""
        while seconds:
            step = min(seconds, 11 * HOUR)
            self.store.place.now += step
            seconds -= step
            for tree in self.mounted:
                uses.note(self.store, tree)

    def run(self, kills: float = 0.01) -> list[str]:
        store, chance = self.store, self.chance
        for image in "abc":
            self.removed = self.pick()
            record.save(store, record_of(image, publish(store, self.folder / image, self.removed)), overwrite=True)
        store.place.now += 5 * DAY
        left = list(record.listing(store))
        record.remove(store, left[2:] if chance.random() < 0.5 else left[1:])
        for _ in range(chance.choice((0, 1, 1, 1, 2))):
            self.collect()
            store.place.now += 4 * DAY
        actors: dict[str, Callable[[], None]] = {"gc1": self.collector, "reader1": self.reader}
        for name, actor in (
            ("gc2", self.collector),
            ("reader2", self.reader),
            ("remover1", self.remover),
            ("remover2", self.remover),
            ("publish1", lambda: self.publisher("d", False)),
            ("publish2", lambda: self.publisher("e", True)),
            ("publish3", lambda: self.publisher("a", True)),
        ):
            if chance.random() < 0.7:
                actors[name] = actor
        store.place.turn = self.stage.turn
        self.stage.run(actors, self.clock, kills)
        if self.stage.errors:
            raise self.stage.errors[0]
        self.check("at the end")
        for _ in range(6):
            self.collect()
            self.go_on(5 * DAY)
            self.check("later")
        needed = (
            {key for tree in self.needed() for key in keys_of(store, tree)} if not self.lost else set(store.place.files)
        )
        left = {key for key in store.place.files if key.startswith(("trees/", "blobs/", "collection/withdrawn/"))}
        assert left <= needed, "what nothing needs stays"
        return self.lost

    def needed(self) -> set[str]:
        return self.mounted | {one.tree for one in record.listing(self.store)}

    def check(self, when: str) -> None:
        self.lost += [f"{when}: {key}" for tree in self.needed() for key in lost(self.store, tree)]


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for module in (spool, uses):
        monkeypatch.setattr(module, "ThreadPoolExecutor", _AtOnce)
    monkeypatch.setattr(uses, "hold", _hold)
    return monkeypatch


def losses(place: Path, rounds: int, *, grace: float = DAY) -> Iterator[str]:
    """What each round lost that lost something."""
    for seed in range(rounds):
        if found := Round(seed, place, grace).run():
            yield f"round {seed}: {found[:3]}"


@pytest.mark.usefixtures("at_once")
def test_no_block_is_lost(place: Path, request: pytest.FixtureRequest) -> None:
    assert not next(losses(place, 1000 if request.config.getoption("soak") else 250), "")


@pytest.mark.parametrize("step", range(4))
def test_what_is_put_back_while_a_reader_looks_for_it_is_found(step: int) -> None:
    store, key, steps = SteppedStore(), "blobs/aa/" + "a" * 64, iter(range(99))
    store.put(key, b"x")
    store.withdraw([key], "a" * 16)

    def turn() -> None:
        if next(steps) == step:
            assert store.put_back(key)

    store.place.turn = turn
    assert store.get(key, most=1) == b"x"


@pytest.mark.parametrize("without", ["notes", "grace", "hold"])
def test_without_one_of_the_means_some_are_lost(at_once: pytest.MonkeyPatch, place: Path, without: str) -> None:
    if without == "notes":
        at_once.setattr(uses, "note", lambda store, tree: None)
    if without == "hold":
        at_once.setattr(uses, "hold", lambda store, tree, keys: None)
    assert next(losses(place, 120, grace=0.0 if without == "grace" else DAY))


@pytest.mark.parametrize("point", ["store.withdraw=kill@3", "upkeep.withdrawn=kill", "upkeep.delete=kill@2"])
@pytest.mark.parametrize("after", ["published again", "collected"])
def test_a_killed_collection_of_a_folder_loses_nothing_and_is_gone_on_with(point: str, after: str, place: Path) -> None:
    store = open_store(str(place / "store"))
    kept, gone = publish(store, place / "w", (0, 1)), publish(store, place / "w", (1, 2, 3))
    record.save(store, record_of("a", kept), overwrite=True)
    store.delete(uses.key_of(gone))
    old = [info.key for info in store.list("") if withdrawn.may_go(info.key)]
    for key in old:
        os.utime(place / "store" / key, (1e9, 1e9))
    raw = msgspec.json.encode(dict.fromkeys(old, 1e9))
    store.put("collection/condemned", zstandard.ZstdCompressor().compress(raw))
    code = "import sys; from bootseer.upkeep import collection; from bootseer.objects import open_store\n"
    code += "collection.collect(open_store(sys.argv[1]), settle=0.0)"
    killed = forked.run("-c", code, store.url, env=os.environ | {"BOOTSEER_FAULTS": point})
    assert killed.returncode == -signal.SIGKILL
    assert [*store.list(withdrawn.FOLDER)]
    assert not lost(store, kept)
    if after == "published again":
        assert publish(store, place / "w", (1, 2, 3)) == gone
        record.save(store, record_of("b", gone), overwrite=True)
        assert not lost(store, gone)
    for _ in range(2):
        collection.collect(store, settle=0.0)
    assert not lost(store, kept)
    assert bool(lost(store, gone)) == (after == "collected")
    assert not [*store.list(withdrawn.FOLDER)]


def test_a_folder_that_is_a_link_stops_a_collection(tmp_path: Path) -> None:
    """Readers find what lies there, and a list passes over it: all of it would count as not needed."""
    for name in ("images", "published", "env", "trees"):
        place = tmp_path / name
        store = open_store(str(place / "store"))
        store.put("blobs/aa/" + "a" * 64, b"x")
        (place / "elsewhere").mkdir()
        (place / "store" / name).symlink_to(place / "elsewhere")
        with pytest.raises(UnsupportedError, match=f"{name} in store .* is a link"):
            collection.collect(store, settle=0)


def test_a_note_of_a_neighbour_takes_the_place_of_none(tmp_path: Path) -> None:
    """It bears the name of ours, and goes before anybody looks."""
    store = open_store(str(tmp_path))
    tree = "a" * 64
    store.put(uses.key_of(tree), b"theirs")
    uses.note(store, tree)
    assert store.get(uses.key_of(tree), most=9) == b""
