"""Which DataNodes new blocks leave out."""

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from bootseer.hdfs import placement
from bootseer.hdfs.placement import Placement
from bootseer.hdfs.records import DataNode

CLUSTER = "hdfs://a:1"


def nodes(count: int, racks: int = 1) -> list[DataNode]:
    return [DataNode(f"n{i}", "127.0.0.1", 1000 + i, f"/r{i % racks}") for i in range(count)]


class Cluster:
    """A NameNode that gives what is wanted, or chooses at random among what is neither left out nor ``busy``;
    ``refused``: blocks for which it had too few."""

    def __init__(self, count: int, racks: int = 1) -> None:
        self.nodes, self.refused = nodes(count, racks), 0
        self.busy: list[DataNode] = []

    def place(self, made: Placement, file: int, replicas: int) -> list[DataNode]:
        """What `FileOutput` does."""
        for _ in range(2):
            wanted, left_out = made.choose(file, CLUSTER, replicas)
            able = [node for node in self.nodes if node not in (*left_out, *self.busy)]
            given = wanted or random.sample(able, min(replicas, len(able)))
            if len(given) == replicas or not left_out:
                break
            self.refused += 1
            placement.too_few(
                CLUSTER, left_out, given, f"There are {len(self.nodes)} datanode(s) running" * (not given)
            )
        if not given:
            given = random.sample([node for node in self.nodes if node not in self.busy], replicas)
        made.begin(file, CLUSTER, tuple(given))
        return given


@pytest.fixture(autouse=True)
def fresh(monkeypatch) -> Iterator[None]:
    placement.all_nodes.clear()
    placement.shunned_nodes.clear()
    random.seed(3)
    monkeypatch.setattr(placement.time, "monotonic", lambda: NOW[0])
    yield
    placement.all_nodes.clear()
    placement.shunned_nodes.clear()


@pytest.mark.parametrize(
    ("count", "replicas", "files", "refused"),
    [(4, 1, 4, 0), (4, 2, 8, 1), (4, 3, 4, 1), (7, 3, 14, 1), (3, 3, 5, 1), (100, 3, 16, 0)],
)
def test_files_written_together_burden_all_alike(count, replicas, files, refused):
    cluster, made = Cluster(count), Placement()
    burden = Counter(node.uuid for file in range(files) for node in cluster.place(made, file, replicas))
    assert max(burden.values()) - min(burden[node.uuid] for node in cluster.nodes) <= 1
    assert cluster.refused == refused, "once it is known which DataNodes there are"


def test_short_files_burden_all_alike():
    """Each is over before the next begins."""
    cluster, made, burden = Cluster(4), Placement(), Counter()
    for file in range(4):
        burden.update(node.uuid for node in cluster.place(made, file, 3))
    assert set(burden.values()) == {3}


def test_more_replicas_than_datanodes():
    cluster, made = Cluster(2), Placement()
    assert [len(cluster.place(made, file, 2)) for file in range(3)] == [2, 2, 2]
    assert made.choose(4, CLUSTER, 3).left_out == []


def test_racks_are_as_hdfs_wants_them():
    cluster, made = Cluster(12, racks=4), Placement()
    placement.too_few(CLUSTER, cluster.nodes, ())
    made.begin(0, CLUSTER, tuple(cluster.nodes[:3]))
    for file in range(1, 20):
        first, *others = cluster.place(made, file, 3)
        assert len({node.rack for node in (first, *others)}) == 2


def test_what_is_given_up_counts_no_longer():
    cluster, made = Cluster(4), Placement()
    kept = cluster.place(made, 0, 2)
    for file in range(1, 10):
        assert not set(cluster.place(made, file, 2)) & set(kept)
        made.give_up(file)
    made.give_up(0)
    assert not any(made.choose(1, CLUSTER, 2))


def test_the_first_file_goes_where_the_namenode_says():
    made = Placement()
    placement.too_few(CLUSTER, nodes(4), ())
    assert not any(made.choose(1, CLUSTER, 3))
    made.begin(1, CLUSTER, tuple(nodes(2)))
    assert not any(made.choose(1, CLUSTER, 3)), "its own block is over"


