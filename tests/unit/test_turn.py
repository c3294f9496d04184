"""When the checkpoint flows, and what the profile hears meanwhile; time is handed in."""

from __future__ import annotations

from bootseer.blocks.tree import TreeStatus
from bootseer.launch.turn import HOT_SECONDS, TURN_SECONDS, HotWait, Step, is_hot


def status(ready: int, *, total: int = 10, known: bool = True, complete: bool = False) -> TreeStatus:
    return TreeStatus(id="t", digest="d", pid=1, hot_ready=ready, hot_total=total, hot_known=known, complete=complete)


def test_a_checkpoint_waits_for_hot_blocks_no_longer_than_its_patience() -> None:
    policy = HotWait(100.0, TURN_SECONDS, 0.2)
    assert policy.look(status(3), 100.1) == Step(tell=False, release=False, over=False, pause=0.2)
    assert policy.look(status(3), 102.0) == Step(tell=True, release=False, over=False, pause=0.2)
    assert policy.look(status(4), 103.0) == Step(tell=False, release=False, over=False, pause=0.2)
    assert policy.look(status(4), 100.0 + TURN_SECONDS).release
    assert policy.look(status(5), 107.0) == Step(tell=True, release=False, over=False, pause=1.0)
    assert policy.look(status(5), 120.0) == Step(tell=False, release=False, over=False, pause=1.0)  # nothing new
    assert policy.look(status(10), 120.1) == Step(tell=True, release=False, over=True, pause=1.0)


def test_hot_blocks_that_were_there_at_once_are_told_of_by_nobody() -> None:
    assert HotWait(0.0, TURN_SECONDS, 0.2).look(status(10), 0.1) == Step(False, False, True, 0.2)


def test_late_and_hot_in_one_look_is_hot() -> None:
    assert HotWait(0.0, TURN_SECONDS, 0.2).look(status(10), 60.0) == Step(True, False, True, 0.2)


def test_looks_become_rare_when_no_first_step_is_told_of() -> None:
    policy = HotWait(0.0, None, 1.0)
    assert policy.look(status(3), HOT_SECONDS - 0.1).pause == 1.0
    assert policy.look(status(3), HOT_SECONDS) == Step(tell=False, release=False, over=False, pause=15.0)


def test_what_is_hot() -> None:
    assert is_hot(None)
    assert is_hot(status(0, known=False, complete=True))
    assert not is_hot(status(0, total=0, known=False))
    assert is_hot(status(0, total=0))
