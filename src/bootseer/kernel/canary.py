"""The fanotify canary: may a lazily filled file under EROFS be trusted here, on this kernel and this file system?

`fanotify_works` has a process of its own (this module's ``__main__``) try it in a folder beside the real files: a
sparse data file is marked, EROFS is mounted over it, a reader reads while a keeper fills what it asks for; then the
keeper is killed with an event in hand, another holder of the group denies that event, a second keeper goes on. Zeros,
a hang or a read that nobody was asked about fail it. Some tenths of a second (``bench/engine.py``), once per boot and
file system: the verdict is kept.

Concurrency: the trial is one process that forks a reader and two keepers, all in a session and a mount namespace of
their own; `fanotify_works` ends them all after `_DEADLINE`, and nothing is left mounted then.
"""

from __future__ import annotations

import errno
import json
import logging
import mmap
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from bootseer import faults
from bootseer.errors import BootseerError, DataError, PrivilegeError, UnavailableError, UnsupportedError
from bootseer.kernel import _canary_image as image
from bootseer.kernel import fanotify, mount

_log = logging.getLogger(__name__)

_DEADLINE = 10.0
_PIECE = 64 << 10
_VERSION = 1


class Verdict(NamedTuple):
    """Whether the fanotify driver may be used, and the line that says why (not)."""

    works: bool
    reason: str


def fanotify_works(cache_dir: Path, state_dir: Path, *, fresh: bool = False) -> Verdict:
    """The verdict for files in ``cache_dir`` (which exists), from this boot's record in ``state_dir`` or by a trial.

    Never raises: what goes wrong is a reason to use another driver. A verdict that may be different next time (no
    privilege, no space, no answer in time) is not recorded. ``fresh`` tries in any case, and changes a record that is
    there but makes none.
    """
    try:
        key = _key(cache_dir)
        record = state_dir / f"canary-{os.stat(cache_dir).st_dev:x}.json"
    except OSError as exc:
        return Verdict(False, f"cannot look at {cache_dir}: {exc.strerror}")
    known = None if fresh else _recall(record, key)
    if known is not None:
        return known
    verdict, final = _ask(cache_dir)
    if final and (not fresh or record.exists()):
        _remember(record, key, verdict)
    return verdict


