"""Start-ups read from logs: what torchrun, Hugging Face's Trainer, Megatron-LM, NeMo and Lightning print."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from bootseer.errors import ConfigError
from bootseer.profile import events, logs

UTC = datetime.UTC

MEGATRON = """\
2024-01-24T11:09:55.5Z > initializing torch distributed ...
time to initialize megatron (seconds): 4.579
[after megatron is initialized] datetime: 2024-01-24 11:10:00
building GPT model ...
 loading checkpoint from /ckpt at iteration 1000
[after model, optimizer, and learning rate scheduler are built] datetime: 2024-01-24 11:10:06
> finished creating GPT datasets ...
[after dataloaders are built] datetime: 2024-01-24 11:10:16
training ...
[before the start of training step] datetime: 2024-01-24 11:10:17
 [2024-01-24 11:10:30] iteration     1001/    5000 | consumed samples:         4004 | lm loss: 1.0E+01 |
 [2024-01-24 11:10:31] iteration     1002/    5000 | consumed samples:         4008 | lm loss: 1.0E+01 |
"""
LIGHTNING = """\
2026-03-28T14:13:05.25Z Initializing distributed: GLOBAL_RANK: 0, MEMBER: 1/2
2026-03-28T14:13:07.50Z distributed_backend=nccl
2026-03-28T14:13:07.50Z All distributed processes registered. Starting with 2 processes
2026-03-28T14:13:09.00Z Restoring states from the checkpoint path at /ckpt/last.ckpt
2026-03-28T14:13:19.00Z Restored all states from the checkpoint at /ckpt/last.ckpt
2026-03-28T14:13:19.50Z Epoch 0:   0%|          | 0/64 [00:00<?, ?it/s]
2026-03-28T14:13:23.00Z Epoch 0:   2%|1         | 1/64 [00:03<03:40,  0.29it/s]
"""
NEMO = """\
[NeMo I 2026-03-28 14:13:05 nemo_logging:393] Initializing distributed: GLOBAL_RANK: 0, MEMBER: 1/2
[NeMo I 2026-03-28 14:13:15 nemo_logging:393] All distributed processes registered. Starting with 2 processes
[NeMo I 2026-03-28 14:13:30 nemo_logging:393] Restoring states from the checkpoint path at /ckpt
[NeMo I 2026-03-28 14:13:50 nemo_logging:393] Restored all states from the checkpoint at /ckpt
[NeMo I 2026-03-28 14:14:10 nemo_logging:393] Training epoch 0, iteration 0/99 | lr: 1.5e-07 | global_step: 0
"""


def read(text: str, **options: object) -> tuple[events.EventLog, logs.Found]:
    """What a log gives, through the lines that are written of it."""
    found = logs.extract(text.splitlines(), logs.patterns(), job="j", node="n1", zone=UTC, **options)  # type: ignore[arg-type]
    return events.parse(msgspec.json.encode(event) + b"\n" for event in found.events), found


def stages(log: events.EventLog) -> list[tuple[str, float]]:
    return [(span.stage, span.duration.ns / 1e9) for span in log.spans if span.duration]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (MEGATRON, [("dist_init", 4.5), ("model_init", 6), ("data_loader_init", 10), ("first_step", 13)]),
        (LIGHTNING, [("dist_init", 2.25), ("model_init", 1.5), ("checkpoint_load", 10), ("first_step", 4)]),
        (NEMO, [("dist_init", 10), ("model_init", 15), ("checkpoint_load", 20), ("first_step", 20)]),
    ],
    ids=["megatron-lm", "lightning", "nemo"],
)
def test_the_stages_of_a_log(text: str, expected: list[tuple[str, float]]) -> None:
    log, _found = read(text)
    assert stages(log) == expected
    assert all(span.state is events.State.DONE for span in log.spans)


def test_lines_without_a_time_are_counted() -> None:
    assert read(MEGATRON)[1].timeless == 1  # "loading checkpoint": between two lines whose time is their own


def test_ranks_and_pods_are_lanes() -> None:
    told = [
        "[pod/llm-0-abc/main] 2026-01-01T00:00:00Z [rank0]: > initializing torch distributed ...",
        "[pod/llm-0-abc/main] 2026-01-01T00:00:01Z [rank1]: > initializing torch distributed ...",
        "3: [after megatron is initialized] datetime: 2026-01-01 00:00:05",
        "[pod/llm-0-abc/main] 2026-01-01T00:00:04Z [rank1]: [after megatron is initialized] datetime: x",
    ]
    log, _found = read("\n".join(told))
    lanes = {(span.node, span.rank, span.stage, span.state.name) for span in log.spans}
    assert lanes == {
        ("llm-0-abc", 0, "dist_init", "OPEN"), ("llm-0-abc", 1, "dist_init", "DONE"), ("n1", 3, "model_init", "OPEN"),
        ("llm-0-abc", 1, "model_init", "OPEN"),
    }  # fmt: skip


def test_a_restart_is_a_cycle_and_nothing_follows_the_first_step() -> None:
    told = "I1123 07:00:0{}.500000 42 torch/distributed/elastic/agent/server/api.py:706] [default] {}"
    lines = [told.format(0, "Rendezvous'ing worker group"), told.format(1, "Starting worker group")]
    ready = [" [2026-11-23 07:00:03] iteration 1/ 5 | loss", " [2026-11-23 07:00:04] iteration 2/ 5 | loss"]
    again = [told.format(6, "Rendezvous'ing worker group"), told.format(8, "Starting worker group")]
    log, _found = read("\n".join([*lines, *ready, *again]), year=2026)
    spans = [(span.stage, span.cycle, span.state.name) for span in log.spans]
    assert spans == [("rendezvous", 0, "DONE"), ("import", 0, "DONE"), ("rendezvous", 1, "DONE"), ("import", 1, "OPEN")]
    assert stages(log) == [("rendezvous", 1.0), ("import", 1.5), ("rendezvous", 2.0)]


@pytest.mark.parametrize(
    "line",
    ["2026-99-99 07:00:00 Starting", "\0\udcff\x1b[1m", "[rank" + "9" * 400 + "]: x", "1970-01-01 00:00:00+14:00 x"],
)
def test_no_line_is_an_error(line: str) -> None:
    log, found = read(f"{line} [after megatron is initialized]\n" + "x" * 100_000)
    assert len(log.spans) == found.matched <= 1


def test_a_log_read_twice_gives_each_span_once() -> None:
    lines = [msgspec.json.encode(event) for _ in range(2) for event in read(MEGATRON)[1].events]
    log = events.parse(line + b"\n" for line in lines)
    assert len(log.spans) == 4
    assert log.duplicates == 8


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[line]]\nmatch = '('\nstage = 'env'", "unterminated"),
        ("[[line]]\nmatch = 'x'", "stage"),
        ("[[line]]\nmatch = 'x'\nstage = 'env'\nstag = 1", "stag"),
        ("no toml", "toml"),
    ],
)
def test_a_bad_pattern_file_is_one_line(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "patterns.toml").write_text(text)
    with pytest.raises(ConfigError, match=said) as caught:
        logs.patterns(tmp_path / "patterns.toml")
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="cannot read"):
        logs.patterns(tmp_path / "none.toml")


@pytest.mark.torch
def test_real_torchrun(tmp_path: Path) -> None:
    """What torchrun itself writes, with one restart."""
    script = tmp_path / "train.py"
    script.write_text("import os, sys; sys.exit(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0')")
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=1", str(script)]
    env = {**os.environ, "LOGLEVEL": "INFO"}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=250, check=True)
    log, _found = read(done.stderr)
    assert [(span.stage, span.cycle) for span in log.spans] == [
        ("rendezvous", 0), ("import", 0), ("rendezvous", 1), ("import", 1)
    ], done.stderr  # fmt: skip


@pytest.mark.torch
def test_real_trainer(tmp_path: Path) -> None:
    """What Hugging Face's Trainer itself writes, each line with the time that a log collector gives it."""
    script = f"""
import transformers, torch
transformers.logging.set_verbosity_info()
transformers.logging.enable_explicit_format()
model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=16))
data = [{{"input_ids": torch.zeros(4, dtype=torch.long), "labels": torch.zeros(4, dtype=torch.long)}}] * 4
options = transformers.TrainingArguments({str(tmp_path)!r}, max_steps=2, logging_steps=1, save_steps=1, report_to=[],
    use_cpu=True, disable_tqdm=True)
transformers.Trainer(model=model, args=options, train_dataset=data).train()
options.max_steps = 3
transformers.Trainer(model=model, args=options, train_dataset=data).train(resume_from_checkpoint=True)
"""
    argv = [sys.executable, "-u", "-W", "ignore", "-c", script]
    done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=250, check=True)
    timed = [
        f"2026-01-01T00:00:{number // 10:02}.{number % 10}Z {line}"
        for number, line in enumerate(done.stdout.splitlines())
    ]
    resumed = next(number for number, line in enumerate(timed) if "Loading model from" in line)
    for lines, expected in ((timed[:resumed], ["first_step"]), (timed[resumed:], ["checkpoint_load", "first_step"])):
        log, _found = read("\n".join(lines))
        assert [(span.stage, span.state.name) for span in log.spans] == [(s, "DONE") for s in expected], done.stdout


