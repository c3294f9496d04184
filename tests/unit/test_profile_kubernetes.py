"""What Kubernetes says of pods becomes events: figures computed by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bootseer.cli.profile import app
from bootseer.errors import DataError
from bootseer.profile import analysis, events, index, kubernetes

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


def test_a_pull_within_a_second_has_ended() -> None:
    """Times of events are whole seconds."""
    log = read(
        pod("llm-0", "n1", ready=12, started=90, init=(16, 80)),
        event("llm-0", "Pulled", 15), event("llm-0", "Pulling", 15), event("llm-0", "Started", 16),
    )  # fmt: skip
    assert spans(log) == {
        ("kubernetes", "queue"): 10.0, ("n1", "alloc"): 5.0, ("n1", "image"): 0.0, ("n1", "env"): 64.0,
    }  # fmt: skip


def test_a_second_import_and_pods_of_one_node_are_told_apart() -> None:
    document = json.dumps({"items": TWO}).encode()
    lines = list(kubernetes.events(document))
    assert events.parse(lines * 2).duplicates == len(lines)
    same = read(pod("a", "n1", ready=12, started=20), pod("b", "n1", ready=12, started=30))
    assert sorted(d.ns / 1e9 for span in same.spans if span.stage == "image" and (d := span.duration)) == [8.0, 18.0]


def test_a_later_dump_ends_what_an_earlier_one_left_open() -> None:
    begun = [one(started=None, **init(0, {"running": {"startedAt": at(30)}})), *pulls(10, 29, "i")]
    ended = [one(started=180, **inits((30, 50), (80, 100))), *pulls(10, 29, "i"), *pulls(51, 79, "i1")]
    dumps = (json.dumps({"items": items}).encode() for items in (begun, ended))
    both = events.parse([line for dump in dumps for line in kubernetes.events(dump)])
    assert sorted(map(str, both.spans)) == sorted(map(str, read(*ended).spans))


def test_names_and_attempts() -> None:
    labels = {"jobset.sigs.k8s.io/jobset-name": "set", "job-name": "set-w-0", "jobset.sigs.k8s.io/restart-attempt": "2"}
    assert read(pod("p", "n1", ready=12, started=20, **labels)).identities() == [("set", "2", 0)]
    bare = pod("p", "n1", ready=12, started=20, app="x")
    assert read(bare).identities() == [("p", "0", 0)]
    bare["metadata"]["ownerReferences"] = [{"name": "owner"}]
    assert read(bare).identities() == [("owner", "0", 0)]


def one(*, started: int | None = 120, uid: str = "u", made: int = 0, labels: Json | None = None, **status: Any) -> Json:
    """A pod of 8 GPUs that was bound after 5 s."""
    running = {"running": {"startedAt": at(started)}} if started else {"waiting": {}}
    bound = {"type": "PodScheduled", "status": "True", "lastTransitionTime": at(made + 5)}
    found = {"conditions": [bound], "containerStatuses": [{"name": "c", "state": running}], **status}
    limits = {"resources": {"limits": {"nvidia.com/gpu": "8"}}}
    return {
        "kind": "Pod", "status": found, "spec": {"nodeName": "n1", "containers": [{"name": "c", **limits}]},
        "metadata": {"name": "p", "uid": uid, "namespace": "d", "creationTimestamp": at(made), "labels": labels or {}},
    }  # fmt: skip


def pull(reason: str, first: int | str | None, last: int | None = None, **more: Any) -> Json:
    times = {
        "firstTimestamp": at(first) if isinstance(first, int) else first,
        "lastTimestamp": at(last) if last else None,
    }
    return {"kind": "Event", "involvedObject": {"kind": "Pod", "uid": "u"}, "reason": reason, **times, **more}


def ran(begin: int, end: int) -> Json:
    return {"terminated": {"startedAt": at(begin), "finishedAt": at(end)}}


def again(count: int, begin: int, end: int, then: int) -> Json:
    state = {"running": {"startedAt": at(then)}}
    return {"containerStatuses": [{"name": "c", "restartCount": count, "state": state, "lastState": ran(begin, end)}]}


def named(name: str, pod: Json) -> Json:
    return pod | {"metadata": pod["metadata"] | {"name": name}}


ZERO = "0001-01-01T00:00:00Z"
BOUND = {"type": "PodScheduled", "status": "True"}
PULLED = [pull("Pulling", 10), pull("Pulled", 115)]
VOLCANO = {"volcano.sh/job-name": "llm"}
SET = {"jobset.sigs.k8s.io/jobset-name": "llm", "batch.kubernetes.io/job-completion-index": "0"}
RAY = {"ray.io/originated-from-cr-name": "llm"}
TWICE: dict[str, tuple[list[Json], list[tuple[str, int, str, float, float | None]]]] = {
    "zero first time": ([one(), pull("Pulling", ZERO, 10), pull("Pulled", 115)], [("0", 0, "image", 10, 115)]),
    "eventTime": (
        [one(), pull("Pulling", None, eventTime=at(10)), pull("Pulled", None, eventTime=at(115), series={"count": 3})],
        [("0", 0, "image", 10, 115)],
    ),
    "zero condition": ([one(conditions=[BOUND | {"lastTransitionTime": ZERO}]), *PULLED], [("0", 0, "image", 10, 115)]),
    "null condition": ([one(conditions=[BOUND | {"lastTransitionTime": None}]), *PULLED], [("0", 0, "image", 10, 115)]),
    "unknown start": ([one(containerStatuses=[{"name": "c", "state": {"terminated": {"startedAt": ZERO}}}])], []),
    "started again": (
        [one(**again(1, 120, 900, 910)), pull("Pulling", 10, 901), pull("Pulled", 115), pull("Pulled", 905)],
        [("0", 0, "image", 10, 115), ("0", 1, "alloc", 900, 901), ("0", 1, "image", 901, 905)],
    ),
    "started again, events gone": (
        [one(**again(1, 120, 900, 910)), pull("Pulling", 901), pull("Pulled", 905)],
        [("0", 0, "image", 5, 120), ("0", 1, "alloc", 900, 901), ("0", 1, "image", 901, 905)],
    ),
    "first start forgotten": ([one(**again(5, 800, 890, 900))], [("0", 5, "alloc", 890, 900)]),
    "retries": (
        [one(started=400), pull("Pulling", 10, 300), pull("Failed", 20, message="failed to pull"), pull("Pulled", 390)],
        [("0", 0, "image", 10, 390)],
    ),
    "sidecar": ([one(initContainerStatuses=[{"name": "i", "state": {"running": {"startedAt": at(30)}}}]), *PULLED[:1],
                 pull("Pulled", 30)], [("0", 0, "image", 10, 30)]),
    "image after init": (
        [one(started=180, initContainerStatuses=[{"name": "i", "state": ran(30, 100)}]), *PULLED[:1],
         pull("Pulled", 29), pull("Pulling", 101), pull("Pulled", 175)],
        [("0", 0, "image", 10, 29), ("0", 0, "image", 101, 175), ("0", 0, "env", 30, 100)],
    ),
    "same name again": (
        [one(labels=VOLCANO), one(uid="v", made=900, started=930, labels=VOLCANO)],
        [("0", 0, "image", 5, 120), ("1", 0, "image", 905, 930)],
    ),
    "a retry": (
        [one(phase="Failed", containerStatuses=[{"name": "c", "state": ran(120, 800)}], labels={"job-name": "llm"}),
         one(uid="v", made=810, started=830, labels={"job-name": "llm"})],
        [("0", 0, "image", 5, 120), ("1", 0, "image", 815, 830)],
    ),
    "clusters of a RayJob": (
        [one(labels=RAY | {"ray.io/cluster": "z"}),
         one(uid="v", made=900, started=930, labels=RAY | {"ray.io/cluster": "a"})],
        [("0", 0, "image", 5, 120), ("1", 0, "image", 905, 930)],
    ),
    "a retry of what never ran": (
        [one(started=None, phase="Failed", labels={"job-name": "llm"},
             conditions=[{"type": "DisruptionTarget", "status": "True", "lastTransitionTime": at(50)}]),
         named("q", one(uid="v", made=100, started=130, labels={"job-name": "llm"}))],
        [("1", 0, "image", 105, 130)],
    ),
    "a worker of a cluster made again": (
        [one(labels={"ray.io/cluster": "c"}), one(uid="v", made=900, started=930, labels={"ray.io/cluster": "c"})],
        [("0", 0, "image", 5, 120), ("0-1", 0, "image", 905, 930)],
    ),
    "jobs of one set": (
        [one(uid=uid, labels=SET | {"batch.kubernetes.io/job-name": f"llm-{uid}"}) for uid in "uv"],
        [("0", 0, "image", 5, 120)] * 2,
    ),
    "crash loop": (
        [one(containerStatuses=[{"name": "c", "restartCount": 3, "state": {}, "lastState": ran(300, 310)}]),
         *PULLED], [("0", 0, "image", 10, 115)],
    ),
    "sidecar started again": (
        [one(containerStatuses=[{"name": "c", "state": {"running": {"startedAt": at(120)}}},
                                again(2, 500, 890, 900)["containerStatuses"][0] | {"name": "proxy"}]), *PULLED],
        [("0", 0, "image", 10, 115)],
    ),
    "debug container": (
        [one(), *PULLED, pull("Pulling", 990), pull("Pulled", 995)], [("0", 0, "image", 10, 115)],
    ),
    "an event without a time": ([one(), pull("Pulling", None), PULLED[1]], [("0", 0, "image", 5, 120)]),
    "counts that are null": (
        [one(), pull("Pulling", 10, count=None), pull("Pulled", 115, count=None, message=None)],
        [("0", 0, "image", 10, 115)],
    ),
    "nulls": (
        [one(initContainerStatuses=None, ephemeralContainerStatuses=None), {**one(uid="v"), "status": None}],
        [("0", 0, "image", 5, 120)],
    ),
    "odd objects": ([one(), {"kind": "Pod", "metadata": {"name": "odd"}}, {"kind": "Event"}, *PULLED],
                    [("0", 0, "image", 10, 115)]),
}  # fmt: skip


@pytest.mark.parametrize("case", TWICE)
def test_what_happens_twice_or_is_not_known(case: str) -> None:
    items, expected = TWICE[case]
    zero = events.parse(kubernetes.events(json.dumps({"items": [one()]}).encode())).spans[0].begin
    assert zero
    got = [
        (span.attempt, span.cycle, span.stage, (span.begin.wall - zero.wall) / 1e9, (span.end.wall - zero.wall) / 1e9)
        for span in read(*items).spans
        if span.begin and span.end and span.stage != "queue" and (span.stage != "alloc" or span.cycle)
    ]
    assert got == expected
    assert not [span for span in read(*items).spans if span.state is events.State.OPEN]


def init(count: int, state: Json, last: Json | None = None) -> Json:
    return {"initContainerStatuses": [{"name": "i", "restartCount": count, "state": state, "lastState": last or {}}]}


def made(kind: str, when: int = 0, **status: Any) -> Json:
    about = {"name": "llm", "namespace": "d", "creationTimestamp": at(when)}
    return {"kind": kind, "metadata": about, "status": status}


def about(pod: Json, **more: Any) -> Json:
    return pod | {"metadata": pod["metadata"] | more}


WAITS = {"containerStatuses": [{"name": "c", "state": {"waiting": {"reason": "PodInitializing"}}}]}
LLM = {"job-name": "llm"}
LATER = named("q", one(uid="v", made=900, started=930, labels=LLM))
SUBMITTER = named("s", one(uid="v", made=130, started=140, labels={"batch.kubernetes.io/job-name": "llm"}))
SUBMITTER["spec"] = {"nodeName": "n2", "containers": [{"name": "c"}]}
SET_UP = [BOUND | {"lastTransitionTime": at(5)}]
SANDBOX = {"type": "PodReadyToStartContainers", "status": "False", "lastTransitionTime": at(5)}
GONE = {"type": "DisruptionTarget", "status": "True", "lastTransitionTime": at(90)}
SUSPENDED = {"type": "Suspended", "status": "False"}
REQUEUED = {"type": "Requeued", "status": "True", "lastTransitionTime": at(600)}
ADMITTED = {"type": "Admitted", "status": "True", "lastTransitionTime": at(898)}


def inits(*runs: tuple[int, int | None]) -> Json:
    states = (ran(begin, end) if end else {"running": {"startedAt": at(begin)}} for begin, end in runs)
    return {"initContainerStatuses": [{"name": f"i{n}", "state": state} for n, state in enumerate(states)]}


def pulls(begin: int, end: int | None, name: str = "c", of: str = "containers") -> list[Json]:
    of = "initContainers" if name[0] == "i" else of
    said = {"involvedObject": {"kind": "Pod", "uid": "u", "fieldPath": f"spec.{of}{{{name}}}"}}
    return [pull("Pulling", begin) | said, *([pull("Pulled", end) | said] if end else [])]


LATE = named("late", one(uid="v", made=600, started=700, labels=LLM))
FIRST: list[tuple[str, str, float, float | None]] = [("0", "queue", 0, 5), ("0", "image", 5, 120)]
SECOND: list[tuple[str, str, float, float | None]] = [("1", "queue", 900, 905), ("1", "image", 905, 930)]
STARTS: dict[str, tuple[list[Json], list[tuple[str, str, float, float | None]]]] = {
    "what submits to a cluster": (
        [one(labels=RAY | {"ray.io/cluster": "z"}), SUBMITTER], [*FIRST, ("0", "image", 135, 140)],
    ),
    "a version that is an annotation": (
        [about(one(labels=VOLCANO), annotations={"volcano.sh/job-version": "2"})],
        [("2", "queue", 0, 5), ("2", "image", 5, 120)],
    ),
    **{
        f"an older {kind} of the job's name": (
            [made(kind), LATER], [("0", "queue", 900, 905), ("0", "image", 905, 930)],
        ) for kind in ("Service", "StatefulSet", "CronJob", "ConfigMap")
    },
    "init fails beside a pod made later": (
        [one(labels=LLM, phase="Failed", **WAITS, **init(0, ran(30, 60))),
         named("q", one(uid="v", made=7, started=90, labels=LLM))],
        [("0", "queue", 0, 12), ("0", "image", 5, 30), ("0", "env", 30, 60), ("0", "image", 12, 90)],
    ),
    "init again": (
        [one(started=101, **init(1, ran(70, 100), ran(30, 60)))],
        [("0", "queue", 0, 5), ("0", "image", 5, 30), ("0", "env", 30, 100)],
    ),
    "init often": ([one(started=901, **init(4, ran(870, 900), ran(730, 760)))], FIRST[:1]),
    "init often, with events": (
        [one(started=901, **init(4, ran(870, 900), ran(730, 760))), *PULLED], [FIRST[0], ("0", "image", 10, 115)],
    ),
    "init fails once and waits": (
        [one(started=None, **init(0, {"waiting": {}}, ran(30, 60)))],
        [FIRST[0], ("0", "image", 5, 30), ("0", "env", 30, None)],
    ),
    "a lost node": (
        [about(one(labels=LLM), deletionTimestamp=at(929), deletionGracePeriodSeconds=30), LATER], FIRST + SECOND,
    ),
    "running since nobody knows": ([one(containerStatuses=[{"name": "c", "state": {"running": {}}}])], FIRST[:1]),
    "no sandbox": ([one(started=None, conditions=[*SET_UP, SANDBOX])], [*FIRST[:1], ("0", "alloc", 5, None)]),
    "no sandbox, as events say": (
        [one(started=None), pull("FailedMount", 9), pull("FailedCreatePodSandBox", 30)],
        [*FIRST[:1], ("0", "alloc", 5, None)],
    ),
    "not seen by its node": (
        [one(started=None, conditions=SET_UP, containerStatuses=None)], [*FIRST[:1], ("0", "alloc", 5, None)],
    ),
    "no sandbox any more": (
        [one(started=None, conditions=[*SET_UP, SANDBOX]), pull("Pulling", 10)],
        [*FIRST[:1], ("0", "alloc", 5, 10), ("0", "image", 10, None)],
    ),
    "failed in its sandbox": (
        [about(one(started=None, phase="Failed", reason="Evicted", conditions=[*SET_UP, SANDBOX]))], FIRST[:1],
    ),
    "failed while it pulled": (
        [one(started=None, phase="Failed", conditions=[*SET_UP, GONE]), pull("Pulling", 10)],
        [*FIRST[:1], ("0", "alloc", 5, 10), ("0", "image", 10, 90)],
    ),
    "a pull within a second, of a pod whose sandbox is gone": (
        [one(started=11, phase="Succeeded", conditions=[*SET_UP, SANDBOX]), *pulls(10, 10)],
        [*FIRST[:1], ("0", "alloc", 5, 10), ("0", "image", 10, 10)],
    ),
    "a pull after an image that was there": (
        [one(started=180, **inits((30, 50))), *pulls(51, 175)],
        [*FIRST[:1], ("0", "alloc", 5, 5), ("0", "image", 5, 30), ("0", "env", 30, 50), ("0", "image", 51, 175)],
    ),
    "a pull after one within a second": (
        [one(started=180, **inits((30, 50))), *pulls(10, 10, "i0"), *pulls(51, 175)],
        [*FIRST[:1], ("0", "alloc", 5, 10), ("0", "env", 30, 50), ("0", "image", 51, 175)],
    ),
    "a pull between init containers": (
        [one(started=180, **inits((30, 50), (80, 100))),
         *pulls(10, 29, "i0"), *pulls(51, 79, "i1"), *pulls(101, 175)],
        [*FIRST[:1], ("0", "alloc", 5, 10), ("0", "image", 10, 29), ("0", "env", 30, 51), ("0", "image", 51, 79),
         ("0", "env", 79, 100), ("0", "image", 101, 175)],
    ),
    "a pull between init containers goes on": (
        [one(started=None, **inits((30, 50))), *pulls(10, 29, "i0"), pull("Pulling", 51)],
        [*FIRST[:1], ("0", "alloc", 5, 10), ("0", "image", 10, 29), ("0", "env", 30, 50), ("0", "image", 51, None)],
    ),
    "the second of two init containers runs": (
        [one(started=None, **inits((30, 50), (80, None))), *pulls(10, 29, "i0"), *pulls(51, 79, "i1")],
        [*FIRST[:1], ("0", "alloc", 5, 10), ("0", "image", 10, 29), ("0", "env", 30, 51), ("0", "image", 51, 79),
         ("0", "env", 79, None)],
    ),
    "a debug container while it is set up": (
        [one(started=None, **init(0, {"running": {"startedAt": at(30)}})), *pulls(10, 29, "i"),
         *pulls(200, 260, "debugger-x", "ephemeralContainers")],
        [*FIRST[:1], ("0", "alloc", 5, 10), ("0", "image", 10, 29), ("0", "env", 30, None)],
    ),
    "a debug container that cannot be pulled": (
        [one(started=None, **init(0, {"running": {"startedAt": at(30)}})), *pulls(10, 29, "i"),
         *pulls(200, None, "debugger-x", "ephemeralContainers")],
        [*FIRST[:1], ("0", "alloc", 5, 10), ("0", "image", 10, 29), ("0", "env", 30, None)],
    ),
    "started again, as events.k8s.io says it": (
        [one(**again(1, 120, 900, 910)),
         *(pull(reason, None, deprecatedFirstTimestamp=at(first), deprecatedLastTimestamp=at(last), deprecatedCount=2)
           for reason, first, last in (("Pulling", 10, 901), ("Pulled", 115, 905)))],
        [*FIRST[:1], ("0", "alloc", 5, 10), ("0", "image", 10, 115),
         ("0", "alloc", 900, 901), ("0", "image", 901, 905)],
    ),
    "a worker that comes late": (
        [one(labels=LLM), LATE],
        [*FIRST, ("0", "alloc", 5, 5), ("0", "alloc", 605, 605), ("0", "image", 605, 700)],
    ),
    "a worker that is asked for late": (
        [one(labels=LLM), LATE | {"spec": {**LATE["spec"], "nodeName": None}, "status": {}}],
        [*FIRST, ("0", "alloc", 5, 5)],
    ),
    "a worker that waits for a node": (
        [one(labels=LLM), about(LATE, creationTimestamp=at(1))],
        [("0", "queue", 0, 605), ("0", "image", 5, 120), ("0", "image", 605, 700),
         ("0", "alloc", 5, 5), ("0", "alloc", 605, 605)],
    ),
    "let in again": (
        [LATER, made("Job", conditions=[SUSPENDED | {"lastTransitionTime": at(899)}]),
         made("Workload", conditions=[REQUEUED, ADMITTED])],
        [("0", "queue", 600, 905), ("0", "image", 905, 930)],
    ),
    "let in again, and the first pods are there": (
        [named("o", about(one(labels=LLM, made=300, started=330, uid="o"), deletionTimestamp=at(600))), LATER,
         made("Workload", conditions=[REQUEUED, ADMITTED])],
        [("0", "queue", 0, 305), ("0", "image", 305, 330), ("1", "queue", 600, 905), ("1", "image", 905, 930)],
    ),
    "let in again, nobody knows since when": (
        [LATER, made("Workload", conditions=[ADMITTED, ADMITTED | {"type": "Evicted", "status": "False"}])],
        [("0", "queue", 898, 905), ("0", "image", 905, 930)],
    ),
    "put back before it had a pod": (
        [LATER, made("Workload", conditions=[REQUEUED | {"reason": "AdmissionCheck"}, ADMITTED])],
        [("0", "queue", 0, 905), ("0", "image", 905, 930)],
    ),
    "a retry whose first pods are gone": ([LATER, made("Job", failed=1, startTime=at(0))],
                                          [("0", "queue", 900, 905), ("0", "image", 905, 930)]),
    "a retry of a job that waited": (
        [LATER, made("Job", failed=1, conditions=[SUSPENDED | {"lastTransitionTime": at(300)}])],
        [("0", "queue", 900, 905), ("0", "image", 905, 930)],
    ),
    "a PyTorchJob that restarts": (
        [LATER, made("PyTorchJob", conditions=[SUSPENDED | {"type": "Restarting"}])],
        [("0", "queue", 900, 905), ("0", "image", 905, 930)],
    ),
    "one pod of a job failed": (
        [about(one(labels=LLM), creationTimestamp=at(2)), made("Job", failed=1, startTime=at(0))],
        [("0", "queue", 0, 5), ("0", "image", 5, 120)],
    ),
    "the label of MPIJob's first version": ([one(labels={"mpi-job-name": "llm", "job-name": "llm-launcher"})], FIRST),
}  # fmt: skip


@pytest.mark.parametrize("case", STARTS)
def test_starts_and_their_queues(case: str) -> None:
    items, expected = STARTS[case]
    zero = events.parse(kubernetes.events(json.dumps(one()).encode())).spans[0].begin
    assert zero
    got = [
        (span.attempt, span.stage, (span.begin.wall - zero.wall) / 1e9,
         (span.end.wall - zero.wall) / 1e9 if span.end else None)
        for span in read(*items).spans
        if span.begin and (span.stage != "alloc" or any(stage == "alloc" for _, stage, *_ in expected))
    ]  # fmt: skip
    assert sorted(got, key=str) == sorted(expected, key=str)
    assert {job for job, _, _ in read(*items).identities()} <= {"llm", "p"}


def test_an_event_that_a_watch_prints_anew_counts_once() -> None:
    failed = [pull("Failed", 20, last, message="failed to pull", count=n, metadata={"uid": "e"}) for n, last in
              ((1, 20), (2, 40))]  # fmt: skip
    assert [s.attrs.get("retries") for s in read(one(), *PULLED, *failed).spans if s.stage == "image"] == [2]
    of = {"regarding": {"kind": "Pod", "uid": "u", "fieldPath": "spec.containers{c}"}, "reason": "Failed"}
    newer = [{"kind": "Event", **of, "note": "failed to pull", **more} for more in (
        {"deprecatedFirstTimestamp": at(20), "deprecatedLastTimestamp": at(40), "deprecatedCount": 4},
        {"eventTime": at(50), "series": {"count": 3, "lastObservedTime": at(70)}},
    )]  # fmt: skip
    debugger = pull("Failed", 80, message="failed to pull") | {"regarding": None, "involvedObject": {
        "kind": "Pod", "uid": "u", "fieldPath": "spec.ephemeralContainers{debugger}"}}  # fmt: skip
    found = read(one(), *PULLED, *newer, debugger).spans
    assert [s.attrs.get("retries") for s in found if s.stage == "image"] == [7]


def test_gpus_that_a_pod_holds_by_claims(caplog: pytest.LogCaptureFixture) -> None:
    claims = {"resourceClaims": [{"name": "g", "resourceClaimTemplateName": "t"}]}
    pod = one(resourceClaimStatuses=[{"name": "g", "resourceClaimName": "p-g"}])
    pod["spec"] |= claims | {"containers": [{"name": "c", "resources": {"claims": [{"name": "g"}]}}]}
    assert {span.gpus for span in read(pod).spans} == {0}
    assert "their GPUs are not counted" in caplog.text
    drivers = ["gpu.nvidia.com"] * 8 + ["compute-domain.nvidia.com"]
    held = made("ResourceClaim", allocation={"devices": {"results": [{"driver": one} for one in drivers]}})
    caplog.clear()
    log = read(about(held, name="p-g"), pod)
    assert [span.gpus for span in log.spans if span.stage == "image"] == [8]
    assert not caplog.text


def test_pods_made_again_under_one_name_are_starts_of_their_own(tmp_path: Path) -> None:
    """Each dump has the pods of one start alone, and the second one cannot know of the first."""
    label = {"job-name": "llm"}
    for uid, made, started in (("u", 0, 120), ("v", 900, 930)):
        dump = json.dumps(one(uid=uid, made=made, started=started, labels=label)).encode()
        (tmp_path / f"{uid}.jsonl").write_bytes(b"".join(kubernetes.events(dump)))
    log = events.read(tmp_path)
    assert log.identities() == [("llm", "0", 0), ("llm", "0+1", 0)]
    assert [analysis.analyse(log, start).elapsed_seconds for start in log.identities()] == [115, 25]
    held = index.Index([tmp_path])
    held.refresh()
    assert len(held.state.rows) == 2
    (tmp_path / "u.jsonl").unlink()
    held.refresh()
    assert [row.attempt for row in held.state.rows.values()] == ["0"]


def test_jobs_of_many_kinds_and_their_queues() -> None:
    other = one(uid="v", made=700, started=800, labels={"job-name": "train"})
    other["metadata"]["namespace"] = "other"
    log = read(one(labels={"job-name": "train"}), other)
    assert [(job, report.queue_seconds) for job, _, _ in log.identities()
            if (report := analysis.analyse(log, (job, "0", 0)))] == [("d/train", 5), ("other/train", 5)]  # fmt: skip
    for label in ("volcano.sh/job-name", "leaderworkerset.sigs.k8s.io/name", "kueue.x-k8s.io/pod-group-name"):
        assert read(one(labels={label: "llm"})).identities() == [("llm", "0", 0)]
    resumed = {"type": "Suspended", "status": "False", "lastTransitionTime": at(300)}
    made = {"name": "llm", "namespace": "d", "creationTimestamp": at(0)}
    kueue: Json = {"kind": "Job", "metadata": made, "status": {"conditions": [resumed]}}
    log = read(kueue, one(made=300, started=400, labels={"job-name": "llm"}))
    assert log.spans[0].attrs["held_seconds"] == 300
    report = analysis.analyse(log)
    assert (report.queue_seconds, report.queue_held_seconds) == (305, 300)
    kueue["status"]["conditions"] = [resumed | {"lastTransitionTime": at(2000)}]  # evicted, and let in again
    log = read(kueue, one(made=300, started=400, labels={"job-name": "llm"}))
    assert "held_seconds" not in log.spans[0].attrs
    odd = one()
    odd["spec"]["containers"] = [{"name": "c", "resources": {"limits": {"nvidia.com/gpu": "1k", "habana.ai/gaudi": 8}}}]
    assert read(odd).spans[-1].gpus == 1008


def test_lists_as_the_server_and_a_watch_give_them() -> None:
    items = [one(), *PULLED]
    expected = read(*items).spans
    bare = [{name: value for name, value in item.items() if name != "kind"} for item in items]
    pods: Json = {"kind": "PodList", "apiVersion": "v1", "items": bare[:1]}
    happened: Json = {"kind": "EventList", "apiVersion": "v1", "items": bare[1:]}
    for text in (
        "\n".join(json.dumps(item, indent=4) for item in items),  # one after the other: kubectl get -w
        "\n".join(map(json.dumps, items)),
        "\n".join(json.dumps({"type": "ADDED", "object": item}) for item in items),
        json.dumps(pods) + json.dumps(happened, indent=2),  # without a kind of their own: kubectl get --raw
        json.dumps({"kind": "List", "items": [pods, happened]}),
    ):
        assert list(events.parse(kubernetes.events(text.encode())).spans) == list(expected), text


def test_a_group_of_pods_is_let_in_by_its_workload() -> None:
    made = {"name": "llm", "namespace": "d", "creationTimestamp": at(0)}
    owners = [{"kind": "Pod", "name": name} for name in ("p", "q")]
    admitted = {"type": "Admitted", "status": "True", "lastTransitionTime": at(300)}
    workload: Json = {"kind": "Workload", "metadata": made | {"ownerReferences": owners},
                      "status": {"conditions": [admitted]}}  # fmt: skip
    gated = one(started=400, labels={"kueue.x-k8s.io/pod-group-name": "llm"})
    gated["status"]["conditions"][0]["lastTransitionTime"] = at(305)
    report = analysis.analyse(read(workload, gated, named("q", gated | {"metadata": gated["metadata"] | {"uid": "v"}})))
    assert (report.queue_seconds, report.queue_held_seconds) == (305, 300)


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


def test_a_pod_that_was_killed_ends_its_start() -> None:
    """Nothing in the container could say so, and nobody waits for it."""
    own = b'{"bootseer":2,"ev":"begin","span":"s","stage":"first_step","job":"llm","node":"n1","wall":1767323000}\n'
    killed = ran(120, 800)
    killed["terminated"] |= {"exitCode": 137, "reason": "OOMKilled"}
    labels = {"job-name": "llm"}
    for pod, said in (
        (one(labels=labels), []),
        (
            one(labels=labels, phase="Failed", containerStatuses=[{"name": "c", "state": killed}]),
            ["Failed (OOMKilled)"],
        ),
        (one(labels=labels, phase="Failed", reason="Evicted"), ["Failed (Evicted)"]),
        (one(labels=labels, phase="Succeeded"), ["Succeeded"]),
    ):
        lines = [*kubernetes.events(json.dumps(pod).encode()), own]
        log = events.parse(lines)
        report = analysis.analyse(log, now=1_767_324_000 * 10**9)
        assert [one.how for one in report.ended] == [f"Kubernetes says {how}" for how in said]
        assert report.goes_on == (not said)
