"""What the daemons of a node cost while nothing happens: memory and processor time of `bootseer node serve`,
`bootseer containerd serve` and `bootseer csi serve`, each with a store in a folder and nothing mounted.

    sudo scripts/bench daemons [--quick] [--runs N] [--out report.json]

``seconds`` of a run is the time from the start of the process until it listens. Then it is left alone: ``rss_mb`` is
its resident memory afterwards, ``cpu_ms_per_s`` what it and its children used of the processor meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from bootseer.demo import report
from bootseer.demo.programs import BOOTSEER
from support.service import service
from support.waits import until

_SETTLE_SECONDS = 5.0
_TICK = os.sysconf("SC_CLK_TCK")


def daemons(here: Path) -> dict[str, tuple[list[str], Path]]:
    """Command line and socket of each."""
    kubelet = here / "kubelet"
    return {
        "node": (["node", "serve"], here / "node/node.sock"),
        "containerd": (
            ["containerd", "serve", "--root", f"{here}/snapshots", "--socket", f"{here}/snapshotter.sock"],
            here / "snapshotter.sock",
        ),
        "csi": (["csi", "serve", "--kubelet-dir", str(kubelet)], kubelet / "plugins/bootseer.io/csi.sock"),
    }


def measure(name: str, number: int, work: Path, idle: float) -> report.Run:
    """Start one daemon below ``work``, wait ``idle`` seconds, look, and end it."""
    with tempfile.TemporaryDirectory(prefix="bootseer-daemons-", dir=work) as folder, contextlib.ExitStack() as stack:
        here = Path(folder)
        for sub in ("plugins", "plugins_registry", "pods"):
            (here / "kubelet" / sub).mkdir(parents=True, mode=0o750)
        args, socket = daemons(here)[name]
        environ = {
            "BOOTSEER_STORE": f"{here}/store",
            "BOOTSEER_CACHE_DIR": f"{here}/cache",
            "BOOTSEER_STATE_DIR": f"{here}/state",
            "BOOTSEER_NODE_DIR": f"{here}/node",
        }
        argv = ["env", *(f"{key}={value}" for key, value in environ.items()), *BOOTSEER, *args]
        began = time.monotonic()
        process = stack.enter_context(service(argv, here / "log"))
        until(socket.exists, 60.0, f"the start of {name}", step=0.01)
        seconds = time.monotonic() - began
        time.sleep(_SETTLE_SECONDS)
        before = _cpu_ms(process.pid)
        time.sleep(idle)
        used = _cpu_ms(process.pid) - before
        details = {"rss_mb": round(_rss(process.pid) / 1e6, 1), "cpu_ms_per_s": round(used / idle, 3)}
    return report.Run(variant=name, n=number, seconds=round(seconds, 3), details=details)


def _cpu_ms(pid: int) -> float:
    """Of the process, and of its children that have ended, in steps of the kernel's clock (10 ms)."""
    text = Path(f"/proc/{pid}/stat").read_text()
    return sum(int(ticks) for ticks in text.rpartition(")")[2].split()[11:15]) * 1000 / _TICK


def _rss(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="once, and left alone for 5 s")
    parser.add_argument("--runs", type=int, help="of each daemon (default 5, quick 1)")
    parser.add_argument("--work", type=Path, default=Path("/var/tmp"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if os.geteuid():
        parser.error("the daemons are root's: run it with sudo")
    made = report.new("daemons")
    for number in range(1, (options.runs or (1 if options.quick else 5)) + 1):
        for name in daemons(Path()):
            made.runs.append(measure(name, number, options.work, 5.0 if options.quick else 30.0))
    for name in daemons(Path()):
        runs = [run for run in made.runs if run.variant == name]
        for key, unit, target in (("rss_mb", "MB", "<= 60"), ("cpu_ms_per_s", "ms/s", "<= 1")):
            value = statistics.median(float(run.details[key]) for run in runs)
            made.figure(f"{name}_{key}", value, unit=unit, target=target, n=len(runs), of="median")
    for figure in made.figures:
        print(f"{figure.name:24} {figure.value:8.2f} {figure.unit:5} {figure.target}")
    if options.out:
        made.write(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
