"""What Kubernetes says of start-ups, as events: ``queue``, and of each pod ``alloc``, ``image`` and ``env``.

Reads what ``kubectl get pods,events -o json`` prints, of jobs in it when they were let in, and of resource claims how
many GPUs they hold. The cluster keeps events
for an hour only: without them the image is taken to have come when the pod's first container started. Of a container
that has started again Kubernetes keeps the last two starts; what it does not know is left out. Times are whole seconds
mostly."""

from __future__ import annotations

import json
import logging
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any, NamedTuple

from bootseer.errors import DataError
from bootseer.profile import imported, intervals
from bootseer.profile.events import AttrValue
from bootseer.wiretypes import json_as, loaded

log = logging.getLogger(__name__)

JOB_LABELS = (
    "jobset.sigs.k8s.io/jobset-name", "training.kubeflow.org/job-name", "volcano.sh/job-name",
    "leaderworkerset.sigs.k8s.io/name", "kueue.x-k8s.io/pod-group-name", "ray.io/originated-from-cr-name",
    "ray.io/cluster", "mpi-job-name", "batch.kubernetes.io/job-name", "job-name",
)  # fmt: skip
"""Labels that name the job of a pod; the first one that it has."""
_ATTEMPT_LABELS = ("jobset.sigs.k8s.io/restart-attempt", "volcano.sh/job-version", "ray.io/cluster")
"""Volcano writes its own as an annotation."""
_QUEUED = re.compile(r"(?!CronJob).*Job|JobSet|Workload|RayCluster|AppWrapper")
"""Kinds that are made when a job is submitted; others of its name may be older."""
_INDEX = "batch.kubernetes.io/job-completion-index"
_GPUS = re.compile(
    r"[\w.-]+/(?:gpu|mlu\w*|xpu|dcu)|nvidia\.com/mig-.+|habana\.ai/gaudi|gpu\.intel\.com/(?:i915|xe)|google\.com/tpu"
    r"|aws\.amazon\.com/neuron(?:device)?|huawei\.com/Ascend.+"
)
_SCALE = {"": 1, "k": 1000, "M": 10**6, "Ki": 1024, "Mi": 1 << 20}
_SPACE, _DEEP = re.compile(r"\s+"), 4
"""Lists in lists that are looked into."""
_HINT = "give what kubectl get pods,events -o json prints"
_BACK_OFF = 10 * 10**9
"""Least time after which a controller makes a pod again that failed (Kubernetes' own)."""
_BEFORE = re.compile("FailedCreatePodSandBox|FailedMount|FailedAttachVolume|FailedMapVolume")
"""Reasons of events of a pod whose images are not pulled yet."""
_LAST = 1 << 63
"""Later than anything, in ns."""
_DRIVERS = ("gpu.", "tpu.")
"""What the names of drivers begin with whose devices count."""
_BAD = (KeyError, TypeError, ValueError, AttributeError, OverflowError)


class _Happened(NamedTuple):
    reason: str
    where: str
    first: int
    last: int
    times: int
    text: str


class _Pod(NamedTuple):
    uid: str
    space: str
    job: str
    label: str
    """Which attempt of the job, where a label says so."""
    slot: str
    """Pods of one attempt have each their own."""
    node: str
    gpus: int
    created: int
    scheduled: int
    started: int
    waits: bool
    failed: int
    """When it failed; 0: it has not, as far as is known."""
    spans: list[tuple[int, str, int, int]]
    """Cycle, stage, begin and end in ns since 1970; 0: not yet."""
    retries: int
    over: str
    """Its phase, and why, once it has ended."""


class _Let(NamedTuple):
    """When a job was made, and when it was let in: by Kueue, or no longer suspended."""

    created: int
    admitted: int
    again: int
    """When it was put back into Kueue's queue."""
    failed: bool
    """Whether pods of it have failed; they may be gone."""

    def queued(self, begin: int, attempt: str) -> int:
        """Since when an attempt was in the queue whose first pod was made at ``begin``; 0: not known."""
        gone = self.failed and begin >= max(self.created, self.admitted) + _BACK_OFF  # others were before it
        made = (self.created if attempt == "0" and not gone else 0, self.again)
        return max((when for when in made if when <= begin), default=0)


