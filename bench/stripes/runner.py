"""Runs of bench/stripefs: a client process for each, told when to begin and, if wanted, disturbed on the way."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3

from bench.common.invocation import say
from bench.common.report import Report, Run
from bench.stripes.client import Answer, Task, digest
from bootseer.errors import BootseerError, UnavailableError, UnsupportedError
from bootseer.hdfs import client as hdfs
from support.hadoop import HadoopCluster

CLIENT = "bench.stripes.client"
_PIECE = 1 << 20
_PIPE = 64 << 10
"""Bytes that a pipe holds (Linux): what is in it was not yet taken."""
LIMIT = 240.0
"""Seconds after which a client is killed: it hangs."""
HEARTBEAT = 3.5
"""Seconds before each write. A NameNode passes over a DataNode that had twice the work of the others at its last
heartbeat, every 3 s: the run before is not to decide where this one's blocks go."""


def _ended(process: subprocess.Popen[bytes]) -> None:
    """Wait for Hadoop's client; `BootseerError` with its last line when it failed."""
    assert process.stderr is not None
    said = process.stderr.read().decode(errors="replace").strip().splitlines()
    if process.wait(LIMIT):
        raise BootseerError(f"Hadoop's client failed: {(said or ['no message'])[-1]}")


class Wrong(BootseerError):
    """Other bytes than were written: nothing that is measured after that is worth anything."""


class LocalRunner:
    """Runs clients that read local files, or are told of no cluster; every run goes into ``report``.

    ``where`` begins the names of variants (``local:mount``); ``prefix`` puts a command where clients are; ``program``
    is its module. ``content`` has the bytes that runs are of; ``expected`` is the digest that answers have to say, when
    it is not that of these bytes.
    """

    def __init__(
        self,
        report: Report,
        where: str,
        content: Path,
        prefix: Sequence[str] = (),
        *,
        program: str = CLIENT,
        expected: str = "",
    ) -> None:
        self.report, self.where, self.content, self.prefix = report, where, content, list(prefix)
        self.program = program
        self.size = content.stat().st_size
        self.expected = expected or blake3().update_mmap(content).hexdigest()
        self._counts: dict[str, int] = {}
        self._missing: set[str] = set()

    def client(
        self,
        task: Task,
        *,
        environ: dict[str, str] | None = None,
        fault: Callable[[], None] | None = None,
        after: float = 0.0,
    ) -> Answer:
        """One run of a client process; ``fault`` is called ``after`` seconds from the moment it begins.

        Raises `BootseerError` with its last line when it fails, `UnavailableError` when it does not end.
        """
        argv = [*self.prefix, sys.executable, "-m", self.program, msgspec.json.encode(task).decode()]
        with (
            tempfile.TemporaryDirectory(prefix="bootseer-cache-", ignore_cleanup_errors=True) as cache,  # of a new node
            subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "BOOTSEER_CACHE_DIR": cache, **(environ or {})},
            ) as process,
        ):
            assert process.stdin is not None
            assert process.stdout is not None
            watchdog = threading.Timer(LIMIT, process.kill)
            watchdog.start()
            try:
                if process.stdout.readline() == "ready\n":
                    if fault is not None and after <= 0:
                        fault()
                    process.stdin.write("go\n")
                    process.stdin.flush()
                    if fault is not None and after > 0:
                        time.sleep(after)
                        fault()
                out, err = process.communicate()
            finally:
                watchdog.cancel()
                process.kill()
        if process.returncode < 0:
            raise UnavailableError(f"a {task.way} client did not end within {LIMIT:.0f} s")
        if process.returncode:
            raise BootseerError((err.strip().splitlines() or ["no message"])[-1])
        return msgspec.json.decode(out, type=Answer)

    def record(self, variant: str, measure: Callable[[], Answer], **details: object) -> float | None:
        """Measure and keep one run; its seconds, None when it failed. Raises `Wrong` for other bytes."""
        name = f"{self.where}:{variant}"
        if name in self._missing:
            return None
        n = self._counts[name] = self._counts.get(name, 0) + 1
        try:
            answer = measure()
        except (BootseerError, OSError) as exc:
            self.report.runs.append(Run(variant=name, n=n, failed=str(exc), details=dict(details)))
            if isinstance(exc, UnsupportedError):  # so it would say every time
                self._missing.add(name)
            say(f"{name}: failed: {exc}")
            return None
        if answer.digest != self.expected:
            raise Wrong(f"{name} has other bytes than were written")
        speed = round(self.size / answer.seconds / 2**20, 1)
        details |= answer.details
        run = Run(variant=name, n=n, seconds=round(answer.seconds, 4), details={"mib_per_s": speed, **details})
        self.report.runs.append(run)
        said = "".join(f", {key} {value}" for key, value in details.items())
        say(f"{name}: {answer.seconds:.2f} s, {speed} MiB/s{said}")
        return answer.seconds


