"""Profiles: merging traces, publishing what is new, and shrugging off what is bad."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from bootseer import ranks
from bootseer.blocks.formats.trace import MAX_TOUCHES, UNIT, Touch, Trace
from bootseer.blocks.profiles import library
from bootseer.blocks.profiles.library import ProfileKey, owner_of
from bootseer.blocks.profiles.merge import HotUse, hot_use, merge
from bootseer.chunks import hashing
from bootseer.chunks.blockmap import BlockMap, ObjectRef
from bootseer.objects.folder import FolderStore
from support import lazy
from support.stores import FlakyStore

TREE = "cd" * 32
BLOCKS = 16
KEY = ProfileKey("train")


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path / "store")


@pytest.fixture(scope="module")
def blob(tmp_path_factory: pytest.TempPathFactory) -> lazy.LazyBlob:
    folder = tmp_path_factory.mktemp("blob")
    return lazy.make(folder, lazy.content(BLOCKS * 4 * UNIT, zeros=0), block_size=4 * UNIT)


def trace(*blocks: int, complete: bool = True, began: int = 0, step: int = 10) -> Trace:
    """Touches the second unit of each of ``blocks``, ``step`` ms apart."""
    touches = tuple(Touch(index * step, 1, block * 4 + 1, 1) for index, block in enumerate(blocks))
    return Trace(TREE, BLOCKS * 4 * UNIT, began, complete, touches)


def names(store: FolderStore) -> list[str]:
    return [info.key for info in store.list("profiles")]


def load(store: FolderStore, key: ProfileKey = KEY) -> list[Trace]:
    return library.load(store, TREE, key, BLOCKS * 4 * UNIT)


EIGHT = [trace(1, 2, began=run) for run in range(8)]


@pytest.mark.parametrize(
    ("runs", "order"),
    [
        pytest.param([trace(3, 1, 2), trace(3, 2, 1), trace(1, 3, 2)], [3, 1, 2], id="median first touch"),
        pytest.param([trace(9, 1, 2), trace(1, 2), trace(1, 2)], [1, 2, 9], id="what few touch comes last"),
        pytest.param([*EIGHT[:7], trace(1, 2, 9)], [1, 2, 9], id="one of eight"),
        pytest.param([*EIGHT, trace(1, 2, 9)], [1, 2], id="what hardly any touches is left out"),
        pytest.param([trace(1), trace(5, complete=False)], [1], id="incomplete beside a complete one"),
        pytest.param([trace(5, complete=False)], [5], id="incomplete alone"),
    ],
)
def test_merge(blob: lazy.LazyBlob, runs: list[Trace], order: list[int]) -> None:
    assert merge(runs, blob.map) == order


def test_a_touch_over_a_border_counts_for_both_blocks(blob: lazy.LazyBlob) -> None:
    wide = Trace(TREE, blob.map.size, 0, True, (Touch(0, 1, 3, 6),))
    assert merge([wide], blob.map) == [0, 1, 2]


def large_map(count: int = 2048) -> BlockMap:
    """Blocks of 64 KiB; 2,048 of them are 128 MiB."""
    pack = ObjectRef("ab" * 32, 10 * count)
    return BlockMap(65536, count * 65536, [pack], bytes(32 * count), range(0, 10 * count, 10), [10] * count)


def test_a_start_that_reads_most_of_a_tree_is_published(store: FolderStore) -> None:
    blocks = large_map()
    touches = tuple(Touch(block, 100 + block % 9, block * 16, 1) for block in range(blocks.count * 9 // 10))
    assert library.publish(store, KEY, Trace(TREE, blocks.size, 0, True, touches), blocks) == "published"


def test_a_start_of_a_scan_only_is_not_published_and_what_was_left_out_is_counted(store: FolderStore) -> None:
    blocks = large_map()
    only = Trace(TREE, blocks.size, 0, True, (), 1)
    assert library.publish(store, KEY, only, blocks) == "reads everything"
    beside = Trace(TREE, blocks.size, 0, True, (Touch(0, 8, 3, 1),), 1)
    assert library.publish(store, KEY, beside, blocks) == "published"
    assert [one.left_out for one in library.load(store, TREE, KEY, blocks.size)] == [1]


def test_waste_and_misses_are_counted(blob: lazy.LazyBlob) -> None:
    lengths = blob.map.lengths
    use = hot_use([1, 2, 3, 4], trace(2, 3, 9), blob.map)
    assert use.unused_bytes == lengths[1] + lengths[4]
    assert use.missed_bytes == lengths[9]
    assert hot_use([], trace(), blob.map) == HotUse()


def test_other_objects_beside_the_traces_are_no_traces(
    store: FolderStore, blob: lazy.LazyBlob, caplog: pytest.LogCaptureFixture
) -> None:
    library.publish(store, KEY, trace(1), blob.map)
    store.put(f"profiles/{TREE}/train/hot-{'0' * 64}.pack", b"x")
    assert load(store) == [trace(1)]
    assert caplog.text == ""


def test_published_traces_come_back(store: FolderStore, blob: lazy.LazyBlob) -> None:
    assert library.publish(store, KEY, trace(1, 2), blob.map) == "published"
    assert load(store) == [trace(1, 2)]
    (name,) = names(store)
    assert name == f"profiles/{TREE}/train/{hashing.hexdigest(trace(1, 2).encode())}.trace"


def test_an_incomplete_trace_never_joins_a_complete_one(store: FolderStore, blob: lazy.LazyBlob) -> None:
    assert library.publish(store, KEY, trace(1, complete=False), blob.map) == "published incomplete"
    assert library.publish(store, KEY, trace(1, 2), blob.map) == "published"
    assert library.publish(store, KEY, trace(7, complete=False), blob.map) == "not needed"
    assert merge(load(store), blob.map) == [1, 2]


def test_three_traces_are_enough_unless_there_is_news(store: FolderStore, blob: lazy.LazyBlob) -> None:
    for began in range(3):
        assert library.publish(store, KEY, trace(1, 2, began=began), blob.map) == "published"
    assert library.publish(store, KEY, trace(1, 2, began=9), blob.map) == "not needed"
    assert library.publish(store, KEY, trace(1, 2, 3), blob.map) == "published"
    assert len(names(store)) == 4


def test_one_a_day_is_news_and_takes_the_place_of_the_oldest(
    store: FolderStore, blob: lazy.LazyBlob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a profile would never forget what jobs no longer read."""
    monkeypatch.setattr(library, "MAX_TRACES", 3)
    day = int(library.DAY)
    for began in (2, 1, 3):
        library.publish(store, KEY, trace(1, 2, began=began), blob.map)
    assert library.publish(store, KEY, trace(1, began=day), blob.map) == "not needed"
    assert library.publish(store, KEY, trace(1, complete=False, began=day + 9), blob.map) == "not needed"
    assert library.publish(store, KEY, trace(1, began=day + 9), blob.map) == "published"
    assert sorted(one.began for one in load(store)) == [2, 3, day + 9]