def events(text: bytes, job: str = "") -> Iterator[bytes]:
    """The lines of an events file; ``job`` replaces the names that the cluster has. A pod's spans always have the same
    ids, so that a second import of it counts as a duplicate. Raises `DataError` where there is no pod."""
    pods, let = _read(text)
    if job:
        pods = [pod._replace(job=job) for pod in pods]
    spaces: defaultdict[str, set[str]] = defaultdict(set)
    for pod in pods:
        spaces[pod.job].add(pod.space)
    for (space, name, attempt), mine in _starts(pods).items():
        named, one = name if len(spaces[name]) == 1 else f"{space}/{name}", let.get((space, name))
        yield from _start((named, attempt, 0), mine, one)
        if one is not None and one.again and one.queued(min(pod.created for pod in mine), attempt) == one.again:
            del let[space, name]  # what comes then was made in its place


def _start(identity: tuple[str, str, int], mine: list[_Pod], let: _Let | None) -> Iterator[bytes]:
    begin = min(pod.created for pod in mine)
    running = min((pod.started for pod in mine if pod.started and pod.gpus), default=0)
    first = [pod for pod in mine if not running or pod.created <= running]  # others were asked for by one that ran
    known = [pod.scheduled for pod in first if pod.scheduled and pod.gpus]
    known = known or [pod.scheduled for pod in first if pod.scheduled]  # a launcher is made once the others are there
    about: dict[str, AttrValue] = {"pods": len(mine)}
    if let is not None and (queued := let.queued(begin, identity[1])):
        begin = queued
        if begin < let.admitted <= max(known, default=let.admitted):  # it may have been let in again
            about["held_seconds"] = (let.admitted - begin) // 10**9
    if said := next((one for pod in mine if (one := pod.over).startswith("Failed")), ""):
        about["phase"] = said
    elif all(pod.over for pod in mine):
        about["phase"] = mine[0].over
    waits = any(pod.waits for pod in first)
    if known or waits:
        end = 0 if waits else max(begin, *known)
        yield from imported.lines(
            "kubernetes", identity, "queue", "kubernetes", begin, end, attrs=about, more=mine[0].uid
        )
    gpus: defaultdict[str, int] = defaultdict(int)
    for pod in mine:
        gpus[pod.node] += pod.gpus
    for pod in mine:
        about = {"nodes": len({pod.node for pod in mine if pod.node})}
        numbers: Counter[str] = Counter()
        for cycle, stage, begin, end in pod.spans if pod.node else ():
            more = about | {"retries": pod.retries} if stage == "image" and pod.retries else about
            yield from imported.lines(
                "kubernetes", (*identity[:2], cycle), stage, pod.node, begin, end, gpus=gpus[pod.node], attrs=more,
                more=f"{pod.uid} {cycle} {numbers[stage]}",
            )  # fmt: skip
            numbers[stage] += 1


def _starts(pods: Iterable[_Pod]) -> dict[tuple[str, str, str], list[_Pod]]:
    """Namespace, job and attempt -> its pods. Where no label says the attempt, a pod that was made after another had
    failed, or in its place, is of the next one."""
    found: dict[tuple[str, str, str], list[_Pod]] = {}
    labels: defaultdict[tuple[str, str], dict[str, None]] = defaultdict(dict)
    state: dict[tuple[str, str, str], tuple[int, set[str], int]] = {}
    ordered = sorted(pods, key=lambda pod: (pod.created, pod.uid))
    firsts = {(pod.space, pod.job): pod.label for pod in reversed(ordered) if pod.label}
    for pod in ordered:
        seen = labels[pod.space, pod.job]
        if not pod.label:  # one that submits to the others
            pod = pod._replace(label=next(reversed(seen), firsts.get((pod.space, pod.job), "")))
        seen.setdefault(pod.label)
        label = pod.label if pod.label.isdecimal() else str(list(seen).index(pod.label))
        number, slots, failed = state.get((pod.space, pod.job, pod.label), (0, set(), 0))
        if pod.slot in slots or 0 < failed <= pod.created:
            number, slots, failed = number + 1, set(), 0
        failed = min(filter(None, (failed, pod.failed)), default=0)
        state[pod.space, pod.job, pod.label] = number, slots | {pod.slot}, failed
        attempt = label if not number else f"{label}-{number}" if pod.label else str(number)
        found.setdefault((pod.space, pod.job, attempt), []).append(pod)
    return found


