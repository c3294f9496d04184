"""Prefetch by profile: what a start begins with, what it leaves, and that trouble with either is only a line."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bootseer.blocks.fetch import prefetch
from bootseer.blocks.fetch.fetcher import Fetcher
from bootseer.blocks.fetch.figures import Fetched
from bootseer.blocks.fetch.prefetch import Plan
from bootseer.blocks.fetch.source import StoreSource
from bootseer.blocks.formats.hotpack import HotPack
from bootseer.blocks.formats.trace import UNIT, Touch, Trace
from bootseer.blocks.profiles import hotpack_builder, library
from bootseer.blocks.profiles.library import ProfileKey, Target
from bootseer.chunks import hashing
from bootseer.chunks.cachefile import CacheFile
from bootseer.errors import UnavailableError
from support import lazy
from support.stores import FlakyStore

TREE = "ab" * 32
KEY = ProfileKey("train")
COUNT = 120


class Rig:
    def __init__(self, folder: Path) -> None:
        self.blob = lazy.make(folder / "blob", lazy.content(COUNT * 4096, zeros=0.1))
        self.store = FlakyStore(self.blob.store)
        self.folder = folder
        self.target = Target(TREE, hashing.hexdigest(self.blob.map.encode()), self.blob.map)
        self.real = [block for block in range(COUNT) if not self.blob.map.is_zero(block)]
        self.cache: CacheFile = self.blob.open_cache(folder / "cache")
        (folder / "work").mkdir()

    def fill(self) -> None:
        for block in self.real:
            self.cache.write(block, self.blob.content[block * 4096 : (block + 1) * 4096])

    def trace(self, *blocks: int, complete: bool = True) -> Trace:
        """Touches ``blocks`` (one unit each, as a unit is as large as a block here) in this order."""
        touches = tuple(Touch(at * 10, 1, block * (4096 // UNIT), 1) for at, block in enumerate(blocks))
        return Trace(TREE, self.blob.map.size, 0, complete, touches)

    def publish(self, trace: Trace, key: ProfileKey = KEY) -> None:
        assert library.publish(self.blob.store, key, trace, self.blob.map).startswith("published")

    def renew(self, stop: threading.Event | None = None, key: ProfileKey = KEY) -> str:
        work = self.folder / "work"
        with contextlib.closing(self.cache.blocks_now()) as ready:
            found, _ = hotpack_builder.renew(
                self.store, key, self.target, ready, meta=self.folder / "absent", work=work,
                stop=stop or threading.Event(), hurry=threading.Event(),
            )  # fmt: skip
        assert list(work.iterdir()) == []
        return found

    def begin(self, cache: CacheFile, key: ProfileKey = KEY) -> tuple[Plan, Fetcher]:
        with contextlib.closing(Fetcher(cache, StoreSource(self.store, self.blob.map), streams=3)) as fetcher:
            plan = prefetch.begin(fetcher, self.store, key, self.target)
            assert fetcher.wait(10)
        return plan, fetcher

    def packs(self) -> list[str]:
        return [info.key for info in self.blob.store.list("profiles") if info.key.endswith(".pack")]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.cache.close()


def test_from_trace_to_stream(rig: Rig, tmp_path: Path) -> None:
    order = rig.real[::-3]
    rig.publish(rig.trace(*order))
    rig.fill()
    assert rig.renew() == "published"
    assert len(rig.packs()) == 1
    with rig.blob.open_cache(tmp_path / "other") as cache:
        rig.store.reads.clear()
        plan, fetcher = rig.begin(cache)
        assert plan == Plan(sorted(order), 1, rig.packs()[0]), "in the order of the file inside a frame"
        assert all(cache.is_ready(block, block) for block in order)
        assert {key for key, *_ in rig.store.reads} == {plan.pack}
        assert fetcher.stats[Fetched.BYTES_HOT] > 0


def test_traces_are_looked_at_when_the_stream_has_ended(rig: Rig, tmp_path: Path) -> None:
    """Loading and merging them takes the interpreter from the threads that fetch."""
    rig.publish(rig.trace(*rig.real[:50]))
    rig.fill()
    assert rig.renew() == "published"
    rig.publish(rig.trace(*rig.real[:50], *rig.real[60:70]))
    (pack,) = rig.packs()
    asked: list[str] = []
    get = rig.store.get
    rig.store.get = lambda key, most: asked.append(key) or get(key, most=most)  # type: ignore[method-assign, func-returns-value]
    told: list[Plan] = []
    with rig.blob.open_cache(tmp_path / "other") as cache:
        fetcher = Fetcher(cache, StoreSource(rig.store, rig.blob.map), streams=3)
        plans: list[Plan] = []

        def tell(plan: Plan) -> None:
            rig.store.hold()
            told.append(plan)

        def begin() -> None:
            plans.append(prefetch.begin(fetcher, rig.store, KEY, rig.target, tell=tell))

        thread = threading.Thread(target=begin)
        thread.start()
        time.sleep(0.3)
        assert told == [Plan(rig.real[:50], 0, pack)]
        assert (asked, plans) == ([], [])
        rig.store.release()
        thread.join(10)
        assert plans == [Plan([*rig.real[:50], *rig.real[60:70]], 2, pack)]
        assert fetcher.wait(10)
        assert all(cache.is_ready(block, block) for block in plans[0].order)
        fetcher.close()


def test_a_stream_that_is_cut_by_the_end_leaves_the_traces_alone(rig: Rig, tmp_path: Path) -> None:
    rig.publish(rig.trace(*rig.real[:50]))
    rig.fill()
    assert rig.renew() == "published"
    with rig.blob.open_cache(tmp_path / "other") as cache:
        fetcher = Fetcher(cache, StoreSource(rig.store, rig.blob.map), streams=3)
        told: list[Plan] = []

        def tell(plan: Plan) -> None:
            rig.store.hold()
            told.append(plan)
            threading.Timer(0.1, lambda: fetcher.close(0.1)).start()

        began = time.monotonic()
        assert [prefetch.begin(fetcher, rig.store, KEY, rig.target, tell=tell)] == told
        assert time.monotonic() - began < 5
        rig.store.release()


def test_without_a_pack_the_traces_do(rig: Rig) -> None:
    order = rig.real[::-3]
    rig.publish(rig.trace(*order))
    plan, _ = rig.begin(rig.cache)
    assert plan == Plan(order, 1, "")
    assert all(rig.cache.is_ready(block, block) for block in order)


def test_without_anything_nothing_happens(rig: Rig) -> None:
    plan, _ = rig.begin(rig.cache)
    assert plan == Plan()
    assert rig.store.reads == []
    assert rig.renew() == "no traces"


def test_another_job_of_the_tree_lends_its_pack(rig: Rig, tmp_path: Path) -> None:
    rig.publish(rig.trace(*rig.real[:20]))
    rig.fill()
    assert rig.renew() == "published"
    with rig.blob.open_cache(tmp_path / "other") as cache:
        plan, _ = rig.begin(cache, ProfileKey("eval"))
        assert plan.pack == rig.packs()[0]
        assert list(plan.order) == rig.real[:20]


def test_of_the_packs_of_other_jobs_only_the_newest_is_read(rig: Rig, tmp_path: Path) -> None:
    """A job that nobody has started yet waits for its pack while others are looked at."""
    rig.fill()
    for number in range(6):
        rig.publish(rig.trace(*rig.real[number : number + 40]), key := ProfileKey(f"job{number}"))
        assert rig.renew(key=key) == "published"
    with rig.blob.open_cache(tmp_path / "other") as cache:
        rig.store.reads.clear()
        plan, _ = rig.begin(cache, ProfileKey("new"))
    assert plan.order[:40] == rig.real[5:45]
    others = [length for key, _, length in rig.store.reads if key in rig.packs() and key != plan.pack]
    assert others == [120] * 5, "their headers"


def test_traces_of_its_own_outrank_the_pack_of_another_job(rig: Rig, tmp_path: Path) -> None:
    rig.publish(rig.trace(*rig.real[:20]))
    rig.fill()
    assert rig.renew() == "published"
    library.publish(rig.blob.store, ProfileKey("eval"), rig.trace(*rig.real[50:60]), rig.blob.map)
    with rig.blob.open_cache(tmp_path / "other") as cache:
        plan, _ = rig.begin(cache, ProfileKey("eval"))
    assert plan == Plan(rig.real[50:60], 1, "")


def test_a_pack_of_more_than_half_of_its_owners_budget_is_renewed(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old one, which it replaces, does not count."""
    key = ProfileKey("j", library.owner_of(7))
    rig.fill()
    packs = []
    for blocks in (rig.real[:70], rig.real[:85]):
        rig.publish(rig.trace(*blocks), key)
        with monkeypatch.context() as patch:
            patch.setattr(library, "SMALL_TREE", 0)  # the budget is what the tree is stored in
            assert rig.renew(key=key) == "published"
        packs += rig.packs()
        assert rig.store.stat(packs[-1]).size > sum(rig.blob.map.lengths) / 2
    assert len(set(packs)) == 2


