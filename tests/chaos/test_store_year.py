"""A site's store over a simulated year, see `support.storeyear`; `scripts/chaos --year` prints its figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.storeyear import year


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