def _read(text: bytes) -> tuple[list[_Pod], dict[tuple[str, str], _Let]]:
    try:
        items = [item for document in _documents(text) for item in _items(document)]
    except ValueError as exc:
        raise DataError(f"this is no JSON: {exc}", hint=_HINT) from None
    happened: defaultdict[str, dict[str | int, _Happened]] = defaultdict(dict)
    """Of a pod its events, by their uid: a watch prints one anew when it has changed."""
    devices: dict[tuple[str, str], int] = {}
    pods: dict[str, _Pod] = {}
    let: dict[tuple[str, str], _Let] = {}
    bad: list[str] = []
    for wanted in (False, True):
        for number, item in enumerate(items, start=1):
            try:
                kind = item["kind"]
                if (kind == "Pod") != wanted:
                    continue
                if kind == "Pod":
                    pod = _pod(item, list(happened[item["metadata"].get("uid", "")].values()), devices)
                    pods[pod.uid] = pod
                elif kind == "Event":
                    about = item.get("involvedObject") or item.get("regarding") or {}
                    if about.get("kind") == "Pod" and "ephemeralContainers" not in (about.get("fieldPath") or ""):
                        uid = (item.get("metadata") or {}).get("uid") or number
                        happened[about.get("uid", "")][uid] = _happened(item, about)
                elif kind == "ResourceClaim":
                    devices[_key(item)] = _devices(item)
                elif _QUEUED.fullmatch(kind):
                    keys, one = _let(item)
                    for key in keys:
                        before = let.get(key, one)
                        let[key] = _Let(
                            min(one.created, before.created), max(one.admitted, before.admitted),
                            max(one.again, before.again), one.failed or before.failed,
                        )  # fmt: skip
            except _BAD as exc:
                if wanted or not isinstance(item, dict):
                    bad.append(f"object {number}: {exc!r}")
    if not pods:
        raise DataError("there is no pod in it" + (f": {bad[0]}" if bad else ""), hint=_HINT)
    if bad:
        log.warning("%d objects are not as Kubernetes writes them and were left out; the first: %s", len(bad), bad[0])
    if unknown := sum(pod.gpus < 0 for pod in pods.values()):
        log.warning("%d pods hold devices by claims that are not in it: their GPUs are not counted; "
                    "give what kubectl get pods,events,resourceclaims -o json prints", unknown)  # fmt: skip
    return [pod._replace(gpus=max(pod.gpus, 0)) for pod in pods.values()], let


def _documents(text: bytes) -> Iterator[object]:
    """One, or as a watch prints them one after the other. Raises `ValueError`."""
    try:
        yield json_as(text, object)
        return
    except ValueError:
        if text.lstrip()[:1] != b"{":
            raise
    whole, read = text.decode(), json.JSONDecoder().raw_decode
    at = whole.index("{")
    while at < len(whole):
        found, at = loaded(lambda begin: read(whole, begin), at)
        yield found
        at = space.end() if (space := _SPACE.match(whole, at)) else at


def _items(document: object, kind: str = "", deep: int = 0) -> Iterator[Any]:
    """The objects of a list, which the server gives no kind of their own, or of a line of a watch."""
    if not isinstance(document, dict):
        raise ValueError("it is no list of Kubernetes objects")
    named = str(document.get("kind") or kind)
    if isinstance(document.get("object"), dict) and deep < _DEEP:
        yield from _items(document["object"], "", deep + 1)
    elif isinstance(items := document.get("items"), list) and deep < _DEEP:
        for item in items:
            yield from _items(item, named.removesuffix("List"), deep + 1) if isinstance(item, dict) else [item]
    elif "items" in document:
        raise ValueError("it is no list of Kubernetes objects")
    else:
        yield document | {"kind": named} if named else document


