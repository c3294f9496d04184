"""A torch image: conversion, and the start of `import torch` in a container with all, none and the hot blocks at hand.

    python bench/image.py [--quick] [--rate BYTES_PER_SECOND] [--latency SECONDS] [--out report.json]

Needs root, mmdebstrap, docker-registry, a container runtime, torch beside this Python, and 25 GB below ``--work``
(deleted at the end). The image is Debian with Python (``mmdebstrap``) and the packages of this Python. ``--quick``
leaves out the CUDA libraries and torch's own, so that it cannot import it and reads Python files instead. Every start
but ``local-warm`` begins with an empty page cache. The store is behind one link of ``--rate`` and ``--latency``; the
pull's time on that link is what its bytes need at least, if that is longer than it took here.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bootseer import image, oci
from bootseer.blocks import server
from bootseer.config import Config
from bootseer.store import Store, open_store
from bootseer.testing.registry import DockerRegistry
from bootseer.testing.source import RateLimitedStore

PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
TORCH = ["python3", "-c", "import torch; print(torch.ones(3).sum().item())"]
READ = [
    "sh",
    "-c",
    "find /usr/local/lib -name '*.py' -size -8k | head -n 2000 | xargs cat > /dev/null; python3 -c 'import json'",
]


def debian(work: Path) -> Path:
    """A small Debian with Python, of this host's release, as one tar file."""
    release = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().split("\n") if "=" in line)
    base = work / "base.tar"
    argv = [
        "mmdebstrap",
        "--variant=minbase",
        "--include=python3,ca-certificates",
        release["VERSION_CODENAME"],
        str(base),
    ]
    with open(work / "mmdebstrap.log", "wb") as log:
        subprocess.run(argv, check=True, stdout=log, stderr=log, timeout=600)
    return base


