"""Logs of real programs behind each carrier: the lines of a start as the programs print them, and its stages.

A program's lines have their seconds in front. ``{t}`` is the program's own time, ``{r}`` its rank where it prints one;
a line after ``*`` is printed by rank 0 alone. Each start has two ranks of one node, as launchers mix them.
"""

from __future__ import annotations

import datetime
import itertools
import json
from collections.abc import Callable

import msgspec
import pytest

from bootseer.profile import analysis, events, logs

Stages = dict[str, float]


def bar(step: int, seconds: int) -> str:
    return f"{step:3}%|▏         | {step}/850 [00:{seconds:02}<1:05:31,  {float(seconds):.2f}s/it]"


LOSS = "{{'loss': 2.3, 'grad_norm': 1.2, 'learning_rate': 1e-05, 'epoch': 0.1}}"
PROGRAMS: dict[str, tuple[str, Stages]] = {
    "trainer": (
        f"""*4 ***** Running training *****
        *4   Num examples = 1,000
        *4 {bar(0, 0)}
        *9 \\r{bar(1, 5)}\\r                                 \\r{LOSS}
        *9 \\r{bar(1, 5)}
        *14 \\r{bar(2, 10)}{LOSS}""",
        {"first_step": 5},
    ),
    "llama-factory": (
        f"""*3 [INFO|2026-09-01 10:00:03] llamafactory.model.loader:143 >> trainable params: 1 || all params: 2
        *4 [INFO|trainer.py:2414] {{t}} >> ***** Running training *****
        *9 {LOSS}""",
        {"first_step": 5},
    ),
    "axolotl": (
        f"""1 [{{t}}] [DEBUG] [axolotl.train.setup:77] [PID:9{{r}}] [RANK:{{r}}] loading model and peft_config...
        4 [{{t}}] [INFO] [axolotl.utils.load:1382] [PID:9{{r}}] [RANK:{{r}}] Converting modules to torch.bfloat16
        4 [{{t}}] [INFO] [axolotl.train.execute_training:203] [PID:9{{r}}] [RANK:{{r}}] Starting trainer...
        *5   0%|          | 0/950 [00:00<?, ?it/s]
        *9 {LOSS}""",
        {"model_init": 3, "first_step": 5},
    ),
    "axolotl, rank 0 alone": (
        f"""*1 [{{t}}] [DEBUG] [axolotl.train.setup:77] [PID:9] [RANK:0] Loading model
        *4 [{{t}}] [INFO] [axolotl.train.execute_training:203] [PID:9] [RANK:0] Starting trainer...
        *9 {LOSS}""",
        {"model_init": 3, "first_step": 5},
    ),
    "lightning": (
        """0 Initializing distributed: GLOBAL_RANK: {r}, MEMBER: 1/2
        *2 distributed_backend=nccl
        *2 All distributed processes registered. Starting with 2 processes
        *3 \\rSanity Checking DataLoader 0:  50%|█████     | 1/2 [00:00<00:00,  1.39it/s]
        *4 Restoring states from the checkpoint path at /ckpt/last.ckpt
        *5 Restored all states from the checkpoint at /ckpt/last.ckpt
        *6 \\rTraining: |          | 0/? [00:00<?, ?it/s]\\rEpoch 0:   0%|          | 0/49 [00:00<?, ?it/s]
        *9 \\rEpoch 0:   2%|▏         | 1/49 [00:03<02:30,  3.10s/it, v_num=3]""",
        {"dist_init": 2, "model_init": 2, "checkpoint_load": 1, "first_step": 4},
    ),
    "megatron": (
        """*0 > initializing torch distributed ...
        *2 [after megatron is initialized] datetime: 2026-09-01 10:00:02
        *3  loading distributed checkpoint from /ckpt at iteration 7
        *5  successfully loaded checkpoint from /ckpt [ t 1/2, p 1/1 ] at iteration 7
        *6 [after model, optimizer, and learning rate scheduler are built] datetime: 2026-09-01 10:00:06
        *7 [after dataloaders are built] datetime: 2026-09-01 10:00:07
        *7 [before the start of training step] datetime: 2026-09-01 10:00:07
        *9  [2026-09-01 10:00:09] iteration        8/    5000 | consumed samples:         4004 | lm loss: 1.0E+01 |""",
        {"dist_init": 2, "model_init": 2, "checkpoint_load": 2, "data_loader_init": 1, "first_step": 2},
    ),
    "megatron-deepspeed": (
        """*0 > initializing torch distributed ...
        *2 [after megatron is initialized] datetime: 2026-09-01 10:00:02
        *6 [after model, optimizer, and learning rate scheduler are built] datetime: 2026-09-01 10:00:06
        *7 [after dataloaders are built] datetime: 2026-09-01 10:00:07
        *7 [before the start of training step] datetime: 2026-09-01 10:00:07
        *9  samples/sec: 7.799 | iteration       34/   10000 | elapsed time per iteration (ms): 4103.1 |""",
        {"dist_init": 2, "model_init": 4, "data_loader_init": 1, "first_step": 2},
    ),
    "megatron-bridge": (
        """0 INFO:megatron.bridge.training.initialize:Initializing torch distributed
        *2 [after megatron is initialized] datetime: 2026-09-01 10:00:02
        *4 [before the start of training step] datetime: 2026-09-01 10:00:04
        *9 Step Time : 5.00s GPU utilization: 1.0MODEL_TFLOP/s/GPU
        *9  [2026-09-01 10:00:09] iteration        1/      10 | consumed samples:    8 |""",
        {"dist_init": 2, "model_init": 2, "first_step": 5},
    ),
    "nemo": (
        """0 [NeMo I 2026-09-01 10:00:00 nemo_logging:393] Initializing distributed: GLOBAL_RANK: {r}, MEMBER: 1/2
        *2 [NeMo I 2026-09-01 10:00:02 nemo_logging:393] All distributed processes registered. Starting with 2 processes
        *4 [NeMo I 2026-09-01 10:00:04 nemo_logging:393] Restoring states from the checkpoint path at /ckpt
        *5 [NeMo I 2026-09-01 10:00:05 nemo_logging:393] Restored all states from the checkpoint at /ckpt
        *9 Training epoch 0, iteration 0/99 | lr: 1.5e-07 | global_step: 0 | reduced_train_loss: 11.03""",
        {"dist_init": 2, "model_init": 2, "checkpoint_load": 1, "first_step": 4},
    ),
    "nemo-automodel": (
        """*0 > initializing torch distributed with 8 workers.
        *2 {t} | INFO | nemo_automodel.components.loggers.log_utils | Setting logging level to 20
        *9 {t} | INFO | root | step 0 | epoch 0 | loss 0.6974 | grad_norm 1.5436 | lr 1.00e-05 | mem 24.90 GiB""",
        {"dist_init": 9, "first_step": 0},
    ),
    "torchtitan": (
        """0 [titan] {t} - root - INFO - Starting job: Llama 3 debug training
        1 [titan] {t} - root - INFO - Building 1-D device mesh with ['dp_shard'], [8]
        3 [titan] {t} - root - INFO - Building llama3 debugmodel
        3 [titan] {t} - root - INFO - Model llama3 debugmodel size: 6,163,712 total parameters
        4 [titan] {t} - root - INFO - Loading the checkpoint from ./outputs/checkpoint/step-10.
        6 [titan] {t} - root - INFO - Finished loading the checkpoint in 2.00 seconds.
        6 [titan] {t} - root - INFO - Training starts at step 11
        9 [titan] {t} - root - INFO - \x1b[31mstep: 11  \x1b[32mloss:  3.24405  \x1b[38;2;180;60;0mgrad_norm:""",
        {"dist_init": 3, "model_init": 1, "checkpoint_load": 2, "first_step": 3},
    ),
    "deepspeed": (
        """*0 [{t}] [INFO] [comm.py:652:init_distributed] Initializing TorchBackend in DeepSpeed with backend nccl
        *2 [{t}] [INFO] [logging.py:107:log_dist] [Rank 0] DeepSpeed info: version=0.16.4, git-hash=unknown
        *4 [{t}] [INFO] [torch_checkpoint_engine.py:28:load] [Torch] Loading checkpoint from /c/mp_rank_00.pt...
        *5 [{t}] [INFO] [torch_checkpoint_engine.py:30:load] [Torch] Loaded checkpoint from /c/mp_rank_00.pt.
        *9 [{t}] [INFO] [logging.py:107:log_dist] [Rank 0] step=1, skipped=0, lr=[1e-05], mom=[(0.9, 0.95)]""",
        {"dist_init": 2, "model_init": 2, "checkpoint_load": 1, "first_step": 0},
    ),
    "deepspeed 0.19": (
        """*0 [{t}] [INFO] [logging.py:123:log_dist] [Rank -1] DeepSpeed info: version=0.19.8, git-hash=unknown
        *1 [{t}] [INFO] [comm.py:908:init_distributed] Initializing TorchBackend in DeepSpeed with backend gloo
        *2 [{t}] [INFO] [engine.py:2192:_configure_distributed_model] ********** distributed groups summary **********
        *3 [{t}] [INFO] [logging.py:123:log_dist] [Rank 0] DeepSpeed Basic Optimizer = AdamW
        *5 [{t}] [INFO] [logging.py:123:log_dist] [Rank 0] step=0, skipped=0, lr=[0.001], mom=[(0.9, 0.999)]
        *9 [{t}] [INFO] [logging.py:123:log_dist] [Rank 0] step=1, skipped=0, lr=[0.001], mom=[(0.9, 0.999)]""",
        {"dist_init": 1, "model_init": 2, "optimizer_init": 2, "first_step": 4},
    ),
    "olmo-core": (
        """3 [{d}] INFO     [olmo_core.train.trainer:1303, rank={r}] Loading checkpoint from '/c/step10'...
        5 [{d}] INFO     [olmo_core.train.trainer:1304, rank={r}] Checkpoint successfully loaded
        5 [{d}] INFO     [olmo_core.train.trainer:1311, rank={r}] Starting epoch 1...
        *9 [{d}] INFO     [olmo_core.train.callbacks.console_logger:62, rank=0] [step=11/70,epoch=1,eta=1h]""",
        {"checkpoint_load": 2, "first_step": 4},
    ),
    "maxtext": (
        """1 I0901 10:00:01.000000 138304841739136 distributed.py:2] Connecting to JAX distributed service on n1
        2 I0901 10:00:02.000000 138304841739136 max_utils.py:3] Jax distributed system initialized
        3 I0901 10:00:03.000000 138304841739136 checkpointing.py:3] restoring from this run's directory step 10
        5 I0901 10:00:05.000000 138304841739136 checkpointer.py:3] Finished restoring checkpoint in 2.00 seconds.
        9 I0901 10:00:09.000000 138304841739136 metric_logger.py:226] completed step: 11, seconds: 4.000, T""",
        {"dist_init": 1, "checkpoint_load": 2, "first_step": 4},
    ),
    "fairseq": (
        """0 {d} | INFO | fairseq.distributed_utils | distributed init (rank {r}): tcp://localhost:19801
        2 {d} | INFO | fairseq.distributed_utils | initialized host n1 as rank {r}
        *4 {d} | INFO | fairseq.trainer | Preparing to load checkpoint /c/checkpoint_last.pt
        *5 {d} | INFO | fairseq.trainer | Loaded checkpoint /c/checkpoint_last.pt (epoch 2 @ 56000 updates)
        *6 {d} | INFO | fairseq.trainer | begin training epoch 2
        *9 {d} | INFO | train_inner | epoch 002:      1 / 100 loss=13.2, nll_loss=12.9, ppl=7640.6""",
        {"dist_init": 2, "model_init": 4, "first_step": 3},
    ),
    "fairseq of 2019": (
        """0 | distributed init (rank {r}): tcp://localhost:19097
        2 | initialized host n1 as rank {r}
        *9 | epoch 001:    100 / 28937 loss=3.211, nll_loss=1.498, ppl=2.82, wps=8809, ups=0, num_updates=100""",
        {"dist_init": 2, "model_init": 7, "first_step": 0},
    ),
    "torchtitan, no dimensions of its mesh": (
        """0 [titan] {t} - root - INFO - Starting job: Llama 3 8B training
        1 [titan] {t} - root - INFO - Building device mesh with parallelism: pp=1, dp_replicate=1
        2 [titan] {t} - root - INFO - Building llama3 8B with {{
        4 [titan] {t} - root - INFO - Training starts at step 1
        9 [titan] {t} - root - INFO - step:  1  loss: 12.2  grad_norm:  3.1""",
        {"dist_init": 2, "model_init": 2, "first_step": 5},
    ),
    "nanotron": (
        """*4 09/01/2026 10:00:04 [INFO|DP=0|PP=0|TP=0|ip-1]: [Start training] datetime: 2026-09-01 10:00:04.0 | mbs: 2
        *9 09/01/2026 10:00:09 [INFO|DP=0|PP=0|TP=0|ip-1]: iteration: 1 / 100 | consumed_tokens: 8.19K | lm_loss: 1""",
        {"first_step": 5},
    ),
    "composer": (
        """1 {t}: rank{r}[12][MainThread]: INFO: llmfoundry.command_utils.train: Building train loader...
        2 {t}: rank{r}[12][MainThread]: INFO: llmfoundry.command_utils.train: Initializing model...
        4 {t}: rank{r}[12][MainThread]: INFO: llmfoundry.command_utils.train: Starting training...
        *9 [epoch=1][batch=1/4800]:""",
        {"data_loader_init": 1, "model_init": 2, "first_step": 5},
    ),
    "colossalai": (
        """*2 INFO     colossalai - colossalai - INFO: Distributed environment is initialized, world size: 2
        *4 Epoch [1/80]:   0%|          | 0/250 [00:00<?, ?it/s]
        *9 Epoch [1/80]:   0%|          | 1/250 [00:05<22:49,  5.00s/it, loss=1.44]""",
        {"model_init": 2, "first_step": 5},
    ),
    "ms-swift": (
        """*2 [INFO:swift] The logging file will be saved in: /x/output/v6-20260528-021630/logging.jsonl
        *4 Train:   0%|          | 0/60 [00:00<?, ?it/s][INFO:swift] use_logits_to_keep: True
        *9 {{'loss': '0.3713', 'global_step/max_steps': '1/60', 'elapsed_time': '5s'}}""",
        {"model_init": 2, "first_step": 5},
    ),
    "verl": (
        """*4 Training Progress:   0%|          | 0/435 [00:00<?, ?it/s]
        *9 step:1 - actor/pg_loss:0.1 - training/global_step:1 - timing_s/step:4.9""",
        {"first_step": 5},
    ),
    "levanter": (
        """*4 {d} - 0 - levanter.trainer - trainer.py:1 - INFO :: Tracing train_step for jaxpr...
        *9 Progress on:train 1.00it/5.00kit rate:0.2it/s remaining:0:10 elapsed:00:07 postfix:loss:11.7""",
        {"first_step": 5},
    ),
    "paddle": (
        """*4 [{t}] [    INFO] - ***** Running training *****
        *9 [{t}] [    INFO] - loss: 11.2, learning_rate: 1e-05, global_step: 1, interval_runtime: 5.0""",
        {"first_step": 5},
    ),
    "ray-train": (
        f"""0 Setting up process group for: env:// [rank={{r}}, world_size=2]
        *4 ***** Running training *****
        *9 {LOSS}""",
        {"dist_init": 4, "first_step": 5},
    ),
}  # fmt: skip
BASE = datetime.datetime(2026, 9, 1, 10, tzinfo=datetime.UTC)
WRITTEN = BASE + datetime.timedelta(days=1)