def _happened(item: dict[str, Any], about: dict[str, Any]) -> _Happened:
    series = item.get("series") or {}
    names = ("eventTime", "firstTimestamp", "deprecatedFirstTimestamp", "lastTimestamp", "deprecatedLastTimestamp")
    times = [when for name in names if (when := _ns(item.get(name)))]
    times = times or [_ns((item.get("metadata") or {}).get("creationTimestamp"))]
    if not times[0]:
        raise ValueError("it has no time")
    last = max(_ns(series.get("lastObservedTime")), times[0], *map(_ns, map(item.get, names[3:])))
    count = item.get("count") or item.get("deprecatedCount") or series.get("count") or 1
    return _Happened(
        item.get("reason") or "", about.get("fieldPath") or "", times[0], last, int(count),
        str(item.get("message") or item.get("note") or ""),
    )  # fmt: skip


def _let(item: dict[str, Any]) -> tuple[set[tuple[str, str]], _Let]:
    """Of a job, or of Kueue's workload of one, or of a group of pods, which has the workload's name."""
    meta = item["metadata"]
    owners = meta.get("ownerReferences") or () if item["kind"] == "Workload" else ()
    names = {str(meta["name"]), *(str(owner["name"]) for owner in owners)}
    status = item.get("status") or {}
    at = {
        f"{one.get('type')} {one.get('status')}": _ns(one.get("lastTransitionTime"))
        for one in status.get("conditions") or ()
        if one.get("reason") != "AdmissionCheck"  # put back before it had a pod
    }
    admitted = max(at.get("Suspended False", 0), at.get("Admitted True", 0))
    again = max((at[one] for one in ("Requeued True", "Requeued False", "Evicted True") if one in at), default=0)
    again = again or (admitted if "Evicted False" in at else 0)  # it was put back before that
    failed = {"Restarting True", "Restarting False"} & at.keys() or any(
        isinstance(count := status.get(name), int) and count > 0 for name in ("failed", "restarts", "retryCount")
    )
    let = _Let(_ns(meta.get("creationTimestamp")), admitted, again, bool(failed))
    return {(str(meta.get("namespace", "")), name) for name in names}, let


def _key(item: dict[str, Any]) -> tuple[str, str]:
    return str(item["metadata"].get("namespace", "")), str(item["metadata"]["name"])


def _devices(claim: dict[str, Any]) -> int:
    """How many GPUs a claim holds."""
    allocation = (claim.get("status") or {}).get("allocation") or {}
    found = (allocation.get("devices") or {}).get("results") or ()
    return sum(str(one.get("driver")).startswith(_DRIVERS) and not one.get("adminAccess") for one in found)


def _claimed(item: dict[str, Any], devices: dict[tuple[str, str], int]) -> int:
    """How many GPUs a pod holds by its claims, one of several pods in the first of them; -1: not known."""
    space, of = str(item["metadata"].get("namespace", "")), item.get("status") or {}
    names = {one["name"]: one.get("resourceClaimName") for one in item["spec"].get("resourceClaims") or ()}
    names |= {one["name"]: one.get("resourceClaimName") for one in of.get("resourceClaimStatuses") or ()}
    keys = {(space, str(name)) for name in names.values() if name}
    found = sum(devices[key] for key in keys & devices.keys())
    devices |= dict.fromkeys(keys & devices.keys(), 0)
    return found if len(names) == len(keys & devices.keys()) else found or -1


