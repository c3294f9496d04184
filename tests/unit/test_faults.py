import errno

import pytest

from bootseer import faults


def test_nothing_happens_unless_asked(monkeypatch):
    monkeypatch.delenv("BOOTSEER_FAULTS", raising=False)
    faults.point("a")


def test_acts_on_the_named_visit_only(monkeypatch):
    faults.visits.clear()
    monkeypatch.setenv("BOOTSEER_FAULTS", "other=eio,here=enospc@2")
    faults.point("here")
    with pytest.raises(OSError, match="here") as caught:
        faults.point("here")
    assert caught.value.errno == errno.ENOSPC
    faults.point("here")


def test_a_misspelt_action_is_an_error(monkeypatch):
    monkeypatch.setenv("BOOTSEER_FAULTS", "here=explode")
    with pytest.raises(ValueError, match="explode"):
        faults.point("here")
