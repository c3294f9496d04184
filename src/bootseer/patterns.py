"""Patterns: regular expressions that are compiled when they are first used, for a start uses few of many."""

from __future__ import annotations

import re
from typing import Any, AnyStr, cast


def pattern(text: AnyStr) -> re.Pattern[AnyStr]:
    """As `re.compile`; a mistake in ``text`` is found at the first use."""
    return cast("re.Pattern[AnyStr]", _Pattern(text))


def compile_all() -> None:
    """Compile those of all modules that are loaded: for a process whose copies use them."""
    for one in _made:
        _ = one.flags


class _Pattern:
    def __init__(self, text: str | bytes) -> None:
        self.pattern = text
        _made.append(self)

    def __getattr__(self, name: str) -> Any:
        found = self.__dict__[name] = getattr(re.compile(self.pattern), name)
        return found


_made: list[_Pattern] = []