def clock(seconds: float, form: str) -> str:
    return (BASE + datetime.timedelta(seconds=seconds)).strftime(form)


def iso(seconds: float) -> str:
    return clock(seconds, "%Y-%m-%dT%H:%M:%S.%f000Z")


Carrier = Callable[[float, int, str], str]
CARRIERS: dict[str, Carrier] = {
    "kubectl": lambda s, r, text: f"{iso(s)} {text}",
    "kubectl --prefix": lambda s, r, text: f"[pod/llm-0/trainer] {iso(s)} {text}",
    "cri": lambda s, r, text: f"{iso(s)} stdout F {text}",
    "docker": lambda s, r, text: json.dumps({"log": text + "\n", "stream": "stdout", "time": iso(s)}),
    "gke": lambda s, r, text: json.dumps({"textPayload": text, "timestamp": iso(s), "insertId": "x"}),
    "gke, json": lambda s, r, text: json.dumps({"jsonPayload": {"message": text}, "timestamp": iso(s)}),
    "stern": lambda s, r, text: f"\x1b[92mllm-0\x1b[0m \x1b[33mtrainer\x1b[0m {iso(s)} {text}",
    "syslog": lambda s, r, text: f"{clock(s, '%b  1 %H:%M:%S')} n1 train[1{r}]: {text}",
    "journald": lambda s, r, text: json.dumps(
        {"__REALTIME_TIMESTAMP": str(1788256800000000 + int(s * 1e6)),
         "MESSAGE": text, "_HOSTNAME": "n1", "_PID": f"1{r}"}),
    "cloudwatch": lambda s, r, text: f"{clock(s, '%Y-%m-%dT%H:%M:%S')}+00:00 llm/n1/abc {text}",
    "ts": lambda s, r, text: f"{clock(s, '%b %d %H:%M:%S')} {text}",
    "ts -s": lambda s, r, text: f"{clock(s, '%Y-%m-%d %H:%M:%S.%f')} {text}",
    "srun --label": lambda s, r, text: f"{r}: {iso(s)} {text}",
    "srun --label, times first": lambda s, r, text: f"{iso(s)} {r}: {text}",
    "mpirun": lambda s, r, text: f"[1,mpirank:{r},algo-1]<stdout>:{iso(s)} {text}",
    "mpirun, times first": lambda s, r, text: f"{iso(s)} [1,{r}]<stdout>:{text}",
    "torchx": lambda s, r, text: f"trainer/0 {iso(s)} [default{r}]:{text}",
    "torchrun": lambda s, r, text: f"{iso(s)} [rank{r}]:{text}",
    "torchrun, local": lambda s, r, text: f"{iso(s)} [default{r}]:{text}",
    "actors of ray": lambda s, r, text: f"{iso(s)} (RayTrainWorker pid=1{r}, ip=10.0.0.1) {text}",
    "actors of ray, times behind": lambda s, r, text: f"(RayTrainWorker pid=1{r}, ip=10.0.0.1) {iso(s)} {text}",
    "ray, json": lambda s, r, text: json.dumps({"asctime": clock(s, "%Y-%m-%d %H:%M:%S,000"), "message": text}),
    "fluent-bit": lambda s, r, text: json.dumps({"time": iso(s), "log": text, "kubernetes": {"pod_name": "llm-0"}}),
}  # fmt: skip


