"""The hot stream: one sequential read of the hot pack, whoever is in a hurry goes around it, and no pack is trusted."""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.blocks.fetch import stream, workers
from bootseer.blocks.fetch.fetcher import Fetcher
from bootseer.blocks.fetch.figures import Fetched
from bootseer.blocks.fetch.queue import STREAM, Batch, Frame, Priority
from bootseer.blocks.fetch.source import StoreSource
from bootseer.blocks.fetch.stream import HotStream
from bootseer.blocks.fetch.watch import Flight
from bootseer.blocks.formats.hotpack import HotPack
from bootseer.blocks.profiles import hotpack_builder
from bootseer.blocks.profiles.library import Target, newest_pack
from bootseer.chunks import hashing
from bootseer.chunks.cachefile import CacheFile
from bootseer.errors import UnavailableError
from bootseer.objects import Source
from support import lazy
from support.stores import FlakyStore
from support.waits import together, until

TREE = "ab" * 32
COUNT = 400
FOLDER = f"profiles/{TREE}/train"


class NoSource:
    name = "nowhere"

    def pieces(self, offset: int, lengths: Sequence[int]) -> Generator[bytes, None, None]:
        raise AssertionError
        yield b""


def taken(stream: HotStream) -> Batch:
    batch = stream.take(lambda _: True)
    assert batch is not None
    return batch


