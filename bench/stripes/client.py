"""One read or write of one file in a process of its own: what a client that just started gets.

    python -m bench.stripes.client TASK

``TASK`` is JSON (`Task`). It loads its modules and has its memory ready, prints ``ready``, waits for a line on its
standard input, does the work, prints how many seconds that took, and only then what it read (`Answer`).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import msgspec
from blake3 import blake3

from bootseer.hdfs import client as hdfs
from bootseer.hdfs import placement, probe
from bootseer.hdfs.blockwriter import BlockWriter
from bootseer.hdfs.placement import Choice, Placement
from bootseer.stripefs import layout, open_fs
from bootseer.stripefs.layout import Geometry

PIECE = 4 << 20
_BUFFER = 1 << 20
_DEADLINE = 600.0


class Task(msgspec.Struct, kw_only=True, omit_defaults=True):
    """``way``: ``striped`` (through StripeFS), ``native`` (one hdfs-native stream), ``stripes-native`` (the stripes of
    a striped file, each by an hdfs-native stream in a thread), ``local`` and ``mounted`` (a local file, see
    `read_local`). ``source``: the file to write; "": read. ``without``: one of `WITHOUT` to write without.
    """

    way: str
    url: str
    path: str
    size: int
    source: str = ""
    replication: int = 1
    width: int = layout.WIDTH
    unit: int = layout.UNIT
    without: str = ""


class Answer(msgspec.Struct, kw_only=True):
    """``digest``: of what was read, as a hash of 64 hex digits; of a write, of what was given to it. ``details``: what
    the report is to say of the run, from whoever measured it."""

    seconds: float
    digest: str
    note: str = ""
    details: dict[str, object] = {}


def digest(data: bytes | bytearray | memoryview) -> str:
    return blake3(data).hexdigest()


def read_striped(task: Task) -> tuple[Callable[[], None], Callable[[], str]]:
    fs = open_fs(task.url)
    buffer = bytearray(task.size)
    buffer[::4096] = bytes(len(range(0, task.size, 4096)))  # the caller's memory is there before it calls

    def work() -> None:
        with fs.open(task.path) as file:
            file.readinto(0, memoryview(buffer))

    return work, lambda: digest(buffer)


def read_native(task: Task) -> tuple[Callable[[], None], Callable[[], str]]:
    client = hdfs.connect(task.url)
    path = f"{hdfs.split(task.url)[1]}/{task.path}"
    found: list[bytes] = []

    def work() -> None:
        found.append(client.call(lambda native: native.read(path).read(), "read", deadline=_DEADLINE))

    return work, lambda: digest(found[0])


def read_local(task: Task, *, mounted: bool = False) -> tuple[Callable[[], None], Callable[[], str]]:
    """In order, through one buffer. ``mounted``: what the kernel keeps of the file is dropped before and after.

    The digest is of a second reading, which the kernel answers with the pages that the first one brought.
    """
    buffer = memoryview(bytearray(_BUFFER))
    fd = os.open(task.path, os.O_RDONLY)

    def forget() -> None:
        if mounted:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def work() -> None:
        while os.readv(fd, [buffer]):
            pass

    def content() -> str:
        os.lseek(fd, 0, os.SEEK_SET)
        found = blake3()
        while count := os.readv(fd, [buffer]):
            found.update(buffer[:count])
        forget()
        return found.hexdigest()

    forget()
    return work, content


def stripes(task: Task) -> tuple[layout.Pointer, list[str]]:
    """The pointer, and the absolute paths of its stripes."""
    base = hdfs.split(task.url)[1]
    pointer = layout.decode_pointer(hdfs.connect(task.url).read(f"{base}/{task.path}"), task.path)
    return pointer, [f"{base}/{pointer.stripe_path(task.path, i)}" for i in range(pointer.width)]


def read_stripes(task: Task) -> tuple[Callable[[], None], Callable[[], str]]:
    """The pointer is read before: hdfs-native gets the names of the stripes for nothing."""
    client = hdfs.connect(task.url)
    pointer, paths = stripes(task)
    found: list[bytes] = []

    def one(path: str) -> bytes:
        data: bytes = client.call(lambda native: native.read(path).read(), "read", deadline=_DEADLINE)
        return data

    def work() -> None:
        with ThreadPoolExecutor(len(paths)) as pool:
            found.extend(pool.map(one, paths))

    def content() -> str:
        shape: Geometry = pointer.geometry
        whole = bytearray()
        for chunk in range(-(-shape.size // shape.unit)):
            start = shape.chunk_offset(chunk // shape.width)
            whole += found[chunk % shape.width][start : start + shape.chunk_length(chunk)]
        return digest(whole)

    return work, content


def write_striped(task: Task) -> tuple[Callable[[], None], Callable[[], str]]:
    fs = open_fs(task.url)
    data = memoryview(Path(task.source).read_bytes())

    def work() -> None:
        with fs.create(task.path, width=task.width, unit=task.unit, striped=True) as out:
            for offset in range(0, len(data), PIECE):
                out.write(data[offset : offset + PIECE])

    return work, lambda: digest(data)


def write_native(task: Task) -> tuple[Callable[[], None], Callable[[], str]]:
    client = hdfs.connect(task.url)
    path = f"{hdfs.split(task.url)[1]}/{task.path}"
    data = Path(task.source).read_bytes()
    pieces = [data[offset : offset + PIECE] for offset in range(0, len(data), PIECE)]  # it copies all but bytes slowly

    def work() -> None:
        with client.create(path, overwrite=True, replication=task.replication) as out:
            for piece in pieces:
                out.write(piece)

    return work, lambda: digest(data)


WITHOUT: dict[str, tuple[object, str, object]] = {
    "choose": (Placement, "choose", lambda placement, file, cluster, replicas: Choice([], [])),
    "slow": (Placement, "slow", lambda placement, file, nodes, run: []),
    "spare": (BlockWriter, "_spare", lambda block, left: None),
    "soon": (probe, "SOON", probe.PROBE),
}
"""Whose attribute what takes the place of: the NameNode chooses; no pipeline is left for being slow; none gets another
DataNode; one that is silent beside another one that answers has as long as all."""


def counted(into: dict[str, object]) -> None:
    """From now on count how often DataNodes are ``asked`` whether they live, and how many are ``left``."""

    def count(name: str, module: ModuleType, function: str, many: Callable[..., int]) -> None:
        real, into[name] = getattr(module, function), 0

        def counting(*args: Any, **options: Any) -> object:
            into[name] = int(str(into[name])) + many(args[0])
            return real(*args, **options)

        setattr(module, function, counting)

    count("asked", probe, "silent", lambda nodes: 1)
    count("left", placement, "shun", len)


Way = Callable[[Task], tuple[Callable[[], None], Callable[[], str]]]
"""Makes ready what a task needs; returns the work that is timed, and the digest, which is asked for after it."""
WAYS: dict[tuple[str, bool], Way] = {
    ("striped", False): read_striped,
    ("native", False): read_native,
    ("stripes-native", False): read_stripes,
    ("local", False): read_local,
    ("mounted", False): partial(read_local, mounted=True),
    ("striped", True): write_striped,
    ("native", True): write_native,
}


def main(ways: Mapping[tuple[str, bool], Way] = MappingProxyType(WAYS)) -> None:
    """``ways``: what a `Task` may ask for, by its ``way`` and whether it writes."""
    task = msgspec.json.decode(sys.argv[1], type=Task)
    if task.without:
        setattr(*WITHOUT[task.without])
    details: dict[str, object] = {}
    if task.source:
        counted(details)
    work, content = ways[task.way, bool(task.source)](task)
    print("ready", flush=True)
    sys.stdin.readline()
    began, cpu = time.perf_counter(), time.process_time()
    work()
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    answer = Answer(seconds=seconds, digest=content(), details={"cpu": round(cpu, 4), **details})
    print(msgspec.json.encode(answer).decode(), flush=True)


if __name__ == "__main__":
    main()
