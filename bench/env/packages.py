"""What a set-up command with one changed requirement costs an empty node, with the package caches of earlier commands.

    scripts/bench packages [--size 6] [--quick] [--runs N] [--out report.json]

Ten packages of so many MB each, of which another one is in the index at each round, lie in an index behind a link of
100 Mbit/s; the store is a folder. ``pip-cached`` and ``uv-cached``: `bootseer env run --cache`; ``pip-empty`` and
``uv-empty``: `bootseer env run` on a node with an empty cache; environments are neither restored nor made.
``pip-local`` and ``uv-local``: the same with the manager's own cache, which earlier commands have left on the node: no
shared cache is faster than that. ``received``: bytes that the node has got of the index.
Processor seconds are those of the whole command, without what goes on in the background.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from bench.common import invocation
from bench.common.figures import Figures, Say
from bench.common.invocation import Options, say
from bench.common.report import Report, Run
from bootseer.demo.programs import BOOTSEER
from bootseer.errors import BootseerError
from bootseer.kernel import mount as mounts
from support.netns import Node, ShapedNetwork
from support.packageindex import PackageIndex, wheel

PACKAGES = 10
_RATE = 100.0
_FILES = 60
_UV = str(Path(sys.executable).with_name("uv"))
_SECONDS = 120.0


class Bench:
    def __init__(self, options: Options, report: Report, node: Node, index: PackageIndex) -> None:
        self.report, self.work, self.node, self.index, self.count = report, options.work, node, index, 0
        self.target = self.work / "target"
        pip = f"{sys.executable} -m pip install -q --disable-pip-version-check --root-user-action=ignore"
        self.commands = {
            "pip": f"{pip} --trusted-host {index.host} --index-url {index.url}".split(),
            "uv": f"{_UV} pip install -q --no-config --index-url {index.url}".split(),
        }

    def start(self, kind: str, n: int, how: str) -> None:
        """The command on a new node. ``n`` is the version of the changed requirement; what is of 1 does not count."""
        self.count += 1
        folder = self.work / f"node{self.count}"
        made = Run(variant=f"{kind}-{how}", n=n - 1)
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
        environ |= {f"BOOTSEER_{name.upper()}_DIR": str(folder / name) for name in ("cache", "state")}
        environ |= {"BOOTSEER_STORE": str(self.work / "store"), "HOME": str(folder)}
        names = [f"part0=={n}", *(f"part{number}" for number in range(1, PACKAGES))]
        options = ["--cache", kind] if how == "cached" else []
        if how == "local":
            environ[f"{kind.upper()}_CACHE_DIR"] = str(self.work / f"left-{kind}")
        argv = [
            *BOOTSEER,
            "env",
            "run",
            "--json",
            "--no-snapshot",
            *options,
            "--target",
            str(self.target),
            "--",
            *self.commands[kind],
        ]
        argv = self.node.argv([*argv, "--target", str(self.target), *names])
        try:
            folder.mkdir()
            before, received = resource.getrusage(resource.RUSAGE_CHILDREN), self.node.bytes_received()
            began = time.monotonic()
            done = subprocess.run(argv, env=environ, capture_output=True, text=True, check=False)
            made.seconds, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
            if done.returncode:
                raise BootseerError((done.stderr.strip().splitlines() or ["no message"])[-1])
            answer = json.loads(done.stdout)
            made.details = {
                "command": answer["timings"]["command"],
                "caches": answer["timings"].get("caches", 0.0),
                "cpu_seconds": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 3),
                "received": self.node.bytes_received() - received,
            }
            _until(lambda: not mounts.below(folder / "cache/caches"))
        except BootseerError as exc:
            made.failed = str(exc)
        finally:
            for path in (self.target, folder):
                shutil.rmtree(path, ignore_errors=True)
        say(f"{made.variant} {made.n}: {made.failed or f'{made.seconds:.2f} s, {made.details}'}")
        if made.n:
            self.report.runs.append(made)


def _until(ready: Callable[[], bool]) -> None:
    until = time.monotonic() + _SECONDS
    while not ready():
        if time.monotonic() > until:
            raise BootseerError("what goes on in the background has not ended")
        time.sleep(0.05)


def compute(made: Report, say: Say) -> Figures:
    """Replace the figures of the report."""
    found = Figures(made, say)
    found.rounds("packages_pip_cached_vs_empty", "<= 0.5", "pip-cached", "pip-empty")
    found.rounds("packages_uv_cached_vs_empty", "<= 0.3", "uv-cached", "uv-empty")
    found.rounds("packages_pip_local_vs_empty", "<= 1", "pip-local", "pip-empty")
    found.rounds("packages_uv_local_vs_empty", "<= 1", "uv-local", "uv-empty")
    return found


def _run(options: Options, made: Report) -> None:
    size = (options.size or (3 if options.quick else 6)) << 20
    wheels = [wheel(f"part{number}", "1", size=size, files=_FILES) for number in range(PACKAGES)]
    wheels += [wheel("part0", str(n + 1), size=size, files=_FILES) for n in range(1, options.runs + 1)]
    with (
        ShapedNetwork("bspkg", nodes=1, rate_mbit=_RATE, subnet="10.84.0.0/24") as network,
        PackageIndex(*wheels, host=network.host) as index,
    ):
        bench = Bench(options, made, network.nodes[0], index)
        for kind in bench.commands:
            for how in ("cached", "local"):
                bench.start(kind, 1, how)
        for n in range(1, options.runs + 1):
            for kind in bench.commands:
                for how in ("cached", "empty", "local")[:: 1 if n % 2 else -1]:
                    bench.start(kind, n + 1, how)


if __name__ == "__main__":
    parser = invocation.parser("packages", __doc__, quick="3 MB each, two runs", runs=(5, 2), work=True)
    parser.add_argument("--size", type=int, help="MB of each package (default 6, quick 3)")
    sys.exit(invocation.carry_out(parser, _run, compute))
