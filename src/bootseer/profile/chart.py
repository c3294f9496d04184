"""Bars of hours by period, as SVG: own work is filled, waiting is hatched, gaps are empty."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from bootseer.profile.fleet import Group
from bootseer.profile.page import HATCHING
from bootseer.units import one_line

_HIGH, _BAR, _STEP, _LEFT = 180, 34, 56, 60
_MOST = 60
"""Periods that are drawn: the latest."""


def bars(groups: Sequence[Group]) -> str:
    """One bar a period; nothing without one. The table beside it has the figures."""
    shown = groups[-_MOST:]
    if not shown:
        return ""
    top = max(group.hours for group in shown) or 1.0
    out = [
        f'<text x="{_LEFT - 6}" y="{10 + _HIGH - _HIGH * part // 4}" text-anchor="end">{top * part / 4:.3g}</text>'
        f'<line x1="{_LEFT}" x2="{_LEFT + _STEP * len(shown)}" y1="{10 + _HIGH - _HIGH * part // 4}"'
        f' y2="{10 + _HIGH - _HIGH * part // 4}"/>'
        for part in range(5)
    ]
    for place, group in enumerate(shown):
        x, y = _LEFT + _STEP * place + (_STEP - _BAR) // 2, 10.0 + _HIGH
        said = f"{group.name}: {group.hours:.1f} hours, {group.own_hours:.1f} own work, {group.wait_hours:.1f} waiting"
        out.append(f"<g><title>{escape(one_line(said))}</title>")
        for hours, kind in ((group.own_hours, "own"), (group.wait_hours, "wait"), (group.gap_hours, "gap")):
            high = _HIGH * hours / top
            y -= high
            out.append(f'<rect x="{x}" y="{y:.1f}" width="{_BAR}" height="{high:.1f}" class="{kind}"/>')
        middle = x + _BAR / 2
        out.append(
            f'<text x="{middle}" y="{_HIGH + 26}" text-anchor="middle">{escape(one_line(group.name))}</text></g>'
        )
    wide = _LEFT + _STEP * len(shown) + 10
    return (
        f'<div class="scroll" tabindex="0"><svg viewBox="0 0 {wide} {_HIGH + 34}" style="width: {wide}px; min-width: 0"'
        ' role="img" aria-label="Hours by period; the table below has the figures">'
        f"{HATCHING}{''.join(out)}</svg></div>"
    )
