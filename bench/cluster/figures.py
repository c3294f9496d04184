"""Figures of bench/cluster, computed from its runs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from bench.common.figures import Figures, Say, gains
from bench.common.report import Report, Run


def compute(report: Report, say: Say) -> Figures:
    """Replace the figures of ``report`` by those that its runs allow; says of which scenario a variant is missing."""
    made = Figures(report, say)
    runs: dict[tuple[str, str], list[Run]] = {}
    for run in report.runs:
        scenario, _, variant = run.variant.partition(":")
        if not run.failed:
            runs.setdefault((scenario, variant), []).append(run)

    def add(name: str, target: str, values: Sequence[float], unit: str = "ratio") -> None:
        if values:
            made.add(name, target, values, unit)

    def overhead(scenario: str, variant: str) -> float | None:
        mine, local = runs.get((scenario, variant)), runs.get((scenario, "local"))
        return _seconds(mine) - _seconds(local) if mine and local else None

    def compare(name: str, target: str, ours: tuple[str, str], theirs: tuple[str, str]) -> None:
        """Two overheads."""
        mine, other = overhead(*ours), overhead(*theirs)
        if mine is None or other is None or other <= 0:
            say(f"no figure {name}")
            return
        n = min(len(runs[key]) for key in (ours, theirs, (ours[0], "local")))
        add(name, target, [mine / other] * n)

    for scenario in dict.fromkeys(scenario for scenario, _ in runs):
        prefix = "" if scenario == "cold" else f"{scenario.replace('-', '_')}_"
        again, local = runs.get((scenario, "again"), []), runs.get((scenario, "local"), [])
        for other, target in (("ordinary", "<= 0.1"), ("strongest", "<= 0.5")):
            compare(f"{prefix}overhead_vs_{other}", target, (scenario, "again"), (scenario, other))
        hot = [run.bytes["registry"] / run.details["hot_bytes"] for run in again if run.details["hot_bytes"]]
        if scenario in ("cold", "mirror"):
            add(f"{'registry' if scenario == 'cold' else 'mirror'}_egress_hot_sets", "<= 2", hot)
        if scenario == "cold":
            if local:
                bounds = [max(_seconds(local), run.details["links_seconds"]) for run in again]
                add("last_vs_bound", "<= 1.25", [_took(run) / bound for run, bound in zip(again, bounds, strict=True)])
            first = runs.get((scenario, "first"), [])
            for name in ("first", "first-uv"):
                mine, best = runs.get((scenario, name), []), runs.get((scenario, "strongest"))
                ratios = [_took(run) / _seconds(best) for run in mine] if best else []
                add(f"nodes_{name.replace('-', '_')}_vs_strongest", "<= 1.3", ratios)
            add("setup_runs", "== 1", [run.details["setup_runs"] for run in first], "runs")
            if plain := runs.get((scenario, "ordinary")):
                one = statistics.median(run.details["index_requests"] / len(run.details["nodes"]) for run in plain)
                asked = [run.details["index_requests"] / one for run in first] if one else []
                add("index_requests_vs_one_node", "<= 1.1", asked)
            if alone := runs.get(("alone", "again")):
                add("last_vs_alone", "<= 2", [_took(run) / _seconds(alone) for run in again])
        if scenario in ("registry", "mirror") and (hdfs := runs.get(("cold", "again"))):
            add(f"{scenario}_vs_hdfs", ">= 1", [_took(run) / _seconds(hdfs) for run in again])
        saved = gains(report.runs, f"{scenario}:again", f"{scenario}:strict")
        add(f"{prefix}gain_turn_limit", ">= 5", saved, "%")
        if scenario == "slow-node":  # the slow one is the first; with at most 100 the 99th percentile is the largest
            healthy = [run.details["nodes"][1:] for run in again]
            spreads = [max(nodes) / statistics.median(nodes) for nodes in healthy if len(nodes) > 1]
            add("p99_over_p50", "<= 1.3", spreads)
        if scenario == "hot":
            compare("hot_cycle_vs_cold", "<= 0.1", ("hot", "again"), ("cold", "again"))
    return made


def _took(run: Run) -> float:
    assert run.seconds is not None
    return run.seconds


def _seconds(found: Sequence[Run]) -> float:
    return statistics.median(_took(run) for run in found)
