"""Logs as loggers and log services write, carry and export them: text, logfmt and JSON, one in the other.

Each form gives the line that begins the first step, and 5 s later the one that ends it; ``RANKED`` names rank 3.
"""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Callable

import msgspec
import pytest

from bootseer.profile import events, logs

RUN, LOSS = "***** Running training *****", "{'loss': 2.3, 'epoch': 0.1}"
BASE = 1788256800
Form = Callable[[int, str], str]


def iso(second: int, part: str = ".123456Z") -> str:
    return f"2026-09-01T10:00:0{second}{part}"


def sql(second: int, part: str = "") -> str:
    return iso(second, part).replace("T", " ")


def epoch(second: int, unit: int = 1) -> float:
    return (BASE + second) * unit + 0.125


def js(**fields: object) -> str:
    return json.dumps({name.replace("__", "@"): value for name, value in fields.items()})


def loguru(second: int, text: str, **extra: object) -> dict[str, object]:
    when = {"repr": sql(second, ".125000+00:00"), "timestamp": epoch(second)}
    took = {"repr": "0:00:15.937072", "seconds": 15.937072}
    return {
        "elapsed": took,
        "exception": None,
        "extra": extra,
        "level": {"name": "INFO"},
        "message": text,
        "time": when,
    }


Q = json.dumps
PLAIN: dict[str, Form] = {
    "logrus": lambda n, x: f'time="{iso(n, "Z")}" level=info msg={Q(x)} job=kubeflow.llm replica-type=worker',
    "logfmt, level first": lambda n, x: f"level=info ts={iso(n)} msg={Q(x)}",
    "logfmt, epoch": lambda n, x: f"ts={epoch(n)} level=info msg={Q(x)}",
    "structlog, logfmt": lambda n, x: f"event={Q(x)} level=info timestamp={iso(n)}",
    "structlog, console": lambda n, x: f"{iso(n)} [info     ] {x}    rank=3",
    "structlog": lambda n, x: js(event=x, level="info", timestamp=iso(n)),
    "zap": lambda n, x: js(level="info", ts=epoch(n), caller="a/b.go:1", msg=x),
    "zap, iso": lambda n, x: js(level="info", ts=iso(n), logger="l", msg=x),
    "zap, console": lambda n, x: f"{iso(n)}\tINFO\ttrainer\t{x}",
    "zap, console of old": lambda n, x: f"{epoch(n) / 1e9!r}e+09\tINFO\ttrainer\t{x}",
    "zap behind kubectl --prefix": lambda n, x: f"[pod/llm-0/main] {iso(n)} {js(level='info', ts=epoch(n), msg=x)}",
    "zap behind cri": lambda n, x: f"{iso(n)} stdout F {js(level='info', ts=epoch(n), msg=x)}",
    "json behind stern": lambda n, x: f"llm-0 trainer {js(message=x, timestamp=iso(n))}",
    "json with spaces": lambda n, x: f'  {{ "message": {Q(x)}, "time": "{iso(n)}" }}',
    "json in an array": lambda n, x: f"{'[' if n == 0 else ' '}{js(message=x, timestamp=iso(n))},",
    "json, capital names": lambda n, x: js(Message=x, Level="Info", Timestamp=iso(n)),
    "json, date": lambda n, x: js(date=iso(n), severity="info", message=x),
    "json, datetime": lambda n, x: js(level="INFO", datetime=sql(n), message=x),
    "klog": lambda n, x: f"I0901 10:00:0{n}.123456   12345 main.go:12] {x}",
    "klog, structured": lambda n, x: f'I0901 10:00:0{n}.123456       1 main.go:12] "{x}" pod="llm-0"',
    "klog, json": lambda n, x: js(ts=epoch(n, 1000), caller="m/main.go:1", msg=x, v=0),
    "loguru": lambda n, x: f"{sql(n, '.125')} | INFO     | __main__:main:1 - {x}",
    "loguru, serialized": lambda n, x: js(text=f"{sql(n, '.125')} | INFO | m:f:1 - {x}\n", record=loguru(n, x)),
    "loguru, serialized, behind docker": lambda n, x: f"{sql(n)} {js(text=f'{sql(n)} | m - {x}', record=loguru(n, x))}",
    "python-json-logger": lambda n, x: js(asctime=sql(n, ",123"), name="root", message=x, taskName=None),
    "python-json-logger, created": lambda n, x: js(name="root", levelname="INFO", message=x, created=epoch(n)),
    "ecs": lambda n, x: js(__timestamp=iso(n), log={"logger": "root", "level": "info"}, message=x, host={"name": "n7"}),
    "ecs, event": lambda n, x: js(__timestamp=iso(n), event={"dataset": "x"}, message=x),
    "elasticsearch": lambda n, x: js(
        _index="logs", _source={"@timestamp": iso(n), "message": x, "kubernetes": {"pod": {"name": "llm-0"}}}
    ),
    "gcp, seconds": lambda n, x: js(severity="INFO", message=x, timestamp={"seconds": BASE + n, "nanos": 125000000}),
    "gcp, timestampSeconds": lambda n, x: js(message=x, timestampSeconds=BASE + n, timestampNanos=125000000),
    "gcp, exported": lambda n, x: js(
        insertId="a", jsonPayload={"msg": x, "ts": epoch(n)}, timestamp=iso(n), receiveTimestamp=iso(9)
    ),
    "gcloud, values": lambda n, x: f"{iso(n)}\t{x}",
    "vertex, streamed": lambda n, x: f"INFO\t{sql(n)} +0000\tworkerpool0-0\t{x}",
    "azure monitor": lambda n, x: js(TimeGenerated=iso(n), Computer="aks-1", PodName="llm-0", LogMessage=x),
    "azure container insights": lambda n, x: js(TimeGenerated=iso(n), LogEntry=x, LogEntrySource="stdout"),
    "azure ml": lambda n, x: f"[{iso(n, '.123456')}] {x}",
    "azure ml, lifecycler": lambda n, x: f"2026/09/01 10:00:0{n} INFO trainer: {x}",
    "spark": lambda n, x: f"26/09/01 10:00:0{n} INFO TorchDistributor: {x}",
    "databricks, log4j": lambda n, x: f"26/09/01 10:00:0{n}.123 INFO DriverLogger: {x}",
    "spark, json": lambda n, x: js(ts=iso(n), level="INFO", msg=x, context={"task_id": "1"}, logger="SparkContext"),
    "sagemaker, local": lambda n, x: f"\x1b[36mabcdefgh-algo-1-xyzab  |\x1b[0m {sql(n, ',123')} toolkit INFO     {x}",
    "sagemaker, notebook": lambda n, x: f"\x1b[34m[1,mpirank:3,algo-1]<stdout>:{sql(n)} {x}\x1b[0m",
    "cloudwatch": lambda n, x: js(timestamp=(BASE + n) * 1000, message=x, logStreamName="llm/algo-1-178"),
    "cloudwatch, insights": lambda n, x: js(__timestamp=sql(n, ".123"), __message=x, __logStream="llm/algo-1-178"),
    "cloudwatch, text": lambda n, x: f"EVENTS\t{(BASE + n) * 1000}\t{x}\t{(BASE + 9) * 1000}",
    "wandb": lambda n, x: f"{iso(n, '.123456')} {x}",
    "wandb, stderr": lambda n, x: f"ERROR {iso(n, '.123456')} {x}",
    "wandb, json": lambda n, x: js(timestamp=iso(n, ".123456"), level="error", line=x, number=3, label=""),
    "pino": lambda n, x: js(level=30, time=(BASE + n) * 1000 + 123, pid=1, hostname="n7", msg=x),
    "serilog": lambda n, x: json.dumps({"@t": iso(n, ".1234567Z"), "@m": x, "@i": "1"}),
    "rust": lambda n, x: f"\x1b[2m{iso(n)}\x1b[0m \x1b[32m INFO\x1b[0m \x1b[2mlauncher\x1b[0m\x1b[2m:\x1b[0m {x}",
    "fluentd": lambda n, x: f"{sql(n, '.000000000 +0000')} kubernetes.var.log.llm: {js(log=x, stream='stdout')}",
    "fluentd, tabs": lambda n, x: f"{iso(n, '+00:00')}\tkubernetes.llm\t{js(log=x, stream='stdout')}",
    "splunk": lambda n, x: js(time=epoch(n), host="n7", event=x),
    "splunk, exported": lambda n, x: js(preview=False, result={"_raw": x, "_time": sql(n, ".000 UTC"), "host": "n7"}),
    "datadog": lambda n, x: js(id="A", content={"timestamp": iso(n), "host": "n7", "message": x}),
    "datadog, attributes": lambda n, x: js(id="A", attributes={"timestamp": iso(n), "host": "n7", "message": x}),
    "vector": lambda n, x: js(file="/var/log/x", host="n7", message=x, source_type="file", timestamp=iso(n)),
    "otel": lambda n, x: js(timeUnixNano=str((BASE + n) * 10**9), severityText="INFO", body={"stringValue": x}),
    "otel, collector": lambda n, x: js(Timestamp=iso(n), SeverityText="INFO", Body=x, Attributes={}),
    "determined": lambda n, x: f"[{iso(n)}] 08204a0a || INFO: [30] root: {x}",
    "determined, old": lambda n, x: f"<info>    [{sql(n)}] 26606941 || INFO: {x}",
    "loki": lambda n, x: f'{iso(n, "Z")} {{app="llm", pod="llm-0"}} {x}',
    "loki, jsonl": lambda n, x: js(labels={"pod": "llm-0"}, line=x, timestamp=iso(n)),
    "csv": lambda n, x: f"{iso(n)},{x}",
    "csv, quoted": lambda n, x: f'"{iso(n)}","llm-0","{x}"',
    "pdsh, addresses": lambda n, x: f"10.0.0.2: [{sql(n, ',123')}] [INFO] [launch.py:1:main] {x}",
    "accelerate": lambda n, x: f"09/01/2026 10:00:0{n} - INFO - __main__ - {x}",
}  # fmt: skip
RANKED: dict[str, Form] = {
    "logfmt": lambda n, x: f"ts={iso(n)} caller=train.go:12 level=info rank=3 msg={Q(x)}",
    "logfmt behind kubectl": lambda n, x: f"{iso(n)} level=info msg={Q(x)} rank=3",
    "logfmt in docker": lambda n, x: js(log=f"level=info msg={Q(x)} rank=3\n", stream="stderr", time=iso(n)),
    "slog": lambda n, x: f"time={iso(n)} level=INFO source=/w/main.go:12 msg={Q(x)} rank=3",
    "slog, json": lambda n, x: js(time=iso(n), level="INFO", msg=x, rank=3),
    "zap behind kubectl": lambda n, x: f"{iso(n)} {js(level='info', ts=epoch(n), msg=x, rank=3)}",
    "json in docker": lambda n, x: js(log=js(levelname="INFO", message=x, rank=3) + "\n", time=iso(n)),
    "json behind srun": lambda n, x: f"3: {js(message=x, timestamp=iso(n))}",
    "json behind torchrun": lambda n, x: f"[rank3]:{js(message=x, timestamp=iso(n))}",
    "json, rank in its text": lambda n, x: js(message=f"[rank3]: {x}", timestamp=iso(n)),
    "json, rank as text": lambda n, x: js(message=x, rank="3", timestamp=iso(n)),
    "json, global_rank": lambda n, x: js(message=x, global_rank=3, local_rank=1, timestamp=iso(n)),
    "json, extra": lambda n, x: js(message=x, extra={"rank": 3}, timestamp=iso(n)),
    "loguru, bare": lambda n, x: js(text=x + "\n", record=loguru(n, x, rank=3)),
    "gcp, labels": lambda n, x: json.dumps(
        {"message": x, "time": iso(n), "logging.googleapis.com/labels": {"rank": "3"}}
    ),
    "gcp, exported": lambda n, x: js(jsonPayload={"message": x, "rank": 3}, resource={"labels": {}}, timestamp=iso(n)),
    "rust, json": lambda n, x: js(timestamp=iso(n), level="INFO", fields={"message": x, "rank": 3}, target="l"),
    "splunk": lambda n, x: js(time=epoch(n), host="n7", event={"message": x, "rank": 3}),
    "ray": lambda n, x: js(asctime=sql(n, ",123"), levelname="INFO", message=x, world_rank=3, timestamp_ns=0),
    "ray, console": lambda n, x: f"(RayTrainWorker pid=12) {js(asctime=sql(n, ',123'), message=x, world_rank=3)}",
    "composer": lambda n, x: f"{sql(n, ',123')}: rank3[113865][MainThread]: INFO: composer.trainer.trainer: {x}",
    "determined": lambda n, x: f"[{iso(n)}] 08204a0a [rank=3] || {x}",
}  # fmt: skip


