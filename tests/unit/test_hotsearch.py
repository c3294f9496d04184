"""Hot packs that are looked for before the block map is known, and streams that begin with that request."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bootseer.blocks import _hash
from bootseer.blocks.cache.blockfile import CacheFile
from bootseer.blocks.fetch import hotsearch
from bootseer.blocks.fetch.fetcher import Fetcher
from bootseer.blocks.fetch.hotsearch import Head, Opened, Sight
from bootseer.blocks.fetch.queue import Batch
from bootseer.blocks.fetch.source import StoreSource
from bootseer.blocks.fetch.stream import HotStream
from bootseer.blocks.formats import hotpack
from bootseer.blocks.serving import foresight
from bootseer.blocks.serving.foresight import Foresight
from bootseer.errors import UnavailableError
from bootseer.store import ObjectInfo
from bootseer.store.folder import FolderStore
from bootseer.testing import lazy
from bootseer.testing.source import FlakyStore
from bootseer.testing.waits import until

TREE = "ab" * 32
JOB = "train"
FOLDER = f"profiles/{TREE}/{JOB}"
COUNT = 120


# -- the head ------------------------------------------------------------------------------------------------------


def head_of(folder: Path, content: bytes, length: int) -> tuple[Head, FlakyStore]:
    store = FlakyStore(FolderStore(folder))
    store.put("object", content, overwrite=True)
    return Head(StoreSource(store, "object"), len(content), length), store


@settings(deadline=None)
@given(
    content=st.binary(min_size=1, max_size=600),
    length=st.integers(1, 700),
    read=st.tuples(st.integers(0, 600), st.integers(0, 600)),
    skip=st.integers(0, 600),
    cuts=st.lists(st.integers(1, 90), max_size=12),
)
def test_it_gives_what_the_object_has(
    tmp_path_factory: pytest.TempPathFactory,
    content: bytes,
    length: int,
    read: tuple[int, int],
    skip: int,
    cuts: list[int],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hotsearch, "_FIRST_READ", 64)
        head, store = head_of(tmp_path_factory.getbasetemp() / "heads", content, length)
        start, end = (min(at, len(content)) for at in (read[0], sum(read)))
        assert head.read(0, start, end - start) == content[start:end]
        skip = min(skip, len(content))
        lengths: list[int] = []
        for cut in cuts:
            if skip + sum(lengths) + cut <= len(content):
                lengths.append(cut)
        before = len(store.reads)
        ends = [skip + sum(lengths[: at + 1]) for at in range(len(lengths))]
        assert list(head.pieces(skip, lengths)) == [
            content[at - size : at] for at, size in zip(ends, lengths, strict=True)
        ]
        if skip + sum(lengths) <= min(length, len(content)):
            assert [one for one in store.reads[before:] if one[1] >= length] == []
        # once: from then on they are reads of their own
        assert b"".join(head.pieces(0, [len(content)])) == content
        head.close()
        with pytest.raises(UnavailableError):
            list(head.pieces(0, [1]))


def test_an_error_on_the_way_comes_with_the_piece_that_lacks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hotsearch, "_FIRST_READ", 1 << 20)
    content = bytes(5 << 20)
    head, store = head_of(tmp_path, content, 4 << 20)
    store.fail_next(9)
    pieces = head.pieces(0, [1 << 20] * 4)
    assert next(pieces) == content[: 1 << 20]
    with pytest.raises(UnavailableError):
        list(pieces)
    store.fail_next(0)
    assert b"".join(head.pieces(0, [1 << 20] * 4)) == content[: 4 << 20]
    head.close()


# -- the search ----------------------------------------------------------------------------------------------------


class Rig:
    def __init__(self, folder: Path) -> None:
        self.blob = lazy.make(folder / "blob", lazy.content(COUNT * 4096))
        self.store = FlakyStore(self.blob.store)
        self.store.streams = True
        self.digest = _hash.hexdigest(self.blob.map.encode())
        self.cache: CacheFile = self.blob.open_cache(folder / "cache")
        self.order = list(range(COUNT))[::-1]
        self.folder = folder

    def publish(self, created: int, order: Sequence[int] = ()) -> str:
        with self.blob.open_cache(self.folder / f"full-{created}") as full:
            for block in range(COUNT):
                full.write(block, self.blob.content[block * 4096 : (block + 1) * 4096])
            pack = hotpack.build(
                full,
                order or self.order,
                self.folder / f"hot-{created}",
                tree=TREE,
                map_digest=self.digest,
                created=created,
            )
            assert pack is not None
            return hotpack.publish(self.blob.store, FOLDER, self.folder / f"hot-{created}", pack)

    def found(self) -> Opened:
        opened = hotsearch.choose(hotsearch.look(self.store, FOLDER, head=True), TREE, self.digest, self.blob.map)
        assert opened is not None
        return opened

    def fetched(self, opened: Opened) -> Fetcher:
        fetcher = Fetcher(self.cache, [StoreSource(self.store, self.blob.map)], streams=3)
        try:
            fetcher.stream(opened.stream())
            assert fetcher.wait(10)
        finally:
            fetcher.close()
        for block in opened.pack.blocks:
            assert self.cache.is_ready(block, block)
            data = self.blob.content[block * 4096 : (block + 1) * 4096]
            assert self.cache.read(block * 4096, 4096) == data
        return fetcher


@pytest.fixture(params=[1, 4], ids=["a block per frame", "4 blocks per frame"])
def rig(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setattr(hotpack, "_FRAME", request.param * 4096)
    rig = Rig(tmp_path)
    yield rig
    rig.store.release()
    rig.cache.close()


def test_a_small_pack_comes_with_its_index(rig: Rig) -> None:
    key = rig.publish(1)
    opened = rig.found()
    fetcher = rig.fetched(opened)
    assert {name for name, *_ in rig.store.reads} == {key}
    assert len(rig.store.reads) == 1
    assert fetcher.stats.hot_bytes == sum(opened.pack.lengths)


def test_a_longer_pack_begins_with_what_came_with_its_index(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    key = rig.publish(1)
    monkeypatch.setattr(hotsearch, "_FIRST_READ", 4096)
    monkeypatch.setattr(hotsearch, "_HEAD", 100_000)
    opened = rig.found()
    rig.fetched(opened)
    ranges = [(offset, length) for name, offset, length in rig.store.reads if name == key]
    assert ranges[0] == (0, 104_096)
    behind = 104_096 - max(opened.pack.lengths)
    assert ranges[1][0] > behind, "the head was not used up"
    assert {name for name, *_ in rig.store.reads} == {key}


def test_blocks_at_the_head_that_are_there_are_left_out(rig: Rig) -> None:
    rig.publish(1)
    for block in rig.order[:40]:
        rig.cache.write(block, rig.blob.content[block * 4096 : (block + 1) * 4096])
    opened = rig.found()
    fetcher = rig.fetched(opened)
    assert len(rig.store.reads) == 1
    assert 0 < fetcher.stats.hot_bytes < sum(opened.pack.lengths)


def test_a_head_that_breaks_off_is_asked_for_again(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.publish(1)
    monkeypatch.setattr(hotsearch, "_FIRST_READ", 4096)
    monkeypatch.setattr(hotsearch, "_HEAD", 10 << 20)
    monkeypatch.setattr("bootseer.store.base._READ", 4096)
    opened = rig.found()
    rig.store.fail_next(1)
    fetcher = rig.fetched(opened)
    assert fetcher.stats.retries == 1


def test_where_nothing_streams_there_is_no_head(rig: Rig) -> None:
    """It would be read in one piece, beside the block map, before the index can be looked at."""
    key = rig.publish(1)
    rig.store.streams = False
    opened = rig.found()
    assert isinstance(opened.source, StoreSource)
    size = rig.blob.store.stat(key).size
    assert rig.store.reads == [(key, 0, size)]
    rig.fetched(opened)
    assert rig.store.reads[1:] == [(key, opened.pack.base, size - opened.pack.base)]


def test_a_listing_that_breaks_off_leaves_nothing_open(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.publish(1)
    seen: list[Sight] = []
    see = hotsearch._see

    def broken(store: FlakyStore, folder: str) -> Iterator[ObjectInfo]:
        yield from store.list(folder)
        raise UnavailableError("the listing breaks off")

    monkeypatch.setattr(hotpack, "packs_in", broken)
    monkeypatch.setattr(hotsearch, "_see", lambda *args: seen.append(see(*args)) or seen[-1])
    with pytest.raises(UnavailableError, match="breaks off"):
        hotsearch.look(rig.store, FOLDER, head=True)
    (sight,) = seen
    assert sight.source is not None
    with pytest.raises(UnavailableError, match="closed"):
        sight.source.read(0, 1 << 19, 1)


def test_only_the_newest_is_kept_open(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.publish(2, rig.order[:50])
    rig.publish(1)
    rig.blob.store.put(f"{FOLDER}/hot-0.pack", b"noise")
    sights = hotsearch.look(rig.store, FOLDER, head=True)
    opened = hotsearch.choose(sights, TREE, rig.digest, rig.blob.map)
    assert opened is not None
    assert opened.pack.created == 2
    assert caplog.text.count("ignoring hot pack") == 1
    for sight in sights:
        if sight.source is not None and sight.source is not opened.source:
            with pytest.raises(UnavailableError, match="closed"):
                sight.source.read(0, 1 << 19, 1)
    opened.source.close()


# -- the stream ----------------------------------------------------------------------------------------------------


class Nothing:
    name = "nothing"

    def pieces(self, offset: int, lengths: Sequence[int]) -> Generator[bytes, None, None]:
        raise AssertionError

    def close(self) -> None: ...


def stream_of(lengths: list[int], *, base: int = 0, head: int) -> HotStream:
    return HotStream(list(range(len(lengths))), array("I", lengths), base, Nothing(), head=head)


def taken(stream: HotStream, missing: Callable[[int], bool] = lambda _: True) -> Batch:
    batch = stream.take(missing)
    assert batch is not None
    return batch


@pytest.mark.parametrize(
    ("head", "length"), [(1_000_100, 1_000_000), (1_000_099, 900_000), (10_000_100, 10_000_000), (100_099, 1_100_000)]
)
def test_the_first_range_is_what_has_been_asked_for(head: int, length: int) -> None:
    stream = stream_of([100_000] * 100, base=100, head=head)
    assert taken(stream).length == length


def test_the_first_range_ends_there_wherever_it_begins() -> None:
    stream = stream_of([100_000] * 100, head=1_000_000)
    batch = taken(stream, lambda block: block >= 4)
    assert (batch.offset, batch.length) == (400_000, 600_000)
    assert taken(stream).offset == 1_000_000


def test_what_waits_says_nothing_of_the_rate() -> None:
    """Bytes that came while the block map did arrive at once; the link may bring a hundredth of that."""
    stream = stream_of([100_000] * 400, head=2_000_000)
    batch = taken(stream)
    assert stream.room, "behind it the next range is asked for at once"
    second = taken(stream)
    assert second.length < 1_200_000
    assert not stream.room, "and no third before it is known how long that takes"
    for part in batch.parts(1 << 18):
        stream.came(batch, part)
    assert stream.rate == HotStream([], [], 0, Nothing()).rate, "not known yet"
    assert stream.lanes._began is None
    time.sleep(0.1)
    stream.came(second, next(second.parts(1 << 18)))
    assert stream.rate < 4e6


def test_a_head_that_is_asked_for_again_is_a_range_like_others() -> None:
    stream = stream_of([100_000] * 400, head=4_000_000)
    batch = taken(stream)
    assert batch.length == 4_000_000
    assert stream.put_back(batch)
    assert taken(stream).length < 1_200_000


# -- foresight -----------------------------------------------------------------------------------------------------


def test_foresight_finds_the_pack_of_its_job(rig: Rig) -> None:
    key = rig.publish(1)
    sights = Foresight(lambda: rig.store, FOLDER).take(rig.store, FOLDER)
    assert [sight.info.key for sight in sights] == [key]
    opened = hotsearch.choose(sights, TREE, rig.digest, rig.blob.map)
    assert opened is not None
    rig.fetched(opened)
    assert Foresight(lambda: rig.store, f"{FOLDER}-other").take(rig.store, FOLDER) == ()


@pytest.mark.parametrize("trouble", ["no store", "another store", "down", "broken"])
def test_foresight_that_fails_gives_nothing(rig: Rig, trouble: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    rig.publish(1)
    rig.store.down = trouble == "down"

    def store() -> FlakyStore | None:
        if trouble == "broken":
            raise ZeroDivisionError("broken")
        return {"no store": None, "another store": FlakyStore(rig.blob.store)}.get(trouble, rig.store)

    assert Foresight(store, FOLDER).take(rig.store, FOLDER) == ()
    assert ("nothing foreseen" in caplog.text) == (trouble in ("down", "broken"))


def test_a_store_that_hangs_is_not_waited_for(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foresight, "_PATIENCE", 0.1)
    heads = opened_heads(monkeypatch)
    rig.publish(1)
    rig.store.hold()
    look = Foresight(lambda: rig.store, FOLDER)
    assert look.take(rig.store, FOLDER) == ()
    rig.store.release()
    until(lambda: [head._source._closed for head in heads] == [True])


def test_foresight_that_nobody_wants_leaves_nothing_open(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.publish(1)
    heads = opened_heads(monkeypatch)
    rig.store.hold()
    look = Foresight(lambda: rig.store, FOLDER)
    until(lambda: rig.store.reads)
    look.close()  # at once, though the store does not answer
    rig.store.release()
    until(lambda: [head._source._closed for head in heads] == [True])


def test_what_is_not_taken_is_closed_after_a_while(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server that was told waits on, when the tree is served already."""
    monkeypatch.setattr(foresight, "_KEPT", 0.1)
    rig.publish(1)
    heads = opened_heads(monkeypatch)
    look = Foresight(lambda: rig.store, FOLDER)
    until(lambda: [head._source._closed for head in heads] == [True])
    assert heads[0]._coming is None
    assert look.take(rig.store, FOLDER) == ()


def opened_heads(monkeypatch: pytest.MonkeyPatch) -> list[Head]:
    """All that are made from now on."""
    made: list[Head] = []
    begin = Head.__init__

    def noted(self: Head, source: StoreSource, size: int, length: int) -> None:
        begin(self, source, size, length)
        made.append(self)

    monkeypatch.setattr(Head, "__init__", noted)
    return made