def test_a_profile_that_is_deleted_while_its_pack_is_made_stays_away(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """An owner has so many profiles: the newest ones, not those whose packs are done last."""
    key, build = ProfileKey("j", library.owner_of(7)), hotpack_builder.build

    def deleted_meanwhile(*args: Any, **more: Any) -> HotPack | None:
        for info in list(rig.blob.store.list(key.prefix(TREE))):
            rig.blob.store.delete(info.key)
        return build(*args, **more)

    rig.fill()
    rig.publish(rig.trace(*rig.real[:50]), key)
    monkeypatch.setattr(hotpack_builder, "build", deleted_meanwhile)
    for _ in range(2):
        assert rig.renew(key=key) == "no traces"
        assert list(rig.blob.store.list(key.prefix(TREE))) == []


def test_a_pack_is_renewed_for_news_only(rig: Rig) -> None:
    rig.fill()
    rig.publish(rig.trace(*rig.real[:50]))
    assert rig.renew() == "published"
    (old,) = rig.packs()
    assert rig.renew() == "not needed"
    rig.publish(rig.trace(*rig.real[:50], *rig.real[60:70]))
    assert rig.renew() == "published"
    (new,) = rig.packs()
    assert new != old


def test_a_pack_of_what_is_not_there_is_not_made(rig: Rig) -> None:
    rig.publish(rig.trace(*rig.real[:50]))
    assert rig.renew() == "not ready"
    assert rig.packs() == []


def test_one_node_makes_it(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.fill()
    rig.publish(rig.trace(*rig.real[:50]))
    claim = f"{KEY.prefix(TREE)}/hot.claim"
    rig.blob.store.put(claim, f"{time.time():.0f}".encode())
    assert rig.renew() == "made elsewhere"
    assert rig.packs() == []
    for stale in (b"1000", b"", b"noise", b"nan", b"-inf", b"1" * (1 << 20)):
        rig.blob.store.put(claim, stale, overwrite=True)
        assert rig.renew() in ("published", "not needed")
    assert "taking over" in caplog.text
    (rig.folder / "blob/store" / claim).symlink_to("/nonexistent/claim")
    assert rig.renew() == "not needed"
    (pack,) = rig.packs()
    rig.blob.store.delete(pack)
    assert rig.renew() == "published"
    assert not rig.blob.store.exists(claim)


def test_it_stops_when_told_and_shrugs_at_a_store_that_is_down(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.fill()
    rig.publish(rig.trace(*rig.real[:50]))
    stop = threading.Event()
    stop.set()
    assert rig.renew(stop=stop) == "stopped"
    rig.store.down = True
    assert rig.renew() == "failed"
    with pytest.raises(UnavailableError):
        rig.begin(rig.cache)
    rig.store.down = False
    assert rig.renew() == "published"
    assert "is down" in caplog.text


def test_an_incomplete_trace_never_replaces_a_complete_one(rig: Rig) -> None:
    rig.fill()
    rig.publish(rig.trace(*rig.real[:50], complete=False))
    rig.publish(rig.trace(*rig.real[60:90]))
    assert rig.renew() == "published"
    plan, _ = rig.begin(rig.cache)
    assert list(plan.order) == rig.real[60:90]