def test_a_profile_does_not_grow_without_end(
    store: FolderStore, blob: lazy.LazyBlob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "MAX_TRACES", 4)
    for began in range(6):
        library.publish(store, KEY, trace(began, began=began), blob.map)
    assert len(names(store)) == 4


@pytest.mark.parametrize("name", ranks.NODE_RANKS)
def test_of_many_nodes_a_few_publish(name: str) -> None:
    assert [library.publishes({name: str(rank)}) for rank in range(1000)] == [True] * 8 + [False] * 992
    assert library.publishes({})
    assert library.publishes({name: "many"})


def test_nodes_publish_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry = threading.Event()
    waits: list[float | None] = []
    monkeypatch.setattr(hurry, "wait", waits.append)
    assert [library.await_turn({"SLURM_NODEID": rank}, hurry) for rank in ("0", "3", "8")] == [True, True, False]
    assert waits == [0, 3]


def test_traces_too_many_are_removed(store: FolderStore, blob: lazy.LazyBlob, monkeypatch: pytest.MonkeyPatch) -> None:
    for began in range(6):
        library.publish(store, KEY, trace(began, began=began), blob.map)
    monkeypatch.setattr(library, "MAX_TRACES", 4)
    read = load(store)
    assert library.trim(store, KEY.prefix(TREE)) == 2
    assert library.trim(store, KEY.prefix(TREE)) == 0
    assert load(store) == read, "those that nobody read are gone"


def test_nothing_touched_is_not_published(store: FolderStore, blob: lazy.LazyBlob) -> None:
    assert library.publish(store, KEY, trace(), blob.map) == "empty"
    assert names(store) == []


def test_another_job_falls_back_to_all(store: FolderStore, blob: lazy.LazyBlob) -> None:
    library.publish(store, KEY, trace(1), blob.map)
    library.publish(store, ProfileKey("eval"), trace(2), blob.map)
    assert load(store) == [trace(1)]
    assert sorted(touch.unit for found in load(store, ProfileKey("new")) for touch in found.touches) == [5, 9]


def test_profiles_of_other_owners_are_nobody_elses(store: FolderStore, blob: lazy.LazyBlob) -> None:
    """Whoever may name a profile for a service that mounts on behalf of users names none of others."""
    evil, alice = ProfileKey("default", owner_of(65534)), ProfileKey("train", owner_of(1000))
    library.publish(store, evil, trace(9), blob.map)
    assert [name.split("/")[1:4] for name in names(store)] == [["owned", TREE, "uid-65534"]]
    for key in (ProfileKey(), ProfileKey("new"), alice):
        assert load(store, key) == []
    assert load(store, ProfileKey("new", evil.owner)) == [trace(9)]
    library.publish(store, ProfileKey(), trace(1), blob.map)
    for key in (KEY, alice):
        assert load(store, key) == [trace(1)], "who has none uses those of who mounts for itself"
    library.publish(store, alice, trace(2), blob.map)
    assert load(store, alice) == [trace(2)]
    assert load(store) == [trace(1)]


