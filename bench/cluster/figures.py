"""Figures of bench/cluster, computed from its runs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from bootseer.demo.report import Report, Run

Say = Callable[[str], None]


def compute(report: Report, say: Say) -> None:
    """Replace the figures of ``report`` by those that its runs allow; says of which scenario a variant is missing."""
    report.figures.clear()
    runs: dict[tuple[str, str], list[Run]] = {}
    for run in report.runs:
        scenario, _, variant = run.variant.partition(":")
        if not run.failed:
            runs.setdefault((scenario, variant), []).append(run)

    def add(name: str, target: str, values: Sequence[float], unit: str = "ratio") -> None:
        if values:
            value, single = statistics.median(values), len(values) == 1
            report.figure(
                name, value, unit=unit, target=target, n=len(values), of="single" if single else "median"
            )  # fmt: skip

    def overhead(scenario: str, variant: str) -> float | None:
        mine, local = runs.get((scenario, variant)), runs.get((scenario, "local"))
        return _seconds(mine) - _seconds(local) if mine and local else None

    for scenario in dict.fromkeys(scenario for scenario, _ in runs):
        prefix = "" if scenario == "cold" else f"{scenario.replace('-', '_')}_"
        again, local = runs.get((scenario, "again"), []), runs.get((scenario, "local"), [])
        ours = overhead(scenario, "again")
        for other, target in (("ordinary", "<= 0.1"), ("strongest", "<= 0.5")):
            theirs = overhead(scenario, other)
            if ours is None or theirs is None or theirs <= 0:
                say(f"no figure {prefix}overhead_vs_{other}")
                continue
            n = min(len(again), len(local), len(runs[scenario, other]))
            of = "single" if n == 1 else "median"
            name = f"{prefix}overhead_vs_{other}"
            report.figure(name, ours / theirs, unit="ratio", target=target, n=n, of=of)  # type: ignore[arg-type]
        hot = [run.bytes["registry"] / run.details["hot_bytes"] for run in again if run.details["hot_bytes"]]
        if scenario in ("cold", "mirror"):
            add(f"{'registry' if scenario == 'cold' else 'mirror'}_egress_hot_sets", "<= 2", hot)
        if scenario == "cold":
            if local:
                least = _seconds(local)
                bounds = [_took(run) / max(least, run.details["links_seconds"]) for run in again]
                add("again_vs_bound", "<= 1.25", bounds)
            first = runs.get((scenario, "first"), [])
            add("setup_runs", "== 1", [run.details["setup_runs"] for run in first], "runs")
            if plain := runs.get((scenario, "ordinary")):
                one = statistics.median(run.details["index_requests"] / len(run.details["nodes"]) for run in plain)
                asked = [run.details["index_requests"] / one for run in first] if one else []
                add("index_requests_vs_one_node", "<= 1.1", asked)
            if alone := runs.get(("alone", "again")):
                add("last_vs_alone", "<= 2", [_took(run) / _seconds(alone) for run in again])
        if scenario in ("registry", "mirror") and (hdfs := runs.get(("cold", "again"))):
            add(f"{scenario}_vs_hdfs", ">= 1", [_took(run) / _seconds(hdfs) for run in again])
        if again and (strict := runs.get((scenario, "strict"), [])):
            gains = [100 * (1 - _took(mine) / _took(other)) for mine, other in zip(again, strict, strict=False)]
            add(f"{prefix}gain_turn_limit", ">= 5", gains, "%")
        if scenario == "slow-node":
            healthy = [run.details["nodes"][1:] for run in again]
            add("p99_over_p50", "<= 1.3", [_spread(nodes) for nodes in healthy if len(nodes) > 1])  # one is no spread
        if scenario == "hot" and ours is not None and (cold := overhead("cold", "again")):
            n = min(len(again), len(runs["cold", "again"]))
            of = "single" if n == 1 else "median"
            report.figure("hot_cycle_vs_cold", ours / cold, unit="ratio", target="<= 0.1", n=n, of=of)  # type: ignore[arg-type]


def _spread(nodes: Sequence[float]) -> float:
    """Of the healthy nodes (the slow one is the first): with at most 100 of them the 99th percentile is the largest."""
    return max(nodes) / statistics.median(nodes)


def _took(run: Run) -> float:
    assert run.seconds is not None
    return run.seconds


def _seconds(found: Sequence[Run]) -> float:
    return statistics.median(_took(run) for run in found)
