"""Causes of a slow start-up, as far as its events tell: what held stragglers back, what a checkpoint moved. Pure
functions of a report; card, pages and ``--json`` say what is found. Events name nodes and stages, and no DataNode."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from statistics import median

from bootseer.profile.report import Cause, JobReport, NodeReport
from bootseer.units import size_text

_SMALL = 0.01
_NODES = 100
"""Of a stage: its slowest nodes, as each is compared with all nodes."""
_REASON = 200
"""Characters of it are shown."""
_WAITED_FOR = {
    "lookup_seconds": "registry and store told it after {} s what its image is",
    "io_pressure_seconds": "processes on it waited {} s for I/O",
    "cpu_pressure_seconds": "processes on it waited {} s for a processor",
    "memory_pressure_seconds": "processes on it waited {} s for memory",
}
"""What the attributes of a straggler's stage say, where they explain it."""


def find(report: JobReport) -> list[Cause]:
    """What held each straggler back; a cause without a stage is of the whole start-up."""
    found = [Cause("", "", line) for line in (*_hot_blocks(report), *_checkpoint(report))]
    for stage in report.stages:
        for node in stage.stragglers[:_NODES]:
            slow = next(one for one in report.nodes if one.node == node)
            excess = (slow.stages[stage.stage].own or 0.0) - (stage.median or 0.0)
            lines = [_another_way(report, slow, stage.stage), _image_late(report, slow, excess)]
            lines += _waited_for(report, slow, stage.stage, excess)
            found += (Cause(stage.stage, node, line) for line in lines if line)
    return found


def _checkpoint(report: JobReport) -> list[str]:
    """What the loads of the checkpoint needed, and what of it did not lie on the nodes."""
    stages = ("init", "checkpoint_load")
    needed, fetched = (
        sum(node.number(stage, name) for node in report.nodes for stage in stages) for name in ("needed", "fetched")
    )
    if not needed:
        return []
    waited = max(node.number(stage, "waited") for node in report.nodes for stage in stages)
    came = f"{size_text(int(fetched))} came from the store"
    return [
        f"checkpoint: {size_text(int(needed))} read, {came}; readers of a node waited {seconds_text(waited)} s at most"
    ]


def _hot_blocks(report: JobReport) -> list[str]:
    """While it starts: the nodes that have the least of the hot blocks of their image."""
    pairs = [(node.node, node.number("image", "hot_ready"), node.number("image", "hot_total")) for node in report.nodes]
    shares = sorted((ready / total, name) for name, ready, total in pairs if total)
    if report.startup_seconds is not None or not shares or shares[0][0] >= 1:
        return []
    least = ", ".join(f"{100 * share:.0f} % on {name}" for share, name in shares[:3] if share < 1)
    return [f"hot blocks of the image: {least}; median {100 * median(share for share, _ in shares):.0f} %"]


def _another_way(report: JobReport, slow: NodeReport, stage: str) -> str:
    """The attributes ``how`` and ``reason`` of a straggler's technique, where most other nodes went another way."""
    told = slow.stages[stage].attrs
    cells = [cell for node in report.nodes if node is not slow and (cell := node.stages.get(stage))]
    ways = Counter(str(cell.attrs["how"]) for cell in cells if cell.attrs.get("how"))
    usual, count = max(ways.items(), key=lambda way: way[1], default=("", 0))
    if not told.get("how") or usual == told["how"] or 2 * count <= len(cells):
        return ""
    reason = f", {str(told['reason'])[:_REASON]}" if told.get("reason") else ""
    return f"it took another way than most nodes ({usual}): {told['how']}{reason}"


def _image_late(report: JobReport, slow: NodeReport, excess: float) -> str:
    """What a straggler's block server says, where its readers waited for at least half of the ``excess`` seconds."""
    waited, rate = slow.number("image", "waited_seconds"), slow.number("image", "link_rate")
    if waited < max(excess / 2, _SMALL):
        return ""
    text = f"its readers waited {seconds_text(waited)} s for blocks of the image"
    others = [usual for node in report.nodes if node is not slow and (usual := node.number("image", "link_rate"))]
    if rate and others:
        text += f", which came at {size_text(rate)}/s at best; other nodes: {size_text(median(others))}/s"
    return text


def _waited_for(report: JobReport, slow: NodeReport, stage: str, excess: float) -> Iterator[str]:
    """For what a straggler waited at least half of the ``excess`` seconds longer than most other nodes did."""
    for name, text in _WAITED_FOR.items():
        mine = slow.number(stage, name)
        if name == "io_pressure_seconds":  # which counts the waits for blocks of the image, too
            mine = max(0.0, mine - slow.number("image", "waited_seconds"))
        usual = median(node.number(stage, name) for node in report.nodes)
        if mine - usual >= max(excess / 2, _SMALL):
            yield f"{text.format(seconds_text(mine))}; median {seconds_text(usual)} s"


def seconds_text(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.2f}" if seconds < 9.995 else f"{seconds:.1f}" if seconds < 999.95 else f"{seconds:,.0f}"