def start(program: str, carrier: str, ending: str) -> str:
    lines: list[tuple[float, int, str]] = []
    for line in PROGRAMS[program][0].split("\n"):
        head, _, text = line.strip().partition(" ")
        seconds = float(head.lstrip("*"))
        own = {"t": clock(seconds, "%Y-%m-%d %H:%M:%S,000"), "d": clock(seconds, "%Y-%m-%d %H:%M:%S")}
        lines += [(seconds, r, text.format(r=r, **own)) for r in ((0,) if head[0] == "*" else (0, 1))]
    return "".join(CARRIERS[carrier](s, r, text.replace("\\r", "\r")) + ending for s, r, text in lines)


@pytest.mark.parametrize(("program", "carrier"), list(itertools.product(PROGRAMS, CARRIERS)))
def test_the_stages_of_a_program_behind_a_carrier(program: str, carrier: str) -> None:
    for ending in ("\n", "\r\n"):
        source = logs.Source(
            start(program, carrier, ending).split("\n"), "n1", written=BASE + datetime.timedelta(days=1)
        )
        found = logs.extract([source], logs.patterns(), job="j", zone=datetime.UTC)
        report = analysis.analyse(events.parse(msgspec.json.encode(event) + b"\n" for event in found.events))
        got = {one.stage: round(one.max, 3) for one in report.stages if one.max is not None}
        assert got == PROGRAMS[program][1]
        assert report.startup_seconds is not None
        assert report.started_ns / 1e9 + report.startup_seconds == BASE.timestamp() + 9


def two(form: str) -> list[str]:
    """A line that begins the first step, and one 5 s later that ends it."""
    return [form.format(n=n, text=text) for n, text in ((0, RUN), (5, "{'loss': 2.3}"))]


def agent(seconds: int, text: str) -> str:
    return f"I0901 10:00:0{seconds}.000000 1 torch/distributed/elastic/agent/server/api.py:677] [default] {text}"


def ranked(seconds: int, form: str, *ranks: int) -> list[str]:
    return [f"{iso(seconds)} {form.format(r=r)}" for r in ranks]


