"""What the service of a node costs while nothing happens: memory and processor time of `bootseer node serve`, alone
(``node``) and with ``--containerd --csi`` (``service``), with a store in a folder and nothing mounted.

    sudo scripts/bench daemons [--quick] [--runs N] [--out report.json]

``seconds`` of a run is the time from the start of the process until all is served. Then it is left alone: ``pss_mb`` is
its memory afterwards, its parts included, with what they share counted once; ``cpu_ms_per_s`` what they used of the
processor meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from pathlib import Path

from bench.common import invocation
from bench.common.figures import Figures, Say
from bench.common.invocation import Options
from bench.common.report import Report, Run
from bootseer.demo.programs import BOOTSEER
from support.service import service
from support.waits import until

_SETTLE_SECONDS = 5.0
_TICK = os.sysconf("SC_CLK_TCK")


def services(here: Path) -> dict[str, tuple[list[str], list[Path]]]:
    """Options and sockets of each."""
    node, kubelet = here / "node/node.sock", here / "kubelet"
    where = [f"--containerd-root={here}/snapshots", f"--containerd-socket={here}/snapshotter.sock"]
    return {
        "node": ([], [node]),
        "service": (
            ["--containerd", "--csi", *where, f"--kubelet-dir={kubelet}"],
            [node, here / "snapshotter.sock", kubelet / "plugins/bootseer.io/csi.sock"],
        ),
    }


def measure(name: str, number: int, work: Path, idle: float) -> Run:
    """Start one below ``work``, wait ``idle`` seconds, look, and end it."""
    with tempfile.TemporaryDirectory(prefix="bootseer-daemons-", dir=work) as folder, contextlib.ExitStack() as stack:
        here = Path(folder)
        for sub in ("plugins", "plugins_registry", "pods"):
            (here / "kubelet" / sub).mkdir(parents=True, mode=0o750)
        args, sockets = services(here)[name]
        environ = {
            "BOOTSEER_STORE": f"{here}/store",
            "BOOTSEER_CACHE_DIR": f"{here}/cache",
            "BOOTSEER_STATE_DIR": f"{here}/state",
            "BOOTSEER_NODE_DIR": f"{here}/node",
        }
        argv = ["env", *(f"{key}={value}" for key, value in environ.items()), *BOOTSEER, "node", "serve", *args]
        began = time.monotonic()
        process = stack.enter_context(service(argv, here / "log"))
        until(lambda: all(socket.exists() for socket in sockets), 60.0, f"the start of {name}", step=0.01)
        seconds = time.monotonic() - began
        time.sleep(_SETTLE_SECONDS)
        pids = [process.pid, *map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())]
        before = sum(map(_cpu_ms, pids))
        time.sleep(idle)
        used = sum(map(_cpu_ms, pids)) - before
        details = {"pss_mb": round(sum(map(_pss, pids)) / 1e6, 1), "cpu_ms_per_s": round(used / idle, 3)}
    return Run(variant=name, n=number, seconds=round(seconds, 3), details=details)


def _cpu_ms(pid: int) -> float:
    """Of the process, and of its children that have ended, in steps of the kernel's clock (10 ms)."""
    text = Path(f"/proc/{pid}/stat").read_text()
    return sum(int(ticks) for ticks in text.rpartition(")")[2].split()[11:15]) * 1000 / _TICK


def _pss(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def _run(options: Options, made: Report) -> None:
    for number in range(1, options.runs + 1):
        for name in services(Path()):
            made.runs.append(measure(name, number, options.work, 5.0 if options.quick else 30.0))


def compute(made: Report, say: Say) -> Figures:
    """Replace the figures of the report."""
    found = Figures(made, say)
    for name in services(Path()):
        found.median(f"{name}_pss_mb", "<= 80", name, "pss_mb", unit="MB")
        found.median(f"{name}_cpu_ms_per_s", "<= 1", name, "cpu_ms_per_s", unit="ms/s")
    return found


if __name__ == "__main__":
    parser = invocation.parser("daemons", __doc__, quick="once, left alone for 5 s", runs=(5, 1), work=True)
    sys.exit(invocation.carry_out(parser, _run, compute))
