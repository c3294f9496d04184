"""A neighbour: processes of another user that put links, pipes, sparse files and sockets wherever they may write.

`Outside` is what nobody may reach through them, and all that they lead to: the suite is also run without protection.
`Neighbour` races in the folders that it is given, `repeated` does something with our rights meanwhile, in a process
that is watched.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import resource
import select
import shutil
import signal
import socket
import stat
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from bootseer.errors import BootseerError
from bootseer.kernel import libc

NOBODY = 65534
_EXCHANGE = 2
_MEMORY = 3 << 30
"""Bytes of addresses more than this process has already."""
_AGED = 3 * 86400


@contextlib.contextmanager
def place() -> Iterator[Path]:
    """A folder that other users may enter, as those of pytest may not be."""
    folder = Path(tempfile.mkdtemp(prefix="bootseer-pytest-neighbour-", dir="/var/tmp"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


class Outside:
    """Files and folders of root that only root may read, and what they look like."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o755)
        self.folder = folder
        self.text = f"only root may read this: {random.getrandbits(64):x}\n"
        self.secret, self.readable, self.private = folder / "secret", folder / "readable", folder / "private"
        self.secret.touch(0o600)
        self.secret.write_text(self.text)
        self.readable.write_text("root's, for all to read\n")
        self.private.mkdir(0o700)
        self.zero = folder / "zero"
        os.mknod(self.zero, stat.S_IFCHR | 0o666, os.makedev(1, 5))
        for name in (".tmp-precious", "hot-1.pack", "1.pages", "0", "default", "secret"):
            (self.private / name).write_text(self.text)
        for path in (self.secret, *self.private.iterdir()):  # with relatime, the next read sets the time of access
            os.utime(path, (time.time() - 2 * _AGED, time.time() - _AGED))
        self.before = self._look()

    def _look(self) -> dict[str, tuple[object, ...]]:
        found: dict[str, tuple[object, ...]] = {}
        for path in sorted([self.folder, *self.folder.rglob("*")]):
            info = path.lstat()
            read = info.st_atime_ns if stat.S_ISREG(info.st_mode) and path != self.readable else 0
            found[str(path)] = (
                info.st_mode,
                info.st_uid,
                info.st_gid,
                info.st_nlink,
                info.st_size,
                read,
                info.st_mtime_ns,
            )
        return found

    def changes(self) -> list[str]:
        """What was made, removed, written, given away or read, one line each."""
        after = self._look()
        return [
            f"{path}: {self.before.get(path)} became {after.get(path)}"
            for path in sorted(self.before.keys() | after.keys())
            if self.before.get(path) != after.get(path)
        ]

    def told(self, folder: Path) -> list[str]:
        """The files below ``folder`` that have the secret's text in them."""
        words = self.text.strip().encode()
        files = [path for path in folder.rglob("*") if stat.S_ISREG(path.lstat().st_mode)]
        return [str(path) for path in files if path.stat().st_size < 1 << 24 and words in path.read_bytes()]


