"""Bars by period or size, as SVG: own work is filled, waiting is hatched, gaps are empty."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from bootseer.profile.page import HATCHING, STYLE
from bootseer.units import one_line

_HIGH, _BAR, _STEP, _LEFT, _LETTER = 180, 34, 56, 60, 7
_MOST, _LONGEST = 60, 20
"""Bars that are drawn, the last, and letters for which one makes room."""


class Bar(NamedTuple):
    """One bar: its name, and how much of it is own work, waiting and gap."""

    name: str
    own: float
    wait: float
    gap: float


def picture(given: Sequence[Bar], unit: str) -> str:
    """The bars as a file of their own."""
    drawn = bars(given, unit)
    svg = drawn[drawn.index("<svg ") + 5 : drawn.rindex("</div>")]
    head, _, rest = svg.partition(">")
    return f'<svg xmlns="http://www.w3.org/2000/svg" {head}><style>{STYLE}</style>{rest}\n'


def bars(given: Sequence[Bar], unit: str) -> str:
    """The bars; nothing without one. ``unit``: of their parts, such as hours. The table beside it has the figures."""
    shown = given[-_MOST:]
    if not shown:
        return ""
    top = max(bar.own + bar.wait + bar.gap for bar in shown) or 1.0
    step = max(_STEP, *(_LETTER * (min(len(bar.name), _LONGEST) + 2) for bar in shown))
    out = [
        f'<text x="{_LEFT - 6}" y="{10 + _HIGH - _HIGH * part // 4}" text-anchor="end">{top * part / 4:.3g}</text>'
        f'<line x1="{_LEFT}" x2="{_LEFT + step * len(shown)}" y1="{10 + _HIGH - _HIGH * part // 4}"'
        f' y2="{10 + _HIGH - _HIGH * part // 4}"/>'
        for part in range(5)
    ]
    for place, bar in enumerate(shown):
        x, y = _LEFT + step * place + (step - _BAR) // 2, 10.0 + _HIGH
        said = f"{bar.name}: {bar.own + bar.wait + bar.gap:.1f} {unit}, {bar.own:.1f} own work, {bar.wait:.1f} waiting"
        out.append(f"<g><title>{escape(one_line(said))}</title>")
        for part, kind in zip(bar[1:], ("own", "wait", "gap"), strict=True):
            high = _HIGH * part / top
            y -= high
            out.append(f'<rect x="{x}" y="{y:.1f}" width="{_BAR}" height="{high:.1f}" class="{kind}"/>')
        middle = x + _BAR / 2
        out.append(f'<text x="{middle}" y="{_HIGH + 26}" text-anchor="middle">{escape(one_line(bar.name))}</text></g>')
    wide = _LEFT + step * len(shown) + 10
    return (
        f'<div class="scroll" tabindex="0"><svg viewBox="0 0 {wide} {_HIGH + 34}" style="width: {wide}px; min-width: 0"'
        f' role="img" aria-label="Bars of {escape(unit)}; the table below has the figures">'
        f"{HATCHING}{''.join(out)}</svg></div>"
    )