RUN = "***** Running training *****"
AGENT = [agent(0, "Rendezvous'ing worker group"), agent(1, "Starting worker group")]
MEMBER, EPOCH = (
    "Initializing distributed: GLOBAL_RANK: 0, MEMBER: 1/2",
    "Epoch 0:   2%|▏  | 1/49 [00:03<02:30,  3.10s/it]",
)
ALL = "All distributed processes registered. Starting with 2 processes"
FIRST = {(None, "first_step"): 5.0}
MEMBERS = ranked(0, "[rank{r}]:" + MEMBER, 0, 1, 2)
DIST_INIT: dict[tuple[int | None, str], float | None] = {(r, "dist_init"): 2 for r in range(3)}
MIXED: dict[str, tuple[list[str], dict[tuple[int | None, str], float | None]]] = {
    "journald, short-precise": (two("Sep 01 10:00:0{n}.123456 n1 train[12]: {text}"), FIRST),
    "journald, short-full": (two("Tue 2026-09-01 10:00:0{n} UTC n1 train[12]: {text}"), FIRST),
    "azure": (two("2026-09-01T10:00:0{n}.1234567Z {text}"), FIRST),
    "mpirun, --timestamp-output": (two("Tue Sep  1 10:00:0{n} 2026<stdout>:{text}"), FIRST),
    "horovod": (two("[3]<stdout>:2026-09-01 10:00:0{n} {text}"), {(3, "first_step"): 5.0}),
    "skypilot": (two("(worker1, rank=1, pid=123, ip=10.0.0.2) 2026-09-01 10:00:0{n} {text}"), FIRST),
    "skypilot, head": (two("(head, rank=0, pid=123) 2026-09-01 10:00:0{n} {text}"), FIRST),
    "nemo-run": (two("trainer/0 [default3]:[NeMo I 2026-09-01 10:00:0{n} nemo:1] {text}"), {(3, "first_step"): 5.0}),
    "loki": (two('{{"line": "{text}", "timestamp": "178825680{n}000000000"}}'), FIRST),
    "a line behind a bar": (
        [f"2026-09-01 10:00:02 | INFO | x | {RUN}",
         "  3%|▎ | 1/32 [00:23<12:16, 23.76s/it]2026-09-01 10:00:07 | INFO | r | step 0 | epoch 0 | loss 12"],
        FIRST,
    ),
    "deepspeed behind a bar": (
        [f"[2026-09-01 10:00:02,000] [INFO] [x] {RUN}",
         "8%|██ | 1/24 [00:05<20:27, 3s/it][2026-09-01 10:00:07,000] [INFO] [x] [Rank 0] step=1, skipped=0, lr=[0.1]"],
        FIRST,
    ),
    "an agent before ranks": (
        [*AGENT, *ranked(4, "[RANK:{r}] Starting trainer...", 0, 1), *ranked(9, "{{'loss': 2.3}}", 0)],
        {(None, "rendezvous"): 1, (None, "import"): 3, (0, "first_step"): 5, (1, "first_step"): 5},
    ),
    "rank 0 speaks for all": (
        [*AGENT, *ranked(3, "[rank{r}]:" + MEMBER, 0, 1), *ranked(5, "[rank0]:" + ALL, 0),
         *ranked(9, "[rank0]:" + EPOCH, 0)],
        {(None, "rendezvous"): 1, (None, "import"): 2, (0, "dist_init"): 2, (1, "dist_init"): 2,
         (0, "model_init"): 4, (0, "first_step"): 0},
    ),
    "rank 0 speaks for another node": (
        [*ranked(0, "[pod/llm-{r}/t] [rank{r}]:" + MEMBER, 0, 8), *ranked(5, "[pod/llm-0/t] [rank0]:" + ALL, 0),
         *ranked(9, "[pod/llm-0/t] [rank0]:" + EPOCH, 0)],
        {(0, "dist_init"): 5, (8, "dist_init"): 5, (0, "model_init"): 4, (0, "first_step"): 0},
    ),
    "nobody's loss of two nodes": (
        [*ranked(4, "[RANK:{r}] Starting trainer...", *range(16)), *ranked(9, "{{'loss': 2.3}}", 0)],
        {(r, "first_step"): 5 for r in range(16)},
    ),
    "ranks, then all": (
        [*ranked(0, "[RANK:{r}] loading model and peft_config...", 0), *ranked(4, RUN, 0),
         *ranked(9, "{{'loss': 2.3}}", 0)],
        {(0, "model_init"): 4, (None, "first_step"): 5},
    ),
    "all, then ranks": (
        [*MEMBERS, *ranked(2, RUN, 0), *ranked(5, "[rank{r}]:{{'loss': 2.3}}", 0, 1, 2)],
        {**DIST_INIT, (None, "first_step"): 3, (0, "first_step"): 3, (1, "first_step"): 3, (2, "first_step"): 3},
    ),
    "all, then a rank that was not seen": (
        [*ranked(2, RUN, 0), *ranked(5, "[rank{r}]:{{'loss': 2.3}}", 0)],
        {(None, "first_step"): 3, (0, "first_step"): 3},
    ),
    "all, then one for all": (
        [*MEMBERS, *ranked(2, RUN, 0), *ranked(5, "{{'loss': 2.3}}", 0), *ranked(9, "[rank{r}]:{{'loss': 2.3}}", 0, 1)],
        {**DIST_INIT, (None, "first_step"): 3},
    ),
    "all, then all but one that hangs": (
        [*MEMBERS, *ranked(2, RUN, 0), *ranked(5, "[rank{r}]:{{'loss': 2.3}}", 0, 1)],
        {**DIST_INIT, (None, "first_step"): None, (0, "first_step"): 3, (1, "first_step"): 3},
    ),
    "a rank that hangs where others step": (
        [*ranked(0, "[rank{r}]:" + RUN, 0, 1, 2), *ranked(5, "[rank{r}]:{{'loss': 2.3}}", 0, 1)],
        {(0, "first_step"): 5, (1, "first_step"): 5, (2, "first_step"): None},
    ),
    "all hang": (ranked(0, "[rank{r}]:" + RUN, 0, 1), {(0, "first_step"): None, (1, "first_step"): None}),
}  # fmt: skip


@pytest.mark.parametrize("shape", MIXED)
def test_what_speaks_for_whom(shape: str) -> None:
    lines, expected = MIXED[shape]
    source = logs.Source(lines, "n1", written=WRITTEN)
    found = logs.extract([source], logs.patterns(), job="j", ranks_per_node=8, zone=datetime.UTC)
    log = events.parse(msgspec.json.encode(event) + b"\n" for event in found.events)
    assert {(s.rank, s.stage): s.duration.ns / 1e9 if s.duration else None for s in log.spans} == expected


def test_a_line_without_a_rank_is_one_thing_of_all_ranks() -> None:
    """However often nobody's lines change the stage of 2,000 ranks: two events a rank, and two a line."""
    lines = ranked(0, "[rank{r}]:" + MEMBER, *range(2000))
    for seconds in range(200):
        stage = RUN if seconds % 2 else "Restoring states from the checkpoint path at /c"
        lines += [f"{iso(seconds + 1)} {stage}", f"{iso(seconds + 1.5)} [rank7]:{ALL}"]
    found = logs.extract([logs.Source(lines, "n1", written=WRITTEN)], logs.patterns(), job="j", zone=datetime.UTC)
    assert 4000 <= len(found.events) <= 4000 + 2 * 400


