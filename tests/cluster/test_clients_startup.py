"""Real programs say themselves when their first step ended: hooks and logs say the same, to 0.1 s.

Those that need libraries of their own run with `scripts/test --clients`.
"""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from bootseer.profile import auto, events, logs
from support import devcache
from support.service import free_port

PROGRAM = Path(__file__).parents[1] / "clients/startup.py"
PLACES = devcache.folder("clients")
NEAR = 0.1
CLIENTS = [
    pytest.param(name, PLACES / version / "bin/python", id=f"{name}-{version}", marks=pytest.mark.clients)
    for name in ("lightning", "jax")
    for version in ("newest", "oldest")
]
CLIENTS += [
    pytest.param(name, PLACES / version / "bin/python", id=f"{name}-{version}", marks=pytest.mark.clients)
    for name, version in (("deepspeed", "newest"), ("composer", "oldest"))
]
TORCH = [pytest.param(name, Path(sys.executable), id=name, marks=pytest.mark.torch) for name in ("trainer", "titan")]
STAGES = {
    "trainer": {"import", "data_loader_init", "first_step"},
    "lightning": {"import", "dist_init", "data_loader_init", "first_step"},
    "titan": {"import", "dist_init", "first_step"},
    "deepspeed": {"import", "dist_init", "data_loader_init", "first_step"},
    "composer": {"import", "first_step"},
    "jax": {"import", "dist_init", "checkpoint_load", "compile", "first_step"},
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("program", "python"), [*TORCH, *CLIENTS])
def test_the_first_step_ends_when_the_program_says(program: str, python: Path, tmp_path: Path) -> None:
    truth, file = tmp_path / "truth", tmp_path / "events.jsonl"
    kept = {k: v for k, v in os.environ.items() if not k.startswith("BOOTSEER_") or "TEST" in k}
    environment = {
        **kept, "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu", "PYTHONWARNINGS": "ignore", "PYTHONUNBUFFERED": "1",
        "BOOTSEER_EVENTS": str(file), **auto.variables(),
    }  # fmt: skip
    argv = [python, PROGRAM, program, truth, str(free_port("127.0.0.1"))]
    lines: list[str] = []
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment) as job:
        timer = threading.Timer(240, job.kill)
        timer.start()
        assert job.stdout is not None
        for line in job.stdout:  # as the runtime of a container does: a time for each line, and only \n ends one
            now = datetime.datetime.fromtimestamp(time.time(), datetime.UTC)
            lines.append(f"{now:%Y-%m-%dT%H:%M:%S.%f}000Z {line.decode()}")
        timer.cancel()
    assert job.returncode == 0, lines[-20:]
    ended = float(truth.read_text())

    seen = events.read(file).spans
    assert STAGES[program] <= {span.stage for span in seen}
    assert {span.state for span in seen} == {events.State.DONE}
    (hooked,) = [span for span in seen if span.stage == "first_step"]
    found = logs.extract([logs.Source(lines, "n1")], logs.patterns(), job="j", zone=datetime.UTC)
    steps = [one for one in found.events if one.stage == "first_step"]
    (logged,) = [one.wall for one in found.events if one.ev == "end" and one.span in {step.span for step in steps}]
    print("by the hooks", round(hooked.end.wall / 1e9 - ended, 3), "by the log", round(logged / 1e9 - ended, 3))
    assert abs(hooked.end.wall / 1e9 - ended) <= NEAR
    assert abs(logged / 1e9 - ended) <= NEAR, "".join(lines)
