"""A bar chart of readiness per variant, as SVG: the bar is the median, the line spans the runs."""

from __future__ import annotations

import html
import math
import statistics

from bootseer.report import Run

_LEFT, _RIGHT, _ROW, _TOP = 190, 90, 22, 40
_WIDTH = 860
_OURS, _OTHERS, _LOCAL = "#1f77b4", "#9a9a9a", "#2ca02c"


def readiness(runs: list[Run], order: list[str]) -> str:
    """The chart; variants in ``order``, those without runs left out. The time axis is logarithmic."""
    times = {name: [r.seconds for r in runs if r.variant == name and r.seconds is not None] for name in order}
    rows = [(name, [float(s) for s in seconds if s]) for name, seconds in times.items() if seconds]
    if not rows:
        return '<svg xmlns="http://www.w3.org/2000/svg"/>\n'
    low = min(min(seconds) for _, seconds in rows) / 1.5
    high = max(max(seconds) for _, seconds in rows)

    def x(seconds: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * math.log(seconds / low) / math.log(high / low)

    height = _TOP + _ROW * len(rows) + 30
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{_LEFT}" y="20" font-size="14">Seconds to the first useful output (median; line: all runs)</text>',
    ]
    for mark in (1, 2, 5, 10, 20, 50, 100, 200):
        if low <= mark <= high:
            lines.append(
                f'<line x1="{x(mark):.1f}" x2="{x(mark):.1f}" y1="{_TOP - 6}" y2="{height - 24}" stroke="#ddd"/>'
            )
            lines.append(f'<text x="{x(mark):.1f}" y="{height - 10}" text-anchor="middle">{mark}</text>')
    for index, (name, seconds) in enumerate(rows):
        y = _TOP + index * _ROW
        middle = statistics.median(seconds)
        ours = name.startswith(("hot", "on-demand", "warm"))
        colour = _LOCAL if name.startswith("local") else _OURS if ours else _OTHERS
        lines.append(f'<text x="{_LEFT - 8}" y="{y + 13}" text-anchor="end">{html.escape(name)}</text>')
        lines.append(f'<rect x="{_LEFT}" y="{y + 3}" width="{x(middle) - _LEFT:.1f}" height="13" fill="{colour}"/>')
        span = f'x1="{x(min(seconds)):.1f}" x2="{x(max(seconds)):.1f}" y1="{y + 9.5}" y2="{y + 9.5}"'
        lines.append(f'<line {span} stroke="black"/>')
        lines.append(f'<text x="{x(max(seconds)) + 6:.1f}" y="{y + 13}">{middle:.1f}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"
