"""The first training step of a small transformer under torch.compile; prints its seconds and those of processors.

With ``--part N`` it is another, smaller model for each N, as ranks of a pipeline have. ``--save FILE`` writes torch's
own archive of what was compiled (Mega-Cache) afterwards, ``--load FILE`` loads it at the begin of the step.
"""

import argparse
import json
import os
import time

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--part", type=int)
parser.add_argument("--save")
parser.add_argument("--load")
args = parser.parse_args()


class Block(torch.nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = torch.nn.LayerNorm(dim), torch.nn.LayerNorm(dim)
        self.qkv, self.out = torch.nn.Linear(dim, 3 * dim), torch.nn.Linear(dim, dim)
        self.up, self.down = torch.nn.Linear(dim, 2 * dim), torch.nn.Linear(2 * dim, dim)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, d))
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm2(x))))


torch.manual_seed(0)
if args.part is None:
    layers = [Block(64, 4), torch.nn.LayerNorm(64)]
else:
    wide = 64 + 16 * args.part
    layers = [torch.nn.Linear(64, wide), torch.nn.GELU(), torch.nn.Linear(wide, 64)]
model = torch.nn.Sequential(*layers, torch.nn.Linear(64, 256))
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
step = torch.compile(lambda x, y: torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten()))
x, y = torch.randn(2, 32, 64), torch.randint(0, 256, (2, 32))
began, cpu = time.perf_counter(), sum(os.times()[:4])
if args.load:
    with open(args.load, "rb") as file:
        torch.compiler.load_cache_artifacts(file.read())
step(x, y).backward()
optimizer.step()
print(json.dumps({"seconds": time.perf_counter() - began, "cpu": sum(os.times()[:4]) - cpu}))
if args.save:
    with open(args.save, "wb") as file:
        file.write(torch.compiler.save_cache_artifacts()[0])
