"""Read and write speed by stripe width, a line for each stripe unit, as SVG; dots are medians, bars span the runs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from bootseer.report import Run

_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 420, 260, 60, 50, 40
_COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#9467bd", "#8c564b", "#17becf")

Speeds = dict[tuple[int, int], list[float]]
"""MiB/s of every run by (unit in bytes, width)."""


def scan(runs: Sequence[Run], cap: float) -> str:
    """The two charts side by side; ``cap``: MiB/s that all links together carry, drawn as a line."""
    panels = [("Read", _speeds(runs, "")), ("Write, 2 replicas", _speeds(runs, "-write"))]
    if not panels[0][1]:
        return '<svg xmlns="http://www.w3.org/2000/svg"/>\n'
    units = sorted({unit for unit, _ in panels[0][1]})
    full_width = _LEFT + 2 * (_WIDTH + _GAP)
    height = _TOP + _HEIGHT + 60 + 18
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {full_width} {height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{full_width}" height="{height}" fill="white"/>',
    ]
    for index, (title, speeds) in enumerate(panels):
        lines += _panel(_LEFT + index * (_WIDTH + _GAP), title, speeds, units, cap)
    for index, unit in enumerate(units):
        x = _LEFT + index * 120
        lines.append(
            f'<rect x="{x}" y="{height - 22}" width="14" height="4" fill="{_COLOURS[index % len(_COLOURS)]}"/>'
            f'<text x="{x + 20}" y="{height - 16}">unit {_size(unit)}</text>'
        )
    return "\n".join([*lines, "</svg>"]) + "\n"


def _speeds(runs: Sequence[Run], suffix: str) -> Speeds:
    found: Speeds = {}
    for run in runs:
        if ":scan-" in run.variant and not run.failed and run.variant.endswith("-write") == bool(suffix):
            shape = (int(run.details["unit"]), int(run.details["width"]))
            found.setdefault(shape, []).append(float(run.details["mib_per_s"]))
    return found


def _panel(left: int, title: str, speeds: Speeds, units: list[int], cap: float) -> list[str]:
    widths = sorted({width for _, width in speeds})
    top = max([cap, *(value for values in speeds.values() for value in values)]) * 1.05

    def x(width: int) -> float:
        return left + _WIDTH * (widths.index(width) + 0.5) / len(widths)

    def y(speed: float) -> float:
        return _TOP + _HEIGHT * (1 - speed / top)

    lines = [f'<text x="{left}" y="24" font-size="14">{title}, MiB/s by stripe width</text>']
    for mark in range(0, int(top) + 1, 60):
        lines.append(f'<line x1="{left}" x2="{left + _WIDTH}" y1="{y(mark):.1f}" y2="{y(mark):.1f}" stroke="#ddd"/>')
        lines.append(f'<text x="{left - 6}" y="{y(mark) + 4:.1f}" text-anchor="end">{mark}</text>')
    lines.append(
        f'<line x1="{left}" x2="{left + _WIDTH}" y1="{y(cap):.1f}" y2="{y(cap):.1f}" stroke="black" '
        'stroke-dasharray="4 3"/>'
        f'<text x="{left + _WIDTH}" y="{y(cap) - 4:.1f}" text-anchor="end">all links together</text>'
    )
    for width in widths:
        lines.append(f'<text x="{x(width):.1f}" y="{_TOP + _HEIGHT + 18}" text-anchor="middle">{width}</text>')
    for index, unit in enumerate(units):
        colour = _COLOURS[index % len(_COLOURS)]
        shift = (index - (len(units) - 1) / 2) * 3  # so that equal values stay visible
        dots = [(width, speeds[unit, width]) for width in widths if (unit, width) in speeds]
        path = " ".join(f"{x(width) + shift:.1f},{y(statistics.median(found)):.1f}" for width, found in dots)
        lines.append(f'<polyline points="{path}" fill="none" stroke="{colour}"/>')
        for width, found in dots:
            at = x(width) + shift
            ends = f'y1="{y(min(found)):.1f}" y2="{y(max(found)):.1f}"'
            lines.append(f'<line x1="{at:.1f}" x2="{at:.1f}" {ends} stroke="{colour}"/>')
            lines.append(f'<circle cx="{at:.1f}" cy="{y(statistics.median(found)):.1f}" r="3" fill="{colour}"/>')
    return lines


def _size(unit: int) -> str:
    return f"{unit >> 20} MiB" if unit >= 1 << 20 else f"{unit >> 10} KiB"
