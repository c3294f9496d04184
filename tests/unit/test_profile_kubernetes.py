"""What Kubernetes says of pods becomes events: figures computed by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bootseer.cli.profile import app
from bootseer.errors import DataError
from bootseer.profile import analysis, events, kubernetes

Json = dict[str, Any]


def at(seconds: float) -> str:
    minutes, rest = divmod(seconds, 60)
    return f"2026-01-02T03:{int(minutes):02}:{rest:02.0f}Z"


def pod(
    name: str, node: str, *, ready: int, started: int | None, init: tuple[int, int] | None = None, **labels: str
) -> Json:
    state = (
        {"running": {"startedAt": at(started)}} if started is not None else {"waiting": {"reason": "ImagePullBackOff"}}
    )
    status: Json = {
        "conditions": [
            {"type": "PodScheduled", "status": "True", "lastTransitionTime": at(10)},
            {"type": "PodReadyToStartContainers", "status": "True", "lastTransitionTime": at(ready)},
            {"type": "Ready", "status": "False", "lastTransitionTime": at(10)},
        ],
        "containerStatuses": [{"state": state}],
    }
    if init:
        done = {"startedAt": at(init[0]), "finishedAt": at(init[1])}
        status["initContainerStatuses"] = [{"state": {"terminated": done}}]
    return {
        "kind": "Pod",
        "metadata": {
            "name": name, "uid": f"uid-{name}", "creationTimestamp": at(0),
            "labels": labels or {"job-name": "old", "batch.kubernetes.io/job-name": "llm"},
        },
        "spec": {"nodeName": node, "containers": [{"resources": {"limits": {"nvidia.com/gpu": "8", "memory": "1Gi"}}}]},
        "status": status,
    }  # fmt: skip


def event(name: str, reason: str, when: int) -> Json:
    about = {"kind": "Pod", "uid": f"uid-{name}"}
    return {
        "kind": "Event",
        "involvedObject": about,
        "reason": reason,
        "firstTimestamp": at(when),
        "lastTimestamp": at(when),
    }


TWO = [
    pod("llm-0", "n1", ready=12, started=75, init=(60, 70)),
    pod("llm-1", "n2", ready=14, started=45),
    event("llm-0", "Pulling", 15),
    event("llm-0", "Pulled", 55),
    event("llm-0", "Started", 75),
    event("llm-1", "Pulled", 44),  # of an image that was there: nothing was pulled
]


def read(*items: Json) -> events.EventLog:
    return events.parse(kubernetes.events(json.dumps({"kind": "List", "items": items}).encode()))


def spans(log: events.EventLog) -> dict[tuple[str, str], float | None]:
    return {(span.node, span.stage): d.ns / 1e9 if (d := span.duration) else None for span in log.spans}


def test_a_pod_is_queued_set_up_and_has_its_image_pulled() -> None:
    log = read(*TWO)
    assert log.identities() == [("llm", "0", 0)]
    assert spans(log) == {
        ("kubernetes", "queue"): 10.0,
        ("n1", "alloc"): 5.0, ("n1", "image"): 40.0, ("n1", "env"): 10.0,
        ("n2", "alloc"): 4.0, ("n2", "image"): 31.0,
    }  # fmt: skip
    report = analysis.analyse(log)
    assert (report.gpus, report.nodes_expected, report.queue_seconds) == (16, 2, 10.0)


def test_what_has_not_ended_is_open() -> None:
    log = read(pod("llm-0", "n1", ready=12, started=None), event("llm-0", "Pulling", 15))
    assert spans(log)["n1", "image"] is None
    waiting = pod("llm-1", "", ready=12, started=None)
    waiting["status"] = {}
    assert spans(read(*TWO, waiting))["kubernetes", "queue"] is None


def test_a_second_import_and_pods_of_one_node_are_told_apart() -> None:
    document = json.dumps({"items": TWO}).encode()
    lines = list(kubernetes.events(document))
    assert events.parse(lines * 2).duplicates == len(lines)
    same = read(pod("a", "n1", ready=12, started=20), pod("b", "n1", ready=12, started=30))
    assert sorted(d.ns / 1e9 for span in same.spans if span.stage == "image" and (d := span.duration)) == [8.0, 18.0]


def test_names_and_attempts() -> None:
    labels = {"jobset.sigs.k8s.io/jobset-name": "set", "job-name": "set-w-0", "jobset.sigs.k8s.io/restart-attempt": "2"}
    assert read(pod("p", "n1", ready=12, started=20, **labels)).identities() == [("set", "2", 0)]
    bare = pod("p", "n1", ready=12, started=20, app="x")
    assert read(bare).identities() == [("p", "0", 0)]
    bare["metadata"]["ownerReferences"] = [{"name": "owner"}]
    assert read(bare).identities() == [("owner", "0", 0)]


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b"3", b'{"items": 3}', b'{"items": []}', b'{"items": [3]}', b'{"kind": "Pod"}',
             b'{"kind": "Pod", "metadata": {"name": "p", "creationTimestamp": "yesterday"}}'],
)  # fmt: skip
def test_what_is_no_list_of_pods_is_refused(text: bytes) -> None:
    with pytest.raises(DataError):
        list(kubernetes.events(text))


def test_the_command(tmp_path: Path) -> None:
    given, made = tmp_path / "pods.json", tmp_path / "pods.jsonl"
    given.write_text(json.dumps({"kind": "List", "items": TWO}))
    args = ["import", "--kubernetes", str(given)]
    done = CliRunner().invoke(app, [*args, "--job", "mine", "-o", str(made)])
    assert done.exit_code == 0, done.output
    assert events.read(made).identities() == [("mine", "0", 0)]
    both = CliRunner().invoke(app, [*args, "--sacct", str(given)])
    assert both.exit_code == 2