def cold() -> None:
    """Empty the page cache."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3\n")


class Bench:
    def __init__(self, work: Path, options: argparse.Namespace) -> None:
        self.work, self.options = work, options
        self.runs: list[dict[str, Any]] = []
        self.store = str(work / "store")
        self.command = READ if options.quick else TORCH

    def note(self, variant: str, number: int, seconds: float, **more: Any) -> None:
        self.runs.append({"variant": variant, "n": number, "seconds": round(seconds, 3), **more})
        extra = " ".join(f"{key}={value}" for key, value in more.items())
        print(f"{variant:14} {number}  {seconds:8.3f} s  {extra}", flush=True)

    def timed(self, variant: str, action: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = action()
        self.note(variant, 1, time.perf_counter() - began)
        return result

    def build(self, registry: DockerRegistry) -> str:
        """Build the image and push it; returns its reference."""
        base = self.options.base or self.timed("base", lambda: debian(self.work))
        packages = Path(sysconfig.get_path("purelib"))
        exclude = ("./nvidia", "./triton", "./torch/lib") if self.options.quick else ()
        layer = oci.LayerDir(packages, f"usr/local/lib/{PYTHON}/dist-packages", exclude)
        config = oci.ContainerConfig(env=("PATH=/usr/local/bin:/usr/bin:/bin",), cmd=("python3",))
        layout = self.work / "layout"
        self.timed("write-layout", lambda: oci.write_layout(layout, [base, layer], config, "bench"))
        ref = f"{registry.address}/bench/torch:v1"
        self.timed("push", lambda: oci.push(f"oci:{layout}:bench", ref))
        shutil.rmtree(layout)
        return ref

    def run(self) -> None:
        with DockerRegistry(root=self.work / "registry") as registry:
            ref = self.build(registry)
            cold()
            record = self.timed("convert", lambda: image.convert(ref, self.store, work_dir=self.work / "tmp"))
            self.runs[-1]["stages"] = record.seconds
            self.runs[-1]["bytes"] = {
                "layers": record.layer_bytes, "tree": record.tree_bytes, "stored": record.stored_bytes
            }  # fmt: skip
            print(self.runs[-1], flush=True)
            cold()
            with oci.open_image(ref) as opened:
                self.timed("pull", lambda: oci.unpack(opened, self.work / "plain"))
            pulled = self.runs[-1]
            pulled["bytes"] = {"registry": record.layer_bytes}
            pulled["on_link"] = round(max(pulled["seconds"], record.layer_bytes / self.options.rate), 3)
        shutil.rmtree(self.work / "registry")
        for number in range(1, 2 if self.options.quick else 4):
            for variant in ("local", "local-warm"):
                self.local(variant, number, record)
        shutil.rmtree(self.work / "plain")
        for number in range(1, 2 if self.options.quick else 4):
            shutil.rmtree(self.work / "store" / "profiles", ignore_errors=True)
            for variant in ("on-demand", "hot"):
                self.lazy(variant, number, ref, record)

    def local(self, variant: str, number: int, record: image.ImageRecord) -> None:
        if variant == "local":
            cold()
        began = time.perf_counter()
        self.start(self.work / "plain", record)
        self.note(variant, number, time.perf_counter() - began)

    def lazy(self, variant: str, number: int, ref: str, record: image.ImageRecord) -> None:
        cold()
        config = Config(cache_dir=str(self.work / "cache"), state_dir=str(self.work / "state"))
        command = [sys.executable, __file__, "--serve", str(self.options.rate), str(self.options.latency)]
        began = time.perf_counter()
        mounted = image.mount(
            ref, self.work / "rootfs", store_url=self.store, config=config, job="bench", record=record, server=command
        )
        try:
            ready = time.perf_counter() - began
            self.start(mounted.rootfs, record)
            seconds = time.perf_counter() - began
            status = mounted.status()
            mounted.ready()
        finally:
            mounted.unmount()
            shutil.rmtree(self.work / "cache")
        moved = {"demand": status.bytes_demand, "hot": status.bytes_hot, "background": status.bytes_background}
        self.note(variant, number, seconds, mount_s=round(ready, 3), stall_s=round(status.stall_seconds, 3),
                  slow_faults=status.slow_faults, hot_blocks=status.hot_total, bytes=moved)  # fmt: skip

    def start(self, rootfs: Path, record: image.ImageRecord) -> None:
        code = image.runtime.run(rootfs, record.config, self.command, state_dir=self.work / "state")
        if code:
            raise SystemExit(f"the container ended with exit code {code}")

    def median(self, variant: str, field: str = "seconds") -> float:
        return statistics.median(run[field] for run in self.runs if run["variant"] == variant)

    def figures(self) -> list[dict[str, Any]]:
        def figure(name: str, value: float, unit: str, target: str, met: bool, variant: str) -> dict[str, Any]:
            count = sum(run["variant"] == variant for run in self.runs)
            return {"name": name, "value": round(value, 4), "unit": unit, "of": "median", "n": count,
                    "target": target, "met": met}  # fmt: skip

        hot, local = self.median("hot"), self.median("local")
        stall = self.median("hot", "stall_s") / max(self.median("on-demand", "stall_s"), 1e-9)
        pull = hot / (self.median("pull", "on_link") + local)
        convert = next(run for run in self.runs if run["variant"] == "convert")
        unpack = convert["bytes"]["tree"] / convert["stages"]["unpack"] / 1e6
        return [
            figure("readiness_hot_vs_local", hot / local, "ratio", "<= 1.3", hot / local <= 1.3, "hot"),
            figure("readiness_hot_vs_pull", pull, "ratio", "<= 0.067", pull <= 0.067, "hot"),
            figure("stall_hot_vs_on_demand", stall, "ratio", "<= 0.02", stall <= 0.02, "hot"),
            figure("unpack_rate", unpack, "MB/s", ">= 250", unpack >= 250, "convert"),
        ]


def serve(rate: float, latency: float, rest: list[str]) -> int:
    def limited(url: str) -> Store:
        return RateLimitedStore(open_store(url), rate=rate, latency=latency)

    return server.main(rest, store_for=limited)


def report(bench: Bench) -> dict[str, Any]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    machine = {"cores": os.cpu_count(), "memory_gib": round(memory), "kernel": platform.release()}
    return {"schema": 1, "name": "image", "commit": commit.strip(), "machine": machine, "argv": sys.argv[1:],
            "runs": bench.runs, "figures": bench.figures()}  # fmt: skip


def main() -> int:
    if sys.argv[1:2] == ["--serve"]:
        return serve(float(sys.argv[2]), float(sys.argv[3]), sys.argv[4:])
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a smaller image, one run of each")
    parser.add_argument("--rate", type=float, default=125e6, help="bytes per second of the link")
    parser.add_argument("--latency", type=float, default=0.001, help="seconds per request")
    parser.add_argument("--base", type=Path, help="tar file of a Debian with Python (default: made by mmdebstrap)")
    parser.add_argument("--work", type=Path, default=Path("/var/tmp"), help="folder for about 25 GB")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-image-", dir=options.work) as work:
        bench = Bench(Path(work), options)
        bench.run()
        document = report(bench)
    for figure in document["figures"]:
        print(f"{figure['name']:26} {figure['value']:8.3f} {figure['unit']}  target {figure['target']}")
    if options.out:
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
