"""Running a command in a container with runc or crun, whichever works on this machine.

Which one works is found out by running one (crun 1.8 refuses hybrid cgroups, for instance) and remembered until the
next boot. The runtime is a child in its own process group, so that a signal reaches the container exactly once: by us.

Signals mean in a container what they mean without one. A command is process 1 there, for which the kernel drops every
signal that it has no handler for: one that would have ended it without a container ends the container.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import msgspec

from bootseer import config as settings
from bootseer import oci
from bootseer.errors import BootseerError, NotFoundError, PrivilegeError, UnavailableError, UnsupportedError
from bootseer.folders import clear, owned_folder, private_folder
from bootseer.image import container
from bootseer.image.cdi import Selection
from bootseer.image.container import Bind
from bootseer.kernel.mount import boot_id

log = logging.getLogger(__name__)

__all__ = ["Bind", "find", "probe", "run"]

RUNTIMES = ("runc", "crun")
_PROBE_DEADLINE = 20.0
_STATE_SECONDS = 30.0
_GUARD_SECONDS = 5.0
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


class Probe(msgspec.Struct, frozen=True):
    """Whether ``name`` runs containers here; ``reason`` when not."""

    name: str
    path: str
    works: bool
    reason: str = ""


class _Note(msgspec.Struct, frozen=True):
    """A probe, of this boot and of the program that is there if ``stamp`` is still the same."""

    stamp: str
    probe: Probe


def run(
    rootfs: Path,
    config: oci.ImageConfig,
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    mounts: Sequence[Bind] = (),
    cwd: str = "",
    runtime: str | None = None,
    network: str = "host",
    devices: Selection | None = None,
    stop_grace: float | None = None,
    state_dir: Path | None = None,
) -> int:
    """Run ``argv`` (or the image's own command) in ``rootfs`` to its end and return its exit code (128+n: signal n).

    Standard streams are the caller's; SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1 and SIGUSR2 are forwarded (when called
    in the main thread). ``stop_grace``: seconds after SIGINT or SIGTERM until a command that handles them is killed
    (None: it may take its time). ``network`` ``host`` is the network namespace of the caller. ``devices``: see
    `cdi.select`. The container is in the caller's cgroups, and gone when this returns. Raises `PrivilegeError`,
    `UnsupportedError` (no working runtime), `NotFoundError` (no such command in the image), `ConfigError`.
    """
    state = state_dir or Path(settings.load().state_dir)
    program = find(state, runtime).path
    args = container.command_of(config, argv)
    document = container.spec(
        rootfs.absolute(), config, args, env=env or {}, mounts=mounts, cwd=cwd, network=network, chosen=devices
    )
    container.check_command(document)
    with _Container(program, state, document) as started:
        code = started.run(stop_grace=stop_grace)
        if code != 0 and (reason := started.failure()):
            raise _start_error(args[0], reason)
        return code


def find(state_dir: Path, runtime: str | None = None) -> Probe:
    """The runtime to use: ``runtime`` if given, else the first that works. Raises `PrivilegeError`, and
    `UnsupportedError` with reasons."""
    if os.geteuid() != 0:
        raise PrivilegeError("running a container needs root", hint="run with sudo")
    probes = []
    for name in [runtime] if runtime else RUNTIMES:
        result = _remembered(state_dir, name)
        if result.works:
            return result
        probes.append(f"{name}: {result.reason}")
    hint = "apt-get install runc" if all("not installed" in text for text in probes) else "see bootseer doctor"
    raise UnsupportedError(f"no container runtime works here ({'; '.join(probes)})", hint=hint)


def probe(name: str, state_dir: Path) -> Probe:
    """Run ``true`` in a container made of this host's programs with runtime ``name`` (a program name or path)."""
    path = _program(name)
    if not path:
        return Probe(name, "", False, "not installed")
    host = [Bind(top, top, readonly=True) for top in ("/bin", "/lib", "/lib64", "/usr") if os.path.isdir(top)]
    empty = oci.ImageConfig(architecture="", os="linux", rootfs=oci.RootFS(diff_ids=()))
    with tempfile.TemporaryDirectory(prefix="bootseer-probe-") as root:
        document = container.spec(Path(root), empty, ["true"], env={}, mounts=host, cwd="/", network="host")
        with _Container(path, state_dir, document) as started:
            code = started.run(quiet=True, deadline=_PROBE_DEADLINE)
            reason = started.failure() or f"exit code {code}"
    return Probe(name, path, code == 0, "" if code == 0 else reason)


def _program(name: str) -> str:
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin:/usr/local/sbin") or ""