def test_any_owner_is_a_safe_folder() -> None:
    assert owner_of(0) == ""
    for owner in ("..", "a/b", "../../etc", "x" * 100):
        assert ProfileKey("j", owner).prefix(TREE).startswith(f"profiles/owned/{TREE}/owner-")


def test_an_owner_has_a_budget_and_the_oldest_profiles_make_room(
    store: FolderStore, blob: lazy.LazyBlob, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    owner = owner_of(7)
    library.publish(store, ProfileKey("j0"), trace(1), blob.map)
    library.publish(store, ProfileKey("j0", owner_of(8)), trace(1), blob.map)
    others = set(names(store))
    for number in range(30):
        assert library.publish(store, ProfileKey(f"j{number}", owner), trace(1, began=number), blob.map) == "published"
    mine = {name.split("/")[4] for name in names(store) if f"/{owner}/" in name}
    assert mine == {f"j{number}" for number in range(30 - library.OWNED_PROFILES, 30)}
    assert "is deleted, to make room for" in caplog.text
    size = len(trace(1).encode())
    monkeypatch.setattr(library, "SMALL_TREE", sum(blob.map.lengths) + 3 * size)
    key = ProfileKey("large", owner)
    budget = library.SMALL_TREE
    store.put(f"{key.prefix(TREE)}/hot-{'0' * 64}.pack", bytes(budget - 2 * size))
    assert library.publish(store, key, trace(2, began=99), blob.map) == "published"
    assert sum(info.size for info in store.list(key.all_of(TREE))) <= budget
    assert library.publish(store, key, trace(3, 4, 5, began=100), blob.map) == "over budget"
    assert others <= set(names(store)), "nobody else pays"


@pytest.mark.parametrize(
    ("job", "folder"),
    [("", "default"), ("default", "default"), ("llama-7b_v1.2", "llama-7b_v1.2"), ("..", None), ("a/b", None)],
)
def test_any_job_name_is_a_safe_folder(job: str, folder: str | None) -> None:
    found = ProfileKey(job).folder
    assert found == folder if folder else found.startswith("job-")
    assert "/" not in found


def test_bad_traces_are_ignored_with_a_line(
    store: FolderStore, blob: lazy.LazyBlob, caplog: pytest.LogCaptureFixture
) -> None:
    library.publish(store, KEY, trace(1), blob.map)
    base = f"profiles/{TREE}/train"
    good = trace(2).encode()
    flipped = good[:80] + bytes([good[80] ^ 1]) + good[81:]
    foreign = msg(trace(3), tree="ef" * 32)
    small = msg(trace(3), size=BLOCKS * 4 * UNIT + UNIT)
    store.put(f"{base}/{'0' * 64}.trace", good)
    for raw in (flipped, foreign, small, b"", b"noise"):
        store.put(f"{base}/{hashing.hexdigest(raw)}.trace", raw)
    big = bytes(200 + 20 * MAX_TOUCHES)
    store.put(f"{base}/{hashing.hexdigest(big)}.trace", big)
    assert load(store) == [trace(1)]
    assert caplog.text.count("ignoring trace") == 7


def msg(base: Trace, **change: object) -> bytes:
    fields = {name: getattr(base, name) for name in base.__struct_fields__}
    return Trace(**{**fields, **change}).encode()  # type: ignore[arg-type]


def test_a_store_that_is_down_costs_a_line_only(
    store: FolderStore, blob: lazy.LazyBlob, caplog: pytest.LogCaptureFixture
) -> None:
    flaky = FlakyStore(store)
    flaky.down = True
    assert library.load(flaky, TREE, KEY, 1) == []
    assert library.publish(flaky, KEY, trace(1), blob.map) == "failed"
    assert caplog.text.count("is down") == 2


def test_what_others_put_into_a_profile_is_not_read_without_end(
    store: FolderStore, blob: lazy.LazyBlob, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(300):
        store.put(f"{KEY.prefix(TREE)}/{number:064x}.trace", b"junk")
        store.put(f"{KEY.prefix(TREE)}/hot-{number:064x}.pack", b"junk")
    read = list[str]()

    def counted(call: Callable[..., object]) -> Callable[..., object]:
        def one(self: FolderStore, key: str, *args: object, **more: object) -> object:
            read.append(key)
            return call(self, key, *args, **more)

        return one

    for name in ("get", "open"):
        monkeypatch.setattr(FolderStore, name, counted(getattr(FolderStore, name)))
    assert library.load_own(store, TREE, KEY, BLOCKS * 4 * UNIT) == []
    assert library.newest_pack(store, KEY.prefix(TREE), library.Target(TREE, "", blob.map)) is None
    assert 0 < len(set(read)) <= 2 * 128
