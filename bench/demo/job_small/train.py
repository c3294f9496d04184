"""The small training job: least squares by gradient descent, standard library only, same interface as the full one."""

from __future__ import annotations

import argparse
import array
import json
import os
import random

from bootseer.profile.emit import span

parser = argparse.ArgumentParser()
parser.add_argument("--resume", help="folder with model.bin and optimizer.bin")
parser.add_argument("--save", help="folder to write them to, after --steps from scratch")
parser.add_argument("--steps", type=int, default=3)
args = parser.parse_args()

with span("import"):
    import networkx
    import tqdm
with span("model_init"):
    WIDTH, PADDING = 64, 1_000_000  # the padding makes the file large enough to be striped
    weights = array.array("d", [0.0] * WIDTH)
    step = 0
    assert networkx.__version__
    assert tqdm.__version__
if args.resume:
    with span("checkpoint_load"):
        with open(os.path.join(args.resume, "model.bin"), "rb") as file:
            saved = array.array("d")
            saved.frombytes(file.read())
        assert list(saved[WIDTH:]) == [float(n) for n in range(PADDING)], "the checkpoint came back changed"
        weights = saved[:WIDTH]
        with open(os.path.join(args.resume, "optimizer.bin"), "rb") as file:
            step = int(file.read())


def train_step() -> None:
    source = random.Random(step)
    rows = [[source.gauss(0, 1) for _ in range(WIDTH)] for _ in range(256)]
    errors = [sum(w * x for w, x in zip(weights, row, strict=True)) - sum(row) for row in rows]
    for n in range(WIDTH):
        weights[n] -= 0.2 * sum(e * row[n] for e, row in zip(errors, rows, strict=True)) / len(rows)
    print(json.dumps({"step": step, "loss": round(sum(e * e for e in errors) / len(rows), 6)}), flush=True)


with span("first_step"):
    train_step()
for _ in range(args.steps - 1):
    step += 1
    train_step()

if args.save:
    os.makedirs(args.save, exist_ok=True)
    with open(os.path.join(args.save, "model.bin"), "wb") as out:
        out.write(weights.tobytes() + array.array("d", range(PADDING)).tobytes())
    with open(os.path.join(args.save, "optimizer.bin"), "wb") as out:
        out.write(b"%d" % (step + 1))
