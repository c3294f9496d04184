"""A real torchrun that restarts its workers: each restart is a cycle, for both emitters and for `bootseer run`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bootseer.profile import analysis, emit, events

WORKER = """
import os, subprocess, sys
from bootseer.profile import emit
with emit.span("import"):
    pass
subprocess.run(["sh", "-c", ". {shell}; bootseer_span model_init -- true"], check=True)
if os.environ["LOCAL_RANK"] == "0":
    done = subprocess.run([sys.executable, "-m", "bootseer.cli.main", "run", "{job}"], capture_output=True, text=True)
    open("{said}", "a").write(f"{{done.returncode}} {{done.stderr}}")
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    sys.exit(os.environ["LOCAL_RANK"] == "0")
with emit.span("first_step"):
    pass
"""


@pytest.mark.torch
@pytest.mark.timeout(200)
def test_restarts_are_cycles(tmp_path: Path) -> None:
    job, said, file = tmp_path / "job.toml", tmp_path / "said", tmp_path / "n0.jsonl"
    job.write_text('[job]\nname = "j"\ncommand = ["true"]\n[image]\nref = "oci:nowhere"\n')
    shell = Path(emit.__file__).with_name("emit.sh")
    (tmp_path / "worker.py").write_text(WORKER.format(shell=shell, job=job, said=said))
    options = ["--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *options, str(tmp_path / "worker.py")],
        env={**os.environ, "BOOTSEER_EVENTS": str(file), "BOOTSEER_JOB": "j", "BOOTSEER_CYCLE": "3"},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    log = events.read([file])
    assert log.identities() == [("j", "0", 3), ("j", "0", 4)]
    first, last = (analysis.analyse(log, identity) for identity in log.identities())
    assert last.ranks == 2
    assert (first.startup_seconds, last.hot) == (None, True)
    assert last.startup_seconds is not None
    assert {stage.stage for stage in last.stages} == {"import", "model_init", "first_step"}
    line = "78 bootseer: torchrun has started bootseer run 2 times on this node, and each would start the whole job; "
    assert [one.startswith(line) for one in said.read_text().splitlines()] == [True, True]
