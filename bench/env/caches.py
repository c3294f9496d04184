"""Compile caches: the first step of a small transformer under torch.compile, cold, restored, and warm on its node.

    scripts/bench caches [--quick] [--runs N] [--out report.json]

``cold``: `bootseer env run --cache` on an empty node with an empty store; ``restored``: on another empty node, from
that store; ``warm``: the same program alone, with a cache folder that it has filled before. Each compiles in one
process; seconds are those of the first step (forward, backward, optimizer), without the import; ``cpu`` those of it in
processors.
``large``: a cache of 2,000 files of 100 KB is restored on an empty node, until a program may start.
``capture``: what making the next generation costs: seconds of processors, and bytes stored when nothing is new.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import sys
import time
from pathlib import Path

from bench.common import invocation
from bench.common.figures import Figures, Say
from bench.common.invocation import Options, say
from bootseer.config import Config
from bootseer.demo.programs import BOOTSEER, run
from bootseer.demo.report import Report, Run
from bootseer.env import generation
from bootseer.env.generation import Cache
from bootseer.errors import BootseerError

_FILES, _BYTES = 2000, 100_000
_TRAIN = """
import json, os, time, torch
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
model = torch.nn.Sequential(Block(64, 4), torch.nn.LayerNorm(64), torch.nn.Linear(64, 256))
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
step = torch.compile(lambda x, y: torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten()))
x, y = torch.randn(2, 32, 64), torch.randint(0, 256, (2, 32))
began, cpu = time.perf_counter(), sum(os.times()[:4])
step(x, y).backward()
optimizer.step()
print(json.dumps({"seconds": time.perf_counter() - began, "cpu": sum(os.times()[:4]) - cpu}))
"""


class Bench:
    def __init__(self, options: Options, report: Report) -> None:
        self.report, self.work = report, options.work
        self.train = self.work / "train.py"
        self.train.write_text(_TRAIN)
        self.left = self.work / "left"

    def start(self, node: str, store: str, *argv: str) -> dict[str, float]:
        """The program's own answer."""
        here = self.work / node
        (here / "tmp").mkdir(parents=True, exist_ok=True)
        environ = {
            "BOOTSEER_CACHE_DIR": str(here / "cache"),
            "BOOTSEER_STATE_DIR": str(here / "state"),
            "BOOTSEER_STORE": str(self.work / store),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "TMPDIR": str(here / "tmp"),
        }
        if node == "left":
            environ |= {"TORCHINDUCTOR_CACHE_DIR": str(here), "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0"}
        said = run([*argv, sys.executable, str(self.train)], env=environ)
        found: dict[str, float] = json.loads(said.strip().splitlines()[-1])
        return found

    def one(self, variant: str, n: int) -> None:
        ours = [*BOOTSEER, "env", "run", "--cache", "inductor", "--cache", "triton"]
        node = "left" if variant == "warm" else f"{variant}-{n}"
        found = self.start(node, f"store-{n}", *(ours if variant != "warm" else []))
        self._note(variant, n, found["seconds"], cpu=round(found["cpu"], 3))
        if node != "left":
            shutil.rmtree(self.work / node, ignore_errors=True)

    def large(self, n: int) -> None:
        """Made once, restored in each round."""
        cache = Cache(group="compile", path="/run/bootseer/caches", owner=(os.geteuid(), os.getegid()))
        store = str(self.work / "store-large")
        if n == 1:
            held = generation.restore(cache, store, self._config("made"))
            made = random.Random(1)
            for number in range(_FILES):
                path = held.folder / f"inductor/{number % 50}/{number}.so"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(made.randbytes(_BYTES // 2) + bytes(_BYTES // 2))
            before = _cpu()
            running = held.capture(last=True)
            if not running or not running.wait(600)[0]:
                raise BootseerError("nothing was captured")
            stored = _stored(Path(store))
            again = held.capture(last=True)
            self._note("capture", n, _cpu() - before, stored=stored, again=_stored(Path(store)) - stored)
            if again:
                raise BootseerError("what is not new was captured again")
            held.close()
        began = time.monotonic()
        held = generation.restore(cache, store, self._config(f"large-{n}"))
        self._note("large", n, time.monotonic() - began)
        if not held.restored or len(held.entries()) != _FILES:
            raise BootseerError(f"it was not restored: {held.said}")
        held.close()

    def _config(self, node: str) -> Config:
        return Config(cache_dir=str(self.work / node / "cache"), state_dir=str(self.work / node / "state"))

    def _note(self, variant: str, n: int, seconds: float, **details: float) -> None:
        self.report.runs.append(Run(variant=variant, n=n, seconds=round(seconds, 4), details=details))
        say(f"{variant} {n}: {seconds:.2f} s {details or ''}")


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _stored(store: Path) -> int:
    return sum(path.stat().st_size for path in store.rglob("*") if path.is_file())


def compute(made: Report, say: Say) -> Figures:
    """Replace the figures of the report."""
    found = Figures(made, say)
    found.rounds("first_step_restored_vs_cold", "<= 0.25", "restored", "cold")
    found.rounds("first_step_restored_vs_warm", "<= 1.1", "restored", "warm")
    found.ratio("first_step_cpu_restored_vs_cold", "<= 0.25", "restored", "cold", field="cpu")
    found.ratio("first_step_cpu_restored_vs_warm", "<= 1.1", "restored", "warm", field="cpu")
    found.median("cache_restore_seconds", "<= 0.3", "large", unit="s")
    found.median("cache_capture_share_of_minute", "<= 0.1", "capture", scale=1 / 60)
    found.median("cache_bytes_again", "<= 0", "capture", "again", unit="bytes")
    return found


def _run(options: Options, made: Report) -> None:
    bench = Bench(options, made)
    for n in range(1, options.runs + 1):
        bench.large(n)
    bench.start("left", "none")
    for n in range(1, options.runs + 1):
        bench.one("cold", n)
        for variant in ("restored", "warm")[:: 1 if n % 2 else -1]:
            bench.one(variant, n)


if __name__ == "__main__":
    parser = invocation.parser("caches", __doc__, quick="one run", runs=(5, 1), work=True)
    sys.exit(invocation.carry_out(parser, _run, compute))
