"""The parts of bench/checkpoint with 4 ranks that load one checkpoint. ``once``: read once, each for itself, and as
torch does it; ``sharing``: read once, with and without each of two parts of that.

    python -m bench.checkpoint.once RANKS RANK PORT TASK

is one rank: it meets the others in a gloo group, loads its modules, prints ``ready``, waits for a line on its standard
input, loads, and prints an `Answer`. A run takes as long as its slowest rank.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from bench.checkpoint.state import Made
from bench.common.figures import Figures
from bench.common.invocation import say
from bench.common.report import Report, Run
from bench.stripes.client import Answer, Task
from bench.stripes.runner import LIMIT, Wrong
from bootseer.errors import BootseerError, UnavailableError
from support.shapedhdfs import ShapedHadoop

RANKS = 4
PLAIN = "plain"
"""The same state dict as one plain HDFS file, beside the striped one."""
ONCE, APART, VANILLA = "capped:ranks-once", "capped:ranks-apart", "capped:ranks-hdfs-native"
WAYS = {VANILLA: "torch-native", APART: "torch", ONCE: "once"}
ONE_READ, ONE_BUCKET = "capped:ranks-once-one-read", "capped:ranks-once-one-bucket"
SHARING = {ONCE: "once", ONE_READ: "once-one-read", ONE_BUCKET: "once-one-bucket"}
"""Without: an owner reads and sends one bucket after the other; each owner has one bucket, and sends nothing before
it has read it."""


def run(
    site: ShapedHadoop, report: Report, path: str, made: Made, *, rounds: int, ways: Mapping[str, str] = WAYS
) -> None:
    """Each rank loads ``path``, or the plain file beside it, ``rounds`` times in each of ``ways``, every other round in
    reverse. All memory of a rank is its own; the node has an empty cache each time."""
    folder, _, name = path.rpartition("/")
    size = made.path.stat().st_size
    for n in range(1, rounds + 1):
        for variant, way in list(ways.items())[:: 1 if n % 2 else -1]:
            task = Task(
                way=way, url=f"{site.cluster.url}{folder}", path=PLAIN if variant == VANILLA else name, size=size
            )
            before = sum(node.bytes_sent() for node in site.network.nodes)
            try:
                seconds, answers = _measure(task)
            except BootseerError as exc:
                report.runs.append(Run(variant=variant, n=n, failed=str(exc)))
                say(f"{variant}: failed: {exc}")
                continue
            if {answer.digest for answer in answers} != {made.digest}:
                raise Wrong(f"{variant} has other bytes than were written")
            found: dict[str, Any] = {"ranks": RANKS, "unique": size}
            found["sent_by_datanodes"] = sum(node.bytes_sent() for node in site.network.nodes) - before
            if way.startswith("once"):
                found["by_rank"] = [answer.details for answer in answers]
                found["read"] = sum(int(answer.details["read"]) for answer in answers)  # type: ignore[call-overload]
            report.runs.append(Run(variant=variant, n=n, seconds=round(seconds, 4), details=found))
            say(f"{variant}: {seconds:.2f} s, DataNodes sent {found['sent_by_datanodes'] / size:.3f} of it")


def compute(found: Figures) -> None:
    """Add the figures."""
    found.ratio("resume_4_ranks_vs_torch_load", ">= 3", VANILLA, ONCE, unit="x")
    found.ratio("resume_4_ranks_vs_apart", ">= 1.05", APART, ONCE, unit="x")
    found.ratio("bytes_vs_unique", "<= 1.02", ONCE, ONCE, field="read", of="unique", unit="x")
    found.gain("gain_two_reads", ONCE, ONE_READ)
    found.gain("gain_many_buckets", ONCE, ONE_BUCKET)


def _measure(task: Task) -> tuple[float, list[Answer]]:
    """Seconds from when all ranks were ready until the last has loaded, and their answers."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    task_text = msgspec.json.encode(task).decode()
    with contextlib.ExitStack() as stack:
        cache = stack.enter_context(tempfile.TemporaryDirectory(prefix="bootseer-cache-", ignore_cleanup_errors=True))
        started = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-m", "bench.checkpoint.once", str(RANKS), str(rank), str(store.port), task_text],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                    env={**os.environ, "BOOTSEER_CACHE_DIR": cache},
                )
            )
            for rank in range(RANKS)
        ]  # fmt: skip
        for process in started:
            stack.callback(process.kill)
        watchdog = threading.Timer(2 * LIMIT, _kill, [started])
        stack.callback(watchdog.cancel)
        watchdog.start()
        for process in started:
            assert process.stdout is not None
            process.stdout.readline()
        for process in started:
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.write("go\n")
                process.stdin.flush()
        said_by = [process.communicate() for process in started]
        answers = [_answer(process, *said) for process, said in zip(started, said_by, strict=True)]
    return max(answer.seconds for answer in answers), answers


def _kill(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        process.kill()


def _answer(process: subprocess.Popen[str], out: str, err: str) -> Answer:
    if process.returncode < 0:
        raise UnavailableError(f"a rank did not end within {2 * LIMIT:.0f} s")
    if process.returncode:
        raise BootseerError((err.strip().splitlines() or ["no message"])[-1])
    return msgspec.json.decode(out, type=Answer)


def _rank(ranks: int, rank: int, port: int, task: Task) -> None:
    import torch.distributed as dist

    import bootseer.torch
    from bench.checkpoint.client import _loading, load_native
    from bootseer.torch import shared_read

    reports: list[shared_read.SharedReadReport] = []

    def noted(requests: Any, group: Any) -> shared_read.SharedReadReport:
        bucket = -(-task.size // ranks) if task.way == "once-one-bucket" else shared_read.BUCKET
        reports.append(shared_read.read_shared(requests, group, bucket=bucket))
        return reports[-1]

    url = f"{task.url}/{task.path}"
    vars(bootseer.torch)["read_shared"] = noted
    if task.way == "once-one-read":
        shared_read.READS = 1
    if task.way.startswith("once"):
        work, content = _loading(lambda: bootseer.torch.load(url, group=dist.group.WORLD))
    elif task.way == "torch":
        work, content = _loading(lambda: bootseer.torch.load(url))
    else:
        work, content = load_native(task)
    dist.init_process_group(
        "gloo", store=dist.TCPStore("127.0.0.1", port, is_master=False), rank=rank, world_size=ranks
    )
    print("ready", flush=True)
    sys.stdin.readline()
    began = time.perf_counter()
    work()
    seconds = time.perf_counter() - began
    details = msgspec.to_builtins(reports[0]) if reports else {}
    dist.barrier()  # hashing is not to slow down who still loads
    print(msgspec.json.encode(Answer(seconds=seconds, digest=content(), details=details)).decode(), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    ranks, rank, port = map(int, sys.argv[1:4])
    _rank(ranks, rank, port, msgspec.json.decode(sys.argv[4], type=Task))
