"""Hot packs: the format, hostile ones, making, publishing, retiring."""

from __future__ import annotations

import struct
import threading
import time
from array import array
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.blocks.formats import hotpack
from bootseer.blocks.formats.hotpack import HotPack
from bootseer.blocks.profiles import hotpack_builder, library
from bootseer.blocks.profiles.library import StoredPack, Target
from bootseer.chunks import hashing
from bootseer.chunks.blockmap import BlockMap, ObjectRef
from bootseer.chunks.cachefile import CacheFile
from bootseer.chunks.frames import opened
from bootseer.errors import DataError, FullError
from support import lazy
from support.stores import FlakyStore

TREE = "ab" * 32
COUNT = 40
GOLDEN = Path(__file__).parents[1] / "golden" / "blocks"
FOLDER = f"profiles/{TREE}/train"


@pytest.fixture(scope="module")
def blob(tmp_path_factory: pytest.TempPathFactory) -> lazy.LazyBlob:
    return lazy.make(tmp_path_factory.mktemp("blob"), lazy.content(COUNT * 4096 - 9))


@pytest.fixture
def cache(blob: lazy.LazyBlob, tmp_path: Path) -> Iterator[CacheFile]:
    with blob.open_cache(tmp_path / "cache") as cache:
        for block in range(COUNT):
            if not blob.map.is_zero(block):
                cache.write(block, blob.content[block * 4096 : (block + 1) * 4096])
        yield cache


def map_digest(blocks: BlockMap) -> str:
    return hashing.hexdigest(blocks.encode())


def real(blocks: BlockMap) -> list[int]:
    return [block for block in range(COUNT) if not blocks.is_zero(block)]


