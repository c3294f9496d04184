"""Start-ups as Prometheus text: for a node exporter's textfile collector, or a push gateway. Nodes and jobs are never
labels: their number has no bound. Histograms count complete start-ups only."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

from bootseer import prometheus
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

    def samples(self, **labels: str) -> Iterator[tuple[str, object]]:
        total = 0
        for bound, count in zip((*BUCKETS, "+Inf"), self.counts, strict=True):
            total += count
            yield "_bucket" + prometheus.labels(**labels, le=bound), total
        yield "_sum" + prometheus.labels(**labels), f"{self.sum:.6f}"
        yield "_count" + prometheus.labels(**labels), total


def text(rows: Iterable[Start]) -> str:
    """All metrics of these start-ups."""
    whole: dict[str, _Histogram] = defaultdict(_Histogram)
    stages: dict[str, _Histogram] = defaultdict(_Histogram)
    hours: dict[tuple[str, str], float] = defaultdict(float)
    started: Counter[tuple[str, bool]] = Counter()
    for start in rows:
        kind, unit = "hot" if start.hot else "cold", "gpu" if start.gpus else "node"
        started[kind, start.startup_seconds is not None] += 1
        if start.startup_seconds is None:
            hours[unit, "unfinished"] += start.hours
            continue
        for name, value in (("own", start.own_hours), ("wait", start.wait_hours), ("gap", start.gap_hours)):
            hours[unit, name] += value
        whole[kind].add(start.startup_seconds)
        for stage in start.stages:
            stages[stage.stage if stage.stage in (*TOP_STAGES, *INIT_STAGES) else OTHER].add(stage.seconds)
    return "".join(line + "\n" for line in _lines(whole, stages, hours, started))


def _lines(
    whole: dict[str, _Histogram], stages: dict[str, _Histogram], hours: dict[tuple[str, str], float],
    started: Counter[tuple[str, bool]],
) -> Iterator[str]:  # fmt: skip
    yield from prometheus.metric(
        "bootseer_startup_seconds", "histogram", "Seconds until the slowest rank ended its first step.",
        (sample for kind, histogram in sorted(whole.items()) for sample in histogram.samples(kind=kind)),
    )  # fmt: skip
    yield from prometheus.metric(
        "bootseer_startup_stage_seconds", "histogram", "Share of a stage in the seconds of a start-up.",
        (sample for stage, histogram in sorted(stages.items()) for sample in histogram.samples(stage=stage)),
    )  # fmt: skip
    yield from prometheus.metric(
        "bootseer_startups_total", "counter", "Start-ups, complete or not.",
        ((prometheus.labels(kind=kind, complete=str(complete).lower()), count)
         for (kind, complete), count in sorted(started.items())),
    )  # fmt: skip
    yield from prometheus.metric(
        "bootseer_startup_cost_seconds_total", "counter", "GPU-seconds or node-seconds before the first step.",
        ((prometheus.labels(unit=unit, part=name), f"{value * 3600:.3f}")
         for (unit, name), value in sorted(hours.items()) if name != "unfinished"),
    )  # fmt: skip
    yield from prometheus.metric(
        "bootseer_startup_unfinished_seconds", "gauge", "GPU-seconds or node-seconds of starts without a first step.",
        ((prometheus.labels(unit=unit), f"{value * 3600:.3f}")
         for (unit, name), value in sorted(hours.items()) if name == "unfinished"),
    )  # fmt: skip
