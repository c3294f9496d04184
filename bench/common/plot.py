"""The chart of a benchmark, as SVG: dots are medians, lines span the runs."""

from __future__ import annotations

import html
import statistics
from collections.abc import Sequence

from bootseer.demo.report import Run

_COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#9467bd", "#8c564b", "#17becf")

Speeds = dict[tuple[int, int], list[float]]
"""MiB/s of every run by (unit in bytes, width)."""


class _Picture:
    """What is drawn, from top to bottom of the file."""

    def __init__(self, width: float, height: float) -> None:
        self._lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" font-family="sans-serif" '
            'font-size="12">'
        ]
        self.rect(0, 0, width, height, "white")

    def rect(self, x: float, y: float, width: float, height: float, colour: str) -> None:
        at = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
        self._lines.append(f'<rect {at} fill="{colour}"/>')

    def line(self, x: float, y: float, to_x: float, to_y: float, colour: str = "black", more: str = "") -> None:
        ends = f'x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}"'
        self._lines.append(f'<line {ends} stroke="{colour}"{more}/>')

    def dot(self, x: float, y: float, colour: str) -> None:
        self._lines.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>')

    def text(self, x: float, y: float, text: str, *, anchor: str = "start", size: int = 12) -> None:
        at = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"'
        self._lines.append(f"<text {at}>{html.escape(text)}</text>")

    def __str__(self) -> str:
        return "\n".join([*self._lines, "</svg>"]) + "\n"


def scan(runs: Sequence[Run], cap: float) -> str:
    """Speed of reads and of writes by stripe width, a line for each unit; ``cap``: MiB/s that all links together
    carry."""
    panels = [("Read", _speeds(runs, write=False)), ("Write, 2 replicas", _speeds(runs, write=True))]
    units = sorted({unit for unit, _ in panels[0][1]})
    width, left, gap, height = 420, 60, 40, 388
    picture = _Picture(left + 2 * (width + gap), height)
    for index, (title, speeds) in enumerate(panels):
        _panel(picture, left + index * (width + gap), width, title, speeds, units, cap)
    for index, unit in enumerate(units):
        picture.rect(left + index * 120, height - 22, 14, 4, _COLOURS[index % len(_COLOURS)])
        size = f"{unit >> 20} MiB" if unit >= 1 << 20 else f"{unit >> 10} KiB"
        picture.text(left + index * 120 + 20, height - 16, f"unit {size}")
    return str(picture)


def _speeds(runs: Sequence[Run], *, write: bool) -> Speeds:
    found: Speeds = {}
    for run in runs:
        if ":scan-" in run.variant and not run.failed and run.variant.endswith("-write") == write:
            shape = (int(run.details["unit"]), int(run.details["width"]))
            found.setdefault(shape, []).append(float(run.details["mib_per_s"]))
    return found


def _panel(
    picture: _Picture, left: float, wide: float, title: str, speeds: Speeds, units: Sequence[int], cap: float
) -> None:
    widths = sorted({width for _, width in speeds})
    top, high = max([cap, *(value for values in speeds.values() for value in values)]) * 1.05, 260

    def x(width: int) -> float:
        return left + wide * (widths.index(width) + 0.5) / len(widths)

    def y(speed: float) -> float:
        return 50 + high * (1 - speed / top)

    picture.text(left, 24, f"{title}, MiB/s by stripe width", size=14)
    for mark in range(0, int(top) + 1, 60):
        picture.line(left, y(mark), left + wide, y(mark), "#ddd")
        picture.text(left - 6, y(mark) + 4, str(mark), anchor="end")
    picture.line(left, y(cap), left + wide, y(cap), more=' stroke-dasharray="4 3"')
    picture.text(left + wide, y(cap) - 4, "all links together", anchor="end")
    for width in widths:
        picture.text(x(width), high + 68, str(width), anchor="middle")
    for index, unit in enumerate(units):
        colour = _COLOURS[index % len(_COLOURS)]
        shift = (index - (len(units) - 1) / 2) * 3  # so that equal values stay visible
        before: tuple[float, float] | None = None
        for found, at in ((speeds[unit, w], x(w) + shift) for w in widths if (unit, w) in speeds):
            middle = y(statistics.median(found))
            if before:
                picture.line(*before, at, middle, colour)
            before = (at, middle)
            picture.line(at, y(min(found)), at, y(max(found)), colour)
            picture.dot(at, middle, colour)
