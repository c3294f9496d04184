"""A crowd of readers: processes that read all files of a mount in random order and compare every byte.

``python -m support.crowd SPEC`` forks ``readers`` processes and ends with them, or when its standard input
ends. What they find is in shared memory (a file), so that it is known also of readers that hang. Each kills itself
when its parent is gone. `Crowd` runs one.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

import msgspec

from support import forked, ways

_PAGE = 4096


class Slot(IntEnum):
    """Numbers each reader keeps, 8 bytes each. ``BEGAN``: when the operation under way began, 0 when none is.
    ``BEGUN``: files begun, for the one that goes on after SIGBUS."""

    BEGAN = 0
    FILES = 1
    PIECES = 2
    BYTES = 3
    MISMATCHES = 4
    ZEROS = 5
    ERRORS = 6
    BEGUN = 7


class Tally(NamedTuple):
    """What a crowd saw. ``mismatches``: pieces with a wrong byte; ``zeros``: those of them with a page of zeros where
    other bytes belong; ``errors``: reads that failed; ``hangs``: reads that took longer than the limit."""

    files: int = 0
    pieces: int = 0
    bytes: int = 0
    mismatches: int = 0
    zeros: int = 0
    errors: int = 0
    hangs: int = 0

    def __add__(self, other: object) -> Tally:
        if not isinstance(other, Tally):
            return NotImplemented
        return Tally(*(a + b for a, b in zip(self, other, strict=True)))


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """``reference``: the folder with the right bytes. ``files``: paths below both. ``passes`` 0: until told to end.
    ``drop``: the share of reads before which the page cache of the file is dropped."""

    target: str
    reference: str
    folder: str
    files: list[str]
    readers: int
    ways: list[str]
    passes: int
    drop: float
    seed: int


def files_of(reference: Path, *, largest: int = 1 << 62) -> list[str]:
    """The regular files below ``reference`` of 1 to ``largest`` bytes, one name for each."""
    seen: set[tuple[int, int]] = set()
    found = []
    for folder, _, names in os.walk(reference):
        for name in names:
            path = os.path.join(folder, name)
            status = os.lstat(path)
            if (
                (status.st_mode & 0o170000) == 0o100000
                and 0 < status.st_size <= largest
                and (status.st_dev, status.st_ino) not in seen
            ):
                seen.add((status.st_dev, status.st_ino))
                found.append(os.path.relpath(path, reference))
    return sorted(found)


class _Reader:
    """One reader process."""

    def __init__(self, spec: Spec, index: int, slots: memoryview) -> None:
        self._spec = spec
        self._slots = slots[index * len(Slot) : (index + 1) * len(Slot)]
        self._seed = f"{spec.seed} {index}"
        self._rand = random.Random(f"{self._seed} {self._slots[Slot.BEGUN]}")
        self._parent = os.getppid()

    def run(self) -> None:
        while True:
            whole, done = divmod(self._slots[Slot.BEGUN], len(self._spec.files))
            if self._spec.passes and whole >= self._spec.passes:
                return
            names = list(self._spec.files)
            random.Random(f"{self._seed} {whole}").shuffle(names)
            for name in names[done:]:
                if os.getppid() != self._parent:
                    return
                self._slots[Slot.BEGUN] += 1
                self._file(name, self._rand.choice(self._spec.ways))
                self._slots[Slot.FILES] += 1

    def _file(self, name: str, way: str) -> None:
        trouble = 0
        try:
            self._begin()
            with open(os.path.join(self._spec.reference, name), "rb") as right:
                self._compare(name, way, right.fileno())
        except OSError as exc:
            trouble = exc.errno or -1
        finally:
            self._slots[Slot.BEGAN] = 0
        if trouble:
            self._slots[Slot.ERRORS] += 1
            self._tell(f"error {os.strerror(trouble)}: {way} {name!r}")

    def _begin(self) -> None:
        self._slots[Slot.BEGAN] = time.monotonic_ns()

    def _compare(self, name: str, way: str, right: int) -> None:
        fd = os.open(os.path.join(self._spec.target, name), os.O_RDONLY | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_size != os.fstat(right).st_size:
                self._wrong(f"size of {name!r}", False)
            if self._rand.random() < self._spec.drop:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            for offset, found in ways.WAYS[way](fd, ways.regions(right), self._rand):
                want = os.pread(right, len(found), offset)
                self._slots[Slot.PIECES] += 1
                self._slots[Slot.BYTES] += len(found)
                if found != want:
                    pages = range(0, len(found), _PAGE)
                    zero = any(not any(found[at : at + _PAGE]) and any(want[at : at + _PAGE]) for at in pages)
                    self._wrong(f"{way} {name!r} at {offset}, {len(found)} bytes, {found.count(0)} zeros", zero)
                elif not found:
                    self._wrong(f"{way} {name!r} ends at {offset}", False)
                self._begin()
        finally:
            os.close(fd)

    def _wrong(self, what: str, zero: bool) -> None:
        self._slots[Slot.MISMATCHES] += 1
        self._slots[Slot.ZEROS] += zero
        self._tell(f"wrong: {what}")

    def _tell(self, line: str) -> None:
        with open(os.path.join(self._spec.folder, "findings"), "a", errors="backslashreplace") as out:
            out.write(f"{time.strftime('%H:%M:%S')} {line}\n")


def main(argv: Sequence[str]) -> int:
    folder = Path(argv[0])
    spec = msgspec.json.decode((folder / "spec.json").read_bytes(), type=Spec)
    spec = msgspec.structs.replace(spec, files=[os.fsdecode(name.encode("latin-1")) for name in spec.files])
    with open(folder / "tally", "r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    slots = memoryview(memory).cast("Q")
    running: dict[int, int] = {}

    def start(index: int) -> None:
        pid = os.fork()
        if pid:
            running[pid] = index
            return
        code = 70
        try:
            os.close(0)
            _Reader(spec, index, slots).run()
            code = 0
        finally:
            os._exit(code)

    for index in range(spec.readers):
        start(index)
    while running:
        if select.select([0], [], [], 0.02)[0]:
            for pid in running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
            for pid in list(running):
                os.waitpid(pid, 0)
            return 0
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            index = running.pop(pid)
            base = index * len(Slot)
            slots[base + Slot.BEGAN] = 0
            if os.waitstatus_to_exitcode(status) == -signal.SIGBUS:
                slots[base + Slot.ERRORS] += 1
                start(index)
            elif status:
                return 70
    return 0


class Crowd:
    """Readers of ``target``, running from `__enter__` on; `tally` at any time. ``limit``: seconds that one read may
    take. ``prefix``: a command to run them under, such as ``unshare -Ur``."""

    def __init__(
        self,
        target: Path,
        reference: Path,
        folder: Path,
        *,
        files: Sequence[str],
        readers: int = 16,
        some: Sequence[str] = tuple(ways.WAYS),
        passes: int = 0,
        drop: float = 0.7,
        limit: float = 60.0,
        prefix: Sequence[str] = (),
        seed: int = 1,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._limit = limit
        self._hung: set[tuple[int, int]] = set()
        names = [os.fsencode(name).decode("latin-1") for name in files]
        spec = Spec(
            target=str(target), reference=str(reference), folder=str(folder), files=names, readers=readers,
            ways=list(some), passes=passes, drop=drop, seed=seed,
        )  # fmt: skip
        (folder / "spec.json").write_bytes(msgspec.json.encode(spec))
        (folder / "tally").write_bytes(bytes(8 * len(Slot) * readers))
        with open(folder / "tally", "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        self._readers = readers
        self._argv = [*prefix, sys.executable, "-m", "support.crowd", str(folder)]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Crowd:
        self._process = forked.Popen(self._argv, stdin=subprocess.PIPE, start_new_session=True)
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def findings(self) -> str:
        path = self.folder / "findings"
        return path.read_text() if path.exists() else ""

    def tally(self) -> Tally:
        slots = memoryview(self._memory).cast("Q")
        now = time.monotonic_ns()
        total = [0] * len(Slot)
        for index in range(self._readers):
            one = slots[index * len(Slot) : (index + 1) * len(Slot)].tolist()
            total = [a + b for a, b in zip(total, one, strict=True)]
            if one[Slot.BEGAN] and now - one[Slot.BEGAN] > self._limit * 1e9:
                self._hung.add((index, one[Slot.BEGAN]))
        return Tally._make([*total[Slot.FILES : Slot.BEGUN], len(self._hung)])

    def reading(self) -> int:
        """How many readers have an operation under way."""
        slots = memoryview(self._memory).cast("Q")
        return sum(slots[index * len(Slot) + Slot.BEGAN] > 0 for index in range(self._readers))

    @property
    def busy(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def join(self, seconds: float) -> Tally:
        """Wait for readers with ``passes`` to end, but stop at the first hang. Raises `TimeoutError`."""
        end = time.monotonic() + seconds
        while self.busy:
            found = self.tally()
            if found.hangs:
                return self.stop()
            if time.monotonic() > end:
                raise TimeoutError(f"readers are not done after {seconds:g} s: {found}")
            time.sleep(0.02)
        found = self.stop()
        assert self._process is not None
        if self._process.returncode:
            raise RuntimeError(f"the crowd failed with code {self._process.returncode}")
        return found

    def stop(self) -> Tally:
        """End the readers. One that does not end within the limit counts as hanging, and is killed."""
        process = self._process
        if process is not None:
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
            try:
                process.wait(self._limit)
            except subprocess.TimeoutExpired:
                self._hung.add((-1, 0))
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)
        return self.tally()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
