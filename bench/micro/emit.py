"""What start-up events cost the job that emits them: import and one event, in Python and in the shells there are.

    scripts/bench emit [--quick] [--runs N] [--out report.json]

``seconds`` of a run is one import, or one event. Every run is a fresh process; the file lies on ``--work``. Where torch
is installed: also what the hooks of `bootseer.profile.auto` add to its import, with and without them in turns, in
seconds of processor time (``auto_import_share``).
"""

from __future__ import annotations

import importlib.util
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

from bench.common import invocation
from bench.common.figures import Figures, Say
from bench.common.invocation import Options, say
from bench.common.report import Report, Run
from bootseer.profile import auto, emit

PYTHON = """
import time
a = time.perf_counter()
from bootseer.profile import auto, emit
b = time.perf_counter()
for i in range({count}):
    emit.begin("env", outcome="restored-mount", n=i)
c = time.perf_counter()
print(b - a, (c - b) / {count})
"""
SHELL = ". {script}; i=0; while [ $i -lt {count} ]; do bootseer_begin env how=mount n=$i; i=$((i + 1)); done"
SHELLS = {"dash": ["dash", "-c"], "bash": ["bash", "-c"], "busybox": ["busybox", "sh", "-c"]}


def _run(options: Options, made: Report) -> None:
    environ = {**os.environ, "BOOTSEER_EVENTS": f"{options.work}/events.jsonl", "BOOTSEER_JOB": "bench"}
    for n in range(1, options.runs + 1):
        code = PYTHON.format(count=2000 if options.quick else 20000)
        done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
        importing, event = map(float, done.stdout.split())
        made.runs.append(Run(variant="python-import", n=n, seconds=importing))
        made.runs.append(Run(variant="python-event", n=n, seconds=event))
        for name, argv in SHELLS.items():
            made.runs.append(_shell(name, argv, n, environ, 50 if options.quick else 300))
        if importlib.util.find_spec("torch"):
            both = [("torch-import", {}), ("torch-import-auto", auto.variables())]
            for variant, hooks in both[:: 1 if n % 2 else -1]:
                made.runs.append(_torch(variant, n, {**environ, **hooks}))
    for name in SHELLS:
        seen = [run.seconds for run in made.runs if run.variant == f"{name}-event" and run.seconds is not None]
        say(f"{name}: {statistics.median(seen) * 1e3:.2f} ms an event" if seen else f"{name}: not installed")


def compute(made: Report, say: Say) -> Figures:
    """Replace the figures of the report."""
    found = Figures(made, say)
    found.median("import_ms", "<= 15", "python-import", unit="ms", scale=1e3)
    found.median("event_us", "<= 20", "python-event", unit="us", scale=1e6)
    plain, hooked = found.values("torch-import"), found.values("torch-import-auto")
    if plain:
        share = 100 * (statistics.median(hooked) / statistics.median(plain) - 1)
        found.add("auto_import_share", "<= 1", [share] * len(plain), "%")
    return found


def _torch(variant: str, n: int, environ: dict[str, str]) -> Run:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", "import torch"], env=environ, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Run(variant=variant, n=n, seconds=spent)


def _shell(name: str, argv: list[str], n: int, environ: dict[str, str], count: int) -> Run:
    if not shutil.which(argv[0]):
        return Run(variant=f"{name}-event", n=n, failed=f"{argv[0]} is not installed")
    script = Path(emit.__file__).with_name("emit.sh")
    began = time.perf_counter()
    subprocess.run([*argv, SHELL.format(script=script, count=count)], env=environ, check=True)
    return Run(variant=f"{name}-event", n=n, seconds=(time.perf_counter() - began) / count)


if __name__ == "__main__":
    parser = invocation.parser("emit", __doc__, quick="fewer events, two runs", runs=(9, 2), work=True)
    sys.exit(invocation.carry_out(parser, _run, compute))