def test_the_command_line(tmp_path: Path) -> None:
    def profile(*args: str | Path, given: str = "") -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "bootseer.cli.main", "profile", *map(str, args)]
        return subprocess.run(argv, input=given, capture_output=True, text=True, timeout=60, check=False)

    for name in ("n1", "n2"):
        (tmp_path / f"{name}.log").write_text(MEGATRON)
    (tmp_path / "none.log").write_text("nothing\n")
    (tmp_path / "timeless.log").write_text("> initializing torch distributed ...\n")
    made = tmp_path / "llm.jsonl"
    inputs = ["--log", tmp_path / "n1.log", "--log", tmp_path / "n2.log"]
    done = profile("import", *inputs, "--utc", "--job", "llm", "--gpus", 8, "-o", made)
    assert (done.returncode, done.stderr.count("\n")) == (0, 1)
    assert "2 lines that are known carry no time" in done.stderr
    report = json.loads(profile("show", made, "--json").stdout)
    assert (report["job"], report["gpus"], report["startup_seconds"]) == ("llm", 16, 34.5)
    told = [("none.log", 65, "no line is known"), ("timeless.log", 65, "carry no time"), ("no.log", 66, "cannot read")]
    for name, code, said in told:
        done = profile("import", "--log", tmp_path / name)
        assert (done.returncode, done.stderr.count("\n")) == (code, 1), done.stderr
        assert said in done.stderr
    done = profile("import", "--log", "-", "--utc", "--node", "x", given=MEGATRON)
    assert events.parse(done.stdout.encode().splitlines(keepends=True)).spans[0].node == "x"
    assert profile("import").returncode == 2
    assert profile("import", *inputs, "--sacct", "-").returncode == 2