def short_ranges(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(stream, "_RANGE", size)


class Clock:
    """Stands still until it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def close(self) -> None:
        pass


# -- bookkeeping ---------------------------------------------------------------------------------------------------


def test_the_stream_goes_from_end_to_end() -> None:
    stream = HotStream([5, 3, 9], [100, 200, 300], 1000, NoSource())
    batch = stream.take(lambda _: True)
    frames = [Frame(0, 100, [5]), Frame(100, 200, [3]), Frame(300, 300, [9])]
    assert batch == Batch(Priority.HOT, [5, 3, 9], 1000, 600, STREAM, frames)
    assert stream.take(lambda _: True) is None
    assert not stream.pending


def test_what_is_there_is_not_read_where_it_is_much() -> None:
    blocks = list(range(10))
    stream = HotStream(blocks, [60_000] * 10, 0, NoSource())
    first = stream.take(lambda block: block in (1, 3, 8))
    assert first is not None
    assert (first.blocks, first.offset, first.length) == ([1, 3], 60_000, 180_000)
    assert first.frames == [Frame(0, 60_000, [1]), Frame(120_000, 60_000, [3])]
    second = stream.take(lambda block: block in (1, 3, 8))
    assert second is not None
    assert (second.blocks, second.offset, second.length) == ([8], 480_000, 60_000)


def test_a_frame_comes_whole_while_one_of_its_blocks_is_missing() -> None:
    stream = HotStream([4, 5, 1, 2, 9], [300_000, 300_000, 100], 0, NoSource(), per_frame=2)
    batch = stream.take(lambda block: block in (2, 9))
    assert batch is not None
    assert (batch.blocks, batch.offset, batch.length) == ([2, 9], 300_000, 300_100)
    assert batch.frames == [Frame(0, 300_000, [1, 2]), Frame(300_000, 100, [9])]
    assert stream.put_back(batch)
    again = stream.take(lambda block: block in (2, 9))
    assert again == batch, "with its frame"


def test_the_next_range_is_asked_for_shortly_before_the_end_of_one() -> None:
    stream = HotStream(list(range(1000)), [1 << 18] * 1000, 0, NoSource())
    assert stream.free
    first = taken(stream)
    parts = list(first.parts(1 << 20))
    for part in parts[:5]:
        stream.came(first, part)
        assert not stream.free
    stream.came(first, parts[5])  # 2 MiB are left
    assert stream.free
    second = taken(stream)
    assert (first.length, second.length, second.offset) == (8 << 20, 8 << 20, 8 << 20)
    assert not stream.free
    stream.ended(first)
    assert not stream.free
    assert stream.put_back(second)
    assert taken(stream) == second, "again, from its beginning"


def test_a_range_that_was_left_holds_up_no_other() -> None:
    stream = HotStream([7, 3, 5, 9], [8 << 20] * 4, 0, NoSource())
    hung = taken(stream)
    stream.skip(hung)
    assert stream.free
    second = taken(stream)
    assert (hung.blocks, second.blocks) == ([7], [3])
    (part,) = hung.parts(1 << 30)
    stream.came(second, second)
    stream.came(hung, part)
    assert stream.free, "one that comes late counts no more"
    stream.ended(second)
    assert taken(stream).blocks == [5]
    assert stream.skipped == [7]


def test_a_stream_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    stream = HotStream(list(range(3)), [8 << 20] * 3, 0, NoSource())

    def lose() -> bool:
        return stream.put_back(taken(stream))

    assert all(lose() for _ in range(50)), "one outage, however many requests it hits"
    clock.now += 29
    assert lose()
    batch = taken(stream)
    stream.came(batch, batch)
    stream.ended(batch)
    clock.now += 29
    assert lose(), "a new outage"
    clock.now += 31
    assert not lose()


@given(st.data())
def test_parts_have_every_frame_and_block_once(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 40))
    per_frame = data.draw(st.integers(1, 5))
    lengths = data.draw(st.lists(st.integers(1, 300_000), min_size=count, max_size=count))
    wanted = data.draw(st.sets(st.integers(0, count * per_frame - 1)))
    stream = HotStream(list(range(count * per_frame)), lengths, 9, NoSource(), per_frame)
    size = data.draw(st.integers(1, 1 << 20))
    batch = stream.take(wanted.__contains__)
    if batch is None:
        return
    first = data.draw(st.sets(st.sampled_from(batch.blocks)))
    parts = list(batch.parts(size, first))
    assert [block for part in parts for block in part.blocks] == batch.blocks
    moved = [Frame(part.offset + start, length, blocks) for part in parts for start, length, blocks in part.frames]
    assert moved == [Frame(batch.offset + start, length, blocks) for start, length, blocks in batch.frames]
    for part, after in itertools.pairwise(parts):
        assert part.length >= size or not first.isdisjoint(part.frames[-1].blocks)
        assert part.length >= size or first.isdisjoint(after.frames[0].blocks)
    for part in parts:
        hurried = [not first.isdisjoint(frame.blocks) for frame in part.frames]
        assert (True, False) not in itertools.pairwise(hurried), "who waits has his as soon as they came"
        assert set(part.blocks) <= {block for frame in part.frames for block in frame.blocks}
        assert part.frames[0].start == 0
        assert part.frames[-1].start + part.frames[-1].length == part.length
    ends = [part.offset + part.length for part in parts]
    assert all(end <= part.offset for end, part in zip(ends, parts[1:], strict=False))
    assert (parts[0].offset, ends[-1]) == (batch.offset, batch.offset + batch.length)


@given(st.data())
def test_every_wanted_block_comes_once_inside_its_range(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 60))
    per_frame = data.draw(st.integers(1, 7))
    blocks = data.draw(st.permutations(range(count)))
    number = -(-count // per_frame)
    lengths = data.draw(st.lists(st.integers(1, 1 << 20), min_size=number, max_size=number))
    wanted = data.draw(st.sets(st.integers(0, count - 1)))
    stream = HotStream(blocks, lengths, 77, NoSource(), per_frame)
    came: list[int] = []

    def missing(block: int) -> bool:
        return block in wanted and block not in came

    while (batch := stream.take(missing)) is not None:
        for start, length, inside in batch.frames:
            number = blocks.index(inside[0]) // per_frame
            assert list(inside) == blocks[number * per_frame : (number + 1) * per_frame]
            assert batch.offset + start == 77 + sum(lengths[:number])
            assert length == lengths[number]
            assert start + length <= batch.length
            assert not set(batch.blocks).isdisjoint(inside)
        assert set(batch.blocks) == {block for frame in batch.frames for block in frame.blocks if missing(block)}
        if data.draw(st.booleans()):
            for part in batch.parts(data.draw(st.integers(1, 1 << 20))):
                came += part.blocks
                stream.came(batch, part)
            stream.ended(batch)
        elif not stream.put_back(batch):
            break
    else:
        assert sorted(came) == sorted(wanted)
        assert not stream.under_way


# -- with a fetcher ------------------------------------------------------------------------------------------------


class Opened(msgspec.Struct, frozen=True):
    """A hot pack in a store, and where it is read."""

    pack: HotPack
    key: str
    source: StoreSource

    def stream(self) -> HotStream:
        return HotStream(self.pack.blocks, self.pack.lengths, self.pack.base, self.source, self.pack.per_frame)


class Rig:
    def __init__(self, folder: Path) -> None:
        self.blob = lazy.make(folder / "blob", lazy.content(COUNT * 4096, zeros=0.1))
        self.store = FlakyStore(self.blob.store)
        self.cache: CacheFile = self.blob.open_cache(folder / "cache")
        self.real = [block for block in range(COUNT) if not self.blob.map.is_zero(block)]
        self.order = self.real[::-2]
        self.key = self._publish(folder)
        self.fetchers: list[Fetcher] = []

    def _publish(self, folder: Path) -> str:
        with self.blob.open_cache(folder / "full") as full:
            for block in self.real:
                full.write(block, self.blob.content[block * 4096 : (block + 1) * 4096])
            digest = hashing.hexdigest(self.blob.map.encode())

            never = threading.Event()
            target = Target(TREE, digest, self.blob.map)
            pack = hotpack_builder.build(full, self.order, folder / "hot", target, created=1, stop=never, hurry=never)
            assert pack is not None
            return hotpack_builder.publish(self.blob.store, FOLDER, folder / "hot", pack, target)

    def open(self, store: object = None) -> Opened:
        digest = hashing.hexdigest(self.blob.map.encode())
        found = newest_pack(self.blob.store, FOLDER, Target(TREE, digest, self.blob.map))
        assert found is not None
        self.store.reads.clear()
        return Opened(found.pack, found.key, StoreSource(store or self.store, found.key))  # type: ignore[arg-type]

    def fetcher(self, **settings: float) -> Fetcher:
        options = {"streams": 4, "window": 1 << 20, "deadline": 10.0, **settings}
        self.fetchers.append(Fetcher(self.cache, StoreSource(self.store, self.blob.map), **options))  # type: ignore[arg-type]
        return self.fetchers[-1]

    def right(self, blocks: list[int]) -> bool:
        return all(
            self.cache.is_ready(block, block)
            and self.cache.read(block * 4096, 4096) == self.blob.content[block * 4096 : (block + 1) * 4096]
            for block in blocks
        )

    @property
    def streamed(self) -> list[tuple[int, int]]:
        return [(offset, length) for key, offset, length in list(self.store.reads) if key == self.key]

    @property
    def direct(self) -> list[tuple[int, int]]:
        return [(offset, length) for key, offset, length in list(self.store.reads) if key != self.key]

    def close(self) -> None:
        self.store.release()
        for fetcher in self.fetchers:
            fetcher.close()
        self.cache.close()


@pytest.fixture(params=[1, 4], ids=["a block per frame", "4 blocks per frame"])
def rig(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setattr(hotpack_builder, "_FRAME", request.param * 4096)
    rig = Rig(tmp_path)
    yield rig
    rig.close()


def test_the_hot_pack_brings_everything_in_few_requests(rig: Rig) -> None:
    fetcher = rig.fetcher()
    opened = rig.open()
    fetcher.stream(opened.stream())
    assert fetcher.wait(20)
    assert rig.right(rig.order)
    assert rig.direct == []
    assert len(rig.streamed) == 1
    assert fetcher.stats[Fetched.BYTES_HOT] == sum(opened.pack.lengths)
    assert bytes(rig.cache.ready[:]).count(1) == len(rig.order) + COUNT - len(rig.real)


def test_a_miss_outside_of_the_pack_is_fetched_alone(rig: Rig) -> None:
    fetcher = rig.fetcher()
    fetcher.stream(rig.open().stream())
    assert fetcher.wait(20)
    other = next(block for block in rig.real if block not in rig.order)
    fetcher.demand(other, other)
    assert rig.direct == [(rig.blob.map.offsets[other], rig.blob.map.lengths[other])]


def test_a_block_that_is_bad_in_a_good_frame_is_fetched_alone(rig: Rig) -> None:
    """Whoever made the pack put another block's bytes there; the others of its frame are taken."""
    opened = rig.open()
    numbers = list(opened.pack.blocks)
    bad = numbers[2], numbers[5]
    numbers[2], numbers[5] = reversed(bad)
    stream = HotStream(numbers, opened.pack.lengths, opened.pack.base, opened.source, opened.pack.per_frame)
    fetcher = rig.fetcher()
    fetcher.stream(stream)
    assert fetcher.wait(20)
    assert rig.right(rig.order)
    assert fetcher.stats[Fetched.BAD_BLOCKS] == 2
    assert len(rig.direct) == 2


def whole(rig: Rig, store: object = None) -> tuple[Batch, bytes]:
    """All of the stream as one range, and its bytes."""
    opened = rig.open(store)
    batch = opened.stream().take(lambda _: True)
    assert batch is not None
    assert batch.blocks == list(opened.pack.blocks)
    return batch, opened.source.read(0, batch.offset, batch.length)


def test_a_bad_frame_holds_up_none_behind_it(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    fetcher = rig.fetcher()
    batch, raw = whole(rig, rig.blob.store)
    bad, good, last = batch.frames[0], batch.frames[1], batch.frames[-1]
    raw = bytes(bad.length) + raw[bad.length :]
    waits = {*bad.blocks, *good.blocks, *last.blocks}
    monkeypatch.setattr(type(fetcher._waiting), "__contains__", lambda _, block: block in waits)
    rig.store.hold()
    thread = threading.Thread(target=fetcher._write, args=(Flight(batch, None, 0.0, 0), batch, raw))
    thread.start()
    try:
        until(lambda: rig.right(list(good.blocks)) and rig.right(list(last.blocks)))
        assert not rig.right([bad.blocks[0]])
    finally:
        rig.store.release()
        thread.join(10)
    assert rig.right(rig.order)


def test_traces_bring_what_the_pack_lacks_after_it(rig: Rig) -> None:
    fetcher = rig.fetcher()
    more = [block for block in rig.real if block not in rig.order][:5]
    opened = rig.open()
    rig.store.hold()
    fetcher.stream(opened.stream())
    until(lambda: len(rig.store.reads) == 1)
    fetcher.hot(more)
    rig.store.release()
    assert fetcher.wait(20)
    assert rig.right(rig.order + more)
    assert rig.store.reads[0][0] == rig.key


def damage(rig: Rig, how: str) -> None:
    path = rig.blob.store.root / rig.key
    raw = bytearray(path.read_bytes())
    pack = rig.open().pack
    if how == "every frame":
        raw[pack.base :] = bytes(len(raw) - pack.base)
    elif how == "cut":
        raw = raw[: pack.base + 10_000]
    elif how == "swapped":
        lengths = pack.lengths
        # two neighbours; alone in their frames and of one length, so that only the hash tells
        same = (at for at, length in enumerate(lengths) if length > 4096 and lengths[at + 1] == length)
        at = next(same) if pack.per_frame == 1 else 3
        start = pack.base + sum(lengths[:at])
        middle, end = start + lengths[at], start + lengths[at] + lengths[at + 1]
        raw[start:end] = raw[middle:end] + raw[start:middle]
    path.write_bytes(raw)


@pytest.mark.parametrize("how", ["every frame", "cut", "swapped", "gone"])
def test_a_bad_pack_costs_time_only(rig: Rig, how: str, caplog: pytest.LogCaptureFixture) -> None:
    opened = rig.open()
    if how == "gone":
        rig.blob.store.delete(rig.key)
        # Opened again: who has the object open of a folder store keeps it.
        opened = msgspec.structs.replace(opened, source=StoreSource(rig.store, rig.key))
    else:
        damage(rig, how)
    fetcher = rig.fetcher()
    fetcher.stream(opened.stream())
    fetcher.demand(rig.order[0], rig.order[3])
    assert fetcher.wait(10)
    assert rig.right(rig.order)
    if how in ("cut", "gone"):
        assert "its blocks come from the packs" in caplog.text
    else:
        assert fetcher.stats[Fetched.BAD_BLOCKS] == (2 * opened.pack.per_frame if how == "swapped" else len(rig.order))
        assert "hash differs" in caplog.text or "bad zstd frame" in caplog.text


def test_an_outage_of_a_second_does_not_cost_the_hot_pack(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    opened = rig.open()
    fetcher = rig.fetcher()
    rig.store.down = True
    fetcher.stream(opened.stream())
    until(lambda: fetcher.stats[Fetched.RETRIES] >= 7)
    rig.store.down = False
    assert fetcher.wait(10)
    assert rig.right(rig.order)
    assert "is left" not in caplog.text
    assert rig.direct == []


def test_what_fails_in_an_unforeseen_way_does_not_leave_the_stream_half_asked_for(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetcher = rig.fetcher()
    write = fetcher._write
    monkeypatch.setattr(fetcher, "_write", lambda *args: write(*args) if args[1].pack != STREAM else _unforeseen())
    stream = rig.open().stream()
    fetcher.stream(stream)
    assert fetcher.wait(10)
    assert rig.right(rig.order), "from the packs"


def _unforeseen() -> list[int]:
    raise ValueError("unforeseen")


def test_an_outage_of_the_pack_alone_does_not_stop_the_prefetch(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bootseer.blocks.fetch.stream._PATIENCE", 0.3)

    class Picky(FlakyStore):
        def _read(self, key: str, offset: int, length: int, read: Callable[[], bytes]) -> bytes:
            if key == rig.key:
                raise UnavailableError("not today")
            return super()._read(key, offset, length, read)

    opened = rig.open()
    opened.source.close()
    stream = msgspec.structs.replace(opened, source=StoreSource(Picky(rig.blob.store), rig.key)).stream()
    fetcher = rig.fetcher()
    fetcher.stream(stream)
    fetcher.hot(rig.real)
    assert fetcher.wait(20)
    assert rig.right(rig.real)


def test_a_hot_list_that_comes_later_does_not_replace_a_stream_that_was_left(rig: Rig) -> None:
    opened = rig.open()
    rig.blob.store.delete(rig.key)
    fetcher = rig.fetcher()
    rig.store.hold()
    fetcher.stream(msgspec.structs.replace(opened, source=StoreSource(rig.store, rig.key)).stream())
    assert fetcher.streamed(5)
    more = [block for block in rig.real if block not in rig.order][:5]
    fetcher.hot(more)
    rig.store.release()
    assert fetcher.wait(10)
    assert rig.right(rig.order + more)


def test_who_waits_for_the_end_of_the_stream_is_not_woken_by_its_parts(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red before: a look, under the lock that all take, for each part that came."""
    short_ranges(monkeypatch, 20_000)
    monkeypatch.setattr("bootseer.blocks.fetch.workers._PART", 4096)
    opened, looks, waiter = rig.open(), [0], threading.current_thread()

    class Counted(HotStream):
        @property
        def under_way(self) -> bool:
            looks[0] += threading.current_thread() is waiter
            return super().under_way

    def stream() -> HotStream:
        return Counted(opened.pack.blocks, opened.pack.lengths, opened.pack.base, opened.source, opened.pack.per_frame)

    fetcher = rig.fetcher(streams=2)
    fetcher.stream(stream())
    assert fetcher.streamed(20)
    assert rig.right(rig.order)
    assert looks[0] <= 3 < len(opened.pack.lengths)


class Dripping(FlakyStore):
    """Gives the hot pack piece by piece: after ``let`` of them it waits, and then fails where it is told to."""

    def __init__(self, rig: Rig, let: int, *, fail: bool) -> None:
        super().__init__(rig.blob.store)
        self.key, self.let, self.fail = rig.key, let, fail
        self.go = threading.Event()

    def open(self, key: str) -> Source:
        inner = super().open(key)
        if key == self.key:
            inner.pieces = functools.partial(self._drip, inner)  # type: ignore[method-assign]
        return inner

    def _drip(self, inner: Source, offset: int, lengths: Sequence[int]) -> Iterator[bytes]:
        self.reads.append((self.key, offset, sum(lengths)))
        for number, length in enumerate(lengths):
            if number == self.let:
                assert self.go.wait(20)
                if self.fail:
                    self.fail = False
                    raise UnavailableError("the connection is cut")
            yield inner.read(offset, length)
            offset += length


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_PART", 1)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("fail", [False, True], ids=["whole", "cut"])
def test_what_has_come_of_a_range_is_there_while_the_rest_arrives(rig: Rig, fail: bool) -> None:
    opened = rig.open()
    store = Dripping(rig, 3, fail=fail)
    stream = msgspec.structs.replace(opened, source=StoreSource(store, rig.key)).stream()
    fetcher = rig.fetcher()
    fetcher.stream(stream)
    early = rig.order[: 3 * opened.pack.per_frame]
    until(lambda: rig.right(early))
    assert not rig.right(rig.order[len(early) : len(early) + 1])
    store.go.set()
    assert fetcher.wait(10)
    assert rig.right(rig.order)
    assert rig.direct == []
    whole = [(offset, length) for key, offset, length in store.reads if key == rig.key and length > 70_000]
    if fail:
        assert whole[1][0] == whole[0][0] + sum(opened.pack.lengths[:3]), "nothing twice"
    else:
        assert len(whole) == 1


def test_readers_and_stream_under_trouble(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is read while requests fail, bits flip, and the pack vanishes in the middle."""
    rig.store.fail_next(6)
    for block in rig.real[::17]:
        if rig.blob.map.lengths[block] > 4096:
            rig.store.flip(rig.blob.map.packs[0].key, rig.blob.map.offsets[block] + 2000, times=1)
    opened = rig.open(rig.blob.store)
    stream = msgspec.structs.replace(opened, source=StoreSource(rig.store, rig.key)).stream()
    short_ranges(monkeypatch, 20_000)
    fetcher = rig.fetcher()
    fetcher.stream(stream)
    fetcher.background()

    def run(start: int) -> None:
        for step in range(0, COUNT, 3):
            block = (start + step * 7) % COUNT
            fetcher.demand(block, block)
            assert rig.right([block])
            if step == COUNT // 3:
                rig.blob.store.delete(rig.key)

    together(run, range(0, COUNT, 100))
    fetcher.eager()
    assert fetcher.wait(10)
    assert rig.cache.complete
    opened.source.close()


def test_a_full_cache_ends_the_stream(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOOTSEER_FAULTS", "chunks.write=enospc")
    stream = rig.open().stream()
    short_ranges(monkeypatch, 4096)
    fetcher = rig.fetcher()
    fetcher.stream(stream)
    until(lambda: fetcher.full)
    assert fetcher.wait(20)
    assert len(rig.streamed) < 20
    (block,) = fetcher.demand(rig.order[0], rig.order[0])
    assert block == rig.order[0]


@pytest.mark.usefixtures("small_parts")
def test_a_reader_waits_a_moment_for_a_range_under_way_then_goes_around_it(rig: Rig) -> None:
    opened = rig.open()
    store = Dripping(rig, 3, fail=False)
    fetcher = rig.fetcher()
    fetcher.stream(msgspec.structs.replace(opened, source=StoreSource(store, rig.key)).stream())
    until(lambda: rig.right(rig.order[: 3 * opened.pack.per_frame]))
    last = rig.order[-1]
    began = time.monotonic()
    done = [threading.Event() for _ in range(6)]
    for one in done:
        fetcher.submit(last, last, lambda *_, one=one: one.set())
    time.sleep(0.3)
    assert rig.direct == [], "it may come with the range"
    assert all(one.wait(20) for one in done)
    assert 0.9 < time.monotonic() - began < 3
    assert rig.right([last])
    where = rig.blob.map.offsets[last]
    assert sum(offset <= where < offset + length for offset, length in rig.direct) == 1
    assert fetcher.stats[Fetched.DIRECT_MISSES] == 0
    store.go.set()
    assert fetcher.wait(10)
    assert rig.right(rig.order)


def test_a_reader_of_a_block_that_is_not_under_way_goes_around_the_stream(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    short_ranges(monkeypatch, 4096)
    fetcher = rig.fetcher()
    stream = rig.open().stream()
    rig.store.hold()
    fetcher.stream(stream)
    until(lambda: len(rig.streamed) == 2)
    done = [threading.Event() for _ in range(6)]
    last = rig.order[-1]
    for one in done:
        fetcher.submit(last, last, lambda *_, one=one: one.set())
        until(lambda: len(rig.direct) == 1)
    rig.store.release()
    assert all(one.wait(20) for one in done)
    assert len(rig.direct) == 1
    assert (fetcher.stats[Fetched.HEDGES], fetcher.stats[Fetched.DIRECT_MISSES]) == (0, 1)
    assert fetcher.wait(20)
    assert rig.right(rig.order)


class Hanging(FlakyStore):
    """Requests for the hot pack hang until `release`: all, or only the first one."""

    def __init__(self, rig: Rig, *, only_first: bool = False) -> None:
        super().__init__(rig.blob.store)
        self.key, self.only_first = rig.key, only_first
        self.hung = 0
        self.hold()

    def _read(self, key: str, offset: int, length: int, read: Callable[[], bytes]) -> bytes:
        if key == self.key:
            self.hung += 1
            if self.hung == 1 or not self.only_first:
                return super()._read(key, offset, length, read)
        return read()

    def stream(self, opened: Opened) -> HotStream:
        return msgspec.structs.replace(opened, source=StoreSource(self, opened.key)).stream()


def test_the_stream_goes_on_without_a_range_that_hangs(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it comes a second later, the blocks of that range from the packs, and nothing else does."""
    monkeypatch.setattr("bootseer.blocks.fetch.watch._SILENCE", 1.0)
    short_ranges(monkeypatch, 100_000)
    opened, hanging = rig.open(), Hanging(rig, only_first=True)
    fetcher = rig.fetcher()
    began = time.monotonic()
    fetcher.stream(hanging.stream(opened))
    try:
        until(lambda: rig.right(rig.order))
        assert 0.8 < time.monotonic() - began < 4
        assert fetcher.streamed(5)
        [(_, _, hung)] = hanging.reads
        assert hung <= sum(length for _, length in rig.direct) < 1.2 * hung < 0.5 * opened.pack.size
        assert fetcher.stats[Fetched.HEDGES] > 0
    finally:
        hanging.release()
    assert fetcher.wait(10)
    assert rig.right(rig.order)


def test_a_range_that_was_left_and_comes_first_brings_its_blocks(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The packs do not answer at all, so that every block is from the stream."""
    monkeypatch.setattr("bootseer.blocks.fetch.watch._SILENCE", 1.0)
    short_ranges(monkeypatch, 100_000)
    opened, hanging = rig.open(), Hanging(rig, only_first=True)
    rig.store.hold()
    fetcher = rig.fetcher(streams=8)
    fetcher.stream(hanging.stream(opened))
    until(lambda: fetcher.stats[Fetched.HEDGES] > 0)
    assert fetcher.streamed(5)
    hanging.release()
    until(lambda: rig.right(rig.order))
    rig.store.release()
    assert fetcher.wait(10)
    assert rig.right(rig.order)


def test_of_a_store_that_hangs_altogether_threads_for_readers_are_left(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bootseer.blocks.fetch.watch._SILENCE", 0.1)
    short_ranges(monkeypatch, 10_000)
    opened, hanging = rig.open(), Hanging(rig)
    fetcher = rig.fetcher(streams=6)
    rig.store.hold()
    fetcher.stream(hanging.stream(opened))
    until(lambda: hanging.hung + len(rig.direct) == 4)
    time.sleep(0.5)
    assert hanging.hung + len(rig.direct) == 4, "a third of the threads is for readers"
    rig.store.release()
    fetcher.demand(rig.order[0], rig.order[0])
    hanging.release()
    assert fetcher.wait(10)
    assert rig.right(rig.order)
