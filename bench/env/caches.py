"""Compile caches: the first step of real frameworks, cold, restored, and warm on its node.

    scripts/bench caches [--parts torch,jax,triton,mega,ranks,job,large] [--quick] [--runs N] [--out report.json]

``cold``: `bootseer env run --cache` on an empty node with an empty store; ``restored``: on another empty node, from
that store; ``warm``: the same program alone, with a cache folder that it has filled before. Nodes are a folder that is
emptied, with everything at its old place. Seconds are those of the first step, without the import; ``cpu`` those of it
in processors; ``whole`` is the command, with bootseer and the import.

``torch``: a small transformer under torch.compile (forward, backward, optimizer), compiled in one process.
``jax``: a small transformer under jax.jit, in an environment of its own (``scripts/bench-peers jax``).
``triton``: kernels compiled for a GPU that is not here; nothing is launched.
``mega``: torch's own archive of what ``torch`` has compiled (Mega-Cache), loaded on an empty node.
``ranks``: four ranks of a node under torchrun, of which each compiles a model of its own; their caches are merged.
``four``: all four restored at once; ``one``: one of them alone; ``left``: all four, with a cache left on the node.
``job``: three starts of one job with `bootseer run` on three empty nodes, with JAX in a container.
``large``: a cache of 2,000 files of 100 KB is restored on an empty node, until a program may start; ``capture``: what
making the next generation costs: seconds of processors, and bytes stored when nothing is new.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import statistics
import sys
import time
from pathlib import Path

from bench.common import invocation
from bench.common.figures import Figures, Say
from bench.common.invocation import Options, say
from bench.common.report import Report, Run
from bootseer import image
from bootseer.config import Config
from bootseer.demo.programs import BOOTSEER, run
from bootseer.env import generation
from bootseer.env.generation import Cache
from bootseer.errors import BootseerError, UnsupportedError
from bootseer.kernel import mount as mounts
from support import devcache
from support.images import Member, folder, write_image
from support.waits import until

PARTS = ("large", "torch", "mega", "jax", "triton", "ranks", "job")
_FILES, _BYTES = 2000, 100_000
_PROGRAMS = Path(__file__).parent / "job"
_RANKS = 4
_WARM = {
    "torch": {"TORCHINDUCTOR_CACHE_DIR": "", "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0"},
    "jax": {
        "JAX_COMPILATION_CACHE_DIR": "",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    },
    "triton": {"TRITON_CACHE_DIR": ""},
}
"""What a user would set; empty: the folder."""
_JOB = """
[job]
name = "bench-caches"
command = ["/python/bin/python", "/job/jax_step.py"]
[image]
ref = "oci:{layout}:v1"
[caches]
kinds = ["jax"]
"""


class Bench:
    def __init__(self, options: Options, report: Report) -> None:
        self.report, self.work = report, options.work
        self.node, self.left = self.work / "node", self.work / "left"
        self.mega = self.work / "mega"

    def start(self, store: str, *argv: str | Path, **more: str) -> list[dict[str, float]]:
        """What the programs of ``argv`` say, on a node that was empty, and ``whole`` of them all."""
        shutil.rmtree(self.node, ignore_errors=True)
        (self.node / "tmp").mkdir(parents=True)
        environ = {
            "BOOTSEER_CACHE_DIR": str(self.node / "cache"),
            "BOOTSEER_STATE_DIR": str(self.node / "state"),
            "BOOTSEER_STORE": str(self.work / store),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "TRITON_DEFAULT_FP_FUSION": "1",
            "TMPDIR": str(self.node / "tmp"),
            **more,
        }
        began = time.monotonic()
        said = run([str(word) for word in argv], env=environ).splitlines()
        whole = time.monotonic() - began
        until(lambda: not mounts.below(self.node), 120, "the end of the mounts of a start")
        found = [json.loads(line) for line in said if line.startswith('{"seconds"')]
        if not found:
            raise BootseerError(f"{argv[-1]} said nothing of its first step")
        return [{**one, "whole": whole} for one in found]

    def rounds(self, part: str, runs: int, python: str, *kinds: str) -> None:
        """``cold``, ``restored`` and ``warm`` of a program."""
        program = [python, str(_PROGRAMS / f"{part}_step.py")]
        ours = [*_ours(*kinds), *program]
        warm = {name: value or str(self.left / part) for name, value in _WARM[part].items()}
        self.start("none", *program, **warm)
        for n in range(1, runs + 1):
            save = ["--save", str(self.mega)] if part == "torch" and n == 1 else []
            self._note(f"{part}-cold", n, self.start(f"{part}-{n}", *ours, *save))
            for variant in ("restored", "warm")[:: 1 if n % 2 else -1]:
                argv, more = (program, warm) if variant == "warm" else (ours, {})
                self._note(f"{part}-{variant}", n, self.start(f"{part}-{n}", *argv, **more))

    def archive(self, runs: int) -> None:
        """torch's own, beside ours, of the same programs."""
        program = [sys.executable, str(_PROGRAMS / "torch_step.py")]
        if not self.mega.exists():
            self._note("torch-cold", 1, self.start("torch-1", *_ours("inductor"), *program, "--save", str(self.mega)))
            self._note("torch-restored", 1, self.start("torch-1", *_ours("inductor"), *program))
        for n in range(1, runs + 1):
            warm = {name: value or str(self.node / "archive") for name, value in _WARM["torch"].items()}
            found = self.start("none", *program, "--load", str(self.mega), **warm)
            self._note("mega", n, found, saved=self.mega.stat().st_size)

    def ranks(self, runs: int) -> None:
        """Each compiles its own, and all get what all have compiled."""
        script = str(_PROGRAMS / "torch_step.py")
        each = [*_ours("inductor"), "sh", "-c", f"exec {sys.executable} {script} --part $LOCAL_RANK"]
        alone = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python"]
        warm = {name: value or str(self.left / "ranks") for name, value in _WARM["torch"].items()}
        four, one = [[*alone, f"--nproc-per-node={count}"] for count in (_RANKS, 1)]
        self._note("ranks-cold", 1, self.start("ranks", *four, *each))
        self.start("none", *four, *each[len(_ours("inductor")) :], **warm)
        for n in range(1, runs + 1):
            self._note("ranks-four", n, self.start("ranks", *four, *each))
            # as torchrun sets it for more than one: it is compiled for so many threads
            self._note("ranks-one", n, self.start("ranks", *one, *each, OMP_NUM_THREADS="1"))
            self._note("ranks-left", n, self.start("none", *four, *each[len(_ours("inductor")) :], **warm))

    def job(self, python: Path) -> None:
        """Three starts in a container that has this machine's /usr and the environment of ``python``."""
        layout, events = self.work / "layout", self.node / "events"
        links = [Member(name, "symlink", link=f"usr/{name}") for name in ("bin", "lib", "lib64")]
        write_image(layout, [[folder("tmp", mode=0o1777), *links, *map(folder, ("usr", "job", "python"))]])
        image.ensure(f"oci:{layout}:v1", str(self.work / "job"), work_dir=self.work / "convert")
        shown = {"/usr": "/usr", "/job": _PROGRAMS, "/python": python.parents[1]}
        table = "".join(f'[[mounts]]\nsource = "{source}"\ntarget = "{target}"\n' for target, source in shown.items())
        file, summary = self.work / "job.toml", self.node / "summary.json"
        file.write_text(_JOB.format(layout=layout) + table)
        for n in range(1, 4):
            argv = [*BOOTSEER, "run", file, "--events", events, "--summary", summary]
            found = self.start("job", *argv, BOOTSEER_NODE=f"node{n}")
            self._note("job-restored" if n > 1 else "job-cold", n, found, said=_caches(summary))

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
            again_bytes = _stored(Path(store)) - stored
            self._add("capture", n, _cpu() - before, stored=stored, again=again_bytes)
            if again:
                raise BootseerError("what is not new was captured again")
            held.close()
        began = time.monotonic()
        held = generation.restore(cache, store, self._config(f"large-{n}"))
        self._add("large", n, time.monotonic() - began)
        if not held.restored or len(held.entries()) != _FILES:
            raise BootseerError(f"it was not restored: {held.said}")
        held.close()

    def _config(self, node: str) -> Config:
        return Config(cache_dir=str(self.work / node / "cache"), state_dir=str(self.work / node / "state"))

    def _note(self, variant: str, n: int, found: list[dict[str, float]], **details: object) -> None:
        """Of several ranks their mean counts."""
        mean = {name: round(statistics.mean(one[name] for one in found), 3) for name in ("seconds", "cpu", "whole")}
        self._add(variant, n, mean.pop("seconds"), **mean, **details)

    def _add(self, variant: str, n: int, seconds: float, **details: object) -> None:
        self.report.runs.append(Run(variant=variant, n=n, seconds=round(seconds, 4), details=details))
        say(f"{variant} {n}: {seconds:.2f} s {details or ''}")


