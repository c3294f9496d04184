"""Lists of nodes as Slurm writes them: ``n[01-04,7],m3`` is n01, n02, n03, n04, n7 and m3."""

from __future__ import annotations

import itertools
import re

from bootseer.errors import ConfigError

_MOST = 100_000
"""Nodes of one list; a longer one is a mistake."""
_NAME = re.compile(r"(?:[^\[\],\s]|\[[0-9,-]+\])+")
_PART = re.compile(r"\[([0-9,-]+)\]|([^\[]+)")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")


def expand(text: str, most: int = _MOST) -> list[str]:
    """The nodes of a list, each once, in its order. Raises `ConfigError` for what is no list of nodes, or has more than
    ``most``, which costs no more than a list of so many."""
    names: dict[str, None] = {}
    at = 0
    while at < len(text):
        found = _NAME.match(text, at)
        if found is None or text[found.end() : found.end() + 1] not in ("", ","):
            raise _mistake(text)
        parts: list[list[str]] = []
        count = 1
        for ranges, plain in _PART.findall(found[0]):
            parts.append(_numbers(text, ranges, most) if ranges else [plain])
            count *= len(parts[-1])
            if count + len(names) > most:
                raise _too_long(text, most)
        names |= dict.fromkeys("".join(name) for name in itertools.product(*parts))
        at = found.end() + 1
    if text.endswith(","):
        raise _mistake(text)
    return list(names)


def _numbers(text: str, ranges: str, most: int) -> list[str]:
    numbers: list[str] = []
    for part in ranges.split(","):
        found = _RANGE.fullmatch(part)
        if found is None:
            raise _mistake(text)
        first, last = found[1], found[2] or found[1]
        if int(last) < int(first):
            raise _mistake(text)
        if int(last) - int(first) + len(numbers) >= most:
            raise _too_long(text, most)
        numbers += (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
    return numbers


def _mistake(text: str) -> ConfigError:
    return ConfigError(f"{text[:60]!r} is no list of nodes", hint="write them like n[01-04,7],m3")


def _too_long(text: str, most: int) -> ConfigError:
    return ConfigError(f"the list of nodes {text[:60]!r} has more than {most:,} nodes")
