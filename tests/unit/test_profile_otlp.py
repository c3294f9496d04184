"""Spans as OTLP: read back with the protocol's own messages."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from google.protobuf import json_format
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

from bootseer.errors import NotFoundError
from bootseer.profile import otlp
from support.startups import StartUp


def read(document: Any) -> TracesData:
    """OTLP/JSON has ids in hexadecimal, where protobuf's JSON has base64."""

    def ids(value: Any) -> Any:
        if isinstance(value, dict):
            found = {name: ids(one) for name, one in value.items()}
            for name in {"traceId", "spanId", "parentSpanId"} & found.keys():
                found[name] = base64.b64encode(bytes.fromhex(found[name])).decode()
            return found
        return [ids(one) for one in value] if isinstance(value, list) else value

    return json_format.Parse(json.dumps(ids(json.loads(json.dumps(document)))), TracesData())


def test_a_start_up_is_a_trace_with_a_resource_for_each_node() -> None:
    made = StartUp("llm", "7", 1)
    above = made.span("n1", "init", 0, 10, rank=3, loss=0.5, warm=True, bytes=1 << 40, how="lazy")
    made.span("n1", "import", 2, 4, rank=3, parent=above)
    made.span("n2", "init", 1, 9)
    made.span("n2", "import", 2, None)
    data = read(otlp.export(made.log()))
    hosts = {
        next(a.value.string_value for a in one.resource.attributes if a.key == "host.name"): one.scope_spans[0].spans
        for one in data.resource_spans
    }
    assert {host: [span.name for span in spans] for host, spans in hosts.items()} == {
        "n1": ["init", "import"],
        "n2": ["init"],
    }
    init, child = hosts["n1"]
    assert child.parent_span_id == init.span_id
    assert len(init.trace_id) == 16
    assert len({span.trace_id for spans in hosts.values() for span in spans}) == 1
    assert init.end_time_unix_nano - init.start_time_unix_nano == 10_000_000_000
    assert child.start_time_unix_nano - init.start_time_unix_nano == 2_000_000_000
    values = {a.key: a.value for a in init.attributes}
    assert values["bootseer.bytes"].int_value == 1 << 40
    assert values["bootseer.loss"].double_value == 0.5
    assert values["bootseer.warm"].bool_value is True
    assert values["bootseer.rank"].int_value == 3
    service = {a.key: a.value for a in data.resource_spans[0].resource.attributes}
    assert service["service.name"].string_value == "llm"


def test_start_ups_are_traces_of_their_own_and_one_can_be_chosen() -> None:
    lines = []
    for cycle in (0, 1):
        made = StartUp("llm", "7", cycle)
        made.span("n1", "env", 0, 10)
        lines += made.lines()
    from bootseer.profile import events

    log = events.parse(lines)
    traces = {span.trace_id for one in read(otlp.export(log)).resource_spans for span in one.scope_spans[0].spans}
    assert len(traces) == 2
    assert len(read(otlp.export(log, ("llm", "7", 1))).resource_spans) == 1
    with pytest.raises(NotFoundError):
        otlp.export(log, ("llm", "8", 1))


def test_a_span_that_failed_says_so() -> None:
    made = StartUp()
    for number, attrs in enumerate(
        ({}, {"exit_code": 0}, {"exit_code": 3}, {"signal": "SIGKILL"}, {"error": "OSError"})
    ):
        made.span("n1", "env", number, number + 1, **attrs)
    (one,) = read(otlp.export(made.log())).resource_spans
    assert [(span.status.code, span.status.message) for span in one.scope_spans[0].spans] == [
        (1, ""), (1, ""), (2, "exit code 3"), (2, "SIGKILL"), (2, "OSError")
    ]  # fmt: skip


def test_a_span_id_of_another_form_becomes_one_of_the_protocol() -> None:
    made = StartUp()
    made.event("begin", "no id", "n1", 0, stage="env")
    made.event("end", "no id", "n1", 5)
    made.event("begin", "0" * 16, "n1", 5, stage="init")
    made.event("end", "0" * 16, "n1", 6)
    (one,) = read(otlp.export(made.log())).resource_spans
    ids = [span.span_id for span in one.scope_spans[0].spans]
    assert all(len(found) == 8 and any(found) for found in ids)
    assert len(set(ids)) == 2
