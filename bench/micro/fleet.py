"""The profiler at the size of a fleet: a job of 10,000 nodes with 8 ranks each, and 30,000 start-ups.

    scripts/bench fleet [--quick] [--runs 3] [--out report.json]

``ingest`` reads the events of the job (20 spans a rank), ``page`` analyses them and makes the HTML page, ``fleet``
looks at the kept rows of 30,000 start-ups; each in a process of its own, ``rss`` is the most memory it had. ``jobs``,
``job``, ``growth`` and ``served-fleet`` are pages of `bootseer profile serve` over all of that, from request to last
byte, without the first request of each. A large start-up is analysed when its events are read, before anybody asks.
``flags`` analyses start-ups of 64 nodes with noise (lognormal, sigma 0.1), half of them with one planted straggler
(twice the median): ``false_flags`` is the share of start-ups in which another node was named, ``found`` that of
planted ones that were. ``log`` reads the stages out of a log of 1.5 million lines. ``hang`` is the time from the last
event of a start of 64 nodes, of which 16 are stuck in ``image``, until the page that `profile serve` shows of it names
them; ``growth-400`` the first page of growth over 400 starts. --quick: a tenth of the nodes, start-ups and noisy ones.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from bench.common import invocation
from bench.common.figures import Figures, Say
from bench.common.invocation import Options
from bench.common.report import Report, Run
from bootseer.profile.index import key

STAGES = ("import", "dist_init", "model_init", "checkpoint_load", "first_step")
SPANS = 20
RANKS = 8
INGEST = "import sys; from bootseer.profile import events; print(len(events.read(sys.argv[1]).spans))"
PAGE = """
import sys, time
from bootseer.profile import events, page
log = events.read(sys.argv[1])
began = time.perf_counter()
made = page.html(log).encode()
print(time.perf_counter() - began, len(made))
"""
FLEET = """
import sys, time
began = time.perf_counter()
from collections.abc import Callable
from pathlib import Path
from typing import Any
from bootseer.profile import fleet, starts
assert fleet.analyse(starts.load([Path(sys.argv[1])])).total.starts
print(time.perf_counter() - began)
"""


LOG = """
import sys, time
from bootseer.profile import loglines, logs
began = time.perf_counter()
with open(sys.argv[1], "rb") as file:
    found = logs.extract([logs.Source(loglines.read(file), "n1")], logs.patterns(), job="j", gpus=8)
