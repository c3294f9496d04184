"""The figures of bench/image, computed from the runs of a report (which may come from several invocations)."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from bootseer.report import Report, Run

Say = Callable[[str], None]


class Medians:
    """Medians over the runs of a variant that ended well. `Missing` when there is none."""

    def __init__(self, runs: list[Run]) -> None:
        self._runs = [run for run in runs if not run.failed]

    def of(self, variant: str, field: str = "seconds") -> float:
        """``field``: ``seconds`` or a key of ``details``."""
        if not (values := self._values(variant, field)):
            raise Missing(f"variant {variant} has no {field}")
        return statistics.median(values)

    def count(self, *variants: str, field: str = "seconds") -> int:
        """Runs that say ``field``, of the variant with the fewest."""
        return min(len(self._values(variant, field)) for variant in variants)

    def first(self, *variants: str) -> str:
        """The first of ``variants`` that has runs."""
        for variant in variants:
            if self._of(variant):
                return variant
        raise Missing(f"no run of {' or '.join(variants)}")

    def _values(self, variant: str, field: str) -> list[float]:
        values = [run.seconds if field == "seconds" else run.details.get(field) for run in self._of(variant)]
        return [float(value) for value in values if value is not None]

    def _of(self, variant: str) -> list[Run]:
        return [run for run in self._runs if run.variant == variant]


class Missing(Exception):
    """A figure cannot be computed: says which runs it lacks."""


def compute(report: Report, say: Say) -> None:
    """Replace the figures of ``report``; says which cannot be computed and why."""
    report.figures.clear()
    runs = Medians(report.runs)

    def ratio(name: str, target: str, ours: str, other: str, field: str = "seconds") -> None:
        value = runs.of(ours, field) / max(runs.of(other, field), 1e-9)
        n = runs.count(ours, other, field=field)
        report.figure(name, value, unit="ratio", target=target, n=n, of="median")

    def single(name: str, target: str, variant: str, field: str) -> None:
        n = runs.count(variant, field=field)
        report.figure(name, runs.of(variant, field), unit="ratio", target=target, n=n, of="median")

    def hot(suffix: str = "") -> str:
        return runs.first(f"hot-fanotify{suffix}", f"hot-fuse{suffix}")

    def stall() -> None:
        driver = hot().removeprefix("hot-")
        ratio("stall_vs_on_demand", "<= 0.02", f"hot-{driver}", f"on-demand-{driver}", "stall_seconds")

    def slow() -> None:
        """Of the reads that a start makes where nothing was read ahead of it."""
        recorded = hot().replace("hot", "record")
        value = runs.of(hot(), "slow_faults") / runs.of(recorded, "reads")
        n = runs.count(hot(), recorded, field="reads")
        report.figure("slow_faults", value, unit="ratio", target="<= 0.01", n=n, of="median")

    def listed() -> None:
        """Read ahead, and touched by no start."""
        driver = hot().removeprefix("hot-")
        value = runs.of(f"page-list-{driver}", "unused")
        n = int(runs.of(f"page-list-{driver}", "starts"))
        report.figure("readahead_waste", value, unit="ratio", target="<= 0.2", n=n, of="median")

    def complete() -> None:
        ours = runs.first("read-filled-fanotify", "read-complete")
        plain = f"{ours}-plain"
        values = [
            runs.of(ours, "sequential_mb_per_s") / runs.of(plain, "sequential_mb_per_s"),
            runs.of(plain, "us_per_4k") / runs.of(ours, "us_per_4k"),
        ]
        n = runs.count(ours, plain)
        report.figure("complete_vs_erofs", min(values), unit="ratio", target=">= 0.97", n=n, of="median")

    def filled() -> None:
        """Large files of a tree that became complete after its mount; plain EROFS over the same data is 1."""
        ours, plain, field = "read-filled-fuse", "read-filled-fuse-plain", "sequential_mb_per_s"
        n = runs.count(ours, plain, field=field)
        value = runs.of(ours, field) / runs.of(plain, field)
        report.figure("filled_vs_erofs", value, unit="ratio", target=">= 0.6", n=n, of="median")

    def scattered() -> None:
        """4 KiB at a random place of such a file."""
        ours, field = "read-filled-fuse", "us_per_4k"
        report.figure(
            "filled_random_us", runs.of(ours, field), unit="us", target="<= 30", n=runs.count(ours), of="median"
        )

    def recording() -> None:
        driver = runs.first("warm-fanotify", "warm-fuse")
        ratio("recording_overhead", "<= 1.02", driver, f"{driver}-norecord")

    wanted: list[tuple[str, Callable[[], None]]] = [
        *(
            (f"readiness_vs_local_{driver}",
             lambda driver=driver, target=target: ratio(
                 f"readiness_vs_local_{driver}", target, f"hot-{driver}", "local"))
            for driver, target in (("fanotify", "<= 1.05"), ("fuse", "<= 1.3"))
        ),
        ("readiness_vs_full_pull", lambda: ratio("readiness_vs_full_pull", "<= 0.0667", hot(), "containerd")),
        ("readiness_vs_nydus", lambda: ratio("readiness_vs_nydus", "<= 0.4", hot(), "nydus")),
        ("readiness_vs_nydus_10ms",
         lambda: ratio("readiness_vs_nydus_10ms", "<= 0.4", hot("-10ms"), "nydus-10ms")),
        ("stall_vs_on_demand", stall),
        ("slow_faults", slow),
        ("waste", lambda: single("waste", "<= 0.2", hot().replace("hot", "record"), "waste")),
        ("readahead_waste", listed),
        ("complete_vs_erofs", complete),
        ("filled_vs_erofs", filled),
        ("filled_random_us", scattered),
        ("recording_overhead", recording),
        ("conversion_vs_tools", lambda: ratio("conversion_vs_tools", "<= 1", "convert", "convert-tools")),
    ]  # fmt: skip
    for name, add in wanted:
        try:
            add()
        except Missing as exc:
            say(f"no figure {name}: {exc}")
