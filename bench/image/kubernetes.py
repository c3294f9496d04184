"""Pods of a converted image, from kubectl apply to the end of an import, beside `bootseer image run` on the same node.

    scripts/bench kubernetes [--quick] [--runs N] [--rate MBIT] [--out report.json]

The image of 7 GB of bench/image (``--quick``: 0.8 GB), its registry and its store behind a link of ``--rate`` Mbit/s; a
real kubelet, containerd 2 and control plane in namespaces (``scripts/kube`` builds them). Each start has an empty node
cache and an empty page cache, and prefetches by what starts before it recorded. By turns: ``pod``; ``run``:
`bootseer image run` of the same command. ``seconds`` end when the import has; ``pull`` are those between the kubelet's
events Pulling and Pulled.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

from bench.common import invocation
from bench.common.figures import Figures, Say
from bench.common.invocation import Options, say
from bench.common.report import Report, Run
from bench.image import site as image_site
from bench.image.parts import SMALL, TORCH, Parts
from bootseer import image, oci
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


def _run(options: Options, report: Report) -> None:
    if reason := kubernetes.missing():
        raise UnsupportedError(reason)
    parts = Parts(SMALL if options.quick else TORCH, say)
    code = "import sklearn, pandas" if options.quick else "import torch"
    with image_site.prepared(parts, options) as (work, site):
        ref, store, pause = site.ref(), site.store(), f"{site.registry()}/bench/pause:1"
        sleeping = oci.ContainerConfig(cmd=("/bin/sleep", "1000000"))
        write_image(work / "pause", [programs("sleep")], config=sleeping)
        push(f"oci:{work}/pause", pause)
        say("converting the image")
        image.ensure(ref, store, work_dir=work / "convert")
        (work / "cluster").mkdir()
        with Kubernetes(work / "cluster", [site.node], kubernetes.Site(site.registry(), pause, store)) as cluster:
            starts = Starts(cluster, ref, code)
            for number in range(1 - RECORDED, options.runs + 1):
                both = [starts.run, starts.pod] if number > 0 else [starts.run]
                for start in both[:: 1 if number % 2 else -1]:
                    run = start(number)
                    say(f"{run.variant} {number}: {run.seconds} s {run.details or ''}")
                    if number > 0:
                        report.runs.append(run)


def compute(report: Report, say: Say) -> Figures:
    """Replace the figures of ``report``."""
    found = Figures(report, say)
    found.ratio("pod_vs_image_run", "<= 1.3", "pod", "run")
    found.median("pull_seconds", "<= 0.5", "pod", "pull", unit="s")
    return found


if __name__ == "__main__":
    parser = invocation.parser("kubernetes", __doc__, quick="a small image", runs=(5, 5))
    image_site.options(parser)
    sys.exit(invocation.carry_out(parser, _run, compute))
