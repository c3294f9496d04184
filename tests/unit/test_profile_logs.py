"""Start-ups read from logs: what torchrun, Hugging Face's Trainer, Megatron-LM, NeMo and Lightning print."""

from __future__ import annotations

import datetime
import json
import os
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from bootseer.cli import profile_import
from bootseer.cli.profile import app
from bootseer.errors import ConfigError, DataError
from bootseer.profile import events, loglines, logs
from support import forked

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


WRITTEN = datetime.datetime(2026, 11, 23, 12, tzinfo=UTC)


def read(*texts: str, **options: int) -> tuple[events.EventLog, logs.Found]:
    """What logs of one node give, through the lines that are written of it."""
    sources = [logs.Source(text.split("\n"), "n1", written=WRITTEN) for text in texts]
    found = logs.extract(sources, logs.patterns(), job="j", zone=UTC, **options)
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
    log, _found = read("\n".join([*lines, *ready, *again]))
    spans = [(span.stage, span.cycle, span.state.name) for span in log.spans]
    assert spans == [
        ("rendezvous", 0, "DONE"), ("import", 0, "DONE"), ("first_step", 0, "DONE"), ("rendezvous", 1, "DONE"),
        ("import", 1, "OPEN"),
    ]  # fmt: skip
    assert stages(log) == [("rendezvous", 1.0), ("import", 1.5), ("first_step", 0.0), ("rendezvous", 2.0)]


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
    assert {span.cycle for span in read("\n".join(timed))[0].spans} == {0}, "of one process"


RUN, LOSS, BAR = "***** Running training *****", "{'loss': 2.3}", "  0%|          | 0/850 [00:00<?, ?it/s]"


def at(seconds: float) -> str:
    moment = datetime.datetime(2026, 9, 1, 10, tzinfo=UTC) + datetime.timedelta(seconds=seconds)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%f000Z")


def torchrun(when: str, text: str) -> str:
    return f"I{when}.000000 5707 torch/distributed/elastic/agent/server/api.py:677] [default] {text}"


def two(form: str, begin: str = RUN, end: str = LOSS) -> list[str]:
    """A line that begins the first step, and one 5 s later that ends it."""
    return [
        form.format(iso=at(n), day=f"2026-09-01 10:00:0{n},000", n=n, text=text) for n, text in ((0, begin), (5, end))
    ]


def words(form: str, bar: str) -> list[str]:
    """The same, where a bar with words in front draws its beginning and its first step."""
    return two(
        form, f"{bar}:   0%|          | 0/266 [00:00<?, ?it/s]", f"{bar}:   0%|1 | 1/266 [00:05<22:05, 5.00s/it]"
    )


def js(form: str, begin: str = RUN, end: str = LOSS) -> list[str]:
    """The same, where the carrier writes JSON."""
    return [
        form.replace("ISO", at(n)).replace("MS", f"178825680{n}000").replace("TEXT", json.dumps(text))
        for n, text in ((0, begin), (5, end))
    ]


