"""Pressure stall information: for how long tasks of this node waited for a processor, for I/O or for memory.

I/O is also that of files which come over the network, as those of a lazy image do.

https://docs.kernel.org/accounting/psi.html"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

_FILES = {"cpu_pressure_seconds": "cpu", "io_pressure_seconds": "io", "memory_pressure_seconds": "memory"}


def totals() -> dict[str, float]:
    """Seconds since the node booted in which at least one task waited; without those that the kernel does not count."""
    found = {}
    for name, file in _FILES.items():
        try:
            some = Path("/proc/pressure", file).read_text().splitlines()[0]
            found[name] = int(some.rpartition("total=")[2]) / 1e6
        except (OSError, ValueError, IndexError):
            continue
    return found


def since(before: Mapping[str, float]) -> dict[str, float]:
    """What was added to the `totals` of then."""
    return {name: round(now - before[name], 3) for name, now in totals().items() if name in before}
