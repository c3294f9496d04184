"""A small job of one program: ``startup.py PROGRAM TRUTH``; its clock at the end of its first step goes to TRUTH."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import time
from pathlib import Path

TRUTH = Path(sys.argv[2])


def told() -> None:
    """The first step has ended: the first call counts."""
    if not TRUTH.exists():
        TRUTH.write_text(repr(time.time()))


def trainer() -> None:
    import torch
    import transformers

    class Steps(transformers.TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            time.sleep(0.3)

        def on_step_end(self, *args, **kwargs):
            told()

    transformers.logging.set_verbosity_info()
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=16))
    data = [{"input_ids": torch.zeros(4, dtype=torch.long), "labels": torch.zeros(4, dtype=torch.long)}] * 40
    with tempfile.TemporaryDirectory() as folder:
        options = transformers.TrainingArguments(
            folder, max_steps=4, logging_steps=1, save_strategy="no", report_to=[], use_cpu=True
        )
        transformers.Trainer(model=model, args=options, train_dataset=data, callbacks=[Steps()]).train()


def lightning() -> None:
    import torch
    from lightning import pytorch as pl

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch, index):
            return self.layer(batch[0]).square().mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

        def on_train_batch_start(self, *args):
            time.sleep(0.3)

        def on_train_batch_end(self, *args):
            told()

    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(16, 4)), batch_size=4)
    bar = pl.callbacks.TQDMProgressBar(refresh_rate=1)
    options = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    pl.Trainer(
        max_epochs=1, accelerator="cpu", strategy="ddp", devices=1, callbacks=[bar], **options
    ).fit(Model(), data)  # fmt: skip


def titan() -> None:
    """A loop of its own, that says what torchtitan says."""
    import torch

    logging.basicConfig(format="[titan] %(asctime)s - root - %(levelname)s - %(message)s", level=logging.INFO)
    say = logging.getLogger().info
    say("Starting job: llama")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    say("Building llama debugmodel with LlamaModel")
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):  # Megatron: once for each chunk of the model
        for one in model.parameters():
            one.grad = torch.zeros_like(one)
        optimizer.step()
        optimizer.zero_grad()
    time.sleep(0.5)
    say("Training starts at step 1")
    for step in range(3):
        time.sleep(0.3)
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        told()
        say(f"step:  {step + 1}  loss:  8.13  memory:  1.41GiB")


def jax() -> None:
    """A loop of its own, that says what MaxText says."""
    import jax
    import jax.numpy as jnp
    import orbax.checkpoint

    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO, force=True)
    say = logging.getLogger("maxtext").info
    logging.getLogger("absl").setLevel(logging.ERROR)
    say("Starting JAX distributed service on 127.0.0.1")
    jax.distributed.initialize(f"127.0.0.1:{sys.argv[3]}", 1, 0)
    say("Jax distributed system initialized!")
    weights = {"w": jnp.ones((256, 256))}
    with tempfile.TemporaryDirectory() as folder:
        keeper = orbax.checkpoint.StandardCheckpointer()
        keeper.save(folder + "/one", weights)
        keeper.wait_until_finished()
        say("restoring from this run's directory")
        weights = keeper.restore(folder + "/one", weights)
        say("Finished restoring checkpoint")

    def loss(weights, data):
        return jnp.square(jnp.tanh(data @ weights["w"]) @ weights["w"]).mean()

    def train(weights, data):
        value, gradients = jax.value_and_grad(loss)(weights, data)
        return jax.tree.map(lambda one, change: one - 0.1 * change, weights, gradients), value

    step = jax.jit(train, donate_argnums=0)
    data = jnp.ones((4096, 256))
    step.lower(weights, data).compile().memory_analysis()  # as MaxText does, without a step
    time.sleep(0.5)
    for number in range(3):
        begun = time.time()
        weights, value = step(weights, data)
        value.block_until_ready()
        told()
        say(f"completed step: {number}, seconds: {time.time() - begun:.3f}, TFLOP/s/device: 1.0")


def deepspeed() -> None:
    """Two micro-batches a step, and an optimizer that ZeRO steps once to make its state."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[3], RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    import torch
    from deepspeed.utils.logging import set_log_level_from_string

    set_log_level_from_string("info")
    model = torch.nn.Linear(8, 1)
    options = {
        "train_batch_size": 8, "train_micro_batch_size_per_gpu": 4, "steps_per_print": 1, "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1},
    }  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters())
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=options)[0]
    data = torch.utils.data.DataLoader(torch.randn(32, 8, dtype=torch.bfloat16), batch_size=4)
    for number, batch in enumerate(data, 1):
        time.sleep(0.3)
        engine.backward(engine(batch).square().mean())
        engine.step()
        if number == 2:
            told()


def composer() -> None:
    import torch
    from composer import Callback, ComposerModel, Trainer

    class Model(ComposerModel):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def forward(self, batch):
            return self.layer(batch[0])

        def loss(self, outputs, batch):
            return outputs.square().mean()

    class Steps(Callback):
        def batch_start(self, *args):
            time.sleep(0.3)

        def batch_end(self, *args):
            told()

    model = Model()
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(16, 4)), batch_size=4)
    options = {"device": "cpu", "progress_bar": False, "log_to_console": True, "python_log_level": "info"}
    Trainer(
        model=model, train_dataloader=data, max_duration="4ba", console_log_interval="1ba", run_name="run",
        optimizers=torch.optim.AdamW(model.parameters()), callbacks=[Steps()], **options,
    ).fit()  # fmt: skip


PROGRAMS = {
    "trainer": trainer, "lightning": lightning, "titan": titan, "jax": jax, "deepspeed": deepspeed,
    "composer": composer,
}  # fmt: skip
PROGRAMS[sys.argv[1]]()
