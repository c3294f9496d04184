"""Commands in an image as an ordinary user: `become` one, or `run` one to its end. `run` has a process of its own for
the command, which it becomes (`kernel.enter`), and waits for it in the caller's thread."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import msgspec

from bootseer.errors import BootseerError, ConfigError, NotFoundError, from_exit_code
from bootseer.kernel import beneath, enter, signals
from bootseer.kernel.child import die_with
from bootseer.kernel.enter import Shown
from bootseer.profile.wrap import CommandError
from bootseer.wiretypes import json_as

log = logging.getLogger(__name__)

SYSTEM = ("/dev", "/proc", "/sys")
"""What every command sees of this host."""


_MAX_USERS = 1 << 20
"""Bytes of a file of users or groups in an image."""


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """``argv`` in the tree at ``root``, with ``shown`` of this host, empty folders ``made`` in it, all of its
    variables, and the first of the ``folders`` that is there to start in."""

    root: str
    argv: Sequence[str]
    env: dict[str, str]
    shown: Sequence[Shown]
    folders: Sequence[str]
    made: Sequence[str] = ()
    must: bool = False
    """There is no command without the first folder."""


class _Failure(msgspec.Struct):
    code: int
    message: str
    hint: str


def become(command: Command, parent: int = 0) -> NoReturn:
    """Make this process, which must have one thread, the command; it ends with process ``parent``, if there is one.
    Raises `CommandError`, `NotFoundError` without the folder to start in, and as `kernel.enter.enter`."""
    root = Path(command.root)
    enter.enter(root, command.shown, _files(root), command.made)
    if parent:
        die_with(parent)
    for folder in (*command.folders, "/"):
        try:
            os.chdir(folder)
            break
        except OSError as exc:
            if command.must:
                raise NotFoundError(f"there is no folder {folder} in the image: {exc.strerror}") from None
    signals.restore()
    program = command.argv[0]
    try:
        os.execvpe(program, list(command.argv), command.env)
    except OSError as exc:
        code = 127 if isinstance(exc, FileNotFoundError) else 126
        raise CommandError(f"cannot run {program} in the image: {exc.strerror}", code=code) from None


def run(command: Command, *, stop_grace: float | None = None, stdin: bool = True) -> int:
    """Run the command to its end and return its exit code (128+n: signal n). Streams are the caller's, but for an input
    that is no terminal where ``stdin`` is false; signals are passed on (in the main thread). ``stop_grace``: seconds
    after SIGINT or SIGTERM until it is killed. What it leaves in its process group is killed. Raises `NotFoundError`
    when the image has no such command, and what `become` raises."""
    try:
        document = msgspec.json.encode((os.getpid(), command))
    except UnicodeEncodeError as exc:
        # of a variable the name alone: its value may be a secret
        odd = next((name for name, value in command.env.items() if value == exc.object), exc.object)
        raise ConfigError(f"{odd!r} is no text in UTF-8", hint="a command takes no other") from None
    with open(os.memfd_create("command"), "w+b") as told, open(os.memfd_create("failure"), "w+b") as said:
        told.write(document)
        told.seek(0)
        fds = [told.fileno(), said.fileno()]
        shared = os.isatty(0)  # another group than the terminal's may not read from it
        process = subprocess.Popen(
            [sys.executable, "-I", "-m", "bootseer.rootless", *map(str, fds)],
            stdin=None if stdin or shared else subprocess.DEVNULL,
            pass_fds=fds,
            process_group=None if shared else 0,
        )
        send = functools.partial(os.kill if shared else os.killpg, process.pid)
        try:
            with _forwarding(process.pid, shared, stop_grace):
                os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # its number stays its own until it is reaped
        finally:
            with contextlib.suppress(OSError):
                send(signal.SIGKILL)
            code = process.wait()
        said.seek(0)
        if answer := said.read():
            failure = json_as(answer, _Failure)
            raise from_exit_code(failure.code, failure.message, hint=failure.hint)
        return code if code >= 0 else 128 - code


@contextlib.contextmanager
def _forwarding(pid: int, shared: bool, stop_grace: float | None) -> Iterator[None]:
    """Pass signals on to the child ``pid``, which is not reaped yet. ``shared``: it is in our process group, the
    terminal's, which interrupts it itself."""
    timers: list[threading.Timer] = []

    def forward(number: int) -> None:
        if not shared or number not in (signal.SIGINT, signal.SIGQUIT):
            os.kill(pid, number)
        if stop_grace is not None and not timers and number in (signal.SIGINT, signal.SIGTERM):
            timers.append(threading.Timer(stop_grace, os.kill, (pid, signal.SIGKILL)))
            timers[0].daemon = True
            timers[0].start()

    with signals.heard(forward):
        try:
            yield
        finally:
            for timer in timers:
                timer.cancel()


def _files(root: Path) -> dict[str, bytes]:
    """Files in place of the image's: this host's names of machines, and an entry for the user."""
    import grp
    import pwd

    found = {}
    for path in ("/etc/hosts", "/etc/resolv.conf"):
        with contextlib.suppress(OSError):
            found[path] = Path(path).read_bytes()
    home = os.path.expanduser("~")
    uid, gid = os.geteuid(), os.getegid()
    try:
        user = pwd.getpwuid(uid).pw_name
        group = grp.getgrgid(gid).gr_name
    except KeyError:
        user, group = os.environ.get("USER", str(uid)), str(gid)
    for path, number, line in (
        ("/etc/passwd", uid, f"{user}:x:{uid}:{gid}::{home}:/bin/sh"),
        ("/etc/group", gid, f"{group}:x:{gid}:"),
    ):
        lines = _users(root, path).decode(errors="replace").splitlines()
        if not any(entry.split(":")[2:3] == [str(number)] for entry in lines):
            found[path] = "\n".join([*lines, line, ""]).encode()
    return {path: content for path, content in found.items() if content}


def _users(root: Path, path: str) -> bytes:
    """What is in a file of the image; nothing where there is none. It may be a link, a pipe, or terabytes."""
    try:
        return beneath.read_inside(root, path, _MAX_USERS)
    except OSError as exc:
        if exc.errno in (errno.EFBIG, errno.EINVAL):
            log.warning("%s of the image is not used: %s", path, exc.strerror)
        return b""


def _main(told: int, said: int) -> int:
    """The process of `run`: what it is to become is in one file in memory, why it cannot goes to the other."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    with open(told, "rb") as file:
        parent, command = json_as(file.read(), tuple[int, Command])
    os.set_inheritable(said, False)
    try:
        become(command, parent)
    except BootseerError as exc:
        code = NotFoundError.exit_code if exc.exit_code == 127 else exc.exit_code
        os.write(said, msgspec.json.encode(_Failure(code, exc.message, exc.hint)))
        return 1


if __name__ == "__main__":
    sys.exit(_main(int(sys.argv[1]), int(sys.argv[2])))
