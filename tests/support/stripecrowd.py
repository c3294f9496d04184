"""Processes that read and write a striped store without end, and compare every byte with what must be there.

Processes, not threads, so that one that hangs does not hang the test, and one that writes can be killed. Each prints a
line for every operation it ends (`Done`); an operation that takes longer than a limit is a hang. The content of a file
follows from its name and version (`content`), so that everybody knows the right bytes.

    python -m support.stripecrowd TASK
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal, NamedTuple

import msgspec

from bootseer.errors import BootseerError, UnavailableError
from bootseer.stripefs import StripeFS, open_fs
from support import forked

_PIECE = 1 << 20


class Sample(NamedTuple):
    """A file of the store and how many bytes it has; its content is `content` of ``path`` and version 0."""

    path: str
    size: int


def content(path: str, version: int, size: int) -> bytes:
    """The bytes of ``version`` of the file ``path``: no two pages of any two are alike."""
    return random.Random(f"{path}-{version}").randbytes(size)


class Task(msgspec.Struct, kw_only=True):
    """``read``: the ``samples`` through `StripeFS`; ``mount``: through the mount at ``mountpoint``; ``write``: new
    versions of the first of the samples, each read back."""

    kind: Literal["read", "mount", "write"]
    url: str
    samples: list[Sample]
    mountpoint: str = ""
    seed: int = 0
    unit: int = 1 << 18


class Done(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One operation; ``wrong``: it succeeded, with other bytes than it must."""

    what: str
    seconds: float
    error: str = ""
    wrong: bool = False


class Tally(NamedTuple):
    """Sums over all workers. ``slowest``: seconds of the slowest operation that ended."""

    done: int
    errors: int
    wrong: int
    hangs: int
    slowest: float


