"""Ranks of a torch job for tests: processes with a gloo group, which do a shared read each and say what came of it."""

from __future__ import annotations

import multiprocessing
import os
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
_THREADS = ("bootseer-shared", "bootseer-receive", "bootseer-peer", "bootseer-door")

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch.distributed", "support.ranks"])


class Task(msgspec.Struct, kw_only=True):
    """What one rank does. ``faults``: its ``BOOTSEER_FAULTS``; ``delay``: seconds before it calls; ``calls``: False: it
    never calls; ``damage``: as of `_damage`; ``load``: the checkpoint that it loads instead; ``spare``: most bytes
    beside the callers' memory; ``stranger``: somebody without the token connects to each rank's door and stays.
    """

    url: str
    wanted: Wanted = ()
    faults: str = ""
    delay: float = 0.0
    calls: bool = True
    damage: int | None = None
    load: str = ""
    spare: int = 0
    stranger: bool = False
    options: dict[str, Any] = {}


class Result(msgspec.Struct, kw_only=True):
    """``right``: the bytes are those that the store has; ``report`` is None after an ``error``. ``threads``: those of
    ours that were left; ``spare``: most bytes that were held beside the callers' memory."""

    right: bool = False
    report: SharedReadReport | None = None
    error: str = ""
    seconds: float = 0.0
    threads: list[str] = []
    spare: int = 0
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
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
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
    from bootseer.torch import outbox, peers, shared_read

    if task.damage is not None:
        _damage(peers, outbox, task.damage)
    if task.stranger:
        _visit(peers)
    if task.spare:
        outbox.SPARE = task.spare
    spare = _watch_spare(outbox)
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
        began = time.monotonic()
        result.report = shared_read.read_shared(requests, dist.group.WORLD, **task.options)
    except (BootseerError, OSError) as exc:
        result.error = str(exc)
        return result
    result.seconds = time.monotonic() - began
    result.spare = max(spare, default=0)
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


def _damage(peers: Any, outbox: Any, frame: int) -> None:
    """Change one bit of the last byte of the chunk that is sent as that one, -1 for any message of a rendezvous."""
    plain, frames = peers.send, iter(range(1 << 30))

    def send(sock: Any, parts: Sequence[Any], until: float) -> None:
        size = outbox.HEADER.size if frame >= 0 else peers._MESSAGE.size
        if len(parts[0]) == size and (frame < 0 or next(frames) == frame):
            last = bytearray(parts[-1])
            last[-1] ^= 1
            parts = [*parts[:-1], memoryview(last)]
        plain(sock, parts, until)

    peers.send = send


def _visit(peers: Any) -> None:
    """Somebody connects to each door, says something wrong or nothing at all, and does not leave."""
    import socket

    plain, visits = peers.Door.open, []

    def open_(door: Any, handlers: Any) -> None:
        plain(door, handlers)
        for said in (b"", b"GET / HTTP/1.1\r\nHost: x\r\nAccept: */*\r\n\r\n", bytes(16) + b"\x02" + bytes(4)):
            visits.append(socket.create_connection((door.host, door.port)))
            visits[-1].sendall(said)

    peers.Door.open = open_


def _watch_spare(module: Any) -> list[int]:
    """What `Outbox` holds beside the callers' memory, whenever that grows."""
    outbox, seen = module.Outbox, list[int]()
    free = outbox._free

    def watched(self: Any) -> None:
        seen.append(self._spare)
        free(self)

    outbox._free = watched
    return seen