Wanted = dict[tuple[int | None, str], float | None]
FIRST: Wanted = {(None, "first_step"): 5}
STEP_3: Wanted = {(3, "first_step"): 5}
INIT = "Initializing distributed: GLOBAL_RANK: 0, MEMBER: 1/2"
NCCL = "n4:2:2 [3] NCCL INFO f comm 0x1 rank 3 nranks 8 cudaDev 3 commId 0x2 - Init "
TIMINGS = "n4:2:2 [3] NCCL INFO Init timings - f: rank {} nranks {} total {} (kernels 3.00, bootstrap 1.00)"
MAXTEXT = "completed step: 0, seconds: "
AGENT = ["Rendezvous'ing worker group", "Starting worker group"]
SHAPES: dict[str, tuple[list[str], Wanted]] = {
    # carriers that are not in test_profile_log_programs or test_profile_log_carriers
    "cri, in pieces": (
        [f"{at(0)} stdout F {RUN}", f"{at(5)} stdout P {{'lo", f"{at(5)} stdout F ss': "], FIRST,
    ),
    "compose": (two("llm-1  | {iso} {text}"), FIRST),
    "pdsh": (two("worker-1: [{day}] [INFO] {text}"), FIRST),
    "journald, bytes": (
        [line.replace(json.dumps(LOSS), str(list(LOSS.encode()))) for line in js('{"ts": MS, "MESSAGE": TEXT}')], FIRST,
    ),
    "journald, iso": (two("2026-09-01T10:00:0{n}+0000 n2 train[12]: {text}"), FIRST),
    "journald, unix": (two("178825680{n}.250000 n2 train[12]: {text}"), FIRST),
    "syslog 5424": (two("<165>1 {iso} n2 train 12 - - {text}"), FIRST),
    "torchx": (two("trainer/0 [default3]:{iso} {text}"), STEP_3),
    "mpirun": (two("[1,3]<stdout>:{iso} {text}"), STEP_3),
    "prrte": (two("{iso} [prterun-n1-77@1,3]<stdout>: {text}"), STEP_3),
    "sagemaker": (
        [line for r in (2, 3) for line in two(f"[1,mpirank:{r},algo-1]<stdout>:{{iso}} #015{{text}}")],
        STEP_3 | {(2, "first_step"): 5},
    ),
    # times
    "rich": (two("[09/01/26 10:00:0{n}] INFO     {text}    trainer.py:2414"), FIRST),
    "asctime": (two("Tue Sep  1 10:00:0{n} 2026 {text}"), FIRST),
    "a clock alone": ([two("{iso} {text}")[0], two("[10:00:0{n}] {text}")[1]], FIRST),
    "newer glog": (two("I20260901 10:00:0{n}.000000 12 x.cc:2] {text}"), FIRST),
    "month by name": (two("[01/Sep/2026:10:00:0{n} +0000] {text}"), FIRST),
    "twelve hours": ([f"2026-09-01 11:59:58 AM {RUN}", f"2026-09-01 12:00:03 PM {LOSS}"], FIRST),
    "zones": ([f"2026-09-01T15:30:00+05:30 {RUN}", f"2026-09-01 02:00:05 -0800 {LOSS}"], FIRST),
    "a logger first": (two("INFO:root:{day} {text}"), FIRST),
    "date in a path": (["loading checkpoint from /ckpt/2026-01-01 00:00:00/x", *two("{iso} {text}")], FIRST),
    "date in prose": ([f"Resuming what stopped 2026-01-01 00:00:00 {LOSS}", *two("{iso} {text}")], FIRST),
    "a year's end": (
        [torchrun("1231 23:59:55", AGENT[0]), torchrun("0101 00:00:00", AGENT[1])],
        {(None, "rendezvous"): 5, (None, "import"): None},
    ),
    "out of order": (two("{iso} {text}")[::-1], FIRST),
    "airflow": (two("[2026-09-01, 10:00:0{n} UTC] {{subprocess.py:93}} INFO - {text}"), FIRST),
    "airflow, a bar": (
        two("[2026-09-01, 10:00:0{n} UTC] {{x.py:9}} INFO - {text}", end=" 0%|1 | 1/850 [00:05<01:00, 4.69s/it]"),
        FIRST,
    ),
    # bars that begin or end the first step
    "verl": (words("(TaskRunner pid=1) {iso} {text}", "Training Progress"), FIRST),
    "verl's SFT": (
        [*words("{iso} {text}", "Epoch 1/3"), f"{at(9)} Epoch 2/3:   0%|          | 0/266 [00:00<?, ?it/s]"], FIRST,
    ),
    "openrlhf": (
        [*words("{iso} {text}", "Train step of epoch 0"),
         f"{at(9)} Train step of epoch 1:   0%|   | 0/266 [00:00<?, ?it/s]"],
        FIRST,
    ),
    "openrlhf, newer": (
        two("{iso} {text}", "Train step of epoch 0:   0%|          | 0/17 [00:00<?, ?it/s]",
            "Train step of epoch 0:   5%|1 | 1/17 [00:05<01:20, 5.0s/it, gpt_loss=0.79, lr=1.25e-6]"), FIRST,
    ),
    "composer": (
        two("{iso} {text}", "x INFO: llmfoundry.command_utils.train: Starting training...",
            "train          Epoch   0:    0%|▋   | 1/625 [00:05<07:23,  1.37ba/s, loss/train/total=7.1292]"), FIRST,
    ),
    # frames
    "frames": (two("{iso} {text}", end=f"\r{BAR}\r  1%|1 | 10/850 [00:46<1:05:31,  4.69s/it]\r{LOSS}"), FIRST),
    "a bar alone": (two("{iso} {text}", end=f"\r{BAR}\r  0%|1 | 1/850 [00:05<1:05:31,  4.69s/it]"), FIRST),
    "a bar's own seconds": (
        [f"{at(0)} {RUN}", f"{at(45)} \r{BAR}\r  0%| | 1/850 [00:05<01:00, 5s/it]\r  1%| | 9/850 [00:45<01:00, 5s/it]"],
        FIRST,
    ),
    "a bar's rate": (
        [f"{at(0)} {RUN}", f"{at(1)} {BAR}",
         f"{at(9)} \r  0%| | 1/850 [00:04<01:00, 4.00s/it]\r  1%| | 9/850 [00:08<01:00,  1.1it/s]"], FIRST,
    ),
    "other bars": ([*two("{iso} {text}", end="Map:  50%|##  | 1/2 [00:01<00:01, 1s/it]"), f"{at(5)} {LOSS}"], FIRST),
    "long lines": (two("{iso} {text}", end="y" * 9000 + "\r" + LOSS), FIRST),
    "rich's bar": (
        [*two("{iso} {text}", INIT, "Epoch 0/9 \x1b[35m━━\x1b[0m 1/49 0:00:03 • 0:02:30 3.2it/s"),
         f"{at(2)} Sanity Checking DataLoader 0:  50%|##  | 1/2 [00:01<00:01, 1it/s]"],
        {(None, "dist_init"): 5, (None, "first_step"): 0},
    ),
    # ranks
    "label": (two(" 3: {iso} {text}"), STEP_3),
    "label and rank": (
        two("0: [rank0]:{day} {text}") + two("1: [rank3]:{day} {text}"), STEP_3 | {(0, "first_step"): 5},
    ),
    "olmo": (two("[{day}] INFO     [olmo_core.x, rank=3] {text}", "Starting epoch 1", "[step=1/9,epoch=1]"), STEP_3),
    "other ranks": ([*two("{iso} [rank: 3] {text}")[:1], *two("{day} - INFO - x - [RANK 3] {text}")[1:]], STEP_3),
    "a bare rank": ([*two("rank3: {day} {text}")[:1], *two("{iso} rank 3: {text}")[1:]], STEP_3),
    # programs
    "maxtext": (two("I0901 10:00:0{n}.000000 1 x:2] {text}", "Finished restoring checkpoint", MAXTEXT + "4.5"), FIRST),
    "maxtext, its seconds": (two("I0901 10:00:0{n}.000000 1 x:2] {text}", "", MAXTEXT + "5.0"), FIRST),
    "titan": (
        [f"[rank3]:[titan] 2026-09-01 10:00:0{n},000 - root - INFO - {m}" for n, m in
         ((0, "Starting job: x"), (2, "Building 1-D device mesh with ['dp']"), (3, "Building llama3 8B with T(...)"),
          (4, "Training starts at step 1."), (9, "\x1b[31mstep:  1  \x1b[32mloss:  8.13"))],
        STEP_3 | {(3, "dist_init"): 3, (3, "model_init"): 1},
    ),
    "deepspeed": (
        two("[{day}] [INFO] [x.py:1:f] {text}", "Initializing TorchBackend in DeepSpeed with backend nccl",
            "[Rank 0] DeepSpeed info: version=0.16"), {(None, "dist_init"): 5, (None, "model_init"): None},
    ),
    "nccl": (
        two("{iso} {text}", TIMINGS.format(1, 2, "2.00"), TIMINGS.format(3, 8, "4.00")),
        {(3, "dist_init"): 4, (3, "kernels"): 3, (3, "bootstrap"): 1},
    ),
    "nccl, begin and end": (two("{iso} {text}", NCCL + "START", NCCL + "COMPLETE"), {(3, "dist_init"): 5}),
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_lines_as_they_are(shape: str) -> None:
    lines, expected = SHAPES[shape]
    for ending in ("\n", "\r\n"):
        log, _found = read(*["".join(line + ending for line in lines)])
        got = {(span.rank, span.stage): span.duration.ns / 1e9 if span.duration else None for span in log.spans}
        assert got == expected


def test_what_is_settled_by_several_lines() -> None:
    agent = [
        torchrun("0901 10:00:00", "Rendezvous'ing worker group"),
        torchrun("0901 10:00:03", "Starting worker group"),
    ]
    rank = "[rank0]:2026-09-01 10:00:{},000 {}"
    steps = [
        rank.format(n, m) for n, m in (("09", "[before the start of training step]"), ("19", " iteration 1/ 9 | x"))
    ]
    again = [one.replace("10:00", "10:01") for one in (*agent, *steps)]
    log, _found = read("\n".join([*agent, *steps, *again]))
    assert [span.cycle for span in log.spans if span.stage == "first_step"] == [0, 1]
    ten, found = read(f"{at(0)} {RUN}\n{at(50)} {BAR}\r  1%|1 | 10/850 [00:46<1:05:31,  4.69s/it]")
    assert (found.steps, [span.attrs.get("steps") for span in ten.spans]) == (10, [10])
    two, _found = read(f"{at(0)} {RUN}\n", f"{at(5)} {LOSS}\n")  # its standard error and its output
    assert stages(two) == [("first_step", 5)]
    old, _found = read(torchrun("1215 10:00:00", "Rendezvous'ing worker group"))
    assert old.spans[0].begin
    assert old.spans[0].begin.wall < WRITTEN.timestamp() * 1e9
    past, _found = read("\n".join([*agent, "2024-09-01 10:00:05 anything"]))
    assert past.spans[0].begin
    assert past.spans[0].begin.wall == 1725184800 * 10**9


def test_the_steps_of_a_long_log_are_passed_over() -> None:
    """A rank that never ends its first step does not make a million lines of others slow, and a restart is seen."""
    told = [f"{at(0)} [rank{r}]: {RUN}" for r in (0, 1)] + [f"{at(5)} [rank0]: {LOSS}"] * 30_000
    again = [f"{at(6)} [default] {AGENT[0]}", f"{at(7)} [rank1]: {RUN}", f"{at(9)} [rank1]: {LOSS}"]
    log, found = read("\n".join([f"{at(-9)} {AGENT[0]}", f"{at(-8)} {AGENT[1]}", *told, *again]))
    assert [(span.rank, span.cycle, span.state.name) for span in log.spans if span.stage == "first_step"] == [
        (0, 0, "DONE"), (1, 0, "DONE"), (1, 1, "DONE")
    ]  # fmt: skip
    assert found.matched < 10


def test_a_log_of_thousands_of_nodes_of_which_one_says_its_step() -> None:
    """Red before: 12 s for 3,000 nodes, as all lines were looked at for each of them."""
    said = ("> initializing torch distributed", "loading checkpoint from /x", "[before the start of training step]")
    begun = [f"node{node}: [2024-01-01 10:00:0{at}] {one}" for at, one in enumerate(said) for node in range(3000)]
    before = time.process_time()
    log, _found = read("\n".join([*begun, "node7: [2024-01-01 10:00:05]  iteration        1/  100 |"]))
    assert time.process_time() - before < 6
    assert len({span.node for span in log.spans}) == 3000


def test_a_log_of_several_nodes() -> None:
    lines = [f"{r}: {at(t)} {m}" for t, m in ((0, RUN), (5, LOSS)) for r in range(16)]
    log, found = read("\n".join(lines), ranks_per_node=8)
    assert {span.node for span in log.spans} == {"n1-0", "n1-1"}
    assert found.divided == ["n1 with 16 ranks"]
    alone, found = read("\n".join(lines[8:16]), ranks_per_node=8)
    assert ({span.node for span in alone.spans}, found.divided) == ({"n1"}, [])


def test_our_patterns_are_fast_and_say_where_they_were_seen() -> None:
    file = Path(logs.__file__).with_name("logpatterns.toml")
    known = logs.patterns()
    assert all(pattern.has for pattern in known)
    for pattern in known:
        for text in (pattern.has * (65536 // len(pattern.has)), f"{'- loss: a, ' * 5000}{pattern.has}"):
            began = time.process_time()
            re.search(pattern.match, text)
            assert time.process_time() - began < 0.3, pattern
    assert {pattern.program for pattern in known} == set(tomllib.loads(file.read_text())["versions"])


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["log/workerlog.0", "log/workerlog.1"], [("workerlog", 0), ("workerlog", 1)]),
        (["a/log/workerlog.0", "b/log/workerlog.0"], [("a/log", 0), ("b/log", 0)]),
        (["a/std_log_process_03.txt"], [("std_log_process", 3)]),
        (["llm_rank0.log", "llm_rank12.log"], [("llm", 0), ("llm", 12)]),
        (["1/rank.0/stdout", "1/rank.1/stdout"], [("rank", 0), ("rank", 1)]),
        (["rank-3.out", "n1.log"], [("rank", 3), ("n1", None)]),
        (["crank3.log", "ranking.log"], [("crank3", None), ("ranking", None)]),
        (["node_rank_0.log", "node_rank_1.log"], [("node_rank_0", None), ("node_rank_1", None)]),
        (["a.machine-rank1.out", "noderank2.log"], [("a.machine-rank1.out", None), ("noderank2", None)]),
    ],
)
def test_a_log_of_one_process_names_its_rank(
    tmp_path: Path, names: list[str], expected: list[tuple[str, int | None]]
) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{at(0)} {RUN}\n{at(5)} {LOSS}\n")
    args = [word for name in names for word in ("--log", str(tmp_path / name))]
    done = CliRunner().invoke(app, ["import", *args])
    found = events.parse(done.stdout.encode().splitlines()).spans
    assert [(span.node, span.rank) for span in found] == expected