# Lines as issues, examples and the sources of programs have them, behind kubectl's times where they have none.
def shown(*lines: tuple[float, str]) -> list[str]:
    return [f"{iso(seconds)} {text}" for seconds, text in lines]


def composer(seconds: float, text: str, *ranks: int) -> list[tuple[float, str]]:
    own = clock(seconds, "%Y-%m-%d %H:%M:%S,000")
    return [(seconds, f"{own}: rank{r}[7{r}][MainThread]: INFO: {text}") for r in ranks or (0,)]


def titan(seconds: float, text: str) -> tuple[float, str]:
    return seconds, f"[rank0]:[titan] {clock(seconds, '%Y-%m-%d %H:%M:%S,000')} - root - INFO - {text}"


def nanotron(seconds: float, text: str) -> tuple[float, str]:
    return seconds, f"{clock(seconds, '%m/%d/%Y %H:%M:%S')} [INFO|DP=0|PP=0|TP=0|ip-26-0-160-225]: {text}"


def paddle(seconds: float, text: str) -> tuple[float, str]:
    return seconds, f"[{clock(seconds, '%Y-%m-%d %H:%M:%S,000')}] [    INFO] - {text}"


ZERO, ONE = "0%|          | 0/250 [00:00<?, ?it/s]", "0%|          | 1/250 [00:05<22:49,  5.50s/it, loss=1.44]"
STEP = "step:{n} - actor/pg_loss:np.float64(0.1) - training/global_step:{n} - timing_s/step:92.4"
BATCH = "Train time/epoch: 0"
FIRST_BATCH = "INFO :: First batch loaded in 0.4s, starting first train step (includes JIT compilation)..."
LINES = ((0, RUN), (5, "{'loss': 2.3}"))
SWIFT = "'grad_norm': '0.8901', 'token_acc': '0.921', 'global_step/max_steps': '1/60', 'elapsed_time': '43s'}"
BRIDGE = " iteration       10/      10 | consumed samples:         5120 | elapsed time per iteration (ms): 4647.8 |"
FRESH: dict[str, tuple[list[str], dict[tuple[str, int | None, str], float | None]]] = {
    "llm-foundry": (
        shown(*composer(1, "__main__: Building train loader...", 0, 1),
              *composer(3, "__main__: Building eval loader..."),
              *composer(4, "__main__: Initializing model...", 0, 1),
              *composer(8, "__main__: Building trainer...", 0, 1),
              *composer(10, "__main__: Starting training...", 0, 1),
              *composer(10, "composer.trainer.trainer: Using precision Precision.AMP_BF16", 0, 1),
              (10, "Config:"), (15, "[batch=1/300000000]:"), (15, f"\t {BATCH}"), (20, "[batch=2/300000000]:")),
        {("n1", r, stage): took for r in (0, 1)
         for stage, took in (("data_loader_init", 3.0), ("model_init", 6.0), ("first_step", 5.0))},
    ),
    "llm-foundry, by epochs, behind srun": (
        [f"0: {line}" for line in shown(
            *composer(10, "llmfoundry.command_utils.train: Starting training..."), (15, "[epoch=1][batch=1/5]:"))],
        {("n1", 0, "first_step"): 5},
    ),
    "llm-foundry of 2023, by tokens": (
        shown((9, "Starting training..."), *composer(10, "composer.trainer.trainer: Using precision amp_bf16"),
              (15, "[token=4096/2000000000]:")), {("n1", 0, "first_step"): 5},
    ),
    "somebody's own words": (
        shown((1, "INFO: train: Starting training..."), (2, "Starting training..."), (10, RUN), (15, "{'loss': 2.3}")),
        {("n1", None, "first_step"): 5},
    ),
    "composer": (
        shown(*composer(10, "composer.trainer.trainer: Using precision Precision.FP32"),
              (10, "[Eval batch=1/3] Eval on eval data"), (15, "[sample=32/640]:")), {("n1", 0, "first_step"): 5},
    ),
    "composer, a checkpoint": (
        shown(*composer(2, "llmfoundry.command_utils.train: Initializing model..."),
              *composer(4, "composer.trainer.trainer: Loading checkpoint from /c/ep0-ba10-rank0.pt"),
              *composer(6, "composer.trainer.trainer: Setting seed to 17"),
              *composer(10, "llmfoundry.command_utils.train: Starting training..."), (15, "[batch=11/40]:")),
        {("n1", 0, "model_init"): 2, ("n1", 0, "checkpoint_load"): 2, ("n1", 0, "first_step"): 5},
    ),
    "composer, a bar": (
        shown(*composer(10, "composer.trainer.trainer: Using precision Precision.FP32"),
              (10, "train          Epoch   0:    0%|               | 0/625 [00:00<?, ?ba/s]"),
              (15, "train          Epoch   0:    0%|         | 1/625 [00:05<52:00,  5.00s/ba, loss/train/total=7.1]")),
        {("n1", 0, "first_step"): 5},
    ),
    "colossalai": (
        shown((2, "[09/01/26 10:00:02] INFO     colossalai - colossalai - INFO:"),
              (2, "                             es/colossalai/initialize.py:69 launch"),
              (2, "                    INFO     colossalai - colossalai - INFO: Distributed"),
              (2, "                             environment is initialized, world size: 2"),
              (10, f"Epoch [1/80]:   {ZERO}"), (15.5, f"Epoch [1/80]:   {ONE}")),
        {("n1", None, "model_init"): 8, ("n1", None, "first_step"): 5.5},
    ),
    "colossalai, steps": (
        shown((2, "INFO     colossalai - colossalai - INFO: Distributed environment is initialized, world size: 8"),
              (10, f"Step:   {ZERO}"), (15.5, f"Step:   {ONE}")),
        {("n1", None, "model_init"): 8, ("n1", None, "first_step"): 5.5},
    ),
    "colossalai of 2022": (
        shown((10, f"[Epoch 0 / Train]:   {ZERO}"), (15.5, f"[Epoch 0 / Train]:   {ONE}")),
        {("n1", None, "first_step"): 5.5},
    ),
    "open-sora": (
        shown((10, "[2026-09-01 10:00:10] Beginning epoch 0..."),
              (10, f"Epoch 0:   {ZERO}"), (15.5, f"Epoch 0:   {ONE}")),
        {("n1", None, "first_step"): 5.5},
    ),
    "torchtitan of November 2025": (
        shown(titan(0, "Starting job: Llama 3 debug training"),
              titan(2, "Building 1-D device mesh with ['dp_shard'], [8]"),
              titan(2, "[GC] Initial GC collection took 0.00 seconds"), (2, "[rank0]:NCCL version 2.27.5+cuda12.9"),
              titan(5, "Building llama3 debugmodel with TransformerModelArgs(dim=256, n_layers=6)"),
              titan(5, "Model llama3 debugmodel size: 6,163,712 total parameters"),
              titan(6, "Trainer is initialized with local batch size 8, global batch size 64"),
              titan(6, "Training starts at step 1"),
              titan(9, "step:  1  loss:  8.0277  grad_norm:  1.4604  memory:  1.21GiB(0.86%)")),
        {("n1", 0, "dist_init"): 5, ("n1", 0, "model_init"): 1, ("n1", 0, "first_step"): 3},
    ),
    "torchtitan of March 2026, a checkpoint": (
        shown(titan(0, "Starting job: Llama 3 debug training"),
              titan(5, "Building llama3 debugmodel"),
              titan(6, "Loading the checkpoint from ./outputs/checkpoint/step-10."),
              titan(8, "Finished loading the checkpoint in 2.00 seconds."),
              titan(9, "Training starts at step 11"), titan(12, "step: 11  loss:  3.0277  grad_norm:  1.4604")),
        {("n1", 0, "dist_init"): 5, ("n1", 0, "model_init"): 1, ("n1", 0, "checkpoint_load"): 2,
         ("n1", 0, "first_step"): 3},
    ),
    "torchtitan 0.3": (
        shown(titan(0, "torchtitan version: 0.3.0 (0.0.0 means __version__ is not defined correctly)."),
              titan(1, "Building device mesh with parallelism: pp=1, dp_replicate=1, dp_shard=8, cp=1, tp=1, ep=1"),
              titan(1, "Successfully created meshes with active dimensions: ['batch', 'loss', 'fsdp']"),
              titan(5, "Building llama3 debugmodel"), titan(6, "No checkpoint was provided, this is a fresh start."),
              titan(6, "Training starts at step 1"), titan(9, "step:  1  loss:  8.02771  grad_norm:  1.4604")),
        {("n1", 0, "dist_init"): 1, ("n1", 0, "model_init"): 5, ("n1", 0, "first_step"): 3},
    ),
    "maxtext": (
        shown((0, "Attempting to initialize the jax distributed system for GPU backend..."),
              (1, "I0901 10:00:01.401081 14058256 distributed.py:119] Connecting to JAX distributed service on h:1"),
              (5, "Jax distributed system initialized on GPU!"), (20, "number parameters: 298.786 billion"),
              (90, "completed step: 0, seconds: 44.923, TFLOP/s/device: 17.022, loss: 12.038"),
              (91, "completed step: 1, seconds: 0.319, TFLOP/s/device: 2400.734, loss: 12.038")),
        {("n1", None, "dist_init"): 5, ("n1", None, "first_step"): 44.923},
    ),
    "maxtext, its metric logger": (
        ["I0901 10:01:00 metric_logger.py:181] completed step: 0, seconds: 56.766, TFLOP/s/device: 29.7, loss: 12.26"],
        {("n1", None, "first_step"): 56.766},
    ),
    "maxdiffusion": (
        shown((10, "***** Running training *****"), (160, "completed step: 0, seconds: 142.395, TFLOP/s/device: 34.3")),
        {("n1", None, "first_step"): 150},
    ),
    "megatron-bridge, each tenth step": (
        shown((10, "Training ..."), (10, "Setting rerun_state_machine.current_iteration to 0..."),
              (11, "> setting tensorboard ..."), (57, "Step Time : 4.65s GPU utilization: 598.5TFLOP/s/GPU"),
              (57, f" [2026-09-01 10:00:57]{BRIDGE}")), {("n1", None, "first_step"): 47},
    ),
    "megatron-bridge of 2026": (
        shown((10, "Starting training loop at iteration 0"),
              (57, f" [2026-09-01 10:00:57.500]{BRIDGE}")), {("n1", None, "first_step"): 47},
    ),
    "nanotron": (
        shown(nanotron(1, "Building model.."), nanotron(2, "Setting PP block ranks..."),
              nanotron(4, "[Optimizer Building] Using LearningRateForSP as learning rate"),
              nanotron(5, "[Start training] datetime: 2026-09-01 10:00:05.889276 | mbs: 2 | grad_accum: 1"),
              nanotron(9, "iteration: 1 / 1000 | consumed_tokens: 640 | lm_loss: 9.63")),
        {("n1", None, "model_init"): 3, ("n1", None, "optimizer_init"): 1, ("n1", None, "first_step"): 4},
    ),
    "levanter": (
        shown((10, f"2026-09-01T10:00:10 - 0 - levanter.trainer - trainer.py:560 - {FIRST_BATCH}"),
              (11, "Tracing train_step for jaxpr..."), (80, "Progress on:train 0.00it/850it rate:-"),
              (89, "Progress on:train 1.00it/850it rate:79.0s/it"),
              (4000, "First train step completed in 79.0s (step 0)")),
        {("n1", None, "first_step"): 79},
    ),
    "levanter without a bar": (
        shown((10, FIRST_BATCH), (63, "INFO :: First train step completed in 53.0s (step 0)")),
        {("n1", None, "first_step"): 53},
    ),
    "paddle": (
        shown(paddle(1, "Starting training from resume_from_checkpoint : /c/checkpoint-10"),
              paddle(4, "[timelog] checkpoint loading time: 3.00s (2026-09-01 10:00:04) "),
              paddle(4, "***** Running training *****"),
              paddle(9, "loss: 12.05887604, learning_rate: 3e-06, global_step: 1, current_memory_allocated: 7.54")),
        {("n1", None, "checkpoint_load"): 3, ("n1", None, "first_step"): 5},
    ),
    "paddle, its second line": (
        shown((4, "[    INFO] - ***** Running training *****"),
              (9, "[    INFO] - loss: nan, learning_rate: 3e-06, global_step: 1, interval_runtime: 4.8704")),
        {("n1", None, "first_step"): 5},
    ),
    "ms-swift": (
        shown((4, "[INFO:swift] The logging file will be saved in: /x/output/v6-20260528-021630/logging.jsonl"),
              (5, "Train:   0%|          | 0/60 [00:00<?, ?it/s][INFO:swift] use_logits_to_keep: True"),
              (47.5, f"Train:   2%|▏         | 1/60 [00:42<41:47, 42.51s/it]{{'loss': '0.3713', {SWIFT}")),
        {("n1", None, "model_init"): 1, ("n1", None, "first_step"): 42.5},
    ),
    "verl": (
        shown((1, "(TaskRunner pid=42) (\"Initial validation metrics: {'val-core/aime/acc/mean@30': 0.1856}\")"),
              (1, "(TaskRunner pid=42) step:0 - val-core/aime/acc/mean@30:np.float64(0.1856)"),
              (5, f"(TaskRunner pid=42) Training Progress:   {ZERO}"),
              (97.4, f"(TaskRunner pid=42) {STEP.format(n=1)}")),
        {("n1", None, "first_step"): 92.4},
    ),
    "verl without its bar": (
        shown((1, "(TaskRunner pid=42) step:0 - val-core/aime/acc/mean@30:0.1856"),
              (97.4, f"(TaskRunner pid=42) {STEP.format(n=1)}"), (190, f"(TaskRunner pid=42) {STEP.format(n=2)}")),
        {("n1", None, "first_step"): 92.4},
    ),
    "verl, fine-tuning": (
        shown((5, f"Epoch 1/1:   {ZERO}"), (10.5, f"Epoch 1/1:   {ONE}step:1 - train/loss:0.5 - train/lr(1e-3):0.01")),
        {("n1", None, "first_step"): 5.5},
    ),
    "skypilot": (
        [f"\x1b[36m({who})\x1b[0m 2026-09-01 10:00:0{n} - INFO - {text}" for n, text in LINES
         for who in ("head, rank=0, pid=17894", "worker1, rank=1, pid=15406, ip=10.164.0.57")],
        {("n1", None, "first_step"): 5, ("10.164.0.57", None, "first_step"): 5},
    ),
    "skypilot, a task": (
        [f"\x1b[36m(sky-cmd, pid=7431)\x1b[0m 2026-09-01 10:00:0{n} {text}" for n, text in LINES],
        {("n1", None, "first_step"): 5},
    ),
    "sagemaker, a notebook": (
        [f"#033[34m2026-09-01 10:00:0{n},123 - INFO - trainer - {text}#033[0m"
         for n, text in LINES], {("n1", None, "first_step"): 5},
    ),
    "sagemaker, bars of mpirun": (
        [f"2026-09-01T10:00:0{n}.123000+00:00 llm/algo-{r + 1}-178 [1,mpirank:{r},algo-{r + 1}]<stderr>:{text}"
         for n, text in ((0, RUN), (5, f"#015 {ONE}")) for r in (0, 1)],
        {(f"algo-{r + 1}", r, "first_step"): 5 for r in (0, 1)},
    ),
    "vertex, read": (
        [json.dumps({"jsonPayload": {"levelname": "INFO", "message": text + "\n"}, "labels": {"tag_name": "w"},
                     "resource": {"labels": {"job_id": "1", "task_name": pool}, "type": "ml_job"}, "timestamp": iso(n)})
         for n, text in LINES for pool in ("workerpool0-0", "workerpool1-3")],
        {(pool, None, "first_step"): 5 for pool in ("workerpool0-0", "workerpool1-3")},
    ),
    "vertex, streamed": (
        [f"ERROR\t2026-09-01 05:00:0{n} -0500\tworkerpool1-0\t{text}" for n, text in LINES],
        {("workerpool1-0", None, "first_step"): 5},
    ),
    "azureml, a driver's log": (
        ["[2026-09-01T09:59:59.123456] Entering context manager injector.",
         *(f"2026-09-01 10:00:0{n},123:INFO:transformers.trainer:{text}" for n, text in LINES)],
        {("n1", None, "first_step"): 5},
    ),
}  # fmt: skip


