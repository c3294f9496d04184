"""Ranks of a torch job for tests: processes with a gloo group, which do a shared read each and say what came of it."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import msgspec
from blake3 import blake3

from bootseer.stripefs import open_fs

if TYPE_CHECKING:
    from bootseer.stripefs.torch.shared_read import SharedReadReport

Wanted = Sequence[tuple[str, int, int]]
"""(path, offset, length) of what a rank needs, in the order of its requests."""
PATIENCE = 120.0

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed", "bootseer.stripefs.torch.shared_read", "support.ranks"])


class Task(msgspec.Struct, kw_only=True):
    """What one rank does. ``faults``: its ``BOOTSEER_FAULTS``; ``delay``: seconds before it calls; ``calls``: False: it
    never calls; ``damage``: number of the frame that it sends in which one bit is wrong; ``environ``: more variables.
    """

    url: str
    wanted: Wanted = ()
    faults: str = ""
    delay: float = 0.0
    calls: bool = True
    damage: int = -1
    options: dict[str, Any] = {}
    environ: dict[str, str] = {}


class Result(msgspec.Struct, kw_only=True):
    """``right``: the bytes are those that the store has; ``report`` is None after an ``error``. ``after``: the default
    group still works between the ranks that are left; ``threads``: threads of ours that were left."""

    right: bool = False
    report: SharedReadReport | None = None
    error: str = ""
    seconds: float = 0.0
    threads: list[str] = []


class Job:
    """``tasks``: one for each rank. Starts them; `results` waits for them."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        from torch.distributed import TCPStore

        # in this process, as a launcher has it: it outlives each rank
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._pipes: list[Connection] = []
        self.processes = []
        for rank, task in enumerate(tasks):
            mine, theirs = _context.Pipe()
            process = _context.Process(target=_main, args=(rank, len(tasks), self._store.port, task, theirs))
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self.processes.append(process)

    def results(self, *, expected: Sequence[int] | None = None) -> dict[int, Result]:
        """By rank, without those that died. ``expected``: wait for these alone, and kill the others."""
        found = {}
        end = time.monotonic() + PATIENCE
        try:
            for rank in range(len(self._pipes)) if expected is None else expected:
                pipe = self._pipes[rank]
                try:
                    assert pipe.poll(max(end - time.monotonic(), 0)), f"rank {rank} does not end"
                    found[rank] = pipe.recv()
                except EOFError:
                    continue
        finally:
            self.close()
        return found

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()


def run(tasks: Sequence[Task], **options: Any) -> dict[int, Result]:
    return Job(tasks).results(**options)


def _main(rank: int, size: int, port: int, task: Task, pipe: Connection) -> None:
    import logging

    import torch.distributed as dist

    logging.basicConfig(level=logging.INFO, format=f"rank {rank} %(relativeCreated)d: %(message)s")
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    os.environ.update(task.environ)
    try:
        pipe.send(_read(task) if task.calls else Result())
    finally:
        pipe.close()
        time.sleep(task.delay if not task.calls else 0)
        os._exit(0)  # without the farewell of gloo, which waits for the dead


def _read(task: Task) -> Result:
    import threading

    import torch.distributed as dist

    from bootseer.errors import BootseerError
    from bootseer.stripefs.torch import peers, shared_read

    fs = open_fs(task.url)
    names = list(dict.fromkeys(path for path, _, _ in task.wanted))
    files = {name: fs.open(name) for name in names}
    memory = [bytearray(length) for _, _, length in task.wanted]
    requests = [(files[path], offset, memoryview(memory[n])) for n, (path, offset, _) in enumerate(task.wanted)]
    if task.damage >= 0:
        _damage(peers, task.damage)
    time.sleep(task.delay)
    os.environ["BOOTSEER_FAULTS"] = task.faults
    before = set(threading.enumerate())
    began = time.monotonic()
    result = Result()
    try:
        result.report = shared_read.read_shared(requests, dist.group.WORLD, **task.options)
    except BootseerError as exc:
        result.error = str(exc)
    result.seconds = time.monotonic() - began
    result.threads = [t.name for t in threading.enumerate() if t not in before and t.name.startswith("bootseer-re")]
    held = [bytes(data) for data in memory]
    result.right = all(
        blake3(data).digest() == blake3(files[path].read(offset, length)).digest()
        for data, (path, offset, length) in zip(held, task.wanted, strict=True)
    )
    return result


def _damage(peers: Any, frame: int) -> None:
    """Change one bit of the last byte of the frame with that number."""
    plain, frames = peers.send, iter(range(1 << 30))

    def send(sock: Any, parts: Sequence[Any], until: float) -> None:
        if len(parts) > 1 and next(frames) == frame:
            last = bytearray(parts[-1])
            last[-1] ^= 1
            parts = [*parts[:-1], memoryview(last)]
        plain(sock, parts, until)

    peers.send = send


def unique(wanted: Mapping[int, Wanted]) -> int:
    """Bytes that any rank needs, each counted once."""
    total = 0
    for path in {path for one in wanted.values() for path, _, _ in one}:
        at = 0
        ranges = sorted((o, o + n) for one in wanted.values() for p, o, n in one if p == path)
        for low, high in ranges:
            total += max(0, high - max(low, at))
            at = max(at, high)
    return total
