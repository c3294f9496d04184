"""A program that somebody brings to ``scripts/bench image``: one that works, fails, hangs, says nothing, or is none."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from bench.image import node
from bench.image.rounds import brought
from bootseer.errors import BootseerError, ConfigError

JOB = ["sh", "-c", "echo ready"]


def program(folder: Path, body: str) -> Path:
    made = folder / "program"
    made.write_text(f"#!/bin/sh\n{body}\n")
    made.chmod(0o755)
    return made


def started(folder: Path, body: str, monkeypatch: pytest.MonkeyPatch) -> node.Outcome:
    def start(clock: node.Clock) -> None:  # without the page cache of this machine
        clock._began = (time.monotonic(), 0, 0.0)

    monkeypatch.setattr(node.Clock, "start", start)
    monkeypatch.setattr(node, "_JOB_SECONDS", 1.5)
    made = program(folder, body)
    order = node.Order(
        how="peer", work=str(folder), link="lo", command=JOB, ref="host/image@sha256:1", record="",
        options={"program": str(made)},
    )  # fmt: skip
    with node.Clock("lo") as clock:
        details = node.peer(order, None, clock)
    return clock.outcome(details)


def test_a_program_that_starts_the_job_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = started(tmp_path, 'echo "$1 $2" > "$2/said"; shift 2; echo pulling; "$@"; sleep 0.1', monkeypatch)
    assert 0 < made.seconds < 1.5
    assert (tmp_path / "peer/said").read_text() == f"host/image@sha256:1 {tmp_path}/peer\n"


def test_a_server_that_it_leaves_behind_takes_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic()
    made = started(tmp_path, 'setsid sleep 20 & echo $! > "$2/pid"; shift 2; "$@"', monkeypatch)
    assert made.seconds < 1.5
    assert time.monotonic() - began < 5
    os.kill(int((tmp_path / "peer/pid").read_text()), 9)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("echo no such image >&2; exit 3", "ended with code 3"),
        ("echo ready; exit 1", "ended with code 1"),
        ("kill -9 $$", "ended with code -9"),
        ("exit 0", "never said that it is ready"),
        ("sleep 300 & echo $! > $2/pid; wait", "has not ended after 1.5 s"),
    ],
)
def test_one_that_does_not_is_told_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, said: str
) -> None:
    with pytest.raises(BootseerError, match=said) as told:
        started(tmp_path, body, monkeypatch)
    assert "\n" not in str(told.value)
    if (pid := tmp_path / "peer/pid").exists():  # nothing of it is left
        deadline = time.monotonic() + 5
        while Path(f"/proc/{int(pid.read_text())}").exists() and _runs(int(pid.read_text())):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def _runs(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def test_what_is_no_program_is_a_mistake(tmp_path: Path) -> None:
    made = program(tmp_path, "")
    assert brought([f"soci={made}"]) == {"peer:soci": str(made)}
    os.chmod(tmp_path / "program", 0o644)
    for words in ([f"soci={made}"], ["soci"], ["=x"], ["a b=/bin/true"], ["x=/nowhere"], ["x=/bin/true", "x=/bin/sh"]):
        with pytest.raises(ConfigError, match="--peer"):
            brought(words)