class _Worker:
    """One process and what it said. A thread reads its lines."""

    def __init__(self, task: Task, log: Path) -> None:
        self.task, self.done, self.since = task, list[Done](), time.monotonic()
        with open(log, "ab") as errors:
            self.process = forked.Popen(
                [sys.executable, "-m", "support.stripecrowd", msgspec.json.encode(task).decode()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with contextlib.suppress(msgspec.DecodeError):  # a line cut by SIGKILL
                self.done.append(msgspec.json.decode(line, type=Done))
            self.since = time.monotonic()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._thread.join(10)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


class StripeCrowd:
    """Context manager: the workers of ``tasks``; they end with it, or with their parent.

    ``limit``: seconds after which an operation hangs. ``log``: a file for what they say besides.
    """

    def __init__(self, tasks: Sequence[Task], log: Path, *, limit: float = 60.0) -> None:
        self._tasks, self._log, self.limit = list(tasks), log, limit
        self._workers: list[_Worker] = []
        self._gone: list[Done] = []

    def __enter__(self) -> StripeCrowd:
        self._workers = [_Worker(task, self._log) for task in self._tasks]
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        for worker in self._workers:
            worker.end()

    def _all(self) -> Iterator[Done]:
        return itertools.chain(self._gone, *(worker.done for worker in self._workers))

    def tally(self) -> Tally:
        done = list(self._all())
        now = time.monotonic()
        hangs = sum(now - worker.since > self.limit for worker in self._workers)
        hangs += sum(one.seconds > self.limit for one in done)
        slowest = max((one.seconds for one in done), default=0.0)
        return Tally(len(done), sum(bool(one.error) for one in done), sum(one.wrong for one in done), hangs, slowest)

    def findings(self) -> str:
        """Every error and wrong content, a line each; then the end of the log."""
        bad = [f"{one.what}: {'wrong bytes' if one.wrong else one.error}" for one in self._all() if _bad(one)]
        log = self._log.read_text(errors="replace") if self._log.exists() else ""
        return "\n".join([*bad[-40:], *log.splitlines()[-20:]])

    def wait(self, operations: int, *, deadline: float = 60.0) -> None:
        """Wait until each worker has ended so many operations that began after now.

        Raises `UnavailableError` with the findings when that takes longer than ``deadline``, or a worker has ended.
        """
        # the one under way began before
        wanted = [(worker, len(worker.done) + operations + 1) for worker in self._workers]
        until = time.monotonic() + deadline
        while any(len(worker.done) < count for worker, count in wanted):
            for worker, _ in wanted:
                if worker.process.poll() is not None:
                    raise UnavailableError(f"a {worker.task.kind} worker has ended: {self.findings()}")
            if time.monotonic() >= until:
                raise UnavailableError(f"the crowd is stuck after {deadline:.0f} s: {self.findings()}")
            time.sleep(0.02)

    def kill(self, kind: str) -> None:
        """SIGKILL to one worker of the kind; another takes its place at once."""
        index = next(i for i, worker in enumerate(self._workers) if worker.task.kind == kind)
        old = self._workers[index]
        old.end()
        self._gone += old.done
        self._workers[index] = _Worker(old.task, self._log)


def _bad(done: Done) -> bool:
    return done.wrong or bool(done.error)


# -- the process --------------------------------------------------------------------------------------------------


def _say(what: str, began: float, error: str = "", wrong: bool = False) -> None:
    done = Done(what=what, seconds=round(time.monotonic() - began, 4), error=error, wrong=wrong)
    os.write(1, msgspec.json.encode(done) + b"\n")


def _differs(found: bytes | bytearray | memoryview, right: memoryview) -> bool:
    return hashlib.sha256(found).digest() != hashlib.sha256(right).digest()


class _Process:
    def __init__(self, task: Task) -> None:
        self._task = task
        self._rand = random.Random(task.seed or os.getpid())
        self._fs: StripeFS = open_fs(task.url)
        self._right = {sample.path: memoryview(content(sample.path, 0, sample.size)) for sample in task.samples}
        self._version = 0

    def step(self) -> None:
        if self._task.kind == "write":
            self._write()
        else:
            self._read()

    def _read(self) -> None:
        path = self._rand.choice(self._task.samples).path
        right = self._right[path]
        start, end = 0, len(right)
        if self._rand.random() < 0.5:
            start = self._rand.randrange(len(right))
            end = self._rand.randint(start + 1, len(right))
        what, began = f"{self._task.kind} {path} {start}-{end}", time.monotonic()
        try:
            found = (
                self._through_mount(path, start, end) if self._task.kind == "mount" else self._direct(path, start, end)
            )
        except (BootseerError, OSError) as exc:
            _say(what, began, error=f"{type(exc).__name__} {exc}")
            return
        _say(what, began, wrong=_differs(found, right[start:end]))

    def _direct(self, path: str, start: int, end: int) -> bytes:
        with self._fs.open(path) as file:
            return file.read(start, end - start)

    def _through_mount(self, path: str, start: int, end: int) -> bytearray:
        fd = os.open(os.path.join(self._task.mountpoint, path), os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # else it is memory that is read
            found = bytearray()
            while start + len(found) < end:
                piece = os.pread(fd, min(_PIECE, end - start - len(found)), start + len(found))
                if not piece:
                    break
                found += piece
            return found
        finally:
            os.close(fd)

    def _write(self) -> None:
        path, size = self._task.samples[0]
        self._version += 1
        new = memoryview(content(path, self._version, size))
        what, began = f"write {path} version {self._version}", time.monotonic()
        try:
            with self._fs.create(path, unit=self._task.unit, striped=True) as out:
                for offset in range(0, size, _PIECE):
                    out.write(new[offset : offset + _PIECE])
            error = ""
        except (BootseerError, OSError) as exc:
            error = f"{type(exc).__name__} {exc}"
        _say(what, began, error=error)
        what, began = f"read back {path} version {self._version}", time.monotonic()
        try:
            found = self._direct(path, 0, size)
        except (BootseerError, OSError) as exc:
            _say(what, began, error=f"{type(exc).__name__} {exc}")
            return
        # a failed write leaves the old content, or the new where nobody can know
        wrong = _differs(found, new) and not (error and not _differs(found, self._right[path]))
        _say(what, began, wrong=wrong)
        if not _differs(found, new):
            self._right[path] = new


def _main(argv: Sequence[str]) -> int:
    def watch() -> None:  # the parent has our standard input: it ends with the parent
        sys.stdin.buffer.read()
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
    process = _Process(msgspec.json.decode(argv[0], type=Task))
    while True:
        process.step()


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
