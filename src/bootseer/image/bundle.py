"""One container: its bundle, the runtime's process, and the signals that reach its command.

Signals mean in a container what they mean without one. Process 1, for which the kernel drops every signal that it has
no handler for, is not the command but a small program (init/init.c) that passes signals on to it. Where there is none
for this machine, a signal that would have ended the command ends the container. The runtime is a child in its own
process group, so that a signal reaches the container exactly once: by us."""

from __future__ import annotations

import json
import logging
import os
import queue
import signal
import subprocess
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import msgspec

from bootseer.errors import ConfigError, UnavailableError
from bootseer.folders import clear, owned_folder, private_folder
from bootseer.image import pins
from bootseer.kernel import procfs, signals
from bootseer.wiretypes import loaded

log = logging.getLogger(__name__)

INIT = "/dev/init"
_FIRST = ("init", "systemd")
"""Commands so called are often those of s6-overlay or a whole system."""
_STATE_SECONDS = 30.0
_GUARD_SECONDS = 5.0


class Bundle:
    """A bundle and its container; leaving the context deletes both. When this process is killed, a guard deletes the
    container, and `image.sweep` what is left; when the guard is killed, too, `image.sweep` does both."""

    def __init__(self, program: str, state: Path, document: dict[str, Any]) -> None:
        self._program, self._document = program, document
        self._state = state
        self._killed = False
        self._over = threading.Event()
        self._ended_by = 0
        """The signal that came before there was a command, or for which a process 1 without a handler was killed."""
        self._undo = ExitStack()

    def __enter__(self) -> Bundle:
        with ExitStack() as undo:
            parent = private_folder(self._state, sub="containers")
            self._bundle = undo.enter_context(owned_folder(parent, "bootseer-"))
            self._ident = self._bundle.name
            undo.callback(delete, self._bundle)
            self._document["linux"]["cgroupsPath"] = _cgroup_path(self._ident)
            self._init = _give_init(self._document, self._bundle / "init")
            self._pins = pins.pins(self._document, self._bundle / "binds")
            try:
                text = msgspec.json.encode(self._document)
            except UnicodeEncodeError as exc:
                odd: str = exc.object  # the argument, variable or path
                if odd in self._document["process"]["env"]:
                    odd = odd.partition("=")[0]  # the value may be a secret
                raise ConfigError(f"{odd!r} is no text in UTF-8", hint="a container takes no other") from None
            (self._bundle / "config.json").write_bytes(text)
            (self._bundle / "program").write_text(self._program)
            argv = [*_base(self._bundle, self._program), "delete", "--force", self._ident]
            # It reads until this process ends, or says that all is well. A session of its own keeps signals away; it
            # ignores those that somebody sends to every process.
            guard = subprocess.Popen(
                ["sh", "-c", 'trap "" HUP INT QUIT TERM USR1 USR2; read -r word || exec "$@"', "guard", *argv],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            undo.callback(_dismiss, guard)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._undo.close()

    def run(
        self,
        *,
        quiet: bool = False,
        stdin: bool = True,
        terminal: bool = False,
        deadline: float | None = None,
        stop_grace: float | None = None,
    ) -> int:
        bundle = str(self._bundle)
        log_to = ["--log", f"{bundle}/log", "--log-format", "json"]  # of this verb alone: `failure` reads it
        argv = [*_base(self._bundle, self._program), *log_to, "run", "--bundle", bundle, "--pid-file", f"{bundle}/pid"]
        where = subprocess.DEVNULL if quiet else None
        # A group of its own keeps signals to ours from coming twice; but one that is not the terminal's may not read
        # from it: an interactive command would stop for good, and we wait for it.
        shared = not quiet and os.isatty(0)
        group = None if shared else 0
        read = where if stdin or shared else subprocess.DEVNULL

        def start() -> subprocess.Popen[bytes]:
            return subprocess.Popen([*argv, self._ident], stdin=read, stdout=where, stderr=where, process_group=group)

        with _restored() if terminal else nullcontext(), pins.spawn(self._pins, start) as child:
            try:
                with nullcontext() if quiet else self._forwarding(shared, stop_grace):
                    code = child.wait(deadline)
            except subprocess.TimeoutExpired:
                raise UnavailableError(f"{self._program} did not end within {deadline} s") from None
            finally:
                if child.poll() is None:
                    self.kill()
                    child.kill()
        if self._ended_by and code:
            return 128 + self._ended_by
        return code if code >= 0 else 128 - code

    def failure(self) -> str:
        """Why the runtime could not start the command; empty when it did start, or was not to any more."""
        if self._ended_by:
            return ""
        try:
            lines = (self._bundle / "log").read_text().splitlines()
        except OSError:
            lines = []
        errors = [entry.get("msg", "") for entry in map(_json_line, lines) if entry.get("level") == "error"]
        if errors and not self._killed:
            return str(errors[-1])
        return "" if (self._bundle / "pid").exists() else f"{self._program} could not start the container"

    def kill(self) -> None:
        self._killed = True
        self._send("KILL")

    def _send(self, sign: str) -> None:
        _answer([*_base(self._bundle, self._program), "kill", self._ident, sign])

    @contextmanager
    def _forwarding(self, shared: bool, stop_grace: float | None) -> Iterator[None]:
        """Pass signals on to the container. ``shared``: its processes are in our process group, the terminal's, which
        gives them interrupts itself."""
        came: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        thread = threading.Thread(target=self._pass_on, args=(came, shared, stop_grace), name="signals", daemon=True)
        with signals.heard(came.put):
            thread.start()
            try:
                yield
            finally:
                self._over.set()
                came.put(None)
                thread.join()

    def _pass_on(self, came: queue.SimpleQueue[int | None], shared: bool, stop_grace: float | None) -> None:
        until: float | None = None
        while True:
            try:
                number = came.get(timeout=None if until is None else max(0.0, until - time.monotonic()))
            except queue.Empty:
                log.warning("the command did not end within %g s, killing it", stop_grace)
                self.kill()
                until = None
                continue
            if number is None:
                return
            status, pid = self._status()
            if status == "stopped" or (not status and (self._bundle / "pid").exists()):
                continue  # it has ended by itself, perhaps for this signal
            if status != "running" or not (self._init or _heeds(pid, number)):
                self._ended_by = self._ended_by or number
                self.kill()
                while status != "running" and not self._over.wait(0.1):  # there may be no container yet
                    self.kill()
            elif not shared or number not in (signal.SIGINT, signal.SIGQUIT):
                self._send(str(int(number)))
            if stop_grace is not None and until is None and number in (signal.SIGINT, signal.SIGTERM):
                until = time.monotonic() + stop_grace

    def _status(self) -> tuple[str, int]:
        """What the runtime calls the state of the container, and its process; "" for none yet or any more, ``unknown``
        when the runtime does not say it in time."""
        argv = [*_base(self._bundle, self._program), "state", self._ident]
        with suppress(subprocess.TimeoutExpired):
            done = subprocess.run(argv, capture_output=True, check=False, timeout=_STATE_SECONDS)
            state = _json_line(done.stdout.decode(errors="replace"))
            return str(state.get("status", "")), int(state.get("pid", 0))
        return "unknown", 0


@contextmanager
def _restored() -> Iterator[None]:
    """The terminal is afterwards as it was, also when the runtime, which changes it, was killed."""
    before = termios.tcgetattr(0)
    try:
        yield
    finally:
        with suppress(termios.error):
            termios.tcsetattr(0, termios.TCSANOW, before)


def _give_init(document: dict[str, Any], place: Path) -> bool:
    """Have a program of the container's own, ``place``, start the command and be process 1, where there is one."""
    program = Path(__file__).parent / "init" / os.uname().machine
    mounts = document["mounts"]
    after = next(n for n, one in enumerate(mounts) if one["destination"] == "/dev") + 1
    hiding = [os.path.normpath(f"/{one['destination'].lstrip('/')}") for one in mounts[after:]]
    if not program.exists() or not {"/", "/dev", INIT}.isdisjoint(hiding):
        log.warning("the command is process 1 of its container: there is no init for this machine, or no place for it")
        return False
    if os.path.basename(command := document["process"]["args"][0]) in _FIRST:
        how = f"-v /dev/null:{INIT} makes it that"
        log.warning("%s may insist on being process 1 of the container, which it is not: %s", command, how)
    place.write_bytes(program.read_bytes())
    place.chmod(0o555)
    options = ["bind", "ro", "nosuid", "nodev"]
    mounts.insert(after, {"destination": INIT, "type": "bind", "source": str(place), "options": options})
    document["process"]["args"].insert(0, INIT)
    return True


def _heeds(pid: int, number: int) -> bool:
    """Whether process ``pid`` has a handler for signal ``number``, ignores it or waits for it."""
    try:
        masks = procfs.masks(pid, "SigCgt:", "SigIgn:", "SigBlk:")
    except OSError:
        return True
    return any(mask >> (number - 1) & 1 for mask in masks)


def delete(bundle: Path) -> None:
    """Delete the container of ``bundle``, and what is in it but the lock."""
    with suppress(FileNotFoundError):
        program = (bundle / "program").read_text()
        said = _answer([*_base(bundle, program), "delete", "--force", bundle.name])
        if (_root(bundle, program) / bundle.name).exists():  # the runtime's own record of a container
            log.warning("container %s could not be deleted, its bundle stays in %s: %s", bundle.name, bundle, said)
            return
    clear(bundle)


def _dismiss(guard: subprocess.Popen[bytes]) -> None:
    """Tell the guard that all is well. One that does not end is killed."""
    try:
        guard.communicate(b"done\n", timeout=_GUARD_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as exc:
        log.warning("the guard of a container does not end, killing it: %s", exc)
        guard.kill()
        guard.wait(_GUARD_SECONDS)


def _root(bundle: Path, program: str) -> Path:
    """Where the runtime ``program`` keeps its state of the containers."""
    return bundle.parent.parent / "runtime" / os.path.basename(program)


def _base(bundle: Path, program: str) -> list[str]:
    return [program, "--root", str(_root(bundle, program))]


def _answer(argv: list[str]) -> str:
    """What the runtime had to say, to be used where it went wrong."""
    try:
        done = subprocess.run(argv, capture_output=True, check=False, timeout=30)
        return done.stderr.decode(errors="replace").strip() or f"exit code {done.returncode}"
    except subprocess.TimeoutExpired:
        log.warning("%s did not end within 30 s", " ".join(argv))
        return "no answer within 30 s"


def _cgroup_path(name: str) -> str:
    """Where a runtime is to make the cgroup ``name``, so that the limits of this process hold for it, too. With cgroup
    v1: relative, below the cgroup of this process of each controller. With v2 alone beside it: one with processes in it
    cannot have others below it and share out controllers."""
    first = procfs.cgroups()[0]
    if first.controllers:
        return name
    return os.path.join(os.path.dirname(first.path), name)


def _json_line(text: str) -> dict[str, Any]:
    try:
        entry = loaded(json.loads, text)
    except ValueError:
        return {}
    return entry if isinstance(entry, dict) else {}
