"""Lines that repeat themselves are left out, and counted."""

from __future__ import annotations

import logging

import pytest

from bootseer import loglimit
from bootseer.loglimit import LogRateLimit


def line(text: str, *args: object, level: int = logging.WARNING) -> logging.LogRecord:
    return logging.LogRecord("a", level, "", 0, text, args, None)


def test_most_lines_of_a_kind_pass_then_none_then_one_says_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [5.0]
    monkeypatch.setattr(loglimit.time, "monotonic", lambda: now[0])
    few = LogRateLimit(3, 10.0)
    assert [few.filter(line("block %d", number)) for number in range(5)] == [True] * 3 + [False] * 2
    assert few.filter(line("block %d", 1, level=logging.ERROR))
    assert few.filter(line("another"))
    now[0] += 10.0
    record = line("block %d", 7)
    assert few.filter(record)
    assert record.getMessage() == "block 7 (and 2 such lines before it, left out)"
    record = line("another")
    assert few.filter(record)
    assert record.getMessage() == "another"
