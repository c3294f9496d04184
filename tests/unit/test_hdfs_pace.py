"""Which DataNode holds up files written together, told from how long each file's writer waited."""

import pytest

from bootseer.hdfs.pace import Pace, Run
from bootseer.hdfs.records import DataNode

A, B, C, D, X = (DataNode(name, name, 1) for name in "ABCDX")
MIB = 1 << 20
QUICK = (4.0, 24 * MIB, 0.3)
SLOW = (4.0, 24 * MIB, 3.6)


def reported(pace: Pace, key: int, *nodes: DataNode, how: tuple[float, ...]) -> str:
    elapsed, length, waited, *backlog = how
    return "".join(node.uuid for node in pace.report(key, Run(nodes, elapsed, int(length), waited, *backlog)))


def test_the_one_that_only_slow_pipelines_have():
    pace = Pace()
    assert reported(pace, 1, A, B, C, how=QUICK) == ""
    assert reported(pace, 2, A, B, X, how=SLOW) == "X"
    assert reported(pace, 3, X, B, C, how=SLOW) == "X"


def test_who_was_slow_once_is_so_without_a_quick_one_to_compare_with():
    pace = Pace()
    reported(pace, 1, A, B, C, how=QUICK)
    assert reported(pace, 2, A, B, X, how=SLOW) == "X"
    pace.closed(1)
    assert reported(pace, 3, C, D, X, how=SLOW) == "X"
    assert reported(pace, 3, C, D, X, how=QUICK) == ""


def test_who_was_slow_once_needs_less_proof():
    """While one pipeline was left because of it, the other one's writer had nothing to wait for."""
    pace = Pace()
    reported(pace, 1, A, B, C, how=QUICK)
    assert reported(pace, 2, A, B, X, how=SLOW) == "X"
    assert reported(pace, 3, C, D, X, how=(0.9, 2 * MIB, 0.8)) == ""
    assert reported(pace, 3, C, D, X, how=(4.0, 8 * MIB, 1.3)) == "X"
    assert reported(pace, 4, C, D, A, how=(4.0, 8 * MIB, 1.3)) == ""


def test_who_was_slow_once_and_is_as_quick_as_the_others_is_left_alone():
    pace = Pace()
    reported(pace, 1, A, B, how=QUICK)
    assert reported(pace, 2, A, X, how=SLOW) == "X"
    pace.ended(2)
    busy = (4.0, 24 * MIB, 1.6)  # all wait, for the network
    reported(pace, 1, A, B, how=busy)
    reported(pace, 2, B, C, how=busy)
    assert reported(pace, 3, C, X, how=busy) == ""
    assert reported(pace, 3, C, X, how=(4.0, 24 * MIB, 3.3)) == "X"


def test_bad_company_is_forgotten():
    pace = Pace()
    reported(pace, 1, A, B, how=QUICK)
    assert reported(pace, 2, D, X, how=SLOW) == "DX"
    reported(pace, 2, A, D, how=QUICK)  # D does well with another
    assert reported(pace, 3, D, X, how=SLOW) == "X"
    pace.closed(1)
    pace.closed(2)
    assert reported(pace, 4, C, D, how=SLOW) == ""


def test_who_was_slow_once_is_no_measure_for_itself():
    pace = Pace()
    reported(pace, 1, A, B, how=QUICK)
    assert reported(pace, 2, A, X, how=SLOW) == "X"
    pace.closed(1)
    assert reported(pace, 3, C, X, how=(4.0, 24 * MIB, 3.0)) == "X"
    assert reported(pace, 3, C, X, how=(4.0, 24 * MIB, 1.6)) == ""


def test_without_a_quick_one_nobody_is_slow():
    pace = Pace()
    for key, nodes in enumerate([(A, B, X), (X, B, C), (A, X, C)]):
        assert reported(pace, key, *nodes, how=SLOW) == ""


def test_where_pipelines_have_no_datanode_in_common_all_of_the_slow_one_are_left():
    pace = Pace()
    reported(pace, 1, A, B, how=QUICK)
    assert reported(pace, 2, D, X, how=SLOW) == "DX"


def test_a_full_window_hides_that_a_pipeline_is_slow():
    pace = Pace()
    reported(pace, 1, A, X, how=(4.0, 24 * MIB, 0.1, 0.9))
    reported(pace, 2, B, C, how=QUICK)
    reported(pace, 3, A, C, how=QUICK)
    assert reported(pace, 4, X, A, how=SLOW) == "X"  # the first one would have spoken for X


@pytest.mark.parametrize(
    "how",
    [
        (2.9, 24 * MIB, 2.8),  # too early to say
        (4.0, 24 * MIB, 2.0),  # the others do not wait for it all the time
        (4.0, 300 * MIB, 3.6),  # not so much slower
    ],
)
def test_what_is_not_slow(how):
    pace = Pace()
    reported(pace, 1, A, B, how=(4.0, 300 * MIB, 1.1))
    assert reported(pace, 2, D, X, how=how) == ""


def test_a_block_that_has_just_begun_says_nothing_yet_and_the_one_before_it_does():
    pace = Pace()
    reported(pace, 1, A, B, how=QUICK)
    pace.ended(1)
    reported(pace, 1, C, D, how=(0.1, MIB, 0.0))
    assert reported(pace, 2, A, X, how=SLOW) == "X"
    pace = Pace()
    reported(pace, 1, A, B, how=QUICK)
    pace.ended(1)
    pace.closed(1)
    assert reported(pace, 2, A, X, how=SLOW) == ""
