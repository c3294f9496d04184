"""Hot packs that are looked for before the block map is known, and streams that begin with that request."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bootseer.blocks import _hash
from bootseer.blocks.cache.cache import CacheFile
from bootseer.blocks.fetcher import hotpack, hotsearch
from bootseer.blocks.fetcher.fetch import Fetcher
from bootseer.blocks.fetcher.hotsearch import Head, Opened
from bootseer.blocks.fetcher.hotstream import HotStream
from bootseer.blocks.fetcher.source import StoreSource
from bootseer.blocks.serving.foresight import Foresight
from bootseer.errors import UnavailableError
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


def test_a_first_range_is_as_long_as_it_is_said_to_be() -> None:
    class Nothing:
        name = "nothing"

        def pieces(self, offset: int, lengths: Sequence[int]) -> Iterator[bytes]:
            raise AssertionError

        def close(self) -> None: ...

    stream = HotStream(range(100), array("I", [100_000] * 100), 0, Nothing(), first=350_000)  # type: ignore[arg-type]
    batch = stream.take(lambda _: True)
    assert batch is not None
    assert batch.length == 400_000


# -- foresight -----------------------------------------------------------------------------------------------------


def test_foresight_finds_the_pack_of_its_job(rig: Rig) -> None:
    key = rig.publish(1)
    foresight = Foresight(lambda: rig.store, TREE, JOB)
    sights = foresight.take()
    assert sights is not None
    assert [sight.info.key for sight in sights] == [key]
    opened = hotsearch.choose(sights, TREE, rig.digest, rig.blob.map)
    assert opened is not None
    opened.source.close()
    assert Foresight(lambda: rig.store, TREE, "other").take() == []


@pytest.mark.parametrize("trouble", ["no store", "down", "broken"])
def test_foresight_that_fails_says_that_nobody_looked(rig: Rig, trouble: str) -> None:
    rig.publish(1)
    rig.store.down = trouble == "down"

    def store() -> FlakyStore | None:
        if trouble == "broken":
            raise ZeroDivisionError
        return None if trouble == "no store" else rig.store

    assert Foresight(store, TREE, JOB).take() is None


def test_foresight_that_nobody_wants_leaves_nothing_open(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.publish(1)
    closed = threading.Event()
    monkeypatch.setattr(Head, "close", lambda self: (self._source.close(), closed.set()))
    rig.store.hold()
    foresight = Foresight(lambda: rig.store, TREE, JOB)
    until(lambda: len(rig.store.reads) == 1)
    foresight.close()  # at once, though the store does not answer
    assert not closed.is_set()
    rig.store.release()
    assert closed.wait(5)
