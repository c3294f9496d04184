"""Bytes touched over time as pictures: an SVG file for a report, a line of blocks for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

from bootseer.blocks.profiles.explain import Point

_WIDTH, _HEIGHT = 800, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 20, 30, 50
_COLOURS = ("#1b6ca8", "#c44536", "#3a7d44", "#8a4fbe", "#b07d12", "#2a9d8f", "#6b705c", "#d1495b")
_LEVELS = "▁▂▃▄▅▆▇█"


def svg(series: Sequence[tuple[str, Sequence[Point]]]) -> str:
    """One rising curve (megabytes over seconds) for each named start, as a whole SVG document."""
    end = max((points[-1].seconds for _, points in series if points), default=0.0) or 1.0
    most = max((points[-1].touched for _, points in series if points), default=0) or 1
    wide, high = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def place(seconds: float, touched: float) -> tuple[float, float]:
        return _LEFT + wide * seconds / end, _HEIGHT - _BOTTOM - high * touched / most

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif"'
        ' font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
    ]
    for step in range(6):
        x, y = place(end * step / 5, most * step / 5)
        parts += [
            f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - _RIGHT}" y2="{y:.1f}" stroke="#ddd"/>',
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{most * step / 5e6:.4g}</text>',
            f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{end * step / 5:.3g}</text>',
        ]
    parts.append(f'<text x="{_LEFT}" y="{_TOP - 12}">MB touched</text>')
    parts.append(f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 12}" text-anchor="end">seconds since the mount</text>')
    for number, (name, points) in enumerate(series):
        colour = _COLOURS[number % len(_COLOURS)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(0, 0), *(place(p.seconds, p.touched) for p in points)))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{_LEFT + 12}" y="{_TOP + 16 + 16 * number}" fill="{colour}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def sparkline(points: Sequence[Point]) -> str:
    """How much was touched in each stretch of time, as one line."""
    steps = [point.touched - before for point, before in zip(points, [0, *(p.touched for p in points)], strict=False)]
    most = max(steps, default=0) or 1
    return "".join(_LEVELS[(len(_LEVELS) - 1) * step // most] if step else " " for step in steps)