def sample(blocks: BlockMap, order: list[int] | None = None, created: int = 5, *, per_frame: int = 4) -> HotPack:
    numbers = order if order is not None else real(blocks)[::-2]
    lengths = array("I", [50] * -(-len(numbers) // per_frame))
    return HotPack(TREE, map_digest(blocks), created, 4096, array("I", numbers), lengths, per_frame)


def decode(raw: bytes, blocks: BlockMap, size: int | None = None) -> HotPack:
    return HotPack.decode(raw, len(raw) if size is None else size, TREE, map_digest(blocks), blocks)


def golden_map() -> BlockMap:
    frames = [100] * 9
    return BlockMap(
        65536, 9 * 65536, [ObjectRef("ab" * 32, 900)], [bytes(32)] * 9, [100 * at for at in range(9)], frames
    )


def test_golden_file() -> None:
    pack = HotPack(TREE, "cd" * 32, 1700000000, 65536, array("I", [7, 3, 1, 8, 0]), array("I", [100, 65552, 7]), 2)
    raw = (GOLDEN / "hotpack-v2.bin").read_bytes()
    assert pack.encode() == raw
    assert HotPack.decode(raw, pack.size, TREE, "cd" * 32, golden_map()) == pack
    assert pack.base == len(raw) == 120 + 20 + 12 + 32


@given(data=st.data())
def test_round_trip(blob: lazy.LazyBlob, data: st.DataObject) -> None:
    order = data.draw(st.permutations(real(blob.map)))[: data.draw(st.integers(0, COUNT))]
    pack = sample(blob.map, list(order), per_frame=data.draw(st.integers(1, 50)))
    raw = pack.encode()
    assert decode(raw + b"frames", blob.map, pack.size) == pack


def test_truncation_is_refused(blob: lazy.LazyBlob) -> None:
    pack = sample(blob.map)
    for size in (pack.size - 1, pack.size + 1, 0):
        with pytest.raises(DataError, match="its index says"):
            decode(pack.encode(), blob.map, size)


@pytest.mark.parametrize("kind", ["twice", "beyond", "zero block", "no frame", "long frame"])
def test_sealed_entries_that_cannot_be_are_refused(blob: lazy.LazyBlob, kind: str) -> None:
    zero = next(block for block in range(COUNT) if blob.map.is_zero(block))
    one = real(blob.map)[0]
    entries = {
        "twice": [(one, 9), (one, 9)],
        "beyond": [(COUNT, 9)],
        "zero block": [(zero, 9)],
        "no frame": [(one, 0)],
        "long frame": [(one, 1 << 20)],
    }[kind]
    blocks, lengths = zip(*entries, strict=True)
    pack = sample(blob.map, list(blocks), per_frame=1)
    pack = msgspec.structs.replace(pack, lengths=array("I", lengths))
    with pytest.raises(DataError, match="not possible"):
        decode(pack.encode(), blob.map, pack.size)


@pytest.mark.parametrize("per_frame", [0, hotpack.MAX_FRAME // 4096 + 1, (1 << 32) - 1])
def test_frames_of_an_absurd_size_are_refused(blob: lazy.LazyBlob, per_frame: int) -> None:
    """Sealed ones: who made the pack may want us to give it our memory."""
    raw = bytearray(sample(blob.map).encode())
    struct.pack_into("<I", raw, 96, per_frame)
    end = hotpack.index_size(len(sample(blob.map).blocks), per_frame) - 32 if per_frame else len(raw) - 32
    raw[end:] = hashing.digest(bytes(raw[:end]))
    with pytest.raises(DataError, match="blocks in a frame"):
        decode(bytes(raw), blob.map)


@pytest.mark.parametrize("change", [{"tree": "ef" * 32}, {"map": "ef" * 32}, {"block_size": 8192}])
def test_a_pack_of_another_tree_is_refused(blob: lazy.LazyBlob, change: dict[str, object]) -> None:
    pack = msgspec.structs.replace(sample(blob.map), **change)
    with pytest.raises(DataError, match="another tree"):
        decode(pack.encode(), blob.map, pack.size)


def test_an_absurd_count_allocates_nothing(blob: lazy.LazyBlob) -> None:
    raw = bytearray(sample(blob.map).encode())
    struct.pack_into("<Q", raw, 16, 1 << 60)
    with pytest.raises(DataError, match="blocks"):
        decode(bytes(raw), blob.map)


def build(cache: CacheFile, path: Path, order: list[int], created: int = 5) -> HotPack | None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hotpack_builder, "_SHARE", 1.0)
        return make(cache, order, path, created=created)


def make(
    cache: CacheFile,
    order: list[int],
    path: Path,
    *,
    created: int = 1,
    stop: threading.Event | None = None,
    hurry: threading.Event | None = None,
) -> HotPack | None:
    stop, hurry = stop or threading.Event(), hurry or threading.Event()
    target = Target(TREE, map_digest(cache.map), cache.map)
    return hotpack_builder.build(cache, order, path, target, created=created, stop=stop, hurry=hurry)


def test_a_built_pack_holds_the_blocks(cache: CacheFile, tmp_path: Path) -> None:
    order = [*real(cache.map)[::-3], *real(cache.map)[:5], *range(3)]
    pack = build(cache, tmp_path / "hot", order)
    assert pack is not None
    zeros = [block for block in range(3) if cache.map.is_zero(block)]
    assert list(pack.blocks) == sorted(block for block in dict.fromkeys(order) if block not in zeros)
    raw = (tmp_path / "hot").read_bytes()
    assert decode(raw, cache.map) == pack
    at, found = pack.base, []
    for number, length in enumerate(pack.lengths):
        inside = pack.blocks[number * pack.per_frame : (number + 1) * pack.per_frame]
        runs, bad = opened(cache.map, inside, inside, raw[at : at + length])
        assert not bad
        found += [block for first, count, _ in runs for block in range(first, first + count)]
        at += length
    assert found == list(pack.blocks)
    assert at == len(raw)


def test_the_blocks_of_a_frame_are_in_the_order_of_the_file(
    cache: CacheFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hotpack_builder, "_FRAME", 4 * 4096)
    order = real(cache.map)[::-1][:10]
    pack = build(cache, tmp_path / "hot", order)
    assert pack is not None
    assert list(pack.blocks) == [*sorted(order[:4]), *sorted(order[4:8]), *sorted(order[8:])]
    assert (pack.per_frame, len(pack.lengths)) == (4, 3)


def test_who_is_in_a_hurry_gets_a_larger_pack_soon(
    cache: CacheFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hotpack_builder, "_FRAME", 4096)
    levels: list[int] = []
    hurry = threading.Event()

    def noted(data: bytes, level: int) -> bytes:
        levels.append(level)
        if len(levels) == 3:
            hurry.set()
        return b"x"

    monkeypatch.setattr(hotpack_builder, "compress", noted)
    path = tmp_path / "hot"
    order = real(cache.map)[:6]
    assert make(cache, order, path, hurry=hurry)
    assert levels == [hotpack_builder.LEVEL] * 3 + [hotpack_builder.QUICK_LEVEL] * 3


def test_what_is_not_in_the_cache_is_left_out(blob: lazy.LazyBlob, tmp_path: Path) -> None:
    first, second = real(blob.map)[:2]
    with blob.open_cache(tmp_path / "cache") as cache:
        assert build(cache, tmp_path / "hot", [first, second]) is None
        cache.write(second, blob.content[second * 4096 : (second + 1) * 4096])
        pack = build(cache, tmp_path / "hot", [first, second])
        assert pack is not None
        assert list(pack.blocks) == [second]


def test_a_stopped_build_makes_no_pack(cache: CacheFile, tmp_path: Path) -> None:
    stop = threading.Event()
    stop.set()
    assert make(cache, real(cache.map), tmp_path / "hot", stop=stop) is None


def test_a_build_rests_most_of_the_time(cache: CacheFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(data: bytes, level: int) -> bytes:
        time.sleep(0.01)
        return b"x"

    monkeypatch.setattr(hotpack_builder, "compress", slow)
    monkeypatch.setattr(hotpack_builder, "_FRAME", 4096)
    began = time.monotonic()
    assert make(cache, real(cache.map)[:5], tmp_path / "hot")
    assert time.monotonic() - began >= 0.2


def test_a_damaged_cache_makes_no_pack(cache: CacheFile, tmp_path: Path) -> None:
    block = real(cache.map)[3]
    with open(cache.folder / "data", "r+b") as file:
        file.seek(block * 4096)
        file.write(b"other")
    with pytest.raises(DataError, match=f"block {block} in the cache"):
        build(cache, tmp_path / "hot", real(cache.map))


def test_no_space_is_said(cache: CacheFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> bytes:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hotpack_builder, "compress", full)
    with pytest.raises(FullError):
        build(cache, tmp_path / "hot", real(cache.map))


class Shelf:
    """Publishes packs of one job."""

    def __init__(self, cache: CacheFile, store: FlakyStore, work: Path) -> None:
        self.cache = cache
        self.store = store
        self.work = work

    def publish(self, created: int, order: list[int] | None = None) -> str:
        path = self.work / f"hot-{created}"
        pack = build(self.cache, path, order or real(self.cache.map), created)
        assert pack is not None
        target = Target(TREE, map_digest(self.cache.map), self.cache.map)
        return hotpack_builder.publish(self.store, FOLDER, path, pack, target)

    def names(self) -> list[str]:
        return [info.key for info in self.store.list(FOLDER)]

    def load(self) -> StoredPack | None:
        return library.newest_pack(self.store, FOLDER, Target(TREE, map_digest(self.cache.map), self.cache.map))


@pytest.fixture
def shelf(cache: CacheFile, blob: lazy.LazyBlob, tmp_path: Path) -> Shelf:
    work = tmp_path / "work"
    work.mkdir()
    return Shelf(cache, FlakyStore(type(blob.store)(tmp_path / "store")), work)


def test_the_newer_pack_replaces_the_older(shelf: Shelf) -> None:
    old = shelf.publish(1)
    assert shelf.names() == [old]
    new = shelf.publish(2)
    assert shelf.names() == [new]
    found = shelf.load()
    assert found is not None
    assert (found.key, found.pack.created) == (new, 2)


def test_many_nodes_will_read_the_pack(shelf: Shelf, caplog: pytest.LogCaptureFixture) -> None:
    class Full(FlakyStore):
        asked: tuple[str, int] | None = None

        def replicate(self, key: str, copies: int) -> None:
            self.asked = (key, copies)
            raise FullError("quota exceeded")

    shelf.store = store = Full(shelf.store.inner)
    key = shelf.publish(1)
    assert store.asked == (key, 10)
    assert shelf.load() is not None, "it is there, if with fewer replicas"
    assert "stays at the replication of the store: quota exceeded" in caplog.text


def test_a_late_older_pack_removes_no_newer_one(shelf: Shelf) -> None:
    new = shelf.publish(2)
    old = shelf.publish(1)
    assert sorted(shelf.names()) == sorted([old, new])
    found = shelf.load()
    assert found is not None
    assert found.key == new


def test_a_pack_from_the_future_is_not_the_newest_for_ever(shelf: Shelf) -> None:
    future = shelf.publish(time.time_ns() + 365 * 86400 * 10**9)
    found = shelf.load()
    assert found is not None
    assert found.key == future, "better than none"
    new = shelf.publish(time.time_ns(), real(shelf.cache.map)[:5])
    assert shelf.names() == [new]
    found = shelf.load()
    assert found is not None
    assert found.key == new


def test_killed_between_publishing_and_retiring_there_is_a_pack(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf.publish(1)
    monkeypatch.setenv("BOOTSEER_FAULTS", "blocks.hotpack.before-retire=eio")
    with pytest.raises(OSError, match="Input/output"):
        shelf.publish(2)
    assert len(shelf.names()) == 2
    monkeypatch.delenv("BOOTSEER_FAULTS")
    found = shelf.load()
    assert found is not None
    assert found.pack.created == 2
    shelf.publish(3)
    assert len(shelf.names()) == 1


def test_bad_packs_are_passed_over_with_a_line(shelf: Shelf, caplog: pytest.LogCaptureFixture) -> None:
    good = shelf.publish(5)
    raw = shelf.store.get(good, most=1 << 30)
    foreign = msgspec.structs.replace(sample(shelf.cache.map), tree="ef" * 32).encode()
    for number, data in enumerate((raw[:-1], raw[:100], b"", foreign, b"noise" * 99)):
        shelf.store.put(f"{FOLDER}/hot-{number}.pack", data)
    shelf.store.put(f"{FOLDER}/other.trace", b"no pack at all")
    found = shelf.load()
    assert found is not None
    assert found.key == good
    assert caplog.text.count("ignoring hot pack") == 5


def test_a_store_that_is_down_costs_a_line(shelf: Shelf, caplog: pytest.LogCaptureFixture) -> None:
    shelf.publish(5)
    shelf.store.down = True
    assert shelf.load() is None
    assert "cannot look for a hot pack" in caplog.text


def test_a_large_index_comes_in_two_requests(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_FIRST_READ", 140)
    shelf.publish(5)
    shelf.store.reads.clear()
    found = shelf.load()
    assert found is not None
    assert [(offset, length) for _, offset, length in shelf.store.reads] == [(0, 140), (140, found.pack.base - 140)]
