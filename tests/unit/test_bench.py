"""What benchmarks take away from the product is there: a part that was renamed is to be noticed here."""

import sys
from pathlib import Path

import pytest

from bootseer.config import Config

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def bench(monkeypatch):
    """Imports modules of bench/ by name, and forgets them."""
    monkeypatch.syspath_prepend(str(BENCH))
    yield __import__
    for name in [n for n, m in sys.modules.items() if str(getattr(m, "__file__", None)).startswith(f"{BENCH}/")]:
        del sys.modules[name]


def test_every_part_of_ablate(bench, monkeypatch):
    for part in bench("_ablated").PARTS:
        assert part.patch or part.settings
        assert all(hasattr(Config(), name.removeprefix("BOOTSEER_").lower()) for name in {*part.settings, *part.both})
        if part.patch:
            monkeypatch.setattr(f"{part.patch.module}.{part.patch.name}", part.patch.value)


def test_every_part_of_the_scheduler(bench):
    cases = {case.name: case for case in bench("_scheduler_cases").CASES}
    for part in bench("_scheduler_parts").PARTS:
        with part.taken_away():
            assert cases["quick"].seconds(bench("random").Random(1)) > 0