def test_the_command_line(tmp_path: Path) -> None:
    def profile(*args: str | Path, given: str = "") -> subprocess.CompletedProcess[str]:
        return forked.cli("profile", *args, input=given)

    for name in ("n1", "n2"):
        (tmp_path / f"{name}.log").write_text(MEGATRON)
    (tmp_path / "none.log").write_text("nothing\n")
    (tmp_path / "timeless.log").write_text("> initializing torch distributed ...\n")
    made = tmp_path / "llm.jsonl"
    inputs = ["--log", tmp_path / "n1.log", "--log", tmp_path / "n2.log"]
    done = profile("import", *inputs, "--job", "llm", "--gpus", 8, "-o", made)
    assert (done.returncode, done.stderr.count("\n")) == (0, 1)
    assert "2 lines that are known carry no time" in done.stderr
    report = json.loads(profile("show", made, "--json").stdout)
    assert (report["job"], report["gpus"], report["startup_seconds"]) == ("llm", 16, 34.5)
    told = [("none.log", 65, "no line is known"), ("timeless.log", 65, "carry no time"), ("no.log", 66, "cannot read")]
    for name, code, said in told:
        done = profile("import", "--log", tmp_path / name)
        assert (done.returncode, done.stderr.count("\n")) == (code, 1), done.stderr
        assert said in done.stderr
    for name, seconds in (("a", 5), ("b", 50)):  # two logs of one name are two nodes
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.log").write_text(f"{at(0)} {RUN}\n{at(seconds)} \r{LOSS}\n")
    same = [word for name in "ab" for word in ("--log", tmp_path / name / "train.log")]
    profile("import", *same, "--gpus", 8, "-o", tmp_path / "1.jsonl")
    profile("import", *same[:2], "--job", "a", "--node", "a", "--gpus", 8, "-o", tmp_path / "2.jsonl")
    report = json.loads(profile("show", tmp_path / "1.jsonl", tmp_path / "2.jsonl", "--json").stdout)
    assert (report["job"], report["gpus"], report["startup_seconds"]) == ("a", 16, 50)
    assert report["problems"]["duplicates"] == 2
    agent = tmp_path / "run_1/attempt_1/3"
    agent.mkdir(parents=True)
    (agent / "stderr.log").write_text(f"{at(0)} {RUN}\n")
    done = profile("import", "--log", agent / "stderr.log")
    span = events.parse(done.stdout.encode().splitlines(keepends=True)).spans[0]
    assert (span.node, span.rank, span.cycle) == ("run_1", 3, 1)
    wide = tmp_path / "wide.log"
    wide.write_text("".join(f"{r}: {at(t)} {m}\n" for t, m in ((0, RUN), (5, LOSS)) for r in range(16)), "utf-16")
    done = profile("import", "--log", wide, "--gpus", 8)
    assert {span.node for span in events.parse(done.stdout.encode().splitlines()).spans} == {"wide-0", "wide-1"}
    assert "wide with 16 ranks: taken as nodes of 8 ranks" in done.stderr
    done = profile("import", "--log", "-", "--node", "x", given=MEGATRON)
    assert events.parse(done.stdout.encode().splitlines(keepends=True)).spans[0].node == "x"
    assert profile("import").returncode == 2
    assert profile("import", *inputs, "--sacct", "-").returncode == 2


@pytest.mark.parametrize("option", ["--log", "--sacct", "--kubernetes"])
def test_a_file_of_holes_or_a_pipe_takes_neither_memory_nor_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    monkeypatch.setattr(loglines, "_ENDLESS", 8 << 20)
    monkeypatch.setattr(profile_import, "_MOST", 8 << 20)
    with (tmp_path / "holes").open("wb") as file:
        file.truncate(1 << 41)
    os.mkfifo(tmp_path / "pipe")
    for name in ("holes", "pipe"):
        done = CliRunner().invoke(app, ["import", option, str(tmp_path / name), "-o", str(tmp_path / "out")])
        assert isinstance(done.exception, DataError), done.exception
