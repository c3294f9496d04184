"""The one report form of the demo and of every benchmark: a JSON document with every single run and its figures.

``figures`` are computed from ``runs`` only, never typed in. A figure ``a_vs_b`` is ours divided by b's; the direction
of its target says whether small or large is good. A variant that could not run is listed with its reason.
"""

from __future__ import annotations

import datetime
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import msgspec

from bootseer.errors import doing

Statistic = Literal["median", "single", "max", "min"]
_TARGET = re.compile(r"^(<=|>=|==) (-?[0-9.]+)$")


class Run(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One run of one variant. ``seconds`` is the quantity compared; ``stages`` are seconds, ``bytes`` by source."""

    variant: str
    n: int
    seconds: float | None = None
    bytes: dict[str, int] = {}
    stages: dict[str, float] = {}
    details: dict[str, Any] = {}
    failed: str = ""


class Figure(msgspec.Struct, kw_only=True):
    """One number computed from the runs; ``n`` is how many runs of the smaller group it rests on."""

    name: str
    value: float | bool
    unit: str
    of: Statistic
    n: int
    target: str
    met: bool


class Report(msgspec.Struct, kw_only=True):
    """The document. ``schema`` 1."""

    name: str
    schema: int = 1
    commit: str = ""
    date: str = ""
    """UTC, as 2026-11-28: of the measurement, or of the day when its report was recorded."""
    machine: dict[str, str | int | float] = {}
    argv: list[str] = []
    runs: list[Run] = []
    figures: list[Figure] = []

    def figure(self, name: str, value: float | bool, *, unit: str, target: str, n: int, of: Statistic) -> Figure:
        """Add a figure and judge it against ``target``: ``<= 1.05``, ``>= 0.8`` or ``== 1`` (for a yes/no figure)."""
        match = _TARGET.match(target)
        if not match:
            raise ValueError(f"target {target!r} is not of the form '<= NUMBER'")
        bound = float(match[2])
        met = {"<=": value <= bound, ">=": value >= bound, "==": value == bound}[match[1]]
        rounded = value if isinstance(value, bool) else round(value, 4)
        made = Figure(name=name, value=rounded, unit=unit, of=of, n=n, target=target, met=met)
        self.figures.append(made)
        return made

    def write(self, path: Path) -> None:
        """Write the document, pretty-printed. Raises `NotWritableError` or `FullError`."""
        with doing(f"write report {path}"):
            path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")


def new(name: str) -> Report:
    """A report of this machine and this command line, without runs yet."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    here = Path(__file__).resolve().parent
    return Report(name=name, commit=commit(here), date=today, machine=_machine(), argv=sys.argv[1:])


def commit(here: Path) -> str:
    """Of the checkout that the folder ``here`` is in, as git describes it."""
    try:
        done = subprocess.run(
            ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=12"],
            capture_output=True, text=True, timeout=10, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"


def _machine() -> dict[str, str | int | float]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "kernel": platform.release(),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30, 1),
    }
