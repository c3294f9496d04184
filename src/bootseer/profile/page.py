"""One start-up as one HTML file that opens from disk: card, time line of the nodes, node x stage table, what-if. No
script and nothing from a network. Everything that events say is escaped, and a content security policy forbids the
rest. Nothing is said by colour alone. From `MAX_ROWS` nodes on a row of the time line is a band of nodes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

from bootseer.profile import analysis, card
from bootseer.profile.events import EventLog, Identity, identity_text
from bootseer.profile.intervals import Interval
from bootseer.profile.report import JobReport, NodeReport
from bootseer.profile.timeline import Timeline, Track
from bootseer.profile.waits import Parts
from bootseer.units import one_line

MAX_ROWS = 200
_WIDTH, _LEFT, _ROW, _BAR, _TOP = 1000, 170, 18, 14, 22
_TICKS = 8
_SMALLEST = 0.4
"""Narrower bars than this (of 1000) are left out: they would not be seen."""
STYLE = """
:root { color-scheme: light dark }
:root { --back: #fff; --text: #1c1e21; --faint: #6b7075; --line: #d5d9dd; --warn: #9a3412; --cell: 217, 119, 6 }
@media (prefers-color-scheme: dark) {
  :root { --back: #16181b; --text: #e7e9ec; --faint: #9aa1a8; --line: #3a3f45; --warn: #fdba74; --cell: 180, 83, 9 } }
body { background: var(--back); color: var(--text); font: 15px/1.5 system-ui, sans-serif; margin: 1.5rem auto;
  max-width: 1200px; padding: 0 1rem }
h1 { font-size: 1.1rem; margin: 0 0 .5rem } h2 { font-size: 1.1rem; margin: 2.2rem 0 .5rem }
h1, td:first-child, li { overflow-wrap: anywhere } .scroll { overflow-x: auto } .faint, dt { color: var(--faint) }
dl { display: flex; flex-wrap: wrap; align-items: baseline; gap: .7rem 2.2rem; margin: .3rem 0 1.2rem }
dl div { display: flex; flex-direction: column } dt { font-size: .85rem; max-width: 20rem }
dd { order: -1; margin: 0; font-size: 1.4rem; line-height: 1.25 }
dl div:first-child dd { font-size: 2.3rem; font-weight: 650 } dd small { margin-left: .3rem; font-size: 1rem }
dd small { font-weight: 400 } ul { padding-left: 1.2rem } li li { font-size: .92rem }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .2rem 1rem; padding: 0; font-size: .88rem }
.key { display: inline-block; width: .8rem; height: .8rem; margin-right: .3rem; vertical-align: -.05rem }
.key.own { background: #2563eb } .key.gap, .key.wait { border: 1px solid var(--faint); box-sizing: border-box }
.key.wait { background: repeating-linear-gradient(135deg, var(--faint) 0 1px, transparent 1px 4px) }
.strip { display: flex; height: 1.9rem; border-radius: 4px; overflow: hidden; background: var(--line) }
.strip span { color: #fff; font: .8rem/1.9rem system-ui, sans-serif; text-indent: 5px; white-space: nowrap }
.strip span { overflow: hidden }
.warn { color: var(--warn); overflow-wrap: anywhere }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .88rem }
th, td { padding: .2rem .6rem; border-bottom: 1px solid var(--line); text-align: right; min-width: 3.2rem }
th:first-child, td:first-child { text-align: left; min-width: 6rem; position: sticky; left: 0;
  background: var(--back) } td:not(:first-child, .wide) { white-space: nowrap }
td.stage { white-space: nowrap } th { font-weight: 600 }
svg { width: 100%; min-width: 860px; height: auto } svg text { fill: var(--text); font: 11px system-ui, sans-serif }
svg .own { fill: #2563eb } svg .gap { fill: none; stroke: var(--faint) }
svg line { stroke: var(--line) } svg text.in { fill: #fff } svg .wait { fill: url(#wait); stroke: var(--faint) }
@media (max-width: 620px) { body { padding: 0 .6rem } table { font-size: .8rem }
  th, td { padding: .2rem .3rem; min-width: 0 } th:first-child, td:first-child { min-width: 6.6rem } }
"""
COLOURS = {
    "alloc": "#64748b", "image": "#2563eb", "env": "#7c3aed", "init": "#475569", "import": "#0f766e",
    "dist_init": "#a16207", "model_init": "#be185d", "optimizer_init": "#9d174d", "data_loader_init": "#4d7c0f",
    "checkpoint_load": "#b91c1c", "compile": "#0e7490", "first_step": "#15803d",
}  # fmt: skip
OTHER = "#57534e"
HATCHING = (
    '<defs><pattern id="wait" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<line x1="0" y1="0" x2="0" y2="5" stroke-width="2"/></pattern></defs>'
)
"""What ``.wait`` of `STYLE` is filled with."""


class _Bar(NamedTuple):
    at: Interval
    stage: str
    wait: bool


def html(log: EventLog, identity: Identity | None = None, *, now: int | None = None) -> str:
    """The page of one start-up, by default the one that began last. Raises `NotFoundError` without it."""
    report, line, parts = analysis.look(log, identity, now=now)
    name = identity_text(report.job, report.attempt, report.cycle)
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{_text(name)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style></head><body><main>\n{body(report, line, parts)}\n</main></body></html>\n"
    )


def body(report: JobReport, line: Timeline, parts: dict[Track, Parts]) -> str:
    """What the page says, as HTML: heading, figures, stages, remarks, time line, node x stage table."""
    name = identity_text(report.job, report.attempt, report.cycle)
    found = [
        f"<h1>{'Hot restart' if report.hot else 'Start-up'} of {_text(short(name, 160))}</h1>",
        *((f'<p class="warn"><strong>{_text(card.unfinished(report))}</strong></p>',) if not report.complete else ()),
        figures(_figures(report)),
        _strip(report),
        _stages(report),
        _remarks(report),
        "<h2>Who did what when</h2>",
        legend([stage.stage for stage in report.stages], "waiting for others"),
        _gantt(report, line, parts),
        "<p class='faint'>A row is a node, of which its slowest rank is drawn; those with the most own work are on top."
        f"{' A row with (+N) stands for N more nodes, which have less.' if len(report.nodes) > MAX_ROWS else ''}"
        " Where a row is empty its node has no span.</p>",
        "<h2>Node by stage</h2>",
        "<p class='faint'>Own work in seconds, of the slowest rank. The darker, the longer against the stage's median; "
        "<b>!</b> marks a straggler.</p>",
        _table(report),
    ]
    return "\n".join(found)


def figures(given: Iterable[tuple[str, str, str]]) -> str:
    """Numbers in large type, the first one the largest: each with its unit and what it is of."""
    rows = "".join(
        f"<div><dt>{_text(of)}</dt><dd>{_text(number)}<small>{_text(unit)}</small></dd></div>"
        for number, unit, of in given
    )
    return f"<dl>{rows}</dl>"


def legend(stages: Iterable[str], waiting: str = "") -> str:
    """Which colour is which stage; ``waiting``: what is hatched."""
    colours = {stage if stage in COLOURS else "other": colour(stage) for stage in stages}
    keys = [f'<li><b class="key" style="background: {one}"></b>{stage}</li>' for stage, one in colours.items()]
    keys += [f'<li><b class="key wait"></b>{_text(waiting)}</li>'] if waiting else []
    return f'<ul class="legend">{"".join(keys)}</ul>'


def colour(stage: str) -> str:
    """Of a stage; those that are not bootseer's own have one together."""
    return COLOURS.get(stage, OTHER)


def _figures(report: JobReport) -> Iterable[tuple[str, str, str]]:
    cost, flagged = report.cost, {node for stage in report.stages for node in stage.stragglers}
    last = max((node for node in report.nodes if node.ready is not None), key=lambda n: n.ready or 0.0, default=None)
    on = f", last on {last.node}" if last and report.complete and len(report.nodes) > 1 else ""
    so_far = "so far" if report.goes_on and report.heard_seconds is not None else "up to the last event"
    yield (
        f"{report.elapsed_seconds:,.{_places(report)}f}",
        "s",
        f"to the first step{on}" if report.complete else f"{so_far}; no first step",
    )
    yield card.hours_text(cost.total), cost.unit, "lost"
    if cost.total:
        yield f"{100 * cost.wait / cost.total:.0f}", "%", "of that waits for others"
    if len(report.nodes) > 1:
        yield str(len(flagged)), "", f"straggler{'' if len(flagged) == 1 else 's'}"
    there = f"{len(report.nodes):,}" + (f" of {report.nodes_expected:,}" if report.nodes_missing else "")
    held = f"node{'s' * (there != '1')}" + (f", {report.gpus:,} GPUs" if report.gpus else "")
    yield there, held, f"with {report.ranks:,} ranks" if report.ranks else "in this start"
    if report.ranks_expected and not report.complete:
        yield f"{report.ranks_ready:,}", f"of {report.ranks_expected:,} ranks", "have ended their first step"
    if report.queue_seconds is not None:
        held = f"; {report.queue_held_seconds} s of it held" if report.queue_held_seconds else ""
        yield f"{report.queue_seconds:,.1f}", "s", f"queued before that, at no GPU cost{held}"


def _remarks(report: JobReport) -> str:
    """As a list; what begins with spaces belongs to the one before."""
    items: list[list[str]] = []
    for line in card.remarks(report):
        if line.startswith(" ") and items:
            items[-1].append(f"<li>{_text(line.strip())}</li>")
        else:
            items.append([_text(line)])
    lines = (one[0] + (f"<ul>{''.join(one[1:])}</ul>" if one[1:] else "") for one in items)
    return "<h2>Findings</h2><ul>" + "".join(f"<li>{line}</li>\n" for line in lines) + "</ul>" if items else ""


def _strip(report: JobReport) -> str:
    """The stages of the start-up one beside the other, as long as they took of it."""
    whole = sum(stage.seconds for stage in report.stages) + report.gap_seconds
    drawn = [
        f'<span style="width: {100 * stage.seconds / whole:.2f}%; background: {colour(stage.stage)}">'
        f"{_text(stage.stage) if stage.seconds > whole * 0.09 else ''}</span>"
        for stage in report.stages
        if whole and stage.seconds > whole * 0.001
    ]
    return f'<div class="strip" aria-hidden="true">{"".join(drawn)}</div>'


def _text(value: object) -> str:
    return escape(short(str(value), 400))


def short(text: str, most: int = 120) -> str:
    """``text`` on one line of at most ``most`` characters: names are input, and may be long."""
    text = one_line(text)
    return text if len(text) <= most else f"{text[: most // 2]}...{text[-(most // 2 - 3) :]}"


def _rows(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; cells are HTML already."""
    top = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    lines = "".join(
        "<tr>" + "".join(c if c.startswith("<td") else f"<td>{c}</td>" for c in row) + "</tr>\n" for row in rows
    )
    return (
        f'<div class="scroll" tabindex="0"><table><thead><tr>{top}</tr></thead><tbody>\n{lines}</tbody></table></div>'
    )


def _stages(report: JobReport) -> str:
    unit, places = report.cost.unit, _places(report)
    rows = [
        (
            f'<td class="stage"><b class="key" style="background: {colour(stage.stage)}"></b>'
            f"{_text(short(stage.stage, 40))}</td>",
            f"{stage.seconds:.{places}f}", f"{stage.own_hours:.2f}", f"{stage.wait_hours:.2f}",
            _seconds(stage.median, places), _seconds(stage.max, places),
            "-" if stage.ratio is None else f"{stage.ratio:.2f}",
            _text(stage.slowest or "-") + (" <b>!</b>" if stage.slowest in stage.stragglers else ""),
        )
        for stage in report.stages
    ]  # fmt: skip
    rows.append(("between stages", f"{report.gap_seconds:.{places}f}", "", "", "", "", "", ""))
    head = (
        "stage",
        "seconds",
        f"own {_text(unit)}",
        f"waiting {_text(unit)}",
        "median s",
        "max s",
        "max/median",
        "slowest",
    )
    return _rows(head, rows)


def _gantt(report: JobReport, line: Timeline, parts: dict[Track, Parts]) -> str:
    begin, length, nodes, places = line.begin, line.length, _ordered(report), _places(report)
    step = -(-len(nodes) // MAX_ROWS) or 1
    rows = [nodes[place : place + step] for place in range(0, len(nodes), step)]
    still = {name: one.stage for one in report.still for name in one.nodes}
    scale = (_WIDTH - _LEFT - 10) / (length or 1)
    out = []
    high = _TOP + _ROW * len(rows) + 4
    for tick in range(_TICKS + 1):
        x = _LEFT + (_WIDTH - _LEFT - 10) * tick / _TICKS
        out.append(f'<line x1="{x:.1f}" y1="{_TOP - 4}" x2="{x:.1f}" y2="{high}"/>')
        anchor = "end" if tick == _TICKS else "middle"
        out.append(
            f'<text x="{x:.1f}" y="12" text-anchor="{anchor}">{length * tick / _TICKS / 1e9:.{places}f} s</text>'
        )
    for place, band in enumerate(rows):
        y = _TOP + _ROW * place
        node = band[0]
        label = node.node + (f" (+{len(band) - 1})" if len(band) > 1 else "")
        label = f"{short(label, 16)}: {still[node.node]}" if node.node in still else label
        out.append(f'<text x="0" y="{y + 11}"><title>{_text(label)}</title>{_text(short(label, 26))}</text>')
        for bar in _bars(max((parts[track] for track in line.tracks[node.node]), key=lambda mine: mine.own_ns)):
            x, wide = _LEFT + (bar.at[0] - begin) * scale, (bar.at[1] - bar.at[0]) * scale
            if wide >= _SMALLEST:
                out.append(_bar(bar, x, y, wide, begin))
    return (
        f'<div class="scroll" tabindex="0"><svg viewBox="0 0 {_WIDTH} {high}" role="img"'
        f' aria-label="Time line of {len(nodes)} nodes; the table below has the figures">{HATCHING}\n'
        + "\n".join(out) + "\n</svg></div>"
    )  # fmt: skip


def _ordered(report: JobReport) -> list[NodeReport]:
    """Those that are not ready, the least advanced first, then those with the most own work: after a common first step
    all are ready at once."""
    held_up = card.stuck(report)
    return sorted(report.nodes, key=lambda n: (held_up.get(n.node, len(held_up)), n.ready is not None, -n.own, n.node))


def _bars(parts: Parts) -> list[_Bar]:
    bars = [_Bar(at, stage, False) for stage, found in parts.own.items() for at in found]
    bars += [_Bar(at, stage, True) for stage, found in parts.wait.items() for at in found]
    return sorted(bars)


def _bar(bar: _Bar, x: float, y: float, wide: float, begin: int) -> str:
    from_, long = (bar.at[0] - begin) / 1e9, (bar.at[1] - bar.at[0]) / 1e9
    said = f"{'waiting in ' if bar.wait else ''}{bar.stage}: {long:.2f} s from {from_:.2f} s on"
    fill = 'class="wait"' if bar.wait else f'fill="{colour(bar.stage)}"'
    drawn = f'<g><title>{_text(said)}</title><rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{_BAR}" {fill}/>'
    if not bar.wait and wide > 7 * len(bar.stage) + 4:
        drawn += f'<text class="in" x="{x + 3:.1f}" y="{y + 11}">{_text(bar.stage)}</text>'
    return drawn + "</g>"


def _table(report: JobReport) -> str:
    stages = [stage for stage in report.stages if any(stage.stage in node.stages for node in report.nodes)]
    nodes, places = _ordered(report)[:MAX_ROWS], _places(report)
    rows = []
    for node in nodes:
        row = [_text(node.node)]
        for stage in stages:
            cell = node.stages.get(stage.stage)
            if cell is not None and cell.state == "OPEN" and cell.open_seconds is not None:
                row.append(f"<b>OPEN</b> {cell.open_seconds:.{places}f}")
                continue
            if cell is None or cell.own is None:
                row.append("" if cell is None else _text(cell.state))
                continue
            over = max(0.0, min(1.0, cell.own / stage.median - 1)) if stage.median else 0.0
            flag = " <b>!</b>" if node.node in stage.stragglers else ""
            row.append(f'<td style="background: rgba(var(--cell), {0.6 * over:.2f})">{cell.own:.{places}f}{flag}</td>')
        rows.append([*row, _seconds(node.ready, places)])
    left = len(report.nodes) - len(nodes)
    more = f"<p>{left} nodes with less own work are left out.</p>" if left else ""
    return _rows(["node", *(_text(short(stage.stage, 40)) for stage in stages), "ready after s"], rows) + more


def _places(report: JobReport) -> int:
    """Places of seconds behind the point: a short start-up has short stages."""
    return 1 if report.elapsed_seconds >= 10 else 2 if report.elapsed_seconds >= 1 else 3


def _seconds(value: float | None, places: int) -> str:
    return "-" if value is None else f"{value:.{places}f}"
