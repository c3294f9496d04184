"""The environment stage against the installers it replaces: capture, mount restore, unpack restore.

    python bench/env.py [--quick] [--repeats N] [--work DIR] [--out report.json]

Needs root and about 3 GB below ``--work`` (deleted at the end). Wheels are packed from the packages beside this Python,
so no network is used; all go into an empty virtual environment. Each restore is on a node with an empty cache.
``uv-warm`` is the warm control: uv with its cache full and on the same file system, which links instead of copying.
``seconds`` of a run is what the job waits for.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

from bootseer import env, report
from bootseer.config import Config
from bootseer.env import EnvResult, EnvSpec, Outcome, Target

PACKAGES = [
    "numpy",
    "sympy",
    "mpmath",
    "networkx",
    "botocore",
    "aiohttp",
    "mypy",
    "hdfs-native",
    "zstandard",
    "transformers",
    "setuptools",
    "hypothesis",
    "rich",
    "pygments",
    "fsspec",
    "jinja2",
    "tokenizers",
    "safetensors",
    "regex",
]
QUICK = ["numpy", "networkx", "mpmath"]
IMPORTS = "import numpy, networkx, mpmath"


def pack_wheels(folder: Path, names: list[str]) -> list[str]:
    """Wheels of the installed packages ``names`` (those that there are); returns their names."""
    folder.mkdir()
    packed = []
    for name in names:
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        tag = next(line[5:] for line in (found.read_text("WHEEL") or "").splitlines() if line.startswith("Tag: "))
        title = found.metadata["Name"].replace("-", "_")
        with zipfile.ZipFile(
            folder / f"{title}-{found.version}-{tag}.whl", "w", zipfile.ZIP_DEFLATED, compresslevel=1
        ) as archive:
            for file in found.files or []:
                path = Path(str(found.locate_file(file)))
                if ".." not in file.parts and file.suffix != ".pyc" and path.is_file():
                    archive.write(path, str(file))
        packed.append(name)
    return packed


def make_venv(target: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(target)], check=True)


class Bench:
    def __init__(self, work: Path, packages: list[str]) -> None:
        self.work = work
        self.links = work / "links"
        self.packages = pack_wheels(self.links, packages)
        self.report = report.new("env")
        self.store = work / "store"
        self.count = 0

    def pip(self, target: Path) -> list[str]:
        quiet = ["-q", "--disable-pip-version-check", "--no-input", "--no-deps", "--no-index", "--no-cache-dir"]
        options = [*quiet, "--find-links", str(self.links)]
        return [sys.executable, "-m", "pip", "--python", f"{target}/bin/python", "install", *options, *self.packages]

    def uv(self, target: Path) -> list[str]:
        tool = Path(sysconfig.get_path("scripts"), "uv")
        cache = ["--cache-dir", str(self.work / "uv-cache")]
        options = ["-q", "--offline", "--no-deps", "--no-index", "--find-links", str(self.links), *cache]
        return [
            str(tool),
            "pip",
            "install",
            "--python",
            sys.executable,
            *options,
            "--target",
            str(target),
            *self.packages,
        ]

    def command(self, variant: str, n: int, argv: Callable[[Path], list[str]]) -> None:
        target = self.work / "plain"
        make_venv(target)
        began = time.perf_counter()
        done = subprocess.run(argv(target), capture_output=True, text=True, check=False)
        seconds = time.perf_counter() - began
        shutil.rmtree(target, ignore_errors=True)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["no message"]
            self.report.runs.append(report.Run(variant=variant, n=n, failed=lines[-1]))
            return
        self.report.runs.append(report.Run(variant=variant, n=n, seconds=round(seconds, 4)))

    def stage(self, variant: str, n: int, *, restore: env.spec.Technique, salt: str, expect: Outcome) -> EnvResult:
        """One stage on a fresh node; restored or captured targets are then imported from, once, by a new process."""
        self.count += 1
        node = self.work / f"node{self.count}"
        target = node / "env"
        node.mkdir()
        make_venv(target)
        os.sync()
        spec = EnvSpec(
            targets=(Target("/opt/env", str(target)),),
            command=("pip", "install", *self.packages),
            image_digest="sha256:bench",
            python=sys.executable,
            restore=restore,
            salt=salt,
        )
        config = Config(cache_dir=str(node / "cache"), state_dir=str(node / "state"), background_fill=False)
        result = env.run(
            spec,
            lambda: subprocess.run(self.pip(target), check=False).returncode,
            store_url=str(self.store),
            config=config,
        )
        if result.outcome is not expect:
            raise SystemExit(f"{variant}: {result.outcome} because {result.reason}")
        began = time.perf_counter()
        environ = {"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"}
        subprocess.run([str(target / "bin" / "python"), "-c", IMPORTS], env=environ, check=True)
        imported = time.perf_counter() - began
        entries = sum(1 for _ in target.rglob("*"))
        for mount in result.mounts:
            mount.unmount()
        shutil.rmtree(node)
        self.report.runs.append(
            report.Run(
                variant=variant,
                n=n,
                seconds=round(result.seconds, 4),
                stages=result.timings,
                details={"entries": entries, "import_seconds": round(imported, 3)},
            )
        )
        return result

    def all(self, repeats: int) -> None:
        self.command("uv-fill", 1, self.uv)
        for n in range(1, repeats + 1):
            print(f"round {n} of {repeats}", file=sys.stderr)
            self.command("pip", n, self.pip)
            self.command("uv-warm", n, self.uv)
            self.stage("capture", n, restore="mount", salt=f"o{n}", expect=Outcome.RAN_AND_PUBLISHED)
            self.stage("capture-scan", n, restore="unpack", salt=f"s{n}", expect=Outcome.RAN_AND_PUBLISHED)
            self.stage("mount", n, restore="mount", salt=f"o{n}", expect=Outcome.RESTORED_MOUNT)
            self.stage("unpack", n, restore="unpack", salt=f"o{n}", expect=Outcome.RESTORED_UNPACK)

    def median(self, variant: str, value: Callable[[report.Run], float]) -> float:
        return statistics.median(value(run) for run in self.report.runs if run.variant == variant and not run.failed)

    def figures(self, repeats: int) -> None:
        def seconds(run: report.Run) -> float:
            assert run.seconds is not None
            return run.seconds

        pip = self.median("pip", seconds)
        mount_ms = 1000 * self.median("mount", lambda run: run.stages["restore"])
        hit_ms = 1000 * self.median("mount", lambda run: run.stages["key"] + run.stages["lookup"])
        per_30k = self.median("capture", lambda run: run.stages["capture"] / run.details["entries"] * 30_000)
        overhead = self.median("capture", seconds) / pip - 1
        rows = [
            ("env_mount_ms", mount_ms, "ms", "<= 100"),
            ("env_hit_decision_ms", hit_ms, "ms", "<= 50"),
            ("env_unpack_vs_pip", self.median("unpack", seconds) / pip, "ratio", "<= 0.2"),
            ("env_mount_vs_pip", self.median("mount", seconds) / pip, "ratio", "<= 0.05"),
            ("env_capture_seconds_per_30k", per_30k, "s", "<= 15"),
            ("env_first_node_overhead", overhead, "ratio", "<= 0.1"),
        ]
        if any(run.variant == "uv-warm" and not run.failed for run in self.report.runs):
            rows.append(
                (
                    "env_mount_vs_uv_warm",
                    self.median("mount", seconds) / self.median("uv-warm", seconds),
                    "ratio",
                    "<= 1",
                )
            )
        for name, value, unit, target in rows:
            self.report.figure(name, value, unit=unit, target=target, n=repeats, of="median")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer packages, two rounds")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--work", default="/var/tmp", help="folder on a disk")
    parser.add_argument("--out", help="write the report here")
    options = parser.parse_args()
    repeats = 2 if options.quick else options.repeats
    with tempfile.TemporaryDirectory(prefix="bench-env-", dir=options.work) as work:
        bench = Bench(Path(work), QUICK if options.quick else PACKAGES)
        bench.all(repeats)
    bench.figures(repeats)
    for variant in ("pip", "uv-fill", "uv-warm", "capture", "capture-scan", "mount", "unpack"):
        runs = [run for run in bench.report.runs if run.variant == variant]
        if failed := [run.failed for run in runs if run.failed]:
            print(f"{variant:14} could not run: {failed[0]}")
            continue
        middle = statistics.median(run.seconds or 0.0 for run in runs)
        stages = {name: statistics.median(run.stages[name] for run in runs) for name in runs[0].stages}
        shown = ", ".join(f"{name} {value:.3f}" for name, value in stages.items())
        print(f"{variant:14} {middle:8.3f} s   {shown}   {runs[0].details or ''}")
    for figure in bench.report.figures:
        verdict = "met" if figure.met else "MISSED"
        print(f"{figure.name:30} {figure.value:10} {figure.unit:6} target {figure.target:8} {verdict}")
    if options.out:
        bench.report.write(Path(options.out))


if __name__ == "__main__":
    main()