FORMS = [
    pytest.param(form, rank, id=name) for rank, forms in ((None, PLAIN), (3, RANKED)) for name, form in forms.items()
]
BEGINS = (" loading checkpoint from /c at iteration 7", " successfully loaded checkpoint from /c at iteration 7")
LINES = {
    "trainer": ((RUN, "first_step"), (LOSS, "")),
    "megatron-lm": ((BEGINS[0], "checkpoint_load"), (BEGINS[1], "model_init")),
    "axolotl": (("Loading model", "model_init"), ("Starting trainer...", "first_step")),
    "fairseq": (
        ("| initialized host n1 as rank 3", "model_init"),
        ("| epoch 001:    100 / 28937 loss=3.2", "first_step"),
    ),
    "torchtitan": (
        ("- INFO - Building llama3 debugmodel", "model_init"),
        ("- INFO - \x1b[31mstep:  1  \x1b[32mloss:  8.1", "first_step"),
    ),
}
"""Two lines of a program, and the stages that begin there: a line that ends the start has made a first step."""


@pytest.mark.parametrize("program", LINES)
@pytest.mark.parametrize(("form", "rank"), FORMS)
def test_the_time_and_the_rank_of_a_line(form: Form, rank: int | None, program: str) -> None:
    written = datetime.datetime(2026, 9, 2, 12, tzinfo=datetime.UTC)
    (first, stage), (then, other) = LINES[program]
    source = logs.Source([form(0, first), form(5, then)], "n1", written=written)
    found = logs.extract([source], logs.patterns(), job="j", zone=datetime.UTC)
    log = events.parse(msgspec.json.encode(event) + b"\n" for event in found.events)
    begun = [(s.rank, s.stage, s.begin and s.begin.wall // 10**9) for s in log.spans]
    assert begun == [(rank, stage, BASE), *([(rank, other, BASE + 5)] if other else [])]
    assert [s.duration and s.duration.ns / 1e9 for s in log.spans][:1] == [5.0]


@pytest.mark.parametrize(
    "line",
    [
        "{" * 5000, '{"a":' * 5000, '{"message": 1e400, "time": 1e400}', '{"message": "x", "time": {"seconds": -1}}',
        '{"message": "' + RUN + '", "time": "1e+309"}', "a=" * 5000, 'msg="' + "\\" * 5001, "0.0e+09 " + RUN,
        '{"message": "x", "timestamp": [1], "rank": true}', "[{]," * 100, '{"time": 99999999999999999999999999999999}',
        "26/99/99 10:00:00 " + RUN,
    ],
)  # fmt: skip
def test_no_line_is_an_error(line: str) -> None:
    found = logs.extract([logs.Source([line, line], "n1")], logs.patterns(), job="j", zone=datetime.UTC)
    assert not found.events


@pytest.mark.parametrize(
    "line",
    ["- loss: 1, ", "NCCL INFO x rank 1 nranks 2 ", "- Loading model from ", "|TP=1", "step:1 - a "],
)
def test_no_line_of_many_beginnings_takes_long(line: str) -> None:
    """Red before, with several patterns: from each beginning all of the line was looked through."""
    words = {one.has for one in logs.patterns()}
    begun = time.process_time()
    many = [f"{line * (65_000 // len(line))}{has}x" for has in words]
    logs.extract([logs.Source(many, "n1")], logs.patterns(), job="j", zone=datetime.UTC)
    assert time.process_time() - begun < 5


@pytest.mark.parametrize("line", ["a=b " + "x" * 60_000, "a=" * 30_000, "INFO\t" * 12_000, "-" * 60_000, " " * 60_000])
def test_no_line_takes_long(line: str) -> None:
    words = {one.has for one in logs.patterns()}
    begun = time.process_time()
    logs.extract([logs.Source([line + has for has in words], "n1")], logs.patterns(), job="j", zone=datetime.UTC)
    assert time.process_time() - begun < 5