@pytest.mark.parametrize("shape", FRESH)
def test_programs_and_carriers_of_today(shape: str) -> None:
    lines, expected = FRESH[shape]
    found = logs.extract([logs.Source(lines, "n1", written=WRITTEN)], logs.patterns(), job="j", zone=datetime.UTC)
    log = events.parse(msgspec.json.encode(event) + b"\n" for event in found.events)
    got = {(s.node, s.rank, s.stage): s.duration.ns / 1e9 if s.duration else None for s in log.spans}
    assert {key: took and round(took, 3) for key, took in got.items()} == expected


def later(base: float, *lines: tuple[float, str]) -> list[str]:
    return shown(*((base + seconds, text) for seconds, text in lines))


MEGATRON_FIRST = (
    (0, "> initializing torch distributed ..."), (2, "[after megatron is initialized] datetime: x"),
    (3, " loading distributed checkpoint from /ckpt at iteration 7"),
    (5, " successfully loaded checkpoint from /ckpt at iteration 7"),
    (7, "[before the start of training step] datetime: x"),
)  # fmt: skip
MEGATRON_LAST = ((9, " iteration        8/    5000 | consumed samples:         4004 | lm loss: 1.0E+01 |"),)
MEGATRON: dict[str, float | None] = {"dist_init": 2.0, "model_init": 3.0, "checkpoint_load": 2.0, "first_step": 2.0}
TITAN = [titan(0, "Starting job: Llama 3 8B training"), titan(3, "Building llama3 8B with {"),
         titan(5, "Loading the checkpoint from ./c/step-10."), titan(9, "Training starts at step 11"),
         titan(12, "step: 11  loss:  3.2")]  # fmt: skip