def _pod(item: dict[str, Any], happened: list[_Happened], devices: dict[tuple[str, str], int]) -> _Pod:
    meta, spec, status = item["metadata"], item.get("spec") or {}, item.get("status") or {}
    labels, phase = meta.get("labels") or {}, status.get("phase")
    marks = (meta.get("annotations") or {}) | labels
    owners = [owner["name"] for owner in meta.get("ownerReferences") or ()]
    conditions = {
        one["type"]: _ns(one.get("lastTransitionTime"))
        for one in status.get("conditions") or ()
        if one.get("status") == "True"
    }
    at = min((one.first for one in happened if one.reason == "Scheduled"), default=0)
    scheduled = conditions.get("PodScheduled", 0) or at
    held = {one.get("name"): _gpus(one) for one in spec.get("containers") or ()}
    claiming = {one.get("name") for one in spec.get("containers") or () if (one.get("resources") or {}).get("claims")}
    gpus = sum(held.values())
    gpus += _claimed(item, devices) if claiming and not (gpus and not devices) else 0
    statuses = status.get("containerStatuses") or ()
    mains = [one for one in statuses if held.get(one.get("name")) or one.get("name") in claiming] or statuses
    node, created = str(spec.get("nodeName") or ""), _ns(meta["creationTimestamp"])
    if not created:
        raise ValueError("it has no time of creation")
    failed = _failed(meta, status, created)
    spans = _first_start(scheduled, conditions, mains, status, spec, happened) + _last_start(mains, happened)
    return _Pod(
        uid=str(meta.get("uid") or meta["name"]),
        space=str(meta.get("namespace", "")),
        job=str(next((labels[name] for name in JOB_LABELS if labels.get(name)), (owners or [meta["name"]])[0])),
        label=str(next((marks[name] for name in _ATTEMPT_LABELS if marks.get(name)), "")),
        slot=f"{list(map(labels.get, JOB_LABELS[-2:]))} {labels[_INDEX]}" if _INDEX in labels else str(meta["name"]),
        node=node,
        gpus=gpus,
        created=created,
        scheduled=max(scheduled, created) if scheduled else 0,
        started=min(filter(None, map(_first, mains)), default=0),
        waits=not scheduled and not node and phase not in ("Failed", "Succeeded"),
        failed=failed,
        spans=[(*span[:3], span[3] or (failed if failed >= span[2] else 0)) for span in spans],
        retries=sum(one.times for one in happened if one.reason == "Failed" and "pull" in one.text),
        over=_over(status, mains),
    )


def _first_start(
    scheduled: int, conditions: dict[str, int], mains: Iterable[dict[str, Any]], status: dict[str, Any],
    spec: dict[str, Any], happened: list[_Happened],
) -> list[tuple[int, str, int, int]]:  # fmt: skip
    begun = ["state" in _runs(one) for one in mains if one.get("state")]
    started = min(filter(None, map(_first, mains)), default=0)
    sidecars = {one.get("name") for one in spec.get("initContainers") or () if one.get("restartPolicy") == "Always"}
    inits = [one for one in status.get("initContainerStatuses") or () if one.get("name") not in sidecars]
    if any(begun):  # what goes on beside the main containers is a sidecar
        inits = [one for one in inits if _ended(one)]
    inits = [one for one in inits if _runs(one) and (not started or _began(one) <= started)]
    env = _first(inits[0]) if inits else 0
    first = min(filter(None, (started, env)), default=0)
    pulls = [(begin, end or started) for begin, end in _pulls(happened) if not started or begin < started]
    pulls = [(begin, min(end, started or end)) for begin, end in pulls if end or not any(begun)]
    sandbox = conditions.get("PodReadyToStartContainers", 0)
    ready = sandbox if sandbox and (not first or sandbox <= first) else scheduled
    known = {one.get("type") for one in status.get("conditions") or ()}
    if not (pulls or first or sandbox) and (
        "PodReadyToStartContainers" in known
        or not status.get("containerStatuses")  # the kubelet has not seen it yet
        or any(_BEFORE.fullmatch(one.reason) for one in happened)
    ):  # it has no sandbox; of one that has ended nobody knows whether it had
        return [(0, "alloc", scheduled, 0)] if scheduled and not _over(status, mains) else []
    pulled = any(begin <= first or not first for begin, _ in pulls)  # else the first image was there, or nobody knows
    if not pulled and ready and (env if inits else first or not any(begun)):
        pulls.append((ready, max(first, ready) if first else 0))
    image = intervals.union(pulls) + [one for one in pulls if not one[1]][:1]
    image = image or sorted(pulls)[:1]  # within one second
    spans = [(0, "image", begin, end) for begin, end in image]
    if scheduled and (image or sandbox):
        spans.insert(0, (0, "alloc", scheduled, max(scheduled, min(pulls)[0] if pulls else ready)))
    if env:
        ends = list(map(_ended, inits))
        at = [(env, max(ends) if all(ends) else _LAST)]
        at = intervals.subtract(at, [(begin, end or _LAST) for begin, end in image])
        spans += ((0, "env", begin, end % _LAST) for begin, end in at)
    return spans


def _last_start(mains: Iterable[dict[str, Any]], happened: list[_Happened]) -> list[tuple[int, str, int, int]]:
    """Of a container that was started again: from its end until then."""
    for one in mains:
        cycle, ended, began = int(one.get("restartCount") or 0), _ended(one, "lastState"), _began(one)
        if cycle and 0 < ended <= began:
            pulls = intervals.union(
                [pull for pull in _pulls(happened, again=True) if ended <= pull[0] and 0 < pull[1] <= began]
            )
            return [
                (cycle, "alloc", ended, pulls[0][0] if pulls else began),
                *((cycle, "image", *pull) for pull in pulls),
            ]
    return []


