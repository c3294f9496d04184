"""A site's store over a simulated year, see `support.storeyear`; `scripts/chaos --year` prints its figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.storeyear import Figures, year, year_of_checkpoints


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_year_of_weekly_collections_keeps_the_store_small_and_loses_nothing(tmp_path: Path) -> None:
    found = year(1, tmp_path)
    assert (found.failed, found.again) == (0, 0)
    assert found.worst <= 1.3


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_without_notes_of_use_some_would_run_their_set_up_commands_again(tmp_path: Path) -> None:
    assert year(1, tmp_path, days=70, notes=False).again


@pytest.mark.parametrize(("keep", "age", "lost"), [(3, 86_400.0, False), (1, 86_400.0, False), (1, 0.0, True)])
def test_months_of_checkpoints_of_which_the_last_are_kept(tmp_path: Path, keep: int, age: float, lost: bool) -> None:
    """Without an age some would be taken away while they are loaded."""
    found = year_of_checkpoints(1, tmp_path, Figures(days=365, images=0, environments=0), keep=keep, age=age, days=91)
    assert bool(found.loads_lost) is lost
    assert found.checkpoints > 100
    assert found.loads > 250
    assert found.checkpoints_left < 10 * (keep + 3)