class Neighbour:
    """Two processes of user `NOBODY` that, for as long as the context lasts, exchange what lies in ``folders``, or has
    one of the ``names`` in them or below, by traps, and put it back. ``sparse``: the size of such files."""

    def __init__(
        self, folders: Sequence[Path], names: Sequence[str], outside: Outside, *, sparse: int = 1 << 40
    ) -> None:
        self._sparse = sparse
        self._folders, self._names, self._outside = [str(folder) for folder in folders], list(names), outside
        self._children: list[int] = []

    def __enter__(self) -> Neighbour:
        for seed in range(2):
            child = os.fork()
            if not child:
                try:
                    os.setgroups([])
                    os.setgid(NOBODY)
                    os.setuid(NOBODY)
                    libc.die_with_parent()
                    _race(random.Random(seed), self._folders, self._names, self._outside, self._sparse)
                finally:
                    os._exit(1)
            self._children.append(child)
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _race(rng: random.Random, folders: list[str], names: list[str], outside: Outside, sparse: int) -> None:
    c = ctypes.CDLL(None)
    targets = [str(p) for p in (outside.secret, outside.readable, outside.private, outside.private / "default")]
    targets += [f"/proc/self/root{outside.private}", str(outside.private / "new"), str(outside.zero)]
    targets += [f"{up}outside/private" for up in ("../", "../../", "../../../")]
    while True:
        where = rng.choice(folders)
        with contextlib.suppress(OSError):
            for _ in range(6):  # down to somewhere
                below = [entry.path for entry in os.scandir(where) if entry.is_dir(follow_symlinks=False)]
                if not below or rng.random() < 0.3:
                    break
                where = rng.choice(below)
            present = [name for name in os.listdir(where) if not name.startswith("trap-")]
            name = os.path.join(where, rng.choice([*present, *names]))
            trap = os.path.join(where, f"trap-{os.getpid()}")
            _set(rng, trap, rng.choice(targets), sparse)
            if os.path.lexists(name):
                for _ in range(rng.randrange(1, 20)):
                    c.renameat2(-100, trap.encode(), -100, name.encode(), _EXCHANGE)
                    c.renameat2(-100, trap.encode(), -100, name.encode(), _EXCHANGE)
                if rng.random() < 0.2:
                    c.renameat2(-100, trap.encode(), -100, name.encode(), _EXCHANGE)
                    time.sleep(rng.random() * 0.05)
                    c.renameat2(-100, trap.encode(), -100, name.encode(), _EXCHANGE)
            else:
                os.rename(trap, name)
                time.sleep(rng.random() * 0.02)
                os.rename(name, trap)
            _unset(trap)


def _set(rng: random.Random, path: str, target: str, sparse: int) -> None:
    _unset(path)
    kind = rng.choice(["link", "link", "link", "pipe", "sparse", "socket", "folder"])
    if kind == "link":
        os.symlink(target, path)
    elif kind == "pipe":
        os.mkfifo(path, 0o666)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as held:
            held.bind(path)
    elif kind == "folder":
        os.mkdir(path)
        os.symlink(target, os.path.join(path, "default"))
    else:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o666))
        os.truncate(path, sparse)


def _unset(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
    elif os.path.lexists(path):
        os.unlink(path)


class Repeated(msgspec.Struct):
    """How often each end was met: ``right``, or the type of a `BootseerError`; ``wrong``: everything else, in words."""

    ends: dict[str, int]
    wrong: list[str]


LEAST = 6
"""On a busy machine a call may take a good part of the seconds."""


def repeated(act: Callable[[int], object], seconds: float, *, each: float = 20.0) -> Repeated:
    """Calls ``act`` with 0, 1, 2, ... for that long, and ``LEAST`` times at least, in a process with this one's rights
    and little memory. A call that takes more than ``each`` seconds is a hang, and ends it."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            libc.die_with_parent()
            os.close(read)
            most = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + _MEMORY
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 28, 1 << 28))
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            found = _repeat(act, seconds, each)
            with open(write, "w") as file:
                file.write(json.dumps(found))
        finally:
            os._exit(0)
    os.close(write)
    with open(read) as file:
        ended, _, _ = select.select([file], [], [], seconds + 2 * each)  # a thread of it may hang, too
        if not ended:
            os.kill(child, signal.SIGKILL)
        text = file.read()
    os.waitpid(child, 0)
    ends, wrong = json.loads(text) if text else ({}, ["it hung" if not ended else "it ended without a word"])
    return Repeated(ends, wrong)


class _Hang(BaseException):
    pass


def _repeat(act: Callable[[int], object], seconds: float, each: float) -> tuple[dict[str, int], list[str]]:
    def late(*_: object) -> None:
        raise _Hang

    signal.signal(signal.SIGALRM, late)
    ends: Counter[str] = Counter()
    wrong: list[str] = []
    end, number = time.monotonic() + seconds, 0
    while (time.monotonic() < end or number < LEAST) and len(wrong) < 5:
        signal.setitimer(signal.ITIMER_REAL, each)
        try:
            act(number)
            ends["right"] += 1
        except BootseerError as exc:
            ends[type(exc).__name__] += 1
            if "\n" in str(exc) or not str(exc):
                wrong.append(f"not one line: {exc!r}")
        except FileExistsError:
            ends["FileExistsError"] += 1
        except BaseException:
            wrong.append(traceback.format_exc(limit=-6))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        number += 1
    return dict(ends), wrong
