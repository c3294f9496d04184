"""Sizes, ages and names, as people write and read them."""

from __future__ import annotations

import re

from bootseer.errors import ConfigError

_NUMBER = r"(\d{1,15}(?:\.\d{1,15})?)"
"""No longer: it is finite whatever it is multiplied with here."""
_SIZE = re.compile(_NUMBER + r"\s*(?:([kmgt])(?:ib?|b)?|b?)", re.IGNORECASE)
_AGE = re.compile(_NUMBER + r"([smhdw])|0")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


MOST, MOST_SECONDS = 1 << 62, 1e9
"""Bytes or things, and seconds: what system calls, clocks and libraries take."""


def parse_size(text: str, *, kilo: int = 1024) -> int:
    """Bytes of ``4096``, ``256K``, ``1MiB`` or ``2G``, in powers of ``kilo``. Raises `ConfigError`."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"{text!r} is not a size", hint="write 4096, 256K, 1M or 2G")
    if (size := int(float(found[1]) * kilo ** " kmgt".index((found[2] or " ").lower()))) > MOST:
        raise ConfigError(f"{text!r} is too large a size")
    return size


def parse_age(text: str) -> float:
    """Seconds of an age such as ``7d``, ``12h``, ``30m``, ``45s``, or ``0``. Raises `ConfigError`."""
    found = _AGE.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"{text!r} is not an age", hint="write 7d, 12h, 30m, 45s or 0")
    if (age := float(found[1]) * _SECONDS[found[2]] if found[1] else 0.0) > MOST_SECONDS:
        raise ConfigError(f"{text!r} is too long an age", hint="10000d is 27 years")
    return age


def size_text(count: float) -> str:
    """A number of bytes in powers of 1000: ``42 B``, ``1.5 MB``."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def age_text(seconds: float) -> str:
    """A time in one unit, at least two of it: ``42 s``, ``3 h``, ``5 d``."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def count_text(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"


def one_line(text: str) -> str:
    """``text`` without what would move the cursor."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)
