"""The whole demo with its small job: every server real, five starts, and nothing left behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bootseer.demo import workplace
from support import devcache

pytestmark = [
    pytest.mark.root, pytest.mark.runtime, pytest.mark.registry, pytest.mark.hdfs, pytest.mark.soak,
    pytest.mark.timeout(400),
]  # fmt: skip


@pytest.fixture(scope="module")
def cache() -> Path:
    """Kept from run to run: the base system takes half a minute to fetch."""
    return devcache.folder("demo-test")


def argv(cache: Path, here: Path) -> list[str]:
    parts = ["--job", "small", "--rounds", "1", "--cache", str(cache), "--subnet", "10.79.0.0/24"]
    return [sys.executable, "-m", "bench.demo", *parts, "--output", str(here / "report.json")]


def left_over(cache: Path) -> list[str]:
    """Work folders, namespaces, bridges and servers of a demo."""
    folders = [str(path) for path in (cache / "small").glob("run-*")]
    prefix = workplace.prefix(cache / "small")
    links = [path.name for path in Path("/sys/class/net").glob(f"{prefix}-*")]
    names = [path.name for path in Path("/run/netns").glob(f"{prefix}-*")] if Path("/run/netns").exists() else []
    servers = subprocess.run(["pgrep", "-af", str(cache / "small/run-")], capture_output=True, text=True).stdout
    return [*folders, *links, *names, *servers.splitlines()]


def test_six_starts_one_report(cache: Path, tmp_path: Path) -> None:
    done = subprocess.run(argv(cache, tmp_path), capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert {run["variant"] for run in report["runs"]} == {
        "ordinary", "local", "strongest", "first-uv", "first", "again", "convert",
    }  # fmt: skip
    runs = {run["variant"]: run for run in report["runs"]}
    moved = {name: runs[name]["bytes"]["link_until_first_step"] for name in ("ordinary", "local")}
    assert moved["ordinary"] > 10 * moved["local"]  # whose image containerd has kept
    assert runs["strongest"]["details"]["strongest"].endswith("uv, hdfs-native")
    for variant in ("first", "first-uv"):
        assert runs[variant]["details"]["env"]["how"] == "ran-and-published", variant
    assert runs["again"]["details"]["env"]["how"] == "restored-mount"
    assert runs["again"]["details"]["image"]["hot_total"] > 0
    figures = {figure["name"]: figure for figure in report["figures"]}
    assert figures["tree_identical"]["value"] is True, done.stderr
    assert figures["loss_continues"]["value"] is True
    assert figures["env_mount_ms"]["value"] < float("inf")
    ratios = {"first_vs_strongest", "first_uv_vs_strongest", "again_vs_bound"}
    assert {"overhead_reduction_first", "overhead_reduction_again", *ratios} <= figures.keys()
    for title in ("ordinary", "first", "again"):
        assert title in done.stdout
    assert list((cache / "small/last/events").rglob("*.jsonl"))
    assert left_over(cache) == []


def test_interrupted_leaves_nothing(cache: Path, tmp_path: Path) -> None:
    process = subprocess.Popen(argv(cache, tmp_path), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    assert process.stderr is not None
    try:
        seen = ""
        for line in process.stderr:
            seen += line
            if "first:" in line:
                break
        time.sleep(2)
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        process.wait(90)
    finally:
        process.kill()
        process.stderr.close()
    assert process.returncode == 130, seen + rest
    assert "Traceback" not in rest
    assert left_over(cache) == []