NEMO = tuple(
    (seconds, f"[NeMo I 2026-09-01 10:00:00 nemo_logging:393] {text}")
    for seconds, text in ((0, MEMBER), (5, ALL), (20, "Training epoch 0, iteration 0/99 | lr: 1e-07 | global_step: 0"))
)
CANCELLED = "slurmstepd: error: *** JOB 48211 ON n1 CANCELLED AT 2026-09-01T10:00:04 DUE TO JOB REQUEUE ***"


TRAINER = ((4, RUN), (9, "{'loss': 2.3}"))
AGAIN = (*shown(*TRAINER), *later(100, *TRAINER))
TRAINED = "{'train_runtime': 55.1, 'train_loss': 2.1, 'epoch': 1.0}"
TORCH = "Initializing TorchBackend in DeepSpeed with backend nccl"
ENGINE = (
    (0, f"[INFO] [comm.py:652:init_distributed] {TORCH}"),
    (2, "[INFO] [logging.py:107:log_dist] [Rank 0] DeepSpeed info: version=0.16.4, git-hash=unknown"),
    (9, "[INFO] [logging.py:107:log_dist] [Rank 0] step=1, skipped=0, lr=[1e-05], mom=[(0.9, 0.95)]"),
)


def elastic(seconds: float, text: str) -> str:
    return f"W{clock(seconds, '%m%d %H:%M:%S.000000')} 7 torch/distributed/elastic/multiprocessing/api.py:900] {text}"


SENT, CLOSED = "Sending process 8 closing signal SIGTERM", "Closing process 8 via signal SIGTERM"
FAILED = "failed (exitcode: -9) local_rank: 0 (pid: 7) of binary: /usr/bin/python3"
KILLED = "[INFO] [launch.py:319:sigkill_handler] Killing subprocess 77"
Starts = dict[tuple[str, int | None, int, str], float | None]


def of(cycle: int, stages: dict[str, float | None], node: str = "n1", rank: int | None = None) -> Starts:
    return {(node, rank, cycle, stage): took for stage, took in stages.items()}