class Runner(LocalRunner):
    """Runs variants over the content of a file on ``cluster``, which ``where`` names (``capped:striped``)."""

    def __init__(
        self, report: Report, where: str, cluster: HadoopCluster, content: Path, prefix: Sequence[str] = (), **more: str
    ) -> None:
        super().__init__(report, where, content, prefix, **more)
        self.cluster = cluster

    def client(self, task: Task, **more: Any) -> Answer:
        if task.source:
            time.sleep(HEARTBEAT)
        return super().client(task, **more)

    def stock_read(self, path: str) -> Answer:
        """Hadoop's own client writes the file into a pipe: from its first byte to its last, so without its JVM's start
        and without finding the blocks."""
        with self._shell("-D", f"io.file.buffer.size={_PIECE}", "-cat", path) as process:
            assert process.stdout is not None
            buffer = memoryview(bytearray(self.size))
            buffer[::4096] = bytes(len(range(0, self.size, 4096)))
            done = process.stdout.readinto(buffer[:1])  # type: ignore[attr-defined]
            began = time.perf_counter()
            while done < self.size and (count := process.stdout.readinto(buffer[done:])):  # type: ignore[attr-defined]
                done += count
            seconds = time.perf_counter() - began
            _ended(process)
        return Answer(seconds=seconds, digest=digest(buffer[:done]))

    def stock_write(self, path: str, replication: int) -> Answer:
        """Hadoop's own client writes what it reads from a pipe: from when it takes the second pipeful to its end."""
        data = memoryview(self.content.read_bytes())
        time.sleep(HEARTBEAT)
        with self._shell("-D", f"dfs.replication={replication}", "-put", "-f", "-", path) as process:
            assert process.stdin is not None
            done = process.stdin.write(data[:_PIPE])
            done += process.stdin.write(data[done : done + 1])
            began = time.perf_counter()
            while done < self.size:
                done += process.stdin.write(data[done : done + _PIECE])
            process.stdin.close()
            process.wait(LIMIT)
            seconds = time.perf_counter() - began
            _ended(process)
        return Answer(seconds=seconds, digest=self.expected)

    @contextlib.contextmanager
    def _shell(self, *args: str) -> Iterator[subprocess.Popen[bytes]]:
        argv = [*self.prefix, *self.cluster.shell_argv(args)]
        with subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
        ) as process:
            watchdog = threading.Timer(LIMIT, process.kill)
            watchdog.start()
            try:
                yield process
            finally:
                watchdog.cancel()
                process.kill()

    def task(self, way: str, folder: str, path: str, **options: object) -> Task:
        """A task over the whole content; ``options``: more fields of `Task`."""
        fields = {"way": way, "url": f"{self.cluster.url}{folder}", "path": path, "size": self.size, **options}
        return msgspec.convert(fields, Task)

    def written(self, way: str, folder: str, path: str, **options: object) -> Task:
        return self.task(way, folder, path, source=str(self.content), **options)

    def check(self, task: Task) -> None:
        """Read a file that was written; raises `Wrong` for other bytes."""
        if self.client(task).digest != self.expected:
            raise Wrong(f"{task.path} in {task.url} has other bytes than were written")

    def remove(self, folder: str) -> None:
        """Delete a folder of the cluster, blocks and all; no error when it is not there."""
        with contextlib.suppress(BootseerError):
            hdfs.connect(self.cluster.url).delete(folder, recursive=True)
