"""Ranks of a torch job for tests: processes with a gloo group, which do a shared read each and say what came of it."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import msgspec
from blake3 import blake3

from bootseer.stripefs import open_fs
from bootseer.torch.shared_read import SharedReadReport

Wanted = Sequence[tuple[str, int, int]]
"""(path, offset, length) of what a rank needs, in the order of its requests."""
PATIENCE = 120.0
_THREADS = ("bootseer-shared", "bootseer-receive")

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch.distributed", "support.ranks"])


class Task(msgspec.Struct, kw_only=True):
    """What one rank does. ``faults``: its ``BOOTSEER_FAULTS``; ``delay``: seconds before it calls; ``calls``: False: it
    never calls; ``damage``: as of `_damage`; ``load``: the checkpoint that it loads instead. ``backend``: of the job's
    default group; ``members``: ranks of the group that reads, if it is not all of them.
    """

    url: str
    wanted: Wanted = ()
    faults: str = ""
    delay: float = 0.0
    calls: bool = True
    damage: int | None = None
    load: str = ""
    backend: str = "gloo"
    members: list[int] = []
    options: dict[str, Any] = {}


class Result(msgspec.Struct, kw_only=True):
    """``right``: the bytes are those that the store has; ``report`` is None after an ``error``. ``threads``: those of
    ours that were left; ``scratch``: most bytes that were held at a time beside the callers' memory."""

    right: bool = False
    report: SharedReadReport | None = None
    error: str = ""
    seconds: float = 0.0
    threads: list[str] = []
    scratch: int = 0
    loaded: float = 0.0


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

    def results(self, *, expected: Sequence[int] | None = None, keep: bool = False) -> dict[int, Result]:
        """By rank, without those that died. ``expected``: wait for these alone. Unless ``keep``, kills all after it."""
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
            if not keep:
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
    if task.backend == "fake":
        import torch.testing._internal.distributed.fake_pg  # noqa: F401
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(task.backend, store=store, rank=rank, world_size=size)
    try:
        pipe.send(_read(task) if task.calls else Result())
    finally:
        pipe.close()
        time.sleep(task.delay if not task.calls else 0)
        os._exit(0)  # without the farewell of gloo, which waits for the dead


def _read(task: Task) -> Result:
    import torch.distributed as dist

    from bootseer.errors import BootseerError
    from bootseer.torch import destination, peers, shared_read

    if task.damage is not None:
        _damage(peers.Peers, task.damage)
    vars(destination)["bytearray"] = _Scratch
    time.sleep(task.delay)
    os.environ["BOOTSEER_FAULTS"] = task.faults
    before = set(threading.enumerate())
    result = Result()
    fs = open_fs(task.url)
    if task.load:
        return _load(task)
    try:
        files = {name: fs.open(name) for name in dict.fromkeys(path for path, _, _ in task.wanted)}
        memory = [bytearray(length) for _, _, length in task.wanted]
        requests = [(files[path], offset, memoryview(memory[n])) for n, (path, offset, _) in enumerate(task.wanted)]
        group = dist.new_group(task.members) if task.members else dist.group.WORLD
        began = time.monotonic()
        result.report = shared_read.read_shared(requests, group, **task.options)
    except (BootseerError, OSError) as exc:
        result.error = str(exc)
        return result
    result.seconds = time.monotonic() - began
    result.scratch = _Scratch.most
    result.threads = [t.name for t in threading.enumerate() if t not in before and t.name.startswith(_THREADS)]
    held = [bytes(data) for data in memory]
    result.right = all(
        blake3(data).digest() == blake3(files[path].read(offset, length)).digest()
        for data, (path, offset, length) in zip(held, task.wanted, strict=True)
    )
    return result


def _load(task: Task) -> Result:
    """`bootseer.torch.load`, and the report that it logs."""
    import torch.distributed as dist

    from bootseer import torch as checkpoints
    from bootseer.stripefs import local

    module: Any = checkpoints
    reports, plain = list[SharedReadReport](), module.read_shared

    def noted(*args: Any) -> SharedReadReport:
        reports.append(plain(*args))
        return reports[-1]

    module.read_shared = noted
    state: Any = checkpoints.load(f"{task.url}/{task.load}", group=dist.group.WORLD)
    local.end()  # what the end of the process does, which no rank comes to
    return Result(right=True, report=reports[0], loaded=float(state["w"].double().sum()))


def _damage(peers: Any, tag: int) -> None:
    """Change one bit of the last byte of what is first sent as that piece, -1 for what ranks tell each other before."""
    send, gather = peers.send, peers.gather
    damaged: list[bytearray] = []

    def send_other(self: Any, data: memoryview, to: int, number: int) -> Any:
        if number == tag and not damaged:
            damaged.append(bytearray(data))
            damaged[0][-1] ^= 1
            data = memoryview(damaged[0])
        return send(self, data, to, number)

    def gather_other(self: Any, body: bytes) -> list[bytes]:
        return [found[:-1] + bytes([found[-1] ^ 1]) for found in gather(self, body)]

    if tag >= 0:
        peers.send = send_other
    else:
        peers.gather = gather_other


class _Scratch(bytearray):
    """Counts the bytes of all that there are at a time."""

    now = most = 0
    _lock = threading.Lock()

    def __init__(self, size: int) -> None:
        super().__init__(size)
        with self._lock:
            _Scratch.now += size
            _Scratch.most = max(self.most, self.now)

    def __del__(self) -> None:
        with self._lock:
            _Scratch.now -= len(self)
