"""The figures of a node for Prometheus, and that the example alerts and the dashboard ask for what there is."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from bootseer.node import figures, unit
from bootseer.node.protocol import NodeStatus, PartStatus

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = DEPLOY / "prometheus/bootseer.rules.yml"
STATUS = NodeStatus(
    pid=1, version="1", started=1.5, draining=False, mounts=2, running=0, connections=1, done={"mount": 3},
    failed={"mount": 1}, parts={"csi": PartStatus(pid=2, serves=False, starts=4, mounts=0)},
)  # fmt: skip
STATES = {"serving": 2, "dead": 1, "silent": 0}
FOUND = figures.Figures(
    cache_bytes=7, cache_limit_bytes=9, servers={"tree": STATES, "fs": STATES}, failed_reads=1, waited_seconds=0.5,
    bytes={"demand": 1, "hot": 2, "background": 3, "ahead": 4},
)  # fmt: skip


def told() -> dict[str, list[dict[str, str]]]:
    """Name -> the labels of each sample."""
    samples: dict[str, list[dict[str, str]]] = {}
    for family in text_string_to_metric_families(unit.up(True) + unit.metrics(STATUS) + FOUND.metrics()):
        assert family.documentation
        for sample in family.samples:
            samples.setdefault(sample.name, []).append(sample.labels)
    return samples


def asked() -> list[str]:
    rules = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    assert all(rule["annotations"].keys() == {"summary", "action"} for rule in rules)
    board = json.loads((DEPLOY / "grafana/nodes.json").read_text())
    return [rule["expr"] for rule in rules] + [one["expr"] for panel in board["panels"] for one in panel["targets"]]


def test_alerts_and_dashboard_ask_for_figures_that_there_are() -> None:
    found = told()
    for expr in asked():
        for name, chosen in re.findall(r"\b(bootseer_\w+)(?:\{([^}]*)\})?", expr):
            assert name in found, expr
            wanted = dict(re.findall(r'(\w+)="(\w+)"', chosen))
            assert any(wanted.items() <= labels.items() for labels in found[name]), expr
        for label in re.findall(r"by \((\w+)\)", expr):
            assert label == "instance" or any(label in one for name in found if name in expr for one in found[name])
    assert FOUND.count("dead") == 2


def test_prometheus_takes_the_alerts() -> None:
    if not (tool := shutil.which("promtool")):
        pytest.skip("no promtool")
    done = subprocess.run([tool, "check", "rules", str(RULES)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
