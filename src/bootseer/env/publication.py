"""A publication in the background: a process of idle priority beside the set-up command, and then beside the job. It
begins with the command, and stores what that has finished with. What it publishes is frozen, so nothing the job writes
gets in. It may be cancelled or killed at any time: a snapshot is published whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import BinaryIO, NamedTuple

from bootseer.config import Config
from bootseer.env import users
from bootseer.env.inputs import Opened
from bootseer.env.key import KeyDocument
from bootseer.env.scan import Changes
from bootseer.env.spec import EnvSpec
from bootseer.errors import doing
from bootseer.folders import private_folder
from bootseer.kernel import background
from bootseer.objects import lease

log = logging.getLogger(__name__)

PROGRAM = background.program("bootseer.env.publisher")
_LOG_BYTES = 4 << 20
_PUBLISHED = "published"
_KILL_SECONDS = 20.0
"""For a cancelled publication to stop reading what is then deleted, before it is killed."""


class Begin(NamedTuple):
    """The command begins. ``replaces``: manifests by name, if one of the same name is to be replaced; ``base``:
    `place.Held` of each target; ``area``: has the folder ``upper`` of the layers that it writes to; empty where it
    writes to the targets themselves."""

    spec: EnvSpec
    document: KeyDocument
    replaces: dict[str, bytes] | None
    base: list[dict[str, str]]
    area: str
    store_url: str
    config: Config


class End(NamedTuple):
    """The command has succeeded. ``changes`` of each target, where it wrote to the targets themselves; ``began``: when
    the command did (ns)."""

    inputs: Opened
    began: int
    seconds: float
    changes: list[Changes]
    lead: lease.Handed | None
    alone: bool
    """Whether it goes on when who has started this process has ended."""


_running: set[Publication] = set()
"""Those that go on although nobody may have kept them: one whose input is closed ends."""


class Publication:
    """The process; its ``begin`` and ``go_on`` messages are those of `publisher`. Raises `BootseerError`, `OSError`."""

    def __init__(self, begin: object, state_dir: Path, program: tuple[str, ...] = PROGRAM) -> None:
        self.log = private_folder(state_dir, sub="env") / "publications.log"
        self._why, self._program = "", program
        self._failed: OSError | None = None
        self._messages = os.memfd_create("publication", os.MFD_CLOEXEC)  # a pipe would make us wait for who reads it
        self._tell(begin)
        with doing(f"write {self.log}"):
            if self.log.exists() and self.log.stat().st_size > _LOG_BYTES:
                os.replace(self.log, self.log.with_suffix(".log.old"))
            with open(self.log, "ab") as errors:
                starting = threading.Thread(target=self._start, args=[errors], name="env-publication")
                try:
                    starting.start()
                    starting.join()
                except RuntimeError as exc:
                    raise OSError(errno.EAGAIN, str(exc)) from exc
            if self._failed:
                raise self._failed

    def _start(self, errors: BinaryIO) -> None:
        """In a thread of its own, whose priority the process has from its first moment on."""
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # and with it the idle class of disks
            os.setpriority(os.PRIO_PROCESS, 0, 19)
        try:
            self._process = subprocess.Popen(
                (*self._program, str(self._messages)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                pass_fds=[self._messages],
                cwd="/",
                process_group=0,
            )
        except OSError as exc:
            self._failed = exc

    @property
    def named(self) -> str:
        """Names the process for others, as `users` does."""
        return next(iter(users.named([self._process.pid])), "")

    def go_on(self, end: object) -> str:
        """The command has succeeded, and what it made is frozen. Why nothing comes of it, or empty."""
        assert self._process.stdin
        try:
            self._tell(end)
            self._process.stdin.write(b"!")
            self._process.stdin.flush()
        except OSError as exc:
            self._why = f"not published: {exc}; {self.log} says more"
        else:
            _running.add(self)
        return self._why

    def _tell(self, message: object) -> None:
        with open(self._messages, "wb", closefd=False) as file:
            import pickle  # takes 5 ms to load

            pickle.dump(message, file)

    def give_up(self) -> None:
        """Nothing of it is in the store by now but blocks: it is ended at once."""
        self._process.kill()
        self.ended(_KILL_SECONDS)

    def cancel(self) -> None:
        """Have it stop without publishing, if that is not too late."""
        if self._process.poll() is None:
            self._process.terminate()

    def ended(self, timeout: float) -> bool:
        """Whether it reads nothing any more, after at most ``timeout`` seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)
        if self._process.returncode is None:
            return False
        assert self._process.stdin
        assert self._process.stdout
        if not self._process.stdout.closed:
            told = self._process.stdout.read().decode(errors="replace")
            self._why = self._why or told or f"not published: the publication was cancelled, {self.log} says more"
            self._process.stdout.close()
            with contextlib.suppress(OSError):
                self._process.stdin.close()
            os.close(self._messages)
            _running.discard(self)
        return True

    def wait(self, timeout: float) -> tuple[bool, str]:
        """(published, why not); gives up after ``timeout`` seconds."""
        if not self.ended(timeout):
            return False, f"not published: not done after {timeout:.0f} s"
        return self._why == _PUBLISHED, "" if self._why == _PUBLISHED else self._why


def end(user: str) -> None:
    """End the publication that is named so (see `Publication.named`) and see that it is gone: it publishes nothing
    from now on, and reads nothing. One that waits for a disk that hangs is left, with a log line."""
    pid = int(user.partition(":")[0] or 0)
    until = time.monotonic() + _KILL_SECONDS
    while users.alive([user]):
        left = until - time.monotonic()
        if left < -_KILL_SECONDS:
            log.warning("%s, a publication, cannot be killed: it waits for a disk or a store", users.shown(user))
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM if left > 0 else signal.SIGKILL)
        time.sleep(0.02)