STARTS: dict[str, tuple[dict[str, list[str]], Starts]] = {
    "rank 0 begins, the last rank of another log steps": (
        {"n1": shown(*MEGATRON_FIRST), "n2": shown(*MEGATRON_LAST)}, of(0, MEGATRON),
    ),
    "rank 0 begins, the last rank of another pod steps": (
        {"all": [f"[pod/llm-{pod}/t] {line}" for pod, lines in ((0, MEGATRON_FIRST), (3, MEGATRON_LAST))
                 for line in shown(*lines)]}, of(0, MEGATRON, "llm-0"),
    ),
    "rank 0 begins, the last rank steps": (
        {"n1": [line.replace("Z ", f"Z [default{rank}]:", 1)
                for rank, lines in ((0, MEGATRON_FIRST), (7, MEGATRON_LAST)) for line in shown(*lines)]},
        of(0, MEGATRON, rank=0),
    ),
    "a step of an earlier run of another node": (
        {"n1": later(60, *MEGATRON_FIRST), "n2": shown(*MEGATRON_LAST)}, of(0, {**MEGATRON, "first_step": None}),
    ),
    "two nodes say that they train, one what it lost": (
        {"n1": shown((4, RUN), (9, "{'loss': 2.3}")), "n2": [f"2026-09-01T19:00:05+09:00 {RUN}"]},
        {**of(0, {"first_step": 5}), **of(0, {"first_step": 4}, "n2")},
    ),
    "requeued while it loads": (
        {"n1": [*shown(*MEGATRON_FIRST[:3]), CANCELLED, *later(600, *MEGATRON_FIRST, *MEGATRON_LAST)]},
        {**of(0, {"dist_init": 2, "model_init": 1, "checkpoint_load": 1}), **of(1, MEGATRON)},
    ),
    "requeued in its first step, which the last rank of another log ends": (
        {"n1": [*shown(*MEGATRON_FIRST), CANCELLED.replace("00:04", "00:08"), *later(600, *MEGATRON_FIRST)],
         "n2": later(600, *MEGATRON_LAST)},
        {**of(0, {**MEGATRON, "first_step": 1}), **of(1, MEGATRON)},
    ),
    "begun again in its first step, which the last rank of another log ends": (
        {"n1": [*shown(*MEGATRON_FIRST), *later(600, *MEGATRON_FIRST)], "n2": later(600, *MEGATRON_LAST)},
        {**of(0, {**MEGATRON, "first_step": None}), **of(1, MEGATRON)},
    ),
    "cancelled, and no more": (
        {"n1": [*shown(*MEGATRON_FIRST[:3]), CANCELLED]},
        of(0, {"dist_init": 2, "model_init": 1, "checkpoint_load": 1}),
    ),
    "begun again after its first step": (
        {"n1": [*shown(*MEGATRON_FIRST, *MEGATRON_LAST), *later(600, *MEGATRON_FIRST, *MEGATRON_LAST)]},
        {**of(0, MEGATRON), **of(1, MEGATRON)},
    ),
    "begun again without a word": (
        {"n1": [line for _, line in TITAN[:3]] + [line.replace("10:00:", "10:10:") for _, line in TITAN]},
        {**of(0, {"dist_init": 3, "model_init": 2, "checkpoint_load": None}, rank=0),
         **of(1, {"dist_init": 3, "model_init": 2, "checkpoint_load": 4, "first_step": 3}, rank=0)},
    ),
    "pods, begun again": (
        {"all": [f"[pod/llm-{pod}/t] {line}" for pod in (0, 1) for base in (0, 100) for line in later(base, *NEMO)]},
        {key: took for cycle in (0, 1) for pod in (0, 1)
         for key, took in of(cycle, {"dist_init": 5, "model_init": 15, "first_step": 0}, f"llm-{pod}").items()},
    ),
    "trainer, which torchrun starts again": (
        {"n1": [*AGAIN[:2], elastic(50, SENT), elastic(51, FAILED), *AGAIN[2:]]},
        {**of(0, {"first_step": 5}), **of(1, {"first_step": 5})},
    ),
    "trainer, which failed in its first step": (
        {"n1": [AGAIN[0], elastic(14, FAILED), *AGAIN[2:]]}, {**of(0, {"first_step": 10}), **of(1, {"first_step": 5})},
    ),
    "trainer, ended by torchrun of 2.6 in its first step": (
        {"n1": [AGAIN[0], elastic(14, CLOSED), elastic(15, CLOSED), *AGAIN[2:]]},
        {**of(0, {"first_step": 10}), **of(1, {"first_step": 5})},
    ),
    "trainer, of ranks": (
        {"n1": [line.replace("Z ", "Z [default0]:", 1) for line in AGAIN]},
        {**of(0, {"first_step": 5}, rank=0), **of(1, {"first_step": 5}, rank=0)},
    ),
    "trainer, of pods": (
        {"all": [f"[pod/llm-{pod}/t] {line}" for line in AGAIN for pod in (0, 1)]},
        {key: took for cycle in (0, 1) for pod in (0, 1)
         for key, took in of(cycle, {"first_step": 5}, f"llm-{pod}").items()},
    ),
    "trainer, begun again from its checkpoint": (
        {"n1": [*AGAIN[:2], *later(100, (1, "Loading model from /o/checkpoint-500."), *TRAINER)]},
        {**of(0, {"first_step": 5}), **of(1, {"checkpoint_load": 3, "first_step": 5})},
    ),
    "trainer, a second training of one process": (
        {"n1": [*AGAIN[:2], *shown((60, TRAINED), (61, "Loading model from /o/checkpoint-500.")), *AGAIN[2:]]},
        of(0, {"first_step": 5}),
    ),
    "trainer, killed in its second training": (
        {"n1": [*AGAIN[:2], *shown((60, TRAINED)), *AGAIN[2:], *later(200, *TRAINER)]},
        {**of(0, {"first_step": 5}), **of(1, {"first_step": 5})},
    ),
    "trainer with deepspeed": (
        {"n1": [line for base in (0, 100) for line in later(base, ENGINE[0], *TRAINER)]},
        {key: took for cycle in (0, 1) for key, took in of(cycle, {"dist_init": 4, "first_step": 5}).items()},
    ),
    "deepspeed, begun again": (
        {"n1": [line for base in (0, 100) for line in later(base, *ENGINE)]},
        {key: took for cycle in (0, 1)
         for key, took in of(cycle, {"dist_init": 2, "model_init": 7, "first_step": 0}).items()},
    ),
    "deepspeed, whose launcher ended it while it made its model": (
        {"n1": [*later(0, *ENGINE[:2]), *shown((12, KILLED), (13, KILLED)), *later(100, *ENGINE)]},
        {**of(0, {"dist_init": 2, "model_init": 10}), **of(1, {"dist_init": 2, "model_init": 7, "first_step": 0})},
    ),
    "killed in its first step": (
        {"n1": [*AGENT, *shown((4, RUN)), agent(6, "Rendezvous'ing worker group"), agent(7, "Starting worker group"),
                *shown((8, RUN), (9, "{'loss': 2.3}"))]},
        {**of(0, {"rendezvous": 1, "import": 3, "first_step": None}),
         **of(1, {"rendezvous": 1, "import": 1, "first_step": 1})},
    ),
    "ranks, begun again": (
        {"n1": [line for base in (0, 300)
                for seconds, text in ((1, "x: Building train loader..."), (2, "x: Initializing model..."))
                for _, line in composer(base + seconds, text, 0, 1)]},
        {key: took for cycle in (0, 1) for rank in (0, 1)
         for key, took in of(cycle, {"data_loader_init": 1, "model_init": None}, rank=rank).items()},
    ),
}  # fmt: skip


@pytest.mark.parametrize("shape", STARTS)
def test_starts_of_several_logs_and_several_starts_of_one(shape: str) -> None:
    given, expected = STARTS[shape]
    sources = [logs.Source(lines, node, written=WRITTEN, path=node) for node, lines in given.items()]
    found = logs.extract(sources, logs.patterns(), job="j", zone=datetime.UTC)
    log = events.parse(msgspec.json.encode(event) + b"\n" for event in found.events)
    got: Starts = {}
    for span in log.spans:
        key = (span.node, span.rank, span.cycle, span.stage)
        got[key] = (got.get(key) or 0) + span.duration.ns / 1e9 if span.duration else None
    assert got == expected