def _remembered(state_dir: Path, name: str) -> Probe:
    """The probe's result, from a note of this boot if the program has not changed since."""
    path = _program(name)
    stamp = f"{boot_id()} {path} "
    stamp += str(os.stat(path).st_mtime_ns) if path else ""
    note = state_dir / f"runtime-{os.path.basename(name)}.json"
    with suppress(OSError, msgspec.DecodeError, UnicodeDecodeError):
        known = msgspec.json.decode(note.read_bytes(), type=_Note)
        if known.stamp == stamp:
            return known.probe
    result = probe(name, state_dir)
    if result.works:
        private_folder(state_dir)
        tmp = note.with_suffix(f".{os.getpid()}")
        tmp.write_bytes(msgspec.json.encode(_Note(stamp, result)))
        tmp.replace(note)
    elif path:
        log.info("%s does not run containers here: %s", name, result.reason)
    return result


class _Container:
    """A bundle and its container; leaving the context deletes both. When this process is killed, a guard deletes the
    container, and `image.sweep` what is left; when the guard is killed, too, `image.sweep` does both."""

    def __init__(self, program: str, state: Path, document: dict[str, Any]) -> None:
        self._program, self._document = program, document
        self._state = state
        self._killed = False
        self._over = threading.Event()
        self._ended_by = 0
        """The signal that a process 1 without a handler for it was killed for."""
        self._undo = ExitStack()

    def __enter__(self) -> _Container:
        with ExitStack() as undo:
            parent = private_folder(self._state, sub="containers")
            self._bundle = undo.enter_context(owned_folder(parent, "bootseer-"))
            self._ident = self._bundle.name
            undo.callback(delete, self._bundle)
            self._document["linux"]["cgroupsPath"] = cgroup_path(self._ident)
            (self._bundle / "config.json").write_text(json.dumps(self._document))
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

    def run(self, *, quiet: bool = False, deadline: float | None = None, stop_grace: float | None = None) -> int:
        bundle = str(self._bundle)
        log_to = ["--log", f"{bundle}/log", "--log-format", "json"]  # of this verb alone: `failure` reads it
        argv = [*_base(self._bundle, self._program), *log_to, "run", "--bundle", bundle, "--pid-file", f"{bundle}/pid"]
        where = subprocess.DEVNULL if quiet else None
        # A group of its own keeps signals to ours from coming twice; but one that is not the terminal's may not read
        # from it: an interactive command would stop for good, and we wait for it.
        shared = not quiet and os.isatty(0)
        group = None if shared else 0
        with subprocess.Popen(
            [*argv, self._ident], stdin=where, stdout=where, stderr=where, process_group=group
        ) as child:
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
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        # What we ignore (as under nohup) the command inherits ignored.
        heard = [number for number in _FORWARDED if signal.getsignal(number) is not signal.SIG_IGN]
        came: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        thread = threading.Thread(target=self._pass_on, args=(came, shared, stop_grace), name="signals", daemon=True)
        before = {number: signal.signal(number, lambda number, frame: came.put(number)) for number in heard}
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            came.put(None)
            thread.join()
            for number, handler in before.items():
                signal.signal(number, handler)

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
            if status != "running" or not _heeds(pid, number):
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


def _heeds(pid: int, number: int) -> bool:
    """Whether process ``pid`` has a handler for signal ``number``, ignores it or waits for it."""
    try:
        masks = container.status_masks(pid, "SigCgt:", "SigIgn:", "SigBlk:")
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


def cgroup_path(name: str) -> str:
    """Where a runtime is to make the cgroup ``name``, so that the limits of this process hold for it, too.

    With cgroup v1 it is relative, and below the cgroup of this process of each controller. With v2 alone it is beside
    the cgroup of this process: one with processes in it cannot have others below it and share out controllers.
    """
    first = Path("/proc/self/cgroup").read_text().partition("\n")[0]
    if not first.startswith("0::"):
        return name
    return os.path.join(os.path.dirname(first[3:]), name)


def _json_line(text: str) -> dict[str, Any]:
    try:
        entry = json.loads(text)
    except ValueError:
        return {}
    return entry if isinstance(entry, dict) else {}


def _start_error(command: str, reason: str) -> BootseerError:
    if "executable file" in reason or ("no such file" in reason and "exec" in reason):
        text = reason.rsplit(": ", 1)[-1]
        return NotFoundError(f"cannot run {command} in the container: {text}", hint="check the command")
    if "permission denied" in reason and "exec" in reason:
        return BootseerError(f"cannot run {command} in the container: it is not executable")
    return UnsupportedError(f"the container runtime could not start: {reason}", hint="see bootseer doctor")