def _pulls(happened: list[_Happened], *, again: bool = False) -> list[tuple[int, int]]:
    """When images were pulled; 0: not yet. ``again``: what an event of several says last."""
    open_: dict[str, int] = {}
    found = []
    # Times are whole seconds: within one, a pull begins before it ends.
    in_order = sorted((one.last if again else one.first, one.reason == "Pulled", one) for one in happened)
    for when, _, (reason, where, *_) in in_order:
        if reason == "Pulling":
            open_.setdefault(where, when)
        elif reason == "Pulled":
            found += [(open_.pop(one), when) for one in {where, ""} & open_.keys()]
    return found + [(when, 0) for when in open_.values()]


def _runs(container: dict[str, Any]) -> list[str]:
    """Where a container's last runs stand, the latest first."""
    states = {of: container.get(of) or {} for of in ("state", "lastState")}
    return [
        of
        for of, state in states.items()
        if {"running", "terminated"} & {name for name in state if state[name] is not None}
    ]


def _first(container: dict[str, Any]) -> int:
    """When it started first; 0: not known, as of what has started thrice."""
    runs, again = _runs(container), int(container.get("restartCount") or 0)
    return _began(container, runs[again]) if again < len(runs) else 0


def _began(container: dict[str, Any], of: str = "state") -> int:
    state = container.get(of) or {}
    return _ns((state.get("running") or state.get("terminated") or {}).get("startedAt"))


def _ended(container: dict[str, Any], of: str = "state") -> int:
    return _ns(((container.get(of) or {}).get("terminated") or {}).get("finishedAt"))


def _over(status: dict[str, Any], mains: Iterable[dict[str, Any]]) -> str:
    """Such as ``Failed (OOMKilled)``; nothing of a pod that has not ended."""
    if (phase := status.get("phase")) not in ("Failed", "Succeeded"):
        return ""
    ends = [(one.get("state") or {}).get("terminated") or {} for one in mains]
    reasons = [status.get("reason"), *(end.get("reason") for end in ends if end.get("exitCode"))]
    reason = next((str(one)[:64] for one in reasons if one), "")
    return f"{phase} ({reason})" if reason and phase == "Failed" else phase


def _failed(meta: dict[str, Any], status: dict[str, Any], created: int) -> int:
    """When a pod failed: with its last container, and where none had started with its last condition; or when it was
    deleted, such as one of a lost node. 0: not."""
    if (phase := status.get("phase")) == "Succeeded":
        return 0
    deleted = _ns(meta.get("deletionTimestamp")) - int(meta.get("deletionGracePeriodSeconds") or 0) * 10**9
    ends = [_ended(one) for name in ("initContainerStatuses", "containerStatuses") for one in status.get(name) or ()]
    if not any(ends):
        ends = [_ns(one.get("lastTransitionTime")) for one in status.get("conditions") or ()]
    failed = max(ends, default=0) if phase == "Failed" else 0
    return min((when for when in (failed, deleted) if when > created), default=0)


def _gpus(container: dict[str, Any]) -> int:
    limits = (container.get("resources") or {}).get("limits") or {}
    held = sum(_quantity(count) for name, count in limits.items() if _GPUS.fullmatch(name))
    if not 0 <= held < 1 << 24:
        raise ValueError(f"{held} GPUs")
    return held


def _quantity(text: object) -> int:
    """A number as Kubernetes writes it, such as 8, 1k or 1e1."""
    found = re.fullmatch(r"([0-9.]+(?:[eE][0-9]{1,2})?)(k|M|Ki|Mi)?", str(text))
    if found is None:
        raise ValueError(f"{text!r} is no quantity")
    return int(float(found[1]) * _SCALE[found[2] or ""])


def _ns(text: str | None) -> int:
    """A time such as 2026-01-02T03:04:05Z or with a fraction; 0 without one, or where it is Go's zero."""
    return max(int(datetime.fromisoformat(text).timestamp() * 1e6) * 1000, 0) if text else 0
