"""How many ranges of the hot stream at once: as many as prove quicker, and no more."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from bootseer.blocks.fetch.lanes import MOST, Lanes

PIECE = 65536


def tried(
    rate: Callable[[float, int], float], flying: Callable[[Lanes, float], int] | None = None
) -> tuple[Lanes, int]:
    """What becomes of trials where ``rate(now, count)`` bytes per second come, and the most that were tried; as many
    fly as are asked for, unless ``flying`` says otherwise."""
    lanes, now, most = Lanes(), 0.0, 0
    for _ in range(100_000):
        if lanes.settled:
            break
        most = max(most, lanes.count)
        now += PIECE / rate(now, lanes.count)
        lanes.came(now, PIECE, lanes.count if flying is None else flying(lanes, now))
    assert lanes.settled
    return lanes, most


@pytest.mark.parametrize(
    ("rates", "count"),
    [
        ((100e6, 100e6), 1),  # a link that one fills
        ((100e6, 120e6), 1),
        ((100e6, 199e6, 200e6), 2),
        ((90e6, 180e6, 270e6), MOST),  # a limit for each connection
        ((1e6, 1e6), 1),
    ],
)
def test_more_ranges_at_once_only_where_they_are_quicker(rates: Sequence[float], count: int) -> None:
    """``rates``: bytes per second with one, two, three."""
    lanes, most = tried(lambda _, flying: rates[flying - 1])
    assert (lanes.count, most) == (count, len(rates))


def test_a_slow_beginning_does_not_make_more_of_them_look_quicker() -> None:
    lanes, most = tried(lambda now, _: 40e6 if now < 0.2 else 100e6)
    assert (lanes.count, most) == (1, 2)


def test_a_trial_begins_when_the_ranges_of_the_one_before_have_come() -> None:
    """Two bring twice as much; the second one ends a while after it is not asked for any more."""
    left = [0.0]

    def flying(lanes: Lanes, now: float) -> int:
        if lanes.count == 2:
            left[0] = now + 0.3
        return 2 if now < left[0] else lanes.count

    lanes, _ = tried(lambda now, count: min(2, count if now >= left[0] else 2) * 50e6, flying)
    assert lanes.count == 2


def test_where_no_thread_takes_more_of_them_trials_end_too() -> None:
    lanes, _ = tried(lambda _, __: 100e6, lambda _, __: 1)
    assert lanes.count == 1


def test_an_outage_makes_no_number_look_slow() -> None:
    """With a limit for each connection, and 10 s without an answer while three are tried."""
    lanes, now, pieces = Lanes(), 0.0, 0
    while not lanes.settled:
        now += PIECE / (lanes.count * 90e6)
        lanes.came(now, PIECE, lanes.count)
        pieces += lanes.count == MOST
        if pieces == 5:
            now += 10.0
            lanes.interrupted()
    assert lanes.count == MOST


def test_nothing_changes_any_more_when_they_are_settled() -> None:
    lanes, _ = tried(lambda _, __: 100e6)
    for now in range(100):
        lanes.came(1000.0 + now, 1 << 30, 1)
    assert lanes.count == 1
