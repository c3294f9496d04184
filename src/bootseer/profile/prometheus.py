"""Start-ups as Prometheus text (exposition format 0.0.4): for a node exporter's textfile collector, or a push gateway.

Nodes and jobs are never labels: their number has no bound. Histograms count complete start-ups only.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

from bootseer.profile.events import INIT_STAGES, TOP_STAGES
from bootseer.profile.starts import Start

BUCKETS = (1, 3, 10, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200)
"""Upper bounds in seconds."""
OTHER = "other"
"""Label of stages that bootseer has no name for, whose number has no bound either."""


class _Histogram:
    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS) + 1)
        self.sum = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BUCKETS, seconds)] += 1
        self.sum += seconds

    def lines(self, name: str, labels: str) -> Iterator[str]:
        total = 0
        for bound, count in zip((*BUCKETS, "+Inf"), self.counts, strict=True):
            total += count
            yield f'{name}_bucket{{{labels},le="{bound}"}} {total}'
        yield f"{name}_sum{{{labels}}} {self.sum:.6f}"
        yield f"{name}_count{{{labels}}} {total}"


def text(rows: Iterable[Start]) -> str:
    """All metrics of these start-ups."""
    whole: dict[str, _Histogram] = defaultdict(_Histogram)
    stages: dict[str, _Histogram] = defaultdict(_Histogram)
    hours: dict[tuple[str, str], float] = defaultdict(float)
    started: Counter[tuple[str, bool]] = Counter()
    for start in rows:
        kind, unit = "hot" if start.hot else "cold", "gpu" if start.gpus else "node"
        started[kind, start.startup_seconds is not None] += 1
        for name, value in (("own", start.own_hours), ("wait", start.wait_hours), ("gap", start.gap_hours)):
            hours[unit, name] += value
        if start.startup_seconds is not None:
            whole[kind].add(start.startup_seconds)
            for stage in start.stages:
                stages[stage.stage if stage.stage in (*TOP_STAGES, *INIT_STAGES) else OTHER].add(stage.seconds)
    return "".join(line + "\n" for line in _lines(whole, stages, hours, started))


def _lines(
    whole: dict[str, _Histogram], stages: dict[str, _Histogram], hours: dict[tuple[str, str], float],
    started: Counter[tuple[str, bool]],
) -> Iterator[str]:  # fmt: skip
    yield from _head("bootseer_startup_seconds", "histogram", "Seconds until the slowest rank ended its first step.")
    for kind, histogram in sorted(whole.items()):
        yield from histogram.lines("bootseer_startup_seconds", f'kind="{kind}"')
    yield from _head("bootseer_startup_stage_seconds", "histogram", "Share of a stage in the seconds of a start-up.")
    for stage, histogram in sorted(stages.items()):
        yield from histogram.lines("bootseer_startup_stage_seconds", f'stage="{stage}"')
    yield from _head("bootseer_startups_total", "counter", "Start-ups, complete or not.")
    for (kind, complete), count in sorted(started.items()):
        yield f'bootseer_startups_total{{kind="{kind}",complete="{str(complete).lower()}"}} {count}'
    yield from _head(
        "bootseer_startup_cost_seconds_total", "counter", "GPU-seconds or node-seconds before the first step."
    )
    for (unit, name), value in sorted(hours.items()):
        yield f'bootseer_startup_cost_seconds_total{{unit="{unit}",part="{name}"}} {value * 3600:.3f}'


def _head(name: str, kind: str, said: str) -> Iterator[str]:
    yield f"# HELP {name} {said}"
    yield f"# TYPE {name} {kind}"
