"""Nodes that wait for another one's publication: none is later than the plain command by more than the rule says."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.env.wager import FEW, LEAST, waits
from bootseer.objects.lease import Progress

amounts = st.floats(0.01, 1e4)


def waited(nodes: int, command: float, publication: float, size: float) -> float:
    """Seconds of the environment stage of a node that starts with the leader, and sees each second how it goes."""
    since = 0.0
    while since < publication:
        left = size * (1 - since / publication)
        rate = size / publication if since else 0.0
        if not waits(Progress(command, since, left, rate), nodes):
            return command + since + command
        since += 1.0
    return command + publication


@given(st.integers(1, FEW), amounts, amounts, st.floats(1, 1e12))
def test_no_node_is_later_than_by_the_smaller_of_both(
    nodes: int, command: float, publication: float, size: float
) -> None:
    least = min(publication, max(command, LEAST))
    assert waited(nodes, command, publication, size) <= (command + least) * (1 + 1e-9) + 1.0


@pytest.mark.parametrize("nodes", [3, 8, 64])
@given(work=st.floats(5, 1e4), load=st.floats(1, 1e3), early=st.floats(0, 0.9), overhead=st.floats(0, 0.3))
def test_where_the_index_is_no_faster_than_a_node_nobody_takes_longer_than_with_the_plain_command(
    nodes: int, work: float, load: float, early: float, overhead: float
) -> None:
    """``load``: seconds that what is installed needs on one link. The plain command of all nodes shares that of the
    index; a leader alone has it, and then sends what it had not sent ``early`` over its own."""
    plain = work + nodes * load
    leader = work + load
    publication = (1 - early) * load + overhead
    assert waited(nodes, leader, publication, 1e9) <= 1.1 * plain


def test_of_many_nodes_one_asks_the_index_whatever_the_publication_takes() -> None:
    assert all(waits(Progress(1.0, 1e6, 1e15, 1.0), nodes) for nodes in (0, FEW + 1, 8, 64))
    assert not any(waits(Progress(1.0, 1e6, 1e15, 1.0), nodes) for nodes in range(1, FEW + 1))
    assert waited(64, 10.0, 30.0, 1e9) == 40.0
    assert math.isclose(waited(2, 10.0, 300.0, 1e9), 21.0)
