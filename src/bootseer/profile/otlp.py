"""Spans as OTLP/JSON (OpenTelemetry protocol 1, file and HTTP encoding): for a collector's ``/v1/traces``. A start-up
is a trace, a node a resource (``host.name``; the job is its ``service.name``). Attributes of a span begin with
``bootseer.``. Only spans with both ends are told: the protocol has no others."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from bootseer.errors import NotFoundError
from bootseer.profile.clock import Axis
from bootseer.profile.ending import failure
from bootseer.profile.events import AttrValue, EventLog, Identity, Span, identity_text

Json = dict[str, object]
_INTERNAL, _OK, _ERROR = 1, 1, 2


def export(log: EventLog, identity: Identity | None = None) -> Json:
    """``TracesData`` of one start-up, or of all. Raises `NotFoundError` when there is no span with both ends."""
    resources: list[Json] = []
    for one, part in log.by_identity().items():
        if identity in (None, one):
            axis = Axis(part.spans)
            axis.align()
            trace = hashlib.blake2b(identity_text(*one).encode("utf-8", "replace"), digest_size=16).hexdigest()
            nodes: dict[str, list[Json]] = {}
            for row, span in enumerate(part.spans):
                begin, end = axis.place(row)
                if begin is not None and end is not None:
                    nodes.setdefault(span.node, []).append(_span(span, begin, end, trace))
            resources += [_resource(one, node, spans) for node, spans in nodes.items()]
    if not resources:
        raise NotFoundError("no span with both ends in the events")
    return {"resourceSpans": resources}


def _resource(identity: Identity, node: str, spans: list[Json]) -> Json:
    job, attempt, cycle = identity
    about: dict[str, AttrValue] = {
        "service.name": job or "(no name)", "host.name": node, "bootseer.attempt": attempt, "bootseer.cycle": cycle
    }  # fmt: skip
    return {
        "resource": {"attributes": _attributes(about)},
        "scopeSpans": [{"scope": {"name": "bootseer"}, "spans": spans}],
    }


def _span(span: Span, begin: int, end: int, trace: str) -> Json:
    about = {f"bootseer.{name}": value for name, value in span.attrs.items() if value is not None}
    if span.rank is not None:
        about["bootseer.rank"] = span.rank
    failed = failure(span.attrs)
    told: Json = {
        "traceId": trace,
        "spanId": _id(span.id),
        "name": span.stage or "?",
        "kind": _INTERNAL,
        "startTimeUnixNano": str(begin),
        "endTimeUnixNano": str(end),
        "attributes": _attributes(about),
        "status": {"code": _ERROR, "message": failed} if failed else {"code": _OK},
    }
    return told | ({"parentSpanId": _id(span.parent)} if span.parent else {})


def _id(text: str) -> str:
    """16 hexadecimal digits, as ours have and the protocol wants."""
    plain = len(text) == 16 and all(char in "0123456789abcdef" for char in text) and text.strip("0")
    return text if plain else hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).hexdigest()


def _attributes(values: Mapping[str, AttrValue]) -> list[Json]:
    return [{"key": name, "value": _value(value)} for name, value in values.items()]


def _value(value: AttrValue) -> Json:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    return {"doubleValue": value} if isinstance(value, float) else {"stringValue": str(value)}
