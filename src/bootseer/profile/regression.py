"""Regressions: whether a start-up, or a stage of it, is slower than those before it, by the median of a baseline."""

from __future__ import annotations

import xml.etree.ElementTree as xml
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import msgspec

from bootseer.errors import DataError, NotFoundError, doing
from bootseer.profile import events
from bootseer.profile.growth import name_of, size_of
from bootseer.profile.starts import Start

WHOLE = "start-up"


class Row(msgspec.Struct, frozen=True):
    """``seconds`` of the start against ``baseline``, the median of ``starts`` earlier ones; ``most`` is still fine."""

    stage: str
    seconds: float
    baseline: float
    most: float
    starts: int

    @property
    def slower(self) -> bool:
        return self.seconds > self.most


class Verdict(msgspec.Struct, frozen=True):
    """One start-up against its baseline."""

    job: str
    attempt: str
    cycle: int
    rows: list[Row]

    @property
    def slower(self) -> list[Row]:
        """What took longer than it may: nothing when all is well."""
        return [row for row in self.rows if row.slower]


def check(start: Start, baseline: Sequence[Start], *, tolerance: float = 0.2, seconds: float = 2.0) -> Verdict:
    """Compare with complete starts of the same job and class of sizes, as hot as this one; the start itself is none. A
    part is slower when it takes over ``tolerance`` (a share) and over ``seconds`` more than the median. Stages that no
    earlier start had are compared with 0 s. Raises `NotFoundError` where there is no such start, `DataError` when this
    one has not ended."""
    name = events.identity_text(start.job, start.attempt, start.cycle)
    if start.startup_seconds is None:
        raise DataError(
            f"the start-up of {name} has not ended", hint="its first step was not seen to end on every node"
        )
    me = (start.attempt, start.cycle, start.began_us)
    others = [
        one
        for one in baseline
        if one.job == start.job and one.hot == start.hot and one.startup_seconds is not None
        and size_of(one) == size_of(start) and (one.attempt, one.cycle, one.began_us) != me
    ]  # fmt: skip
    if not others:
        kind = "hot" if start.hot else "cold"
        unit, most = size_of(start)
        of = f"of job {start.job or '(no name)'} on {name_of(most)} {unit}"
        raise NotFoundError(f"no other complete, {kind} start {of} in the baseline")

    def row(stage: str, took: float, before: list[float]) -> Row:
        usual = median(before)
        return Row(stage, took, usual, max(usual * (1 + tolerance), usual + seconds), len(before))

    rows = [row(WHOLE, start.startup_seconds, [one.startup_seconds or 0.0 for one in others])]
    for part in start.stages:
        before = [sum(s.seconds for s in one.stages if s.stage == part.stage) for one in others]
        rows.append(row(part.stage, part.seconds, before))
    return Verdict(start.job, start.attempt, start.cycle, rows)


def junit(verdict: Verdict, path: Path) -> None:
    """Write what a CI server shows: a test for the start and for each stage."""
    name = events.identity_text(verdict.job, verdict.attempt, verdict.cycle)
    suite = xml.Element("testsuite", name=_clean(name), tests=str(len(verdict.rows)), failures=str(len(verdict.slower)))
    for row in verdict.rows:
        case = xml.SubElement(
            suite, "testcase", classname="bootseer.start-up", name=_clean(row.stage), time=f"{row.seconds:.3f}"
        )
        if row.slower:
            said = f"{row.seconds:.1f} s, at most {row.most:.1f} s (median of {row.starts}: {row.baseline:.1f} s)"
            xml.SubElement(case, "failure", message=said)
    with doing(f"write {path}"):
        path.write_bytes(xml.tostring(suite, encoding="utf-8", xml_declaration=True) + b"\n")


def _clean(text: str) -> str:
    """XML has no control characters, not even escaped ones."""
    return "".join(char if char.isprintable() else "?" for char in text)
