"""Packing: the packs give back every block; the same input gives the same bytes; what is known is not stored again."""

from __future__ import annotations

import contextlib
import gc
import random
import threading
import time
import weakref
from collections.abc import Iterable
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from bootseer.blocks import tree
from bootseer.blocks.metadata import localize
from bootseer.blocks.publish.dedup import KnownBlocks
from bootseer.blocks.publish.packs import Packed, PackWriter
from bootseer.blocks.publish.tree import TreeWriter
from bootseer.chunks import hashing
from bootseer.chunks.blockmap import BlockMap, ObjectRef, encoded_size
from bootseer.chunks.frames import verified
from bootseer.chunks.zstd import compress, decompress, unpack
from bootseer.errors import DataError, FullError, NotFoundError, UnavailableError
from bootseer.objects.folder import FolderStore
from support import lazy
from support.stores import FlakyStore

BLOCK = 4096


def noise(blocks: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(blocks * BLOCK)


class Bench:
    """Packs data in memory's reach: what was put, by digest."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.packs: dict[str, bytes] = {}

    def put(self, path: Path, ref: ObjectRef) -> None:
        raw = path.read_bytes()
        assert (hashing.hexdigest(raw), len(raw)) == (ref.digest, ref.size)
        self.packs[ref.digest] = raw

    def pack(
        self, *layers: bytes, dead: Iterable[tuple[int, int]] = (), piece: int = 1 << 30, **more: object
    ) -> Packed:
        with PackWriter(self.folder, self.put, block_size=BLOCK, **more) as out:  # type: ignore[arg-type]
            for number, layer in enumerate(layers):
                if number:
                    out.next_pack()
                for start in range(0, len(layer), piece):
                    out.write(layer[start : start + piece])
            packed = out.finish(dead)
        assert list(self.folder.iterdir()) == [], "packs are removed when they are put"
        return packed

    def read(self, blocks: BlockMap) -> bytes:
        parts = []
        for block in range(blocks.count):
            frame = b""
            if blocks.lengths[block]:
                start = blocks.offsets[block]
                frame = self.packs[blocks.packs[blocks.pack_of[block]].digest][start : start + blocks.lengths[block]]
            length = blocks.length_of(block)
            parts.append(decompress(frame, length) if frame else bytes(length))
            assert blocks.matches(block, parts[-1])
        return b"".join(parts)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 50 * 4096 + 17, (1 << 20) - 1, (1 << 20) + 4097])
def test_every_block_comes_back(bench: Bench, size: int) -> None:
    data = lazy.content(size)
    packed = bench.pack(data, threads=3)
    assert packed.map.size == size
    assert bench.read(packed.map) == data
    assert packed.stored == sum(pack.size for pack in packed.map.packs) == sum(map(len, bench.packs.values()))


@given(st.lists(st.binary(max_size=9000), max_size=8), st.integers(1, 5000), st.integers(200, 20_000))
def test_whatever_the_pieces_and_packs(
    tmp_path_factory: pytest.TempPathFactory, layers: list[bytes], piece: int, limit: int
) -> None:
    bench = Bench(tmp_path_factory.mktemp("packs"))
    packed = bench.pack(*layers, piece=piece, pack_limit=limit, threads=2)
    whole = b"".join(layer + bytes(-len(layer) % BLOCK) for layer in layers[:-1]) + (layers[-1] if layers else b"")
    assert bench.read(packed.map) == whole


def test_deterministic_whatever_the_threads(bench: Bench) -> None:
    layers = [lazy.content(700 * BLOCK, seed=seed) for seed in (1, 2, 1)]
    one = bench.pack(*layers, threads=1)
    packs = dict(bench.packs)
    for threads in (2, 8):
        assert bench.pack(*layers, threads=threads, piece=10_000).map.encode() == one.map.encode()
    assert bench.packs == packs


def test_zero_blocks_store_nothing(bench: Bench) -> None:
    packed = bench.pack(bytes(10 * BLOCK + 5))
    assert packed.map.packs == ()
    assert bench.packs == {}
    assert all(packed.map.is_zero(block) for block in range(11))


def test_equal_blocks_are_stored_once(bench: Bench) -> None:
    data = lazy.content(40 * BLOCK, zeros=0)
    packed = bench.pack(data + data, data)
    assert len(packed.map.packs) == 1, "the second layer has nothing of its own"
    assert packed.stored == bench.pack(data).stored
    assert bench.read(packed.map) == data * 3


def test_equal_layers_give_equal_packs(bench: Bench) -> None:
    base, one, two = (lazy.content(40 * BLOCK + 100, seed=seed, zeros=0) for seed in (1, 2, 3))
    first, second = bench.pack(base, one), bench.pack(base, two)
    assert first.map.packs[0] == second.map.packs[0]
    assert first.map.packs[1] != second.map.packs[1]


def test_a_pack_ends_at_its_limit(bench: Bench) -> None:
    data = random.Random(1).randbytes(100 * BLOCK)
    packed = bench.pack(data, pack_limit=10 * (BLOCK + 100))
    assert len(packed.map.packs) == 10
    assert all(pack.size <= 10 * (BLOCK + 100) for pack in packed.map.packs)
    assert bench.read(packed.map) == data


def test_dead_blocks_become_zeros_and_dead_packs_disappear(bench: Bench) -> None:
    first, second = (noise(20, seed) for seed in (1, 2))
    tail = b"tail"
    dead = [(0, 20 * BLOCK), (20 * BLOCK + 1, 3 * BLOCK), (39 * BLOCK, BLOCK + 4)]
    packed = bench.pack(first, second + tail, dead=dead)
    zeroed = {*range(20), 21, 22, 39, 40}
    assert {block for block in range(41) if packed.map.is_zero(block)} == zeroed
    assert len(packed.map.packs) == 1, "nothing refers to the first layer's pack"
    whole = first + second + tail
    read = bench.read(packed.map)
    for block in range(41):
        start = block * BLOCK
        assert read[start : start + BLOCK] == (
            bytes(len(whole[start : start + BLOCK])) if block in zeroed else whole[start : start + BLOCK]
        )


def test_align_and_position(bench: Bench) -> None:
    with PackWriter(bench.folder, bench.put, block_size=BLOCK) as out:
        out.write(b"x" * 5)
        assert out.position == 5
        out.align()
        assert out.position == BLOCK
        out.align()
        assert out.position == BLOCK
        out.write(memoryview(bytearray(b"y")))
        packed = out.finish()
    assert bench.read(packed.map) == b"x" * 5 + bytes(BLOCK - 5) + b"y"


def test_what_put_raises_comes_out_and_every_thread_ends(bench: Bench) -> None:
    def fail(path: Path, ref: ObjectRef) -> None:
        raise UnavailableError("the store is gone")

    before = threading.active_count()
    with PackWriter(bench.folder, fail) as out:
        out.write(b"x")
        with pytest.raises(UnavailableError, match="the store is gone"):
            out.finish()
    assert threading.active_count() == before


@pytest.mark.parametrize("fails", [False, True])
def test_a_writer_that_has_ended_holds_no_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """Nor its buffers: not until garbage is collected, as a store has connections open."""

    def publish() -> weakref.ref[FolderStore]:
        store = FolderStore(tmp_path / "store")
        (tmp_path / "meta").write_bytes(b"meta")
        (tmp_path / "data").write_bytes(noise(9, 1))
        with pytest.raises(UnavailableError) if fails else contextlib.nullcontext():
            tree.publish(store, tmp_path / "meta", tmp_path / "data", block_size=BLOCK)
        return weakref.ref(store)

    def fail(self: FolderStore, key: str, data: bytes | Path, **more: bool) -> bool:
        raise UnavailableError("the store is gone")

    if fails:
        monkeypatch.setattr(FolderStore, "put", fail)
    gc.disable()
    try:
        assert publish()() is None
    finally:
        gc.enable()


def test_metadata_is_put_beside_the_last_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, put, others, beside = FolderStore(tmp_path / "store"), FolderStore.put, list[str](), threading.Event()

    def slow(self: FolderStore, key: str, data: bytes | Path, **more: bool) -> bool:
        if isinstance(data, Path):
            assert beside.wait(20)
            assert len(others) == 2  # metadata and map
        else:
            others.append(key)
        return put(self, key, data, **more)

    monkeypatch.setattr(FolderStore, "put", slow)
    (tmp_path / "work").mkdir()
    with TreeWriter(store, tmp_path / "work") as out:
        out.packs.write(noise(9, 1))
        made = out.seal(b"meta", beside=beside.set)
    assert others[2] == f"trees/{made.digest}.json"


def test_a_full_work_folder_is_one_clear_error(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOOTSEER_FAULTS", "pack.end=enospc")
    with pytest.raises(FullError, match="write a pack to"):
        bench.pack(b"x")


def test_packs_in_the_work_folder_are_bounded(tmp_path: Path) -> None:
    go = threading.Event()
    most = [0]

    def put(path: Path, ref: ObjectRef) -> None:
        assert go.wait(20)

    def watch() -> None:
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            with contextlib.suppress(FileNotFoundError):
                most[0] = max(most[0], sum(path.stat().st_size for path in tmp_path.iterdir()))
        go.set()

    limit = 1 << 20
    watcher = threading.Thread(target=watch)
    watcher.start()
    with PackWriter(tmp_path, put, block_size=BLOCK, pack_limit=limit) as out:
        out.write(noise(12 * limit // BLOCK, 1))
        out.finish()
    watcher.join()
    assert limit < most[0] <= 4 * limit


def test_too_many_packs_are_refused(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bootseer.blocks.publish.spool.MAX_PACKS", 3)
    bench.pack(noise(1, 1), noise(1, 2), noise(1, 3))
    with pytest.raises(DataError, match="more than 3 packs"):
        bench.pack(*(noise(1, seed) for seed in range(4)))


def test_what_could_never_be_mounted_is_refused(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bootseer.blocks.publish.packs.MAX_ENCODED", encoded_size(256, 1))
    assert len(bench.pack(noise(256, 1)).map.encode()) == encoded_size(256, 1)
    with pytest.raises(DataError, match="too large"):
        bench.pack(noise(257, 1))


def test_a_work_folder_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="write a pack to"):
        Bench(tmp_path / "absent").pack(b"x")


class Published:
    """Trees in a folder store, packed with what the store knows already."""

    def __init__(self, folder: Path) -> None:
        self.store = FolderStore(folder / "store")
        self.folder = folder / "work"
        self.folder.mkdir()

    def publish(self, data: bytes, *known: str) -> str:
        blocks = KnownBlocks.of_trees(self.store, known, BLOCK)
        with TreeWriter(self.store, self.folder, block_size=BLOCK, known=blocks) as out:
            out.packs.write(data)
            self.ref = out.seal(b"meta of %d" % len(data))
        return self.ref.digest

    def stored(self) -> int:
        return sum(info.size for info in self.store.list("blobs"))


def test_blocks_of_other_trees_are_not_stored_again(tmp_path: Path) -> None:
    trees = Published(tmp_path)
    shared, news = (lazy.content(60 * BLOCK, seed=seed, zeros=0) for seed in (1, 2))
    first = trees.publish(shared)
    before = trees.stored()
    trees.publish(shared + news, first)
    assert trees.ref.shared > 0
    second = trees.ref.digest
    assert trees.stored() - before == pytest.approx(before, rel=0.5), "only the news"
    packs = [path for path in trees.store.root.glob("blobs/*/*") if path.stat().st_size > 50_000]
    assert len(packs) == 2
    trees.publish(news + shared, second, first)
    assert len([path for path in trees.store.root.glob("blobs/*/*") if path.stat().st_size > 50_000]) == 2


def test_a_store_is_told_which_packs_of_others_are_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[str] = []
    trees = Published(tmp_path)
    monkeypatch.setattr(trees.store, "keep", kept.append)
    first = trees.publish(noise(20, 1))
    assert kept == []
    trees.publish(noise(20, 1) + noise(5, 2), first)
    (pack,) = localize(trees.store, first, tmp_path / "cache").map.packs
    assert kept == [pack.key]


@pytest.mark.parametrize("how", ["gone", "short"])
def test_a_lost_pack_is_not_shared(tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str) -> None:
    trees = Published(tmp_path)
    data = lazy.content(60 * BLOCK, zeros=0)
    first = trees.publish(data)
    pack = max(trees.store.root.glob("blobs/*/*"), key=lambda path: path.stat().st_size)
    raw = pack.read_bytes()
    pack.unlink() if how == "gone" else pack.write_bytes(raw[:-1])
    trees.publish(data + b"more", first)
    assert trees.ref.shared == 0
    assert caplog.text.count("stored again") == 1, "asked once for each pack"


@pytest.mark.parametrize("length", [None, 17])
def test_a_map_that_lies_about_a_pack_is_not_believed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, length: int | None
) -> None:
    trees = Published(tmp_path)
    data, other = noise(20, 1), noise(20, 2)
    first, second = trees.publish(data), trees.publish(other)
    wanted = localize(trees.store, first, tmp_path / "cache").map
    there = localize(trees.store, second, tmp_path / "cache").map
    lengths = [length] * there.count if length else there.lengths
    lie = BlockMap(BLOCK, there.size, there.packs, wanted.hashes, there.offsets, lengths, there.pack_of)
    known = KnownBlocks(trees.store)
    known.add(lie, BLOCK)
    assert known.proven([wanted.hash_of(3)]) == {}
    assert known.proven([wanted.hash_of(4)]) == {}
    assert caplog.text.count("is damaged") == 1
    known = KnownBlocks(trees.store)
    known.add(wanted, BLOCK)
    assert list(known.proven([wanted.hash_of(3)])) == [wanted.hash_of(3)]


def readable(trees: Published, digest: str, cache: Path) -> bytes:
    """The data of a tree, each block of it read from its pack."""
    blocks = localize(trees.store, digest, cache, meta=False).map
    frames = (
        trees.store.get(blocks.packs[pack].key, most=1 << 30)[offset : offset + length]
        for pack, offset, length in zip(blocks.pack_of, blocks.offsets, blocks.lengths, strict=True)
    )
    return b"".join(verified(blocks, block, frame) for block, frame in enumerate(frames))


@pytest.mark.parametrize("block", [0, 7, 19])
def test_a_damaged_frame_of_a_shared_pack_is_stored_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, block: int
) -> None:
    trees = Published(tmp_path)
    data = noise(20, 1)
    first = trees.publish(data)
    blocks = localize(trees.store, first, tmp_path / "cache").map
    pack = trees.store.root / blocks.packs[0].key
    raw = bytearray(pack.read_bytes())
    raw[blocks.offsets[block] + blocks.lengths[block] // 2] ^= 1
    pack.write_bytes(raw)
    second = trees.publish(data + noise(3, 2), first)
    assert readable(trees, second, tmp_path / "cache") == data + noise(3, 2)
    assert caplog.text.count("is damaged") == 1


def test_of_shared_packs_only_the_frames_that_are_shared_are_read(tmp_path: Path) -> None:
    trees = Published(tmp_path)
    first = trees.publish(noise(600, 1))
    flaky = FlakyStore(trees.store)
    known = KnownBlocks.of_trees(flaky, [first], BLOCK)
    flaky.reads.clear()
    with TreeWriter(flaky, tmp_path / "work", block_size=BLOCK, known=known) as out:
        out.packs.write(noise(600, 1)[: 300 * BLOCK] + noise(5, 2))
        ref = out.seal(b"meta")
    assert sum(length for _, _, length in flaky.reads) == ref.shared
    assert len(flaky.reads) == 2, "one read for the neighbours of a batch"


def test_known_blocks_are_looked_at_for_a_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trees = Published(tmp_path)
    digests = [trees.publish(noise(20, seed)) for seed in range(3)]
    monkeypatch.setattr("bootseer.blocks.publish.dedup._SECONDS", -1.0)
    with caplog.at_level("INFO"):
        assert len(KnownBlocks.of_trees(trees.store, digests, BLOCK)) == 0
    assert "blocks of 0 trees are looked for" in caplog.text


def test_a_store_that_fails_costs_sharing_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trees = Published(tmp_path)
    data = lazy.content(20 * BLOCK, zeros=0)
    digest = trees.publish(data)
    assert trees.publish(data, "f" * 64, "nonsense") == digest
    assert caplog.text.count("are not shared") == 2


def test_maps_of_another_block_size_are_of_no_use(tmp_path: Path) -> None:
    trees = Published(tmp_path)
    digest = trees.publish(lazy.content(20 * BLOCK, zeros=0))
    assert len(KnownBlocks.of_trees(trees.store, [digest], BLOCK)) == 20
    assert len(KnownBlocks.of_trees(trees.store, [digest], 2 * BLOCK)) == 0


def test_the_index_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trees = Published(tmp_path)
    digests = [trees.publish(noise(20, seed)) for seed in range(3)]
    assert len(KnownBlocks.of_trees(trees.store, digests, BLOCK)) == 60
    monkeypatch.setattr("bootseer.blocks.publish.dedup.MAX_TREES", 2)
    assert len(KnownBlocks.of_trees(trees.store, digests, BLOCK)) == 40
    monkeypatch.setattr("bootseer.blocks.publish.dedup.MAX_MAP_BYTES", 1500)
    assert len(KnownBlocks.of_trees(trees.store, digests, BLOCK)) == 20


BAD_FRAMES = {
    "empty": b"",
    "noise": b"x",
    "magic alone": b"\x28\xb5\x2f\xfd",
    "zeros": bytes(40),
    "promises too much": compress(bytes(64 << 20), 3),
    "without a size": zstandard.ZstdCompressor(write_content_size=False).compress(b"x" * 4096),
    "cut": compress(lazy.content(4096, zeros=0), 3)[:-1],
}


@pytest.mark.parametrize("frame", BAD_FRAMES.values(), ids=BAD_FRAMES)
def test_garbage_is_refused(frame: bytes) -> None:
    with pytest.raises(DataError):
        decompress(frame, 4096)


@pytest.mark.parametrize("size", [0, 1, 5_000_000])
def test_a_frame_piece_by_piece(size: int) -> None:
    data = random.Random(size).randbytes(size)
    frame = compress(data, 3)
    assert b"".join(unpack(frame, size)) == data
    # Of nothing, half a frame is as good as a whole one.
    cut = [(frame[:-1], size)] if size else []
    for bad, length in (*cut, (frame, size + 1), (b"garbage", size), (b"", size)):
        with pytest.raises(DataError):
            b"".join(unpack(bad, length))
