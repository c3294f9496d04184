"""What Kubernetes says of start-ups, as events: ``queue``, and of each pod ``alloc``, ``image`` and ``env``.

Reads what ``kubectl get pods,events -o json`` prints. The cluster keeps events for an hour only: without them the image
is taken to have come when the pod's first container started. Times are whole seconds mostly.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from datetime import datetime
from typing import Any, NamedTuple

from bootseer.errors import DataError
from bootseer.profile import imported
from bootseer.profile.events import AttrValue
from bootseer.wiretypes import json_as

JOB_LABELS = (
    "jobset.sigs.k8s.io/jobset-name", "training.kubeflow.org/job-name", "ray.io/cluster",
    "batch.kubernetes.io/job-name", "job-name",
)  # fmt: skip
"""Labels that name the job of a pod; the first one that it has."""
_ATTEMPT_LABEL = "jobset.sigs.k8s.io/restart-attempt"
_GPUS = ("nvidia.com/gpu", "amd.com/gpu")
_HINT = "give what kubectl get pods,events -o json prints"


class _Pod(NamedTuple):
    name: str
    job: str
    attempt: str
    node: str
    gpus: int
    created: int
    scheduled: int
    spans: list[tuple[str, int, int]]
    """Stage, begin and end in ns since 1970; 0: not yet."""


def events(text: bytes, job: str = "") -> Iterator[bytes]:
    """The lines of an events file; ``job`` replaces the names that the cluster has. A pod's spans always have the same
    ids, so that a second import of it counts as a duplicate. Raises `DataError` where there is no pod."""
    pods = _read(text, job)
    by_start: defaultdict[tuple[str, str], list[_Pod]] = defaultdict(list)
    for pod in pods:
        by_start[pod.job, pod.attempt].append(pod)
    for (name, attempt), mine in by_start.items():
        identity = (name, attempt, 0)
        begin, waiting = min(pod.created for pod in mine), any(not pod.scheduled for pod in mine)
        end = 0 if waiting else max(pod.scheduled for pod in mine)
        about: dict[str, AttrValue] = {"pods": len(mine)}
        yield from imported.lines("kubernetes", identity, "queue", "kubernetes", begin, end, attrs=about, more="")
        about = {"nodes": len({pod.node for pod in mine if pod.node})}
        for pod in mine:
            for stage, begin, end in pod.spans if pod.node else ():
                yield from imported.lines(
                    "kubernetes", identity, stage, pod.node, begin, end, gpus=pod.gpus, attrs=about, more=pod.name
                )


def _read(text: bytes, job: str) -> list[_Pod]:
    try:
        document = json_as(text, object)
    except ValueError as exc:
        raise DataError(f"this is no JSON: {exc}", hint=_HINT) from None
    items = document.get("items", [document]) if isinstance(document, dict) else None
    if not isinstance(items, list):
        raise DataError("this is no list of Kubernetes objects", hint=_HINT)
    happened: defaultdict[str, list[tuple[str, int]]] = defaultdict(list)
    pods = []
    try:
        for item in items:
            if item.get("kind") == "Event" and item["involvedObject"].get("kind") == "Pod":
                when = item.get("eventTime") or item.get("firstTimestamp") or item.get("lastTimestamp")
                happened[item["involvedObject"].get("uid", "")].append((item.get("reason", ""), _ns(when)))
        for item in items:
            if item.get("kind") == "Pod":
                pods.append(_pod(item, happened[item["metadata"].get("uid", "")], job))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as exc:
        raise DataError(f"a pod or event is not as Kubernetes writes it: {exc!r}", hint=_HINT) from None
    if not pods:
        raise DataError("there is no pod in it", hint=_HINT)
    return pods


def _pod(item: dict[str, Any], happened: list[tuple[str, int]], job: str) -> _Pod:
    meta, spec, status = item["metadata"], item.get("spec") or {}, item.get("status") or {}
    labels = meta.get("labels") or {}
    owners = [owner["name"] for owner in meta.get("ownerReferences") or ()]
    conditions = {
        one["type"]: _ns(one.get("lastTransitionTime"))
        for one in status.get("conditions") or ()
        if one.get("status") == "True"
    }
    scheduled = conditions.get("PodScheduled", 0)
    started = min((when for one in status.get("containerStatuses") or () if (when := _began(one))), default=0)
    inits = [one.get("state", {}).get("terminated") or {} for one in status.get("initContainerStatuses") or ()]
    begun = [when for one in status.get("initContainerStatuses") or () if (when := _began(one))]
    ended = [_ns(one.get("finishedAt")) for one in inits]
    sandbox = conditions.get("PodReadyToStartContainers", 0)
    pulling = min((when for reason, when in happened if reason == "Pulling"), default=0)
    pulled = max((when for reason, when in happened if reason == "Pulled"), default=0)
    first = min((when for when in (*begun, started) if when), default=0)
    image = pulling or sandbox or scheduled
    spans = [("alloc", scheduled, image), ("image", image, (pulled if pulling else 0) or first)]
    if begun:
        spans.append(("env", min(begun), max(ended) if all(ended) else 0))
    return _Pod(
        name=str(meta["name"]),
        job=job or str(next((labels[name] for name in JOB_LABELS if labels.get(name)), (owners or [meta["name"]])[0])),
        attempt=str(labels.get(_ATTEMPT_LABEL, "0")),
        node=str(spec.get("nodeName") or ""),
        gpus=sum(_gpus(one) for one in spec.get("containers") or ()),
        created=_ns(meta["creationTimestamp"]),
        scheduled=scheduled,
        spans=[(stage, begin, max(begin, end) if end else 0) for stage, begin, end in spans if begin],
    )


def _began(container: dict[str, Any]) -> int:
    state = container.get("state") or {}
    return _ns((state.get("running") or state.get("terminated") or {}).get("startedAt"))


def _gpus(container: dict[str, Any]) -> int:
    limits = (container.get("resources") or {}).get("limits") or {}
    held = sum(int(limits.get(name, 0)) for name in _GPUS)
    if not 0 <= held < 1 << 24:
        raise ValueError(f"{held} GPUs")
    return held


def _ns(text: str | None) -> int:
    """A time such as 2026-01-02T03:04:05Z or with a fraction; 0 without one."""
    return int(datetime.fromisoformat(text).timestamp() * 1e6) * 1000 if text else 0