def _ours(*kinds: str) -> list[str]:
    return [*BOOTSEER, "env", "run", *(word for kind in kinds for word in ("--cache", kind))]


def _caches(summary: Path) -> str:
    said: str = json.loads(summary.read_text())["caches"]["how"]
    return said


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _stored(store: Path) -> int:
    return sum(path.stat().st_size for path in store.rglob("*") if path.is_file())


def compute(made: Report, say: Say) -> Figures:
    """Replace the figures of the report."""
    found = Figures(made, say)
    for part, prefix, most in (("torch", "", 0.25), ("jax", "jax_", 0.3), ("triton", "triton_", 0.3)):
        ours, cold, warm = (f"{part}-{variant}" for variant in ("restored", "cold", "warm"))
        found.rounds(f"{prefix}first_step_restored_vs_cold", f"<= {most}", ours, cold)
        found.rounds(f"{prefix}first_step_restored_vs_warm", "<= 1.1", ours, warm)
        found.ratio(f"{prefix}first_step_cpu_restored_vs_cold", f"<= {most}", ours, cold, field="cpu")
        found.ratio(f"{prefix}first_step_cpu_restored_vs_warm", "<= 1.1", ours, warm, field="cpu")
    found.ratio("first_step_restored_vs_mega_cache", "<= 0.5", "torch-restored", "mega")
    found.ratio("first_step_cpu_restored_vs_mega_cache", "<= 0.5", "torch-restored", "mega", field="cpu")
    found.ratio("ranks_first_step_cpu_four_vs_one", "<= 1.1", "ranks-four", "ranks-one", field="cpu")
    found.rounds("ranks_first_step_restored_vs_warm", "<= 1.1", "ranks-four", "ranks-left")
    found.ratio("job_first_step_restored_vs_cold", "<= 0.3", "job-restored", "job-cold")
    found.median("cache_restore_seconds", "<= 0.3", "large", unit="s")
    found.median("cache_capture_share_of_minute", "<= 0.1", "capture", scale=1 / 60)
    found.median("cache_bytes_again", "<= 0", "capture", "again", unit="bytes")
    return found


def _run(options: Options, made: Report) -> None:
    bench, runs = Bench(options, made), options.runs
    jax = devcache.folder("peers/jax/bin/python")
    parts = invocation.chosen(options.parts or ("large,torch,jax,triton,job" if options.quick else ""), PARTS)
    if {"jax", "job"} & {*parts} and not jax.exists():
        raise UnsupportedError("JAX is not installed", hint="run scripts/bench-peers jax")
    for part in parts:
        if part == "large":
            for n in range(1, runs + 1):
                bench.large(n)
        elif part == "mega":
            bench.archive(min(runs, 2))
        elif part == "ranks":
            bench.ranks(min(runs, 3))
        elif part == "job":
            bench.job(jax)
        else:
            kinds = [*(["inductor"] if part == "torch" else []), "jax" if part == "jax" else "triton"]
            bench.rounds(part, runs, str(jax) if part == "jax" else sys.executable, *kinds)


if __name__ == "__main__":
    parser = invocation.parser(
        "caches", __doc__, quick="one run; without mega and ranks", runs=(5, 1), append=True, work=True
    )
    parser.add_argument("--parts", default="", help=f"only these of {', '.join(PARTS)}")
    sys.exit(invocation.carry_out(parser, _run, compute))
