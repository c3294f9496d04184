"""Pods of a converted image, from kubectl apply to the end of an import, beside `bootseer image run` on the same node.

    scripts/bench kubernetes [--quick] [--runs N] [--rate MBIT] [--out report.json]

The image of 7 GB of bench/image (``--quick``: 0.8 GB), its registry and its store behind a link of ``--rate`` Mbit/s; a
real kubelet, containerd 2 and control plane in namespaces (``scripts/kube`` builds them). Each start has an empty node
cache and an empty page cache, and prefetches by what starts before it recorded. By turns: ``pod``; ``run``:
`bootseer image run` of the same command. ``seconds`` end when the import has; ``pull`` are those between the kubelet's
events Pulling and Pulled.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from bench.common import figures, invocation
from bench.image import parts as image_parts
from bench.image import site as image_site
from bootseer import image, oci
from bootseer.demo import report
from bootseer.demo.report import Run
from bootseer.errors import BootseerError, UnsupportedError
from support import kubernetes
from support.images import programs, write_image
from support.kubernetes import Kubernetes
from support.layouts import push
from support.waits import until

RECORDED = 2
"""Starts before those that are measured."""
_SECONDS = 600.0


class Starts:
    """Starts of ``code`` in the image ``ref`` on the one node of ``cluster``."""

    def __init__(self, cluster: Kubernetes, ref: str, code: str) -> None:
        self._cluster, self._node, self._ref = cluster, cluster.nodes[0], ref
        self._command = ["python3", "-c", f"{code}; import time; print(time.time())"]

    def run(self, number: int) -> Run:
        self._empty()
        words = [sys.executable, "-m", "bootseer.cli.main", "image", "run", self._ref, *self._command]
        began = time.time()
        done = subprocess.run(self._node.command(words), capture_output=True, text=True, timeout=_SECONDS, check=False)
        if done.returncode:
            raise BootseerError(f"bootseer image run: {done.stderr.strip()}")
        return Run(variant="run", n=number, seconds=round(float(done.stdout) - began, 3))

    def pod(self, number: int) -> Run:
        self._empty()
        began = time.time()
        self._cluster.pod("bench", self._ref, *self._command)
        self._cluster.await_phase("bench", "Succeeded")
        ended = float(self._cluster.kubectl("logs", "bench"))
        events = json.loads(self._cluster.kubectl("get", "events", "-o", "json"))["items"]
        # the end of an event's name is its time, in nanoseconds
        at = {event["reason"]: int(event["metadata"]["name"].rpartition(".")[2], 16) / 1e9 for event in events}
        self._cluster.kubectl("delete", "events", "--all")
        self._cluster.clear(self._ref)
        pull = at["Pulled"] - at["Pulling"]
        return Run(variant="pod", n=number, seconds=round(ended - began, 3), details={"pull": round(pull, 3)})

    def _empty(self) -> None:
        """Nothing of the image is on the node, not even in memory."""
        until(lambda: not list((self._node.here / "state/trees").glob("*/")), 60.0, "the end of block servers")
        shutil.rmtree(self._node.here / "cache", ignore_errors=True)
        Path("/proc/sys/vm/drop_caches").write_text("3")


def _run(options: argparse.Namespace) -> None:
    if reason := kubernetes.missing():
        raise UnsupportedError(reason)
    document = report.new("kubernetes-quick" if options.quick else "kubernetes")
    parts = image_parts.Parts(image_parts.SMALL if options.quick else image_parts.TORCH, invocation.say)
    code = "import sklearn, pandas" if options.quick else "import torch"
    with image_site.prepared(parts, options) as (work, site):
        ref, store, pause = site.ref(), site.store(), f"{site.registry()}/bench/pause:1"
        sleeping = oci.ContainerConfig(cmd=("/bin/sleep", "1000000"))
        write_image(work / "pause", [programs("sleep")], config=sleeping)
        push(f"oci:{work}/pause", pause)
        invocation.say("converting the image")
        image.convert(ref, store, work_dir=work / "convert")
        (work / "cluster").mkdir()
        with Kubernetes(work / "cluster", [site.node], kubernetes.Site(site.registry(), pause, store)) as cluster:
            starts = Starts(cluster, ref, code)
            for number in range(1, RECORDED + 1):
                _note(document, starts.run, -number)
            for number in range(1, options.runs + 1):
                for start in (starts.run, starts.pod) if number % 2 else (starts.pod, starts.run):
                    _note(document, start, number)
    document.runs = [run for run in document.runs if run.n > 0]
    figures.ratio(document, "pod_vs_image_run", "<= 1.3", "pod", ["run"], "seconds")
    pulls = [run.details["pull"] for run in document.runs if run.variant == "pod"]
    median = statistics.median(pulls)
    document.figure("pull_seconds", median, unit="s", target="<= 0.5", n=len(pulls), of="median")
    figures.show(document)
    if options.out:
        document.write(options.out)


def _note(document: report.Report, start: Callable[[int], Run], number: int) -> None:
    run = start(number)
    document.runs.append(run)
    invocation.say(f"{run.variant} {number}: {run.seconds} s {run.details or ''}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small image")
    parser.add_argument("--runs", type=int, default=5, help="of each")
    image_site.options(parser)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(invocation.main(_run, _options()))
