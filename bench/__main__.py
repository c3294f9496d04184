"""The runner of benchmarks: ``scripts/bench NAME ...``. It installs and builds what one needs when that one starts.

Standard library only, so that it answers before anything is installed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from bench import every

ROOT = Path(__file__).resolve().parents[1]
PYTHON = ROOT / ".venv/bin/python"


class Benchmark(NamedTuple):
    """A module that is run as a program, and what it says of itself before it starts."""

    module: str
    measures: str
    takes: str
    needs: str = "root"
    peers: tuple[str, ...] = ()
    """What ``scripts/bench-peers`` builds for it."""
    kubernetes: bool = False


BENCHMARKS = {
    "image": Benchmark("bench.image.readiness", "starts of a container: lazy, local, full pull, nydus; conversion",
                       "30 minutes, quick 5", "root, registry, 40 GB", peers=("containerd", "nydus")),
    "ablate": Benchmark("bench.image.ablate", "what single parts of a lazy start are worth",
                        "20 minutes, quick 5", "root, registry, 40 GB"),
    "kubernetes": Benchmark("bench.image.kubernetes", "pods of a converted image, beside image run",
                            "10 minutes", "root, registry, 40 GB", kubernetes=True),
    "stripefs": Benchmark("bench.stripes.stripefs", "striped files against one HDFS file, with faults and without",
                          "30 minutes, quick 10", "root, Hadoop, krb5-kdc, 4 GB of memory"),
    "env": Benchmark("bench.env.env", "environments: the first node, publication, mount, unpack; pip and uv",
                     "15 minutes, quick 4", "root"),
    "caches": Benchmark("bench.env.caches", "compile caches: the first step (torch, JAX, Triton) cold, restored, warm",
                        "20 minutes, quick 5", "root, torch, gcc", peers=("jax",)),
    "packages": Benchmark("bench.env.packages", "one changed requirement, with the package caches of earlier commands",
                          "5 minutes, quick 1", "root"),
    "scheduler": Benchmark("bench.stripes.scheduler", "what the parts of the engine of replicas are worth, simulated",
                           "2 minutes", "nothing"),
    "checkpoint": Benchmark("bench.checkpoint.checkpoint", "resuming and saving: mount, torch, shared reads; vanilla",
                            "30 minutes, quick 5", "root, Hadoop, 10 GB of memory", peers=("fuse",)),
    "cluster": Benchmark("bench.cluster.cluster", "one job on many nodes at once: ordinary, strongest, bootseer",
                         "3 hours, quick 5 minutes", "root, registry, Hadoop, containerd", peers=("nydus",)),
    "start": Benchmark("bench.cluster.start", "what the order of a start's bytes is worth, in the small demo",
                       "10 minutes, quick 3", "root"),
    "turn": Benchmark("bench.cluster.turn", "what it is worth that a checkpoint waits, in the full demo",
                      "10 minutes", "root, registry, Hadoop, containerd, 40 GB"),
    "daemons": Benchmark("bench.micro.daemons", "memory and processor time of idle daemons", "2 minutes"),
    "account": Benchmark("bench.micro.account", "`store du` of 100,000 objects in a folder and on HDFS",
                         "2 minutes, quick 1", "Hadoop"),
    "emit": Benchmark("bench.micro.emit", "what start-up events cost the job", "1 minute", "nothing"),
    "fleet": Benchmark("bench.micro.fleet", "the profiler with 10,000 nodes and 30,000 starts", "3 minutes", "nothing"),
}  # fmt: skip


def listing() -> str:
    """A line for each benchmark."""
    rows = [f"  {name:11} {one.measures}; {one.takes}; needs {one.needs}" for name, one in BENCHMARKS.items()]
    last = f"  {'all':11} every report of bench/results, going on where it was interrupted; 4 hours"
    return "\n".join(
        ["usage: scripts/bench NAME [--quick] [--out FILE] ...    options: scripts/bench NAME --help", *rows, last]
    )


def prepare(chosen: Benchmark) -> None:
    """Install and build what it needs. A peer that cannot be built is left out of the benchmark, and said so there."""
    scripts = ROOT / "scripts"
    subprocess.run([scripts / "setup"], check=True)
    if chosen.kubernetes:
        subprocess.run([scripts / "kube"], check=True)
    if chosen.peers and subprocess.run([scripts / "bench-peers", *chosen.peers]).returncode:
        print("peers that are not built are left out, and listed so", file=sys.stderr)


def main() -> int:
    name, *rest = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print(listing())
        return 0
    if name == "all":
        try:
            return every.main(rest)
        except KeyboardInterrupt:
            return 130
    if name not in BENCHMARKS:
        print(f"error: no benchmark named {name}; there are: {' '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    chosen, asks = BENCHMARKS[name], {"-h", "--help"} & set(rest)
    if chosen.needs.startswith("root") and os.geteuid() and not asks:
        print(f"error: {name} mounts file systems and makes network namespaces (run it with sudo)", file=sys.stderr)
        return 77
    if not asks or not PYTHON.exists():
        try:
            prepare(chosen)
        except subprocess.CalledProcessError as exc:
            return exc.returncode
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # what is installed has byte code
    os.environ["PATH"] = f"{PYTHON.parent}:{os.environ['PATH']}"
    os.chdir(ROOT)
    program = f"import runpy, sys; sys.argv[0] = 'bench {name}'; runpy.run_module('{chosen.module}', {{}}, '__main__')"
    os.execv(PYTHON, [str(PYTHON), "-c", program, *rest])


if __name__ == "__main__":
    sys.exit(main())
