"""The demo's training job: a small Llama that resumes from a checkpoint and goes on training.

Nothing in it is special to bootseer but the spans around its initialisation. It prints one JSON line a step. With
``--save DIR`` it trains from scratch and writes the checkpoint that other starts resume.
"""

from __future__ import annotations

import argparse
import json
import os

from bootseer.profile.emit import span

parser = argparse.ArgumentParser()
parser.add_argument("--resume", help="folder with model.pt and optimizer.pt")
parser.add_argument("--save", help="folder to write them to, after --steps from scratch")
parser.add_argument("--steps", type=int, default=3)
parser.add_argument("--hidden", type=int, default=512)
parser.add_argument("--layers", type=int, default=8)
args = parser.parse_args()

with span("import"):
    import torch
    import torch.distributed as dist
    from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY, BATCH, LENGTH = 8192, 2, 64


def batch(step: int) -> torch.Tensor:
    """Token ids [BATCH, LENGTH] of one step: arithmetic progressions, so that there is something to learn."""
    generator = torch.Generator().manual_seed(step)
    first = torch.randint(0, 512, (BATCH, 1), generator=generator)
    return (first + torch.arange(LENGTH) * 3) % 509


with span("dist_init"):
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    dist.init_process_group("gloo", rank=0, world_size=1)
with span("model_init"):
    torch.manual_seed(7)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=args.hidden,
            intermediate_size=args.hidden * 4,
            num_hidden_layers=args.layers,
            num_attention_heads=8,
        )
    )
with span("optimizer_init"):
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
step = 0
if args.resume:
    with span("checkpoint_load"):
        model.load_state_dict(torch.load(os.path.join(args.resume, "model.pt"), weights_only=True))
        saved = torch.load(os.path.join(args.resume, "optimizer.pt"), weights_only=True)
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]


def train_step() -> None:
    tokens = batch(step)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    print(json.dumps({"step": step, "loss": round(loss.item(), 6)}), flush=True)


with span("first_step"):
    train_step()
for _ in range(args.steps - 1):
    step += 1
    train_step()

if args.save:
    os.makedirs(args.save, exist_ok=True)
    torch.save(model.state_dict(), os.path.join(args.save, "model.pt"))
    torch.save({"optimizer": optimizer.state_dict(), "step": step + 1}, os.path.join(args.save, "optimizer.pt"))
dist.destroy_process_group()
