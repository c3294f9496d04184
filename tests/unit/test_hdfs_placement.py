"""Which DataNodes blocks are wished to have, begin at, and avoid."""

import random
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from bootseer.errors import NotWritableError
from bootseer.hdfs import placement
from bootseer.hdfs.placement import Placement
from bootseer.hdfs.records import DataNode


class Names:
    """What `placement` asks of a NameNode."""

    def __init__(self, url: str, nodes: list[DataNode] | None) -> None:
        self.url, self._nodes, self.asked = url, nodes, 0

    def live_nodes(self, *, deadline: float) -> list[DataNode]:
        self.asked += 1
        if self._nodes is None:
            raise NotWritableError("superuser privilege is required")
        return self._nodes


def nodes(count: int, racks: int = 1) -> list[DataNode]:
    return [DataNode(f"n{i}", "127.0.0.1", 1000 + i, f"/r{i % racks}") for i in range(count)]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    placement.live_nodes.clear()
    placement.shunned_nodes.clear()
    random.seed(3)
    yield
    placement.live_nodes.clear()
    placement.shunned_nodes.clear()


@pytest.mark.parametrize(("count", "replicas", "files"), [(4, 1, 4), (4, 2, 8), (4, 3, 4), (7, 3, 14), (3, 3, 5)])
def test_wishes_burden_all_alike(count, replicas, files):
    names, made = Names("hdfs://a:1", nodes(count)), Placement()
    burden = Counter(node.uuid for file in range(files) for node in made.wish(file, names, replicas))
    assert max(burden.values()) - min(burden.values()) <= 1
    assert names.asked == 1


def test_more_replicas_than_datanodes():
    made = Placement()
    assert len(made.wish(1, Names("hdfs://a:1", nodes(2)), 3)) == 2


def test_racks_are_as_hdfs_wants_them():
    names, made = Names("hdfs://a:1", nodes(12, racks=4)), Placement()
    for file in range(20):
        first, second, third = made.wish(file, names, 3)
        assert first.rack != second.rack
        assert second.rack == third.rack


def test_where_only_the_superuser_is_told_the_namenode_chooses():
    names, made = Names("hdfs://a:1", None), Placement()
    assert made.wish(1, names, 3) == []
    assert made.wish(2, names, 3) == []
    assert names.asked == 1


def test_what_is_over_counts_no_longer():
    names, made = Names("hdfs://a:1", nodes(4)), Placement()
    kept = made.wish(0, names, 2)
    for file in range(1, 10):
        wished = made.wish(file, names, 2)
        assert not set(wished) & set(kept)
        if file % 2:  # else the NameNode had no block for it
            made.begin(file, tuple(wished))
        made.end(file)
    made.end(0)
    assert {node.uuid for _ in range(20) for node in made.wish(1, names, 2)} == {"n0", "n1", "n2", "n3"}


def test_for_a_file_that_is_written_alone_the_namenode_chooses():
    names, made = Names("hdfs://a:1", nodes(4)), Placement(alone=True)
    assert made.wish(1, names, 3) == []
    assert names.asked == 0


def test_a_failed_datanode_is_avoided_for_a_time(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(placement.time, "monotonic", lambda: clock[0])
    names, made = Names("hdfs://a:1", nodes(4)), Placement()
    bad = nodes(4)[1]
    placement.shun([bad])
    assert placement.shunned() == [bad]
    for file in range(8):
        assert bad not in made.wish(file, names, 3)
    clock[0] += placement.SHUNNED
    assert placement.shunned() == []


def test_the_first_files_of_a_process_wait_for_the_list():
    """They are written together: who went on without it would begin where another one does."""

    class Slow(Names):
        def live_nodes(self, *, deadline: float) -> list[DataNode]:
            time.sleep(0.2)
            return super().live_nodes(deadline=deadline)

    namenode = Slow("slow", nodes(4))
    placed = Placement()
    with ThreadPoolExecutor(4) as pool:
        firsts = [wished[0].uuid for wished in pool.map(lambda file: placed.wish(file, namenode, 1), range(4))]
    assert sorted(firsts) == ["n0", "n1", "n2", "n3"]
    assert namenode.asked == 1


def test_no_two_blocks_have_the_same_pair_of_datanodes():
    """Else two files may be held up by one pair, and nobody tells by whom of it."""
    for seed in range(20):
        random.seed(seed)
        names, made = Names("hdfs://a:1", nodes(4)), Placement()
        pairs = [frozenset(node.uuid for node in made.wish(file, names, 2)) for file in range(4)]
        assert len(set(pairs)) == 4


def test_a_slow_datanode_is_told_from_one_that_failed():
    failed, slow = nodes(2)
    placement.shun([failed])
    placement.shun([failed, slow], slow=True)
    assert placement.shunned() == [failed, slow]
    assert placement.shunned(slow=False) == [failed]


QUICK, SLOW = (0.1, 30e6, 0.1), (0.8, 5e6, 1.0)
"""Share of the time that its writer waited for a pipeline, bytes per second, share of the window not acknowledged."""


def slow(made: Placement, file: int, members: str, *runs: tuple[float, float, float]) -> str:
    """Whom the file had better leave after ``runs`` one after the other."""
    having = tuple(DataNode(name, "127.0.0.1", 1) for name in members)
    found = made.slow(file, having, None)
    for run in runs:
        found = made.slow(file, having, placement.Run(having, *run))
    return "".join(node.uuid for node in found)


def test_who_is_in_no_quick_pipeline_holds_the_others_up():
    made = Placement()
    assert slow(made, 1, "ABC", QUICK) == ""
    assert slow(made, 2, "ABX", SLOW, SLOW) == "X"
    assert slow(made, 3, "CX") == "X"  # it is known by now


@pytest.mark.parametrize(
    "other",
    [
        (0.5, 30e6, 0.1),  # waits as well
        (0.0, 30e6, 0.9),  # only hides for now that it is slow
    ],
)
def test_without_a_quick_pipeline_nobody_is_slow(other):
    made = Placement()
    slow(made, 1, "AB", other)
    assert slow(made, 2, "CX", SLOW, SLOW) == ""


@pytest.mark.parametrize(
    "runs",
    [
        [SLOW],
        [SLOW, QUICK, SLOW],
        [(0.99, 12e6, 1.0)] * 5,  # busier than others, but no slower than a busy DataNode is
    ],
)
def test_a_datanode_that_is_slow_for_a_moment_or_only_busy_is_not_left(runs):
    made = Placement()
    slow(made, 1, "AB", QUICK)
    assert slow(made, 2, "CX", *runs) == ""


def test_a_block_that_is_written_says_nothing_any_more():
    made = Placement()
    slow(made, 1, "AB", QUICK)
    made.end(1)
    assert slow(made, 2, "CX", SLOW, SLOW) == ""


def test_who_takes_part_in_a_new_block_is_measured_anew():
    made = Placement()
    slow(made, 1, "A", QUICK)
    assert slow(made, 2, "X", SLOW, SLOW) == "X"
    made.begin(3, (DataNode("X", "127.0.0.1", 1),))
    assert slow(made, 4, "X") == ""