def test_which_datanodes_there_are_is_believed_for_a_time(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(placement.time, "monotonic", lambda: clock[0])
    made, all_nodes = Placement(), nodes(4)
    made.begin(0, CLUSTER, tuple(all_nodes[:2]))
    assert made.choose(1, CLUSTER, 2) == ([], all_nodes[:2])
    placement.too_few(CLUSTER, all_nodes[:3], all_nodes[3:])
    wanted, left_out = made.choose(1, CLUSTER, 2)
    assert (set(wanted), left_out) == (set(all_nodes[2:]), [])
    clock[0] += 61
    assert made.choose(1, CLUSTER, 2) == ([], all_nodes[:2])


def test_a_datanode_that_is_busy_is_not_forgotten():
    """The NameNode gives none of four while three are left out: it counts the fourth, but does not say which it is."""
    made, four = Placement(), nodes(4)
    made.begin(0, CLUSTER, tuple(four[:3]))
    why = "could only be written to 0 of the 1 minReplication nodes. There are 4 datanode(s) running and 3 node(s) are"
    placement.too_few(CLUSTER, four[:3], (), why)
    assert made.choose(1, CLUSTER, 1) == ([], four[:3])
    placement.too_few(CLUSTER, four, (), why)
    assert made.choose(1, CLUSTER, 1) == (four[3:], [])


def test_a_failed_datanode_is_avoided_for_a_time(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(placement.time, "monotonic", lambda: clock[0])
    made, bad = Placement(), nodes(4)[1]
    placement.shun([bad])
    assert placement.shunned() == [bad]
    placement.too_few(CLUSTER, nodes(4), ())
    made.begin(0, CLUSTER, tuple(nodes(1)))
    for file in range(1, 8):
        assert bad not in made.choose(file, CLUSTER, 3).wanted
    clock[0] += placement.SHUNNED
    assert placement.shunned() == []


def test_a_file_that_is_written_alone_names_those_that_are_left_while_one_is_avoided():
    """Asked for any, a NameNode whose other DataNodes are busy gives too few, or that one."""
    made, three = Placement(), nodes(3)
    placement.too_few(CLUSTER, three, ())
    placement.shun(three[:1])
    assert set(made.choose(1, CLUSTER, 2).wanted) == set(three[1:])


def test_no_two_blocks_have_the_same_pair_of_datanodes():
    """Else two files may be held up by one pair, and nobody tells by whom of it."""
    for seed in range(20):
        random.seed(seed)
        cluster, made = Cluster(4), Placement()
        pairs = [frozenset(node.uuid for node in cluster.place(made, file, 2)) for file in range(4)]
        assert len(set(pairs)) == 4


def test_a_datanode_that_is_busy_has_its_share():
    """The NameNode passes over it where it may choose, not where it is named."""
    cluster, made = Cluster(4), Placement()
    placement.too_few(CLUSTER, cluster.nodes, ())
    cluster.busy = cluster.nodes[1:2]
    burden = Counter(node.uuid for file in range(4) for node in cluster.place(made, file, 2))
    assert set(burden.values()) == {2}


def test_a_slow_datanode_is_told_from_one_that_failed():
    failed, slow = nodes(2)
    placement.shun([failed])
    placement.shun([failed, slow], slow=True)
    assert placement.shunned() == [failed, slow]
    assert placement.shunned(slow=False) == [failed]


QUICK, SLOW = (0.1, 30e6), (0.8, 5e6)
"""Share of the time that its writer waited for a pipeline, bytes per second."""
NOW = [0.0]


def members(names: str) -> tuple[DataNode, ...]:
    return tuple(DataNode(name, "127.0.0.1", 1) for name in names)


def beside(*others: str, idle: Callable[[], bool] = lambda: True) -> Placement:
    """Files that are being written, each on the DataNodes of these letters; one of them was quick."""
    made = Placement()
    for file, names in enumerate(others):
        made.begin(file, CLUSTER, members(names), lambda: idle)
    slow(made, others[0], QUICK, QUICK, file=0)
    return made


def slow(made: Placement, names: str, *runs: tuple[float, float], file: int = 9, beside: str = "") -> str:
    """Whom the file had better leave after ``runs`` one after the other, while others give as many bytes to the
    DataNodes ``beside``."""
    found = made.slow(file, members(names), None)
    for waited, rate in runs:
        NOW[0] += placement.ENOUGH
        for some in (names, *beside):
            made.took(members(some), int(rate * placement.ENOUGH))
        found = made.slow(file, members(names), waited)
    return "".join(node.uuid for node in found)


def test_who_is_in_no_idle_pipeline_holds_the_others_up():
    made = beside("ABC")
    assert slow(made, "ABX", SLOW, SLOW) == "X"
    assert slow(made, "CX", file=10) == "X"  # it is known by now


def test_one_slow_datanode_of_four_is_found_where_three_of_four_files_have_it():
    """Red before: with the three waiting, none of the others was known to be quick."""
    made = beside("ABC")
    made.begin(1, CLUSTER, members("ABX"), lambda: lambda: False)
    made.begin(2, CLUSTER, members("ACX"), lambda: None)  # its file is gone
    assert slow(made, "BCX", SLOW, SLOW) == "X"


def test_without_an_idle_pipeline_nobody_is_slow():
    """As where all links are equally slow."""
    assert slow(beside("AB", idle=lambda: False), "CX", SLOW, SLOW, SLOW) == ""


def test_who_is_idle_once_is_not_sure_to_be_quick():
    """A slow DataNode has given all that it was asked for now and then, of a file that waits for another one."""
    turns = itertools.cycle([True, False])
    assert slow(beside("AX", idle=lambda: next(turns)), "BX", *[SLOW] * 6) == ""


def test_which_of_them_is_slow_is_not_told_without_one_that_is_not():
    assert slow(beside("AB"), "XYZ", SLOW, SLOW) == "XYZ"


@pytest.mark.parametrize(
    "runs",
    [
        [SLOW],
        [SLOW, QUICK, SLOW],
        [(0.99, 12e6)] * 5,  # busier than others, but no slower than a busy DataNode is
    ],
)
def test_a_datanode_that_is_slow_for_a_moment_or_only_busy_is_not_left(runs):
    assert slow(beside("AB"), "CX", *runs) == ""


def test_two_that_were_idle_in_turn_are_not_slow_together():
    """Red before: A alone was idle twice, so both others were left, and every block that had one of them ended."""
    made = beside("AB")
    turns = itertools.cycle([True, False, False, True])  # file 0, file 1; file 0, file 1
    for file, names in enumerate(("AB", "AC")):
        made.begin(file, CLUSTER, members(names), lambda: lambda: next(turns))
    assert slow(made, "BC", SLOW, SLOW) == ""


def test_a_datanode_that_takes_much_of_other_files_is_not_slow():
    """Red before: a pipeline that got little of a link which others filled was left, and with it healthy DataNodes."""
    assert slow(beside("AB"), "CX", SLOW, SLOW, beside="XX") == "C"
    assert slow(beside("AB"), "CX", SLOW, SLOW, beside="XXCC") == ""


def test_what_comes_in_a_burst_is_no_measure():
    """Red before: what had waited for another DataNode came at once, and no pipeline was as quick again."""
    made = beside("AB")
    assert slow(made, "AB", (0.1, 200e6), (0.1, 30e6), file=0) == ""
    assert slow(made, "CX", (0.9, 12e6), (0.9, 12e6)) == ""


def test_while_a_block_is_copied_nobody_is_slow():
    """Red before: the copy filled links, and the DataNodes of a pipeline beside it were left. Who was late before and
    after it was not so twice in a row."""
    made = beside("AB")
    assert slow(made, "CX", SLOW) == ""
    made.copy(0, members("C")[0])
    assert slow(made, "CX", SLOW, SLOW, SLOW) == ""
    made.copy(0, None)
    assert slow(made, "CX", SLOW) == ""
    assert slow(made, "CX", SLOW) == "CX"
    made, copied = beside("AB"), members("D")[0]
    assert slow(made, "CX", SLOW) == ""
    made.copy(0, copied)
    assert slow(made, "CX", *[(0.9, 0.0)] * 9) == ""  # the copy has all of their links
    made.copy(0, None)
    assert slow(made, "CX", (0.9, 12e6), (0.9, 12e6)) == ""  # only busy


def test_new_blocks_go_where_none_is_copied_to():
    made, four = Placement(), nodes(4)
    placement.too_few(CLUSTER, four, ())
    made.begin(0, CLUSTER, tuple(four[:2]))
    made.copy(0, four[2])
    assert made.choose(1, CLUSTER, 1).wanted == four[3:]


def test_who_has_more_to_do_since_one_was_left_is_not_slow():
    """Red before: of the three that were left one more was left, for less than a third of what four had given."""
    made = beside("ABC")
    assert slow(made, "ABX", SLOW, SLOW) == "X"
    slow(made, "ABC", *[(0.1, 20e6)] * 3, file=0)
    assert slow(made, "AD", (0.9, 9e6), (0.9, 9e6), file=10) == ""
    assert slow(made, "AD", SLOW, SLOW, file=10) == "D"


def test_a_file_that_is_whole_tells_who_is_quick():
    """Red before: at the end of a striped file the slow stripes had nobody left to be compared with."""
    made = beside("ABC", idle=lambda: False)
    made.end(0)
    assert slow(made, "ABX", SLOW, SLOW) == "X"


@pytest.mark.parametrize("end", [Placement.give_up, lambda made, file: made.choose(file, CLUSTER, 2)])
def test_a_file_without_a_block_tells_nothing(end):
    made = beside("AB")
    end(made, 0)
    assert slow(made, "CX", SLOW, SLOW) == ""


def test_who_takes_part_in_a_new_block_is_measured_anew():
    made = beside("A")
    assert slow(made, "X", SLOW, SLOW) == "X"
    made.begin(3, CLUSTER, members("X"))
    assert slow(made, "X", file=4) == ""
