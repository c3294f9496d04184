"""Bars by period or size, as SVG: of stages each in its colour, or of own work, which is filled, waiting, which is
hatched, and gaps, which are empty."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

from bootseer.profile.page import COLOURS, HATCHING, OTHER, STYLE, legend
from bootseer.units import one_line

_HIGH, _BAR, _STEP, _LEFT, _LETTER = 180, 34, 56, 60, 7
_MOST, _LONGEST = 60, 20
"""Bars that are drawn, the last, and letters for which one makes room."""


KINDS = (
    '<ul class="legend"><li><b class="key own"></b>own work</li><li><b class="key wait"></b>waiting for others</li>'
    '<li><b class="key gap"></b>between stages</li></ul>'
)
"""What `bars` are filled with."""


class Bar(NamedTuple):
    """One bar: its name, and how much of it is own work, waiting and gap."""

    name: str
    own: float
    wait: float
    gap: float


def picture(given: Sequence[Bar], unit: str, words: tuple[str, str]) -> str:
    """The bars as a file of their own. ``words``: what their first and second parts are."""
    drawn = bars(given, unit, words)
    svg = drawn[drawn.index("<svg ") + 5 : drawn.rindex("</div>")]
    head, _, rest = svg.partition(">")
    return f'<svg xmlns="http://www.w3.org/2000/svg" {head}><style>{STYLE}</style>{rest}\n'


def bars(given: Sequence[Bar], unit: str, words: tuple[str, str] = ("own work", "waiting")) -> str:
    """The bars; nothing without one. ``unit``: of their parts, such as hours. The table beside it has the figures."""
    kinds = ("own", "wait", "gap")
    return (KINDS if given else "") + _drawn(
        [
            _Drawn(
                one.name,
                f"{sum(one[1:]):.1f} {unit}, {one.own:.1f} {words[0]}, {one.wait:.1f} {words[1]}",
                [(part, f'class="{kind}"') for part, kind in zip(one[1:], kinds, strict=True)],
            )
            for one in given
        ],
        unit,
    )


def stages(given: Sequence[tuple[str, Mapping[str, float]]]) -> str:
    """Bars of stages in %, with a legend. A stage that is not bootseer's own is among the others, which are last."""
    there = {stage for _, parts in given for stage in parts}
    known = {stage: colour for stage, colour in COLOURS.items() if stage in there}
    known |= {"other": OTHER} if there - known.keys() else {}
    drawn = []
    for name, parts in given:
        of = {stage: parts.get(stage, 0.0) for stage in known}
        of |= {"other": sum(part for stage, part in parts.items() if stage not in known)} if "other" in known else {}
        said = ", ".join(f"{stage} {part:.2f}" for stage, part in of.items() if part)
        drawn.append(
            _Drawn(name, f"{sum(of.values()):.2f} %: {said}", [(of[s], f'fill="{c}"') for s, c in known.items()])
        )
    return legend(known) + _drawn(drawn, "%") if given else ""


class _Drawn(NamedTuple):
    """A bar: what is said of it, and its parts from below with their paint."""

    name: str
    said: str
    parts: list[tuple[float, str]]

    @property
    def high(self) -> float:
        return sum(part for part, _ in self.parts)


def _round(least: float) -> float:
    """The next of 1, 2, 2.5 and 5 by powers of ten."""
    if not 0 < least < math.inf:
        return 0.25
    size = 10.0 ** math.floor(math.log10(least))
    return float(f"{next(part * size for part in (1, 2, 2.5, 5, 10) if part * size >= least * (1 - 1e-9)):.6g}")


def _drawn(given: Sequence[_Drawn], unit: str) -> str:
    shown = given[-_MOST:]
    if not shown:
        return ""
    top = _round(max(bar.high for bar in shown) / 4) * 4
    step = max(_STEP, *(_LETTER * (min(len(bar.name), _LONGEST) + 2) for bar in shown))
    out = [
        f'<text x="{_LEFT - 6}" y="{10 + _HIGH - _HIGH * part // 4}" text-anchor="end">{top * part / 4:,.10g}</text>'
        f'<line x1="{_LEFT}" x2="{_LEFT + step * len(shown)}" y1="{10 + _HIGH - _HIGH * part // 4}"'
        f' y2="{10 + _HIGH - _HIGH * part // 4}"/>'
        for part in range(5)
    ]
    for place, bar in enumerate(shown):
        x, y = _LEFT + step * place + (step - _BAR) // 2, 10.0 + _HIGH
        out.append(f"<g><title>{escape(one_line(f'{bar.name}: {bar.said}'))}</title>")
        for part, paint in bar.parts:
            high = _HIGH * part / top
            y -= high
            out.append(f'<rect x="{x}" y="{y:.1f}" width="{_BAR}" height="{high:.1f}" {paint}/>')
        middle = x + _BAR / 2
        out.append(f'<text x="{middle}" y="{_HIGH + 26}" text-anchor="middle">{escape(one_line(bar.name))}</text></g>')
    wide = _LEFT + step * len(shown) + 10
    return (
        f'<div class="scroll" tabindex="0"><svg viewBox="0 0 {wide} {_HIGH + 34}" style="width: {wide}px; min-width: 0"'
        f' role="img" aria-label="Bars of {escape(unit)}; the table below has the figures">'
        f"{HATCHING}{''.join(out)}</svg></div>"
    )
