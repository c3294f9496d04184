"""Nodes that wait for another one's publication: none is later than the plain command by more than the rule says."""

from __future__ import annotations

import math

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from bootseer import env
from bootseer.cli.env import run
from bootseer.env import EnvSpec
from bootseer.env.wager import FEW, LEAST, waits
from bootseer.objects.lease import Progress

amounts = st.floats(0.01, 1e4)
STARTS = [1, 3, 8, 64]


def start(nodes: int, command: float, publication: float, size: float = 1e9) -> tuple[list[float], int]:
    """Of a start whose first node leads: the seconds of each one's environment stage, and how many ran the command at
    most at once. Each looks about once a second how the publication goes."""
    step = max(1.0, publication / 400)
    ended, began = [command], [0.0]
    for rank in range(1, nodes):
        since = 0.0
        while since < publication:
            left = size * (1 - since / publication)
            if not waits(Progress(command, since, left, size / publication if since else 0.0), nodes, rank):
                break
            since += step
        ran = since < publication
        ended.append(command + since + command if ran else command + publication)
        began += [command + since] * ran
    return ended, max(sum(one <= at < one + command for one in began) for at in began)


@pytest.mark.parametrize("nodes", STARTS)
@given(command=amounts, publication=amounts)
def test_no_node_is_later_than_by_its_turn_or_than_with_the_result(
    nodes: int, command: float, publication: float
) -> None:
    step = max(1.0, publication / 400)
    ended, at_once = start(nodes, command, publication)
    for rank, took in enumerate(ended):
        turn = (rank // FEW + 1) * max(command, LEAST) + command
        assert took <= min(command + publication + 1e-6, turn + step) * (1 + 1e-9) + step
    if command > 2 * step:
        assert at_once <= FEW + math.ceil(step / command) * FEW
    if publication <= command:
        assert at_once == 1, "one asks the index"


@pytest.mark.parametrize("nodes", STARTS)
@given(work=st.floats(5, 1e4), load=st.floats(1, 1e3), early=st.floats(0, 0.9), overhead=st.floats(0, 0.3))
def test_where_the_index_is_no_faster_than_a_node_nobody_takes_longer_than_with_the_plain_command(
    nodes: int, work: float, load: float, early: float, overhead: float
) -> None:
    """``load``: seconds that what is installed needs on one link. The plain command of all nodes shares that of the
    index; a leader alone has it, and then sends what it had not sent ``early`` over its own."""
    ended, _ = start(nodes, work + load, (1 - early) * load + overhead)
    assert max(ended) <= 1.1 * (work + nodes * load)


@pytest.mark.parametrize("nodes", STARTS)
@given(command=st.floats(10, 1e3), times=st.floats(0.1, 100))
def test_where_the_index_serves_few_at_once_the_last_node_waits_for_two_commands_more(
    nodes: int, command: float, times: float
) -> None:
    """However long the publication takes. Of plain commands so many are served at once."""
    ended, _ = start(nodes, command, times * command)
    assert max(ended) <= command * (max(1.0, nodes / FEW) + 2) + 0.06 * times * command + 2.0


def test_how_many_ask_the_index() -> None:
    def ran(nodes: int, times: float) -> int:
        ended, _ = start(nodes, 100.0, 100.0 * times)
        return 1 + sum(took != ended[0] + 100.0 * times for took in ended[1:])

    assert [ran(64, times) for times in (0.5, 1.0, 1.5, 2.5, 10.0)] == [1, 1, 3, 6, 27]
    assert [ran(8, times) for times in (0.5, 1.0, 1.5, 2.5, 10.0)] == [1, 1, 3, 6, 8]
    assert [ran(3, times) for times in (1.0, 1.5)] == [1, 3]
    assert all(waits(Progress(1.0, 1e6, 1e15, 1.0), 0, rank) for rank in (0, 63)), "nobody knows how many there are"
    assert waits(Progress(1.0, 1e6, 1e15, 1.0), 1000, -1), "nobody knows which one this is"
    assert sum(not waits(Progress(0.0, 5.0, 1e15, 1.0), 1000, rank) for rank in range(1000)) <= 6 * FEW


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({"SLURM_STEP_NUM_NODES": "8", "SLURM_NODEID": "5", "SLURM_JOB_NUM_NODES": "9"}, (8, 5)),
        ({"GROUP_WORLD_SIZE": "64", "GROUP_RANK": "63"}, (64, 63)),
        ({"BOOTSEER_NODES": "3", "JOB_COMPLETION_INDEX": "2"}, (3, 2)),
        ({"BOOTSEER_NODES": "many", "GROUP_RANK": "0"}, (0, 0)),
        ({"BOOTSEER_NODES": "1000"}, (1000, -1)),
    ],
)
def test_env_run_knows_how_many_nodes_there_are(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], found: tuple[int, int]
) -> None:
    seen: list[EnvSpec] = []

    def instead(spec: EnvSpec, *args: object, **more: object) -> None:
        seen.append(spec)
        raise typer.Exit

    monkeypatch.setattr(env, "run", instead)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(typer.Exit):
        run(["true"], ["/opt/env"])
    assert (seen[0].nodes, seen[0].rank) == found
