"""What start-up events cost the job that emits them: import and one event, in Python and in the shells there are.

    scripts/bench emit [--quick] [--repeats N] [--out report.json]

``seconds`` of a run is one import, or one event. Every run is a fresh process; the file lies on ``--work``. Where torch
is installed: also what the hooks of `bootseer.profile.auto` add to its import, with and without them in turns, in
seconds of processor time (``auto_import_share``).
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bootseer.demo import report
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


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer events and imports of torch")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--work", type=Path, default=Path("/var/tmp"))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    made = report.new("emit")
    with tempfile.TemporaryDirectory(prefix="bootseer-emit-", dir=args.work) as folder:
        environ = {**os.environ, "BOOTSEER_EVENTS": f"{folder}/events.jsonl", "BOOTSEER_JOB": "bench"}
        for n in range(1, args.repeats + 1):
            count = 2000 if args.quick else 20000
            code = PYTHON.format(count=count)
            done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
            importing, event = map(float, done.stdout.split())
            made.runs.append(report.Run(variant="python-import", n=n, seconds=importing))
            made.runs.append(report.Run(variant="python-event", n=n, seconds=event))
            for name, argv in SHELLS.items():
                made.runs.append(_shell(name, argv, n, environ, 50 if args.quick else 300))
            if importlib.util.find_spec("torch") and not (args.quick and n > 1):
                for variant, hooks in (("torch-import", {}), ("torch-import-auto", auto.variables()))[
                    :: 1 if n % 2 else -1
                ]:
                    made.runs.append(_torch(variant, n, {**environ, **hooks}))
    for name, variant, unit, scale, target in (
        ("import_ms", "python-import", "ms", 1e3, "<= 15"),
        ("event_us", "python-event", "us", 1e6, "<= 20"),
    ):
        values = [run.seconds for run in made.runs if run.variant == variant and run.seconds is not None]
        figure = made.figure(
            name, statistics.median(values) * scale, unit=unit, target=target, n=len(values), of="median"
        )
        print(f"{figure.name}: {figure.value:g} {figure.unit} (target {figure.target})")
    plain, hooked = (
        [run.seconds for run in made.runs if run.variant == variant and run.seconds is not None]
        for variant in ("torch-import", "torch-import-auto")
    )
    if plain:
        share = 100 * (statistics.median(hooked) / statistics.median(plain) - 1)
        figure = made.figure("auto_import_share", share, unit="%", target="<= 1", n=len(plain), of="median")
        print(f"{figure.name}: {figure.value:g} {figure.unit} (target {figure.target})")
    for name in SHELLS:
        seen = [run.seconds for run in made.runs if run.variant == f"{name}-event" and run.seconds is not None]
        print(f"{name}: {statistics.median(seen) * 1e3:.2f} ms an event" if seen else f"{name}: not installed")
    if args.out:
        made.write(args.out)


def _torch(variant: str, n: int, environ: dict[str, str]) -> report.Run:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", "import torch"], env=environ, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return report.Run(variant=variant, n=n, seconds=spent)


def _shell(name: str, argv: list[str], n: int, environ: dict[str, str], count: int) -> report.Run:
    if not shutil.which(argv[0]):
        return report.Run(variant=f"{name}-event", n=n, failed=f"{argv[0]} is not installed")
    script = Path(emit.__file__).with_name("emit.sh")
    began = time.perf_counter()
    subprocess.run([*argv, SHELL.format(script=script, count=count)], env=environ, check=True)
    return report.Run(variant=f"{name}-event", n=n, seconds=(time.perf_counter() - began) / count)


if __name__ == "__main__":
    main()
