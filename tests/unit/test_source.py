"""Sources: packs of a tree, opened late, again after a failure, and closed when nobody reads from them."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.backends import interface
from bootseer.blocks.fetch.source import StoreSource, read_block
from bootseer.blocks.serving.fetcher_process import NamedStores
from bootseer.blocks.serving.protocol import Users
from bootseer.chunks.blockmap import BlockMap, ObjectRef
from bootseer.errors import DataError, NotFoundError, UnavailableError
from bootseer.objects import Source, Store
from bootseer.objects.folder import FolderStore
from support import lazy
from support.stores import FlakyStore


class Counting(FlakyStore):
    """Counts how many readers are open."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.opened = 0
        self.closed = 0

    def open(self, key: str) -> Source:
        reader = super().open(key)
        self.opened += 1
        close = reader.close

        def counted() -> None:
            self.closed += 1
            close()

        reader.close = counted  # type: ignore[method-assign]
        return reader


@pytest.fixture
def store(tmp_path: Path) -> Counting:
    return Counting(FolderStore(tmp_path / "store"))


def packs(store: Store, count: int) -> BlockMap:
    refs = [ObjectRef(f"{number:02x}" * 32, 100) for number in range(count)]
    for number, ref in enumerate(refs):
        store.put(ref.key, bytes([number]) * 100)
    return BlockMap(4096, 0, refs, b"", [], [])


def test_a_store_that_a_mount_names_is_opened_once_whoever_asks(store: Counting) -> None:
    """Meanwhile nobody waits for it."""
    opened: list[str] = []
    begun, go = threading.Event(), threading.Event()

    def slowly(url: str) -> Store:
        opened.append(url)
        begun.set()
        assert go.wait(10)
        return store

    spec = SimpleNamespace(store_url=store.url, id="tree")
    users = msgspec.msgpack.encode(Users([], ["there", store.url]))
    named = NamedStores(spec, store, slowly, lambda: users)  # type: ignore[arg-type]
    first = threading.Thread(target=named)
    first.start()
    assert begun.wait(10)
    assert named() == [store]
    go.set()
    first.join()
    assert named() == [store, store]
    assert opened == ["there"]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(0, 20), st.integers(1, 90))
def test_a_store_that_cannot_stream_reads_pieces_together(lengths: list[int], offset: int, at_once: int) -> None:
    reads: list[int] = []

    class Reader(Source):
        size = 2000

        def read(self, offset: int, length: int) -> bytes:
            reads.append(length)
            return bytes(at % 251 for at in range(offset, offset + length))

        def close(self) -> None: ...

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interface, "_READ", at_once)
        pieces = list(Reader().pieces(offset, lengths))
    assert list(map(len, pieces)) == lengths
    assert b"".join(pieces) == bytes(at % 251 for at in range(offset, offset + sum(lengths)))
    assert all(length <= at_once or length in lengths for length in reads)
    assert all(one + other > at_once for one, other in itertools.pairwise(reads)), "together where they fit"


def test_pieces_that_are_left_in_the_middle_keep_nothing_open(store: Counting) -> None:
    store.put("object", bytes(range(100)))
    source = StoreSource(store, "object")
    pieces = source.pieces(0, 10, [5, 5])
    assert next(pieces) == bytes(range(10, 15))
    source.close()
    assert store.closed == 0
    pieces.close()
    assert store.closed == store.opened == 1


def test_pieces_of_another_length_are_none(store: Counting) -> None:
    store.put("object", bytes(100))
    source = StoreSource(store, "object")
    with pytest.raises(DataError):
        list(source.pieces(0, 90, [5, 6]))
    assert store.closed == 1, "opened again next time"
    source.close()


def test_packs_are_told_apart_and_opened_once(store: Counting) -> None:
    source = StoreSource(store, packs(store, 3))
    for _ in range(2):
        assert [source.read(pack, 7, 3) for pack in range(3)] == [b"\0" * 3, b"\1" * 3, b"\2" * 3]
    assert store.opened == 3
    source.close()
    assert store.closed == 3


def test_many_packs_do_not_take_all_descriptors(store: Counting) -> None:
    source = StoreSource(store, packs(store, 200))
    for pack in range(200):
        source.read(pack, 0, 1)
    assert store.opened - store.closed <= 64
    source.close()
    assert store.opened == store.closed


def test_a_failed_reader_is_replaced_and_closed(store: Counting) -> None:
    source = StoreSource(store, packs(store, 1))
    source.read(0, 0, 1)
    store.fail_next(1)
    with pytest.raises(UnavailableError):
        source.read(0, 0, 1)
    assert (store.opened, store.closed) == (1, 1)
    with pytest.raises(DataError):
        source.read(0, 99, 2)
    source.read(0, 0, 1)
    source.close()
    assert store.opened == store.closed == 3


def test_closing_leaves_a_reader_in_use_to_its_user(store: Counting) -> None:
    source = StoreSource(store, packs(store, 1))
    store.hold()
    found: list[bytes] = []
    thread = threading.Thread(target=lambda: found.append(source.read(0, 0, 4)))
    thread.start()
    while not store.reads:
        pass
    source.close()
    assert store.closed == 0
    store.release()
    thread.join(20)
    assert found == [bytes(4)]
    assert store.closed == 1
    source.close()
    assert store.closed == 1, "each once"


def test_a_missing_pack_is_said_to_be_missing(store: Counting) -> None:
    blocks = packs(store, 1)
    store.delete(blocks.packs[0].key)
    with pytest.raises(NotFoundError):
        StoreSource(store, blocks).read(0, 0, 1)


def test_a_damaged_block_comes_past_the_mirrors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blob = lazy.make(tmp_path / "blob", lazy.content(20 * 4096))
    block = next(block for block in range(20) if blob.map.lengths[block] > 4096)
    flipped = FlakyStore(blob.store)
    flipped.flip(blob.key, blob.map.offsets[block] + 2000)
    source = StoreSource(flipped, blob.map)
    counted: list[int] = []
    with pytest.raises(DataError, match="is damaged in"):
        read_block(source, blob.map, block, counted.append)
    monkeypatch.setattr(source, "original", StoreSource(blob.store, blob.map).read)
    assert read_block(source, blob.map, block, counted.append) == blob.content[block * 4096 : (block + 1) * 4096]
    assert counted == [blob.map.lengths[block]] * 3
    flipped.down = True
    with pytest.raises(UnavailableError):
        read_block(source, blob.map, block, counted.append)


def test_a_store_where_a_read_failed_comes_after_the_others(tmp_path: Path) -> None:
    blob = lazy.make(tmp_path / "blob", lazy.content(64 << 10))
    bad = FlakyStore(blob.store)
    source = StoreSource(blob.store, blob.map, lambda: [bad])
    bad.fail_next(9)
    with pytest.raises(UnavailableError):
        source.read(0, 0, 1)
    assert source.read(0, 0, 10) == blob.store.get(blob.key, most=1 << 20)[:10]