assert sum(event.ev == "end" for event in found.events) == 16
print(time.perf_counter() - began)
"""
LINES, SIZES = 1_500_000, 400


def job(path: Path, nodes: int) -> None:
    """Events of a job: per node image and env, per rank the five stages, each but the last with three details."""
    rng, span = random.Random(1), 0
    with path.open("w") as out:

        def write(node: str, stage: str, begin: float, end: float, rank: int | None, parent: str = "") -> str:
            nonlocal span
            span += 1
            common = f'"span":"{span:016x}","job":"big","node":"{node}","gpus":{RANKS}'
            if rank is not None:
                common += f',"rank":{rank}'
            above = f',"parent":"{parent}"' if parent else ""
            out.write(f'{{"bootseer":2,"ev":"begin",{common},"stage":"{stage}"{above},"wall":{int(begin * 1e9)}}}\n')
            out.write(f'{{"bootseer":2,"ev":"end",{common},"wall":{int(end * 1e9)}}}\n')
            return f"{span:016x}"

        for number in range(nodes):
            node, at = f"n{number:05}", 1_750_000_000.0
            for stage in ("image", "env"):
                write(node, stage, at, at + 10 + rng.random(), None)
                at += 12
            for local in range(RANKS):
                rank, begin = number * RANKS + local, at
                for stage in STAGES:
                    took = 4 + rng.random()
                    mine = write(node, stage, begin, begin + took, rank)
                    if stage != STAGES[-1]:
                        for part in range((SPANS - len(STAGES)) // (len(STAGES) - 1)):
                            write(node, f"part-{part}", begin + part, begin + part + 0.5, rank, mine)
                    begin += 6


def starts(path: Path, count: int) -> None:
    """Kept rows of start-ups of 3,000 jobs, of 2 to 2,048 GPUs."""
    from bootseer.profile import starts as kept

    rng = random.Random(2)
    events = path.with_suffix(".jsonl")
    with events.open("w") as out:
        for number in range(count):
            begin = 1_750_000_000 + number * 600
            for node in ("n1", "n2"):
                at = float(begin)
                for stage in ("image", "env", "first_step"):
                    common = f'"span":"{number}-{node}-{stage}","job":"j{number % 3000}","attempt":"{number}"'
                    common += f',"node":"{node}","gpus":{1 << number % 11}'
                    took = 5 + rng.expovariate(0.1)
                    for kind, when in (("begin", at), ("end", at + took)):
                        extra = f',"stage":"{stage}"' if kind == "begin" else ""
                        text = f'"bootseer":2,"ev":"{kind}",{common}{extra},"wall":{int(when * 1e9)}'
                        out.write(f"{{{text}}}\n")
                    at += took
    path.write_bytes(kept.compact([events])[0])
    events.unlink()


def flags(count: int) -> tuple[float, float]:
    """Share of start-ups in which a node was named that was none, and of planted stragglers that were named."""
    from bootseer.profile import analysis, events

    rng, wrong, planted, found = random.Random(3), 0, 0, 0
    for number in range(count):
        slow = "n7" if number % 2 else ""
        lines = []
        for node in (f"n{n}" for n in range(64)):
            took = 30 * rng.lognormvariate(0, 0.1) * (2 if node == slow else 1)
            for stage, begin, end in (("env", 0.0, took), ("first_step", 100.0, 105.0)):
                common = {"bootseer": 2, "span": f"{node}{stage}", "node": node, "job": "j"}
                lines.append({**common, "ev": "begin", "stage": stage, "wall": int((begin + 1e9) * 1e9)})
                lines.append({**common, "ev": "end", "wall": int((end + 1e9) * 1e9)})
        log = events.parse(json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in lines)
        named = {node for stage in analysis.analyse(log).stages for node in stage.stragglers}
        wrong += bool(named - {slow})
        planted += bool(slow)
        found += slow in named if slow else 0
    return wrong / count, found / planted


def log(path: Path, lines: int) -> None:
    """A log of eight ranks: each has two stages, and says its loss at every step."""
    with path.open("w") as out:
        for number in range(lines):
            step, rank = divmod(number, 8)
            stamp = f"2026-09-{1 + step // 86_400:02}T{step // 3600 % 24:02}:{step // 60 % 60:02}:{step % 60:02}.5Z"
            said = ("loading model and peft_config...", "Starting trainer...")[step] if step < 2 else "{'loss': 2.3}"
            out.write(f"{stamp} [rank{rank}]: {said}\n")


@contextlib.contextmanager
def served(*paths: Path) -> Iterator[str]:
    """The address of a server that has read these files."""
    command = [sys.executable, "-m", "bootseer.cli.main", "profile", "serve", "--port", "0", *map(str, paths)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            address = server.stderr.readline().split()[-1]
            until = time.monotonic() + 120
            while time.monotonic() < until:
                with contextlib.suppress(urllib.error.HTTPError):  # it still reads them
                    urllib.request.urlopen(address + "jobs.json", timeout=60).close()
                    break
                time.sleep(0.05)
            yield address
        finally:
            server.terminate()


def hang(work: Path, rounds: int) -> list[Run]:
    """From the last event until the page names who is stuck."""
    work.mkdir()
    made = []
    with served(work) as address:
        for n in range(1, rounds + 1):
            time.sleep(n * 0.37 + 1)  # not in step with the server's looks at its files
            name, at = f"hang-{n}", time.time_ns() - 171 * 10**9
            lines = []
            for number in range(64):
                stuck = number % 4 == 0
                for stage, begin, end in (("image", 0, 30), ("env", 30, 0))[: 1 if stuck else 2]:
                    about = {"bootseer": 2, "span": f"{n}-{number}-{stage}", "job": name, "node": f"gpu-{number:03}"}
                    lines.append(about | {"ev": "begin", "stage": stage, "wall": at + begin * 10**9, "gpus": 8})
                    lines += [] if stuck or not end else [about | {"ev": "end", "wall": at + end * 10**9}]
            (work / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
            began = time.perf_counter()
            while time.perf_counter() < began + 60:
                with contextlib.suppress(urllib.error.HTTPError):
                    with urllib.request.urlopen(f"{address}job/{key((name, '0', 0))}", timeout=60) as answer:
                        page = answer.read().decode()
                    if "image: 16 nodes since" in page and "gpu-060" in page:
                        break
                time.sleep(0.02)
            made.append(Run(variant="hang", n=n, seconds=time.perf_counter() - began))
    return made


def grown(kept: Path, rounds: int) -> list[Run]:
    """The first page of growth that a server makes of its starts."""
    made = []
    for n in range(1, rounds + 1):
        with served(kept) as address:
            began = time.perf_counter()
            urllib.request.urlopen(address + "growth", timeout=60).read()
            made.append(Run(variant="growth-400", n=n, seconds=time.perf_counter() - began))
    return made


def pages(kept: Path, events: Path, rounds: int) -> list[Run]:
    """The pages of a server, asked for ``rounds`` times."""
    job = key(("big", "0", 0))
    made = []
    with served(kept, events) as address:
        for variant, path in (("jobs", ""), ("job", f"job/{job}"), ("served-fleet", "fleet"), ("growth", "growth")):
            for n in range(rounds + 1):
                began = time.perf_counter()
                with urllib.request.urlopen(address + path, timeout=60) as answer:
                    size = len(answer.read())
                if n:
                    seconds = time.perf_counter() - began
                    made.append(Run(variant=variant, n=n, seconds=seconds, details={"bytes": size}))
    return made


def _run(options: Options, made: Report) -> None:
    tenth = 10 if options.quick else 1
    events, kept = options.work / "job.jsonl", options.work / "starts.parquet"
    job(events, 10_000 // tenth)
    starts(kept, 30_000 // tenth)
    for n in range(1, options.runs + 1):
        for variant, code, file in (("ingest", INGEST, events), ("page", PAGE, events), ("fleet", FLEET, kept)):
            made.runs.append(_one(variant, n, code, file))
    made.runs += pages(kept, events, max(options.runs, 5))
    log(options.work / "train.log", LINES // tenth)
    made.runs += [_one("log", n, LOG, options.work / "train.log") for n in range(1, options.runs + 1)]
    made.runs += hang(options.work / "hanging", max(options.runs, 5))
    starts(options.work / "few.parquet", SIZES)
    made.runs += grown(options.work / "few.parquet", options.runs)
    began = time.perf_counter()
    wrong, found = flags(1000 // tenth)
    took = time.perf_counter() - began
    made.runs.append(Run(variant="flags", n=1, seconds=took, details={"false": wrong, "found": found}))


def compute(made: Report, say: Say) -> Figures:
    """Replace the figures of the report."""
    found = Figures(made, say)
    found.median("ingest_10k_nodes_s", "<= 30", "ingest", unit="s")
    found.median("ingest_10k_nodes_mb", "<= 500", "ingest", "rss", unit="MB")
    found.median("job_page_s", "<= 1", "job", unit="s")
    found.median("job_page_mb", "<= 1", "job", "bytes", unit="MB", scale=1e-6)
    found.median("html_export_s", "<= 1", "page", unit="s")
    found.median("fleet_page_s", "<= 2", "fleet", unit="s")
    found.median("served_fleet_page_s", "<= 2", "served-fleet", unit="s")
    found.median("growth_page_s", "<= 2", "growth", unit="s")
    found.median("growth_400_s", "<= 0.5", "growth-400", unit="s")
    found.median("hang_named_s", "<= 2", "hang", unit="s")
    found.median("log_1500k_lines_s", "<= 15", "log", unit="s")
    found.median("jobs_page_ms", "<= 200", "jobs", unit="ms", scale=1e3)
    found.median("false_flags", "<= 1", "flags", "false", unit="%", scale=100)
    found.median("planted_found", ">= 99", "flags", "found", unit="%", scale=100)
    return found


def _one(variant: str, n: int, code: str, file: Path) -> Run:
    """``seconds`` are the first that it prints, or those of the process; ``rss`` in MB."""
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-c", code, str(file)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    said = [float(word) for word in process.stdout.read().split()]
    _pid, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - began
    if process.returncode:
        raise SystemExit(f"{variant} failed")
    return Run(
        variant=variant, n=n, seconds=seconds if variant == "ingest" else said[0],
        details={"rss": usage.ru_maxrss / 1000, "said": said},
    )  # fmt: skip


if __name__ == "__main__":
    parser = invocation.parser("fleet", __doc__, quick="a tenth of everything", runs=(3, 3), work=True)
    sys.exit(invocation.carry_out(parser, _run, compute))