def _key(cache_dir: Path) -> str:
    """What a verdict holds for: this version of the trial, this boot, this file system."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{_VERSION} {boot} {os.uname().release} {os.stat(cache_dir).st_dev:x}"


def _recall(record: Path, key: str) -> Verdict | None:
    try:
        found = json.loads(record.read_bytes())
        if found["key"] == key:
            return Verdict(bool(found["works"]), str(found["reason"]))
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError) as exc:
        _log.info("%s cannot be read, trying again: %s", record, exc)
    return None


def _remember(record: Path, key: str, verdict: Verdict) -> None:
    """No fsync: a record lost with the machine is one of an earlier boot."""
    text = json.dumps({"key": key, "works": verdict.works, "reason": verdict.reason})
    try:
        record.parent.mkdir(parents=True, exist_ok=True)
        fd, name = tempfile.mkstemp(prefix=record.name, dir=record.parent)
        try:
            with os.fdopen(fd, "w") as file:
                file.write(text)
            faults.point("canary.record.before-publish")
            os.replace(name, record)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as exc:
        _log.warning("the canary's verdict cannot be kept in %s: %s", record, exc.strerror)


def _ask(cache_dir: Path) -> tuple[Verdict, bool]:
    """Run the trial; its verdict, and whether it would be the same again."""
    try:
        for left in cache_dir.glob(".canary-*"):  # of a trial that was killed
            if time.time() - left.stat().st_mtime > 60 * _DEADLINE:
                shutil.rmtree(left, ignore_errors=True)
        folder = tempfile.mkdtemp(prefix=".canary-", dir=cache_dir)
    except OSError as exc:
        return Verdict(False, f"{cache_dir} cannot be written to: {exc.strerror}"), False
    started = time.monotonic()
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    try:
        trial = subprocess.Popen(
            [sys.executable, "-m", "bootseer.kernel.canary", folder],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environ,
            start_new_session=True,
            text=True,
        )
        try:
            out, err = trial.communicate(timeout=_DEADLINE)
        except subprocess.TimeoutExpired:
            os.killpg(trial.pid, signal.SIGKILL)
            trial.communicate()
            return Verdict(False, f"the fanotify canary hung for {_DEADLINE:g} s"), False
        try:
            answer = json.loads(out)
            verdict, final = Verdict(answer["works"], answer["reason"]), bool(answer["final"])
        except (ValueError, KeyError, TypeError):
            lines = err.strip().splitlines() or [f"it ended with code {trial.returncode}"]
            return Verdict(False, f"the fanotify canary failed: {lines[-1]}"), False
    except OSError as exc:
        return Verdict(False, f"the fanotify canary could not be started: {exc.strerror}"), False
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    _log.info("fanotify canary in %.2f s: %s", time.monotonic() - started, verdict.reason)
    return verdict, final


# ---- the trial, in a process of its own ----


def attempt(folder: Path, *, holder: bool = True) -> str:
    """The trial; one line about what was seen. Raises `BootseerError` where it fails. Forks, so no threads.

    Without ``holder`` nobody else holds the group when the keeper is killed: that must fail, which shows that the trial
    sees zeros.
    """
    if not mount.private_namespace():
        raise PrivilegeError("mounts need CAP_SYS_ADMIN", hint="run as root")
    right = image.data()
    meta, data, target = folder / "meta", folder / "data", folder / "target"
    target.mkdir()
    image.write_meta(meta)
    with data.open("xb") as sparse:
        sparse.truncate(len(right))
    filler = os.open(data, os.O_WRONLY | os.O_CLOEXEC)  # before the mark, else the keeper would wait for itself
    group = fanotify.Group.open()
    group.mark(data)
    ours, told = os.pipe()
    keeper = _fork(lambda: _keep(group, filler, right, told))
    if not holder:
        group.close()
    if mount.mount_erofs(meta, data, target) != "file":
        raise UnsupportedError("EROFS goes through a loop device here, whose reads raise no events")
    found, tell = os.pipe()
    reader = _fork(lambda: os.write(tell, _read(target).encode()))
    try:
        number = int(_told(ours, "a keeper to be asked", found) or b"-1")
        os.kill(keeper, signal.SIGKILL)
        os.waitpid(keeper, 0)
        if holder:
            if select.select([found], [], [], 0.02)[0]:
                raise DataError(f"a reader went on when the keeper was killed: {os.read(found, 1000).decode()}")
            group.deny(number, errno.EIO)
            keeper = _fork(lambda: _keep(group, filler, right, -1))
        verdict = _told(found, "the reader").decode()
        if verdict != "right":
            raise DataError(verdict)
    finally:
        for child in (keeper, reader):
            _end(child)
    group.unmark(data)
    for path in (data, target / "before"):
        _drop(path)
    if (target / "before").read_bytes() != image.contents("before"):
        raise DataError("a complete file without its mark gave wrong bytes")
    return "a lazily filled file under EROFS gave right bytes or errors, also when its keeper was killed"


def _keep(group: fanotify.Group, filler: int, right: bytes, tell: int) -> None:
    """A keeper: fills what is asked for and allows it. With ``tell`` it stops at the first event for ``after``, says
    the event's number and waits to be killed."""
    buffer = bytearray(64 * fanotify.EVENT_SIZE)
    deadline = time.monotonic() + _DEADLINE
    while time.monotonic() < deadline:
        if not select.select([group], [], [], 1.0)[0]:
            continue
        for event in group.events(buffer):
            if event.fd < 0 or event.offset < 0:
                raise DataError(f"an event without a range: {event}")
            if tell >= 0 and event.offset < image.FILE_SIZE:
                os.write(tell, str(event.fd).encode())
                signal.pause()
            faults.point("canary.keeper.event")
            os.pwrite(filler, right[event.offset : event.offset + event.length], event.offset)
            group.allow(event.fd)
            os.close(event.fd)


def _read(target: Path) -> str:
    """Read both files, one of them through a mapping at first; ``"right"``, or what was not."""
    for name in ("before", "after"):
        right = image.contents(name)
        with (target / name).open("rb", buffering=0) as file:
            if name == "before":
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                    if mapped[image.FILE_SIZE // 2 :][:4096] != right[image.FILE_SIZE // 2 :][:4096]:
                        return "a mapped file gave wrong bytes"
            for offset in range(0, image.FILE_SIZE, _PIECE):
                for again in (True, False):
                    try:
                        got = os.pread(file.fileno(), _PIECE, offset)
                    except OSError as exc:
                        if not again:
                            return f"a second read failed too: {exc.strerror}"
                        continue
                    if got != right[offset : offset + _PIECE]:
                        return f"a read gave {'wrong bytes' if any(got) else 'zeros'}"
                    break
    return "right"


def _fork(body: Callable[[], object]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        body()
        os._exit(0)
    except BaseException as exc:
        os.write(2, f"{type(exc).__name__}: {exc}\n".encode())
    finally:
        os._exit(1)


def _told(fd: int, whom: str, *others: int) -> bytes:
    readable, _, _ = select.select([fd, *others], [], [], _DEADLINE / 2)
    if fd in readable:
        return os.read(fd, 1000)
    for other in readable:
        raise DataError(f"reads are not asked about: {os.read(other, 1000).decode()}")
    raise UnavailableError(f"waited {_DEADLINE / 2:g} s for {whom}")


def _end(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        pass


def _drop(path: Path) -> None:
    """Have the next read of ``path`` go past the page cache."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def _main(folder: str) -> None:
    try:
        answer = {"works": True, "reason": attempt(Path(folder)), "final": True}
    except (UnsupportedError, DataError) as exc:
        answer = {"works": False, "reason": exc.message, "final": True}
    except BootseerError as exc:
        answer = {"works": False, "reason": exc.message, "final": False}
    print(json.dumps(answer))


if __name__ == "__main__":
    _main(sys.argv[1])
