"""The job of the emulated cluster: light, so that many nodes fit on one machine, with real imports and a checkpoint."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections.abc import Callable

try:
    from bootseer.profile import emit

    span: Callable[[str], contextlib.AbstractContextManager[object]] = emit.span
except ImportError:  # started without bootseer: the job runs just the same

    def span(stage: str) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()


os.environ["OPENBLAS_NUM_THREADS"] = "1"  # the nodes share the cores of this machine

parser = argparse.ArgumentParser()
parser.add_argument("--resume", help="folder with weights.npy and step")
parser.add_argument("--save", help="folder to write them to, after --steps from scratch")
parser.add_argument("--steps", type=int, default=3)
args = parser.parse_args()

with span("import"):
    import cv2  # of the environment
    import networkx
    import numpy
    import sympy  # of the image
    import tqdm

ROWS, COLUMNS = 4096, 1024  # 32 MiB

with span("model_init"):
    weights = numpy.random.default_rng(1).random((ROWS, COLUMNS))
    step = 0
    assert cv2.__version__
    assert networkx.__version__
    assert sympy.__version__
    assert tqdm.__version__
if args.resume:
    with span("checkpoint_load"):
        weights = numpy.load(os.path.join(args.resume, "weights.npy"))
        with open(os.path.join(args.resume, "step")) as file:
            step = int(file.read())


def train_step() -> None:
    global weights
    weights = weights * 0.99 + cv2.flip(weights, 0) * 0.01
    print(json.dumps({"step": step, "loss": round(float(weights[:64].mean()), 9)}), flush=True)


with span("first_step"):
    train_step()
for _ in range(args.steps - 1):
    step += 1
    train_step()

if args.save:
    os.makedirs(args.save, exist_ok=True)
    numpy.save(os.path.join(args.save, "weights.npy"), weights)
    with open(os.path.join(args.save, "step"), "w") as out:
        out.write(str(step + 1))
