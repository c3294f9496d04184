"""Running a command in a container with runc or crun, whichever works on this machine.

Which one works is found out by running one (crun 1.8 refuses hybrid cgroups, for instance) and remembered until the
next boot. The runtime is a child in its own process group, so that a signal reaches the container exactly once: by us.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import msgspec

from bootseer import config as settings
from bootseer import oci
from bootseer.errors import BootseerError, NotFoundError, PrivilegeError, UnavailableError, UnsupportedError
from bootseer.image import container
from bootseer.image.container import Bind

log = logging.getLogger(__name__)

__all__ = ["Bind", "find", "probe", "run"]

RUNTIMES = ("runc", "crun")
GRACE = 10.0
"""Seconds between a forwarded SIGINT or SIGTERM and SIGKILL: as process 1, a command without a handler ignores both."""
_PROBE_DEADLINE = 20.0
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


class Probe(msgspec.Struct, frozen=True):
    """Whether ``name`` runs containers here; ``reason`` when not."""

    name: str
    path: str
    works: bool
    reason: str = ""


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
    state_dir: Path | None = None,
) -> int:
    """Run ``argv`` (or the image's own command) in ``rootfs`` to its end and return its exit code (128+n: signal n).

    Standard streams are the caller's; SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1 and SIGUSR2 are forwarded (when called
    in the main thread). The container is gone when this returns. ``network`` ``host`` is the network namespace of the
    caller. Raises `PrivilegeError`, `UnsupportedError` (no working runtime), `NotFoundError` (no such command in the
    image), `ConfigError`.
    """
    _need_root()
    state = state_dir or Path(settings.load().state_dir)
    program = find(state, runtime).path
    args = container.command_of(config, argv)
    ident = f"bootseer-{uuid.uuid4().hex[:12]}"
    document = container.spec(
        rootfs.absolute(),
        config,
        args,
        env=env or {},
        mounts=mounts,
        cwd=cwd,
        network=network,
        cgroup=f"/{ident}",
    )
    container.check_command(document)
    with _Container(program, state, ident, document) as started:
        code = started.run()
        if code != 0 and (reason := started.failure()):
            raise _start_error(args[0], reason)
        return code


def find(state_dir: Path, runtime: str | None = None) -> Probe:
    """The runtime to use: ``runtime`` if given, else the first that works. Raises `UnsupportedError` with reasons."""
    _need_root()
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
    ident = f"bootseer-probe-{uuid.uuid4().hex[:8]}"
    with tempfile.TemporaryDirectory(prefix="bootseer-probe-") as root:
        document = container.spec(
            Path(root), empty, ["true"], env={}, mounts=host, cwd="/", network="host", cgroup=f"/{ident}"
        )
        with _Container(path, state_dir, ident, document) as started:
            code = started.run(quiet=True, deadline=_PROBE_DEADLINE)
            reason = started.failure() or f"exit code {code}"
    return Probe(name, path, code == 0, "" if code == 0 else reason)


def _program(name: str) -> str:
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin:/usr/local/sbin") or ""


def _remembered(state_dir: Path, name: str) -> Probe:
    """The probe's result, from a note of this boot if the program has not changed since."""
    path = _program(name)
    stamp = f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {path} "
    stamp += str(os.stat(path).st_mtime_ns) if path else ""
    note = state_dir / f"runtime-{os.path.basename(name)}.json"
    try:
        known = json.loads(note.read_text())
        if known["stamp"] == stamp:
            return msgspec.convert(known["probe"], Probe)
    except (OSError, ValueError, KeyError, msgspec.ValidationError):
        pass
    result = probe(name, state_dir)
    if result.works:
        state_dir.mkdir(parents=True, exist_ok=True)
        tmp = note.with_suffix(f".{os.getpid()}")
        tmp.write_text(json.dumps({"stamp": stamp, "probe": msgspec.to_builtins(result)}))
        tmp.replace(note)
    elif path:
        log.info("%s does not run containers here: %s", name, result.reason)
    return result


class _Container:
    """A bundle and its container; leaving the context deletes both."""

    def __init__(self, program: str, state: Path, ident: str, document: dict[str, object]) -> None:
        self._program, self._ident, self._document = program, ident, document
        self._root = state / "runtime" / os.path.basename(program)
        self._bundle = state / "containers" / ident
        self._killed = False

    def __enter__(self) -> _Container:
        self._bundle.mkdir(parents=True, mode=0o700)
        (self._bundle / "config.json").write_text(json.dumps(self._document))
        return self

    def __exit__(self, *exc: object) -> None:
        said = self._command("delete", "--force", self._ident)
        if (self._root / self._ident).exists():  # the runtime's own record of a container
            log.warning(
                "container %s could not be deleted, its bundle stays in %s: %s", self._ident, self._bundle, said
            )
            return
        shutil.rmtree(self._bundle, ignore_errors=True)

    def run(self, *, quiet: bool = False, deadline: float | None = None) -> int:
        argv = [*self._base(), "run", "--bundle", str(self._bundle), "--pid-file", str(self._bundle / "pid")]
        where = subprocess.DEVNULL if quiet else None
        # A group of its own keeps signals to ours from coming twice; but one that is not the terminal's may not read
        # from it: an interactive command would stop for good, and we wait for it.
        shared = not quiet and os.isatty(0)
        group = None if shared else 0
        with subprocess.Popen(
            [*argv, self._ident], stdin=where, stdout=where, stderr=where, process_group=group
        ) as child:
            try:
                with self._forwarding(child, shared):
                    code = child.wait(deadline)
            except subprocess.TimeoutExpired:
                raise UnavailableError(f"{self._program} did not end within {deadline} s") from None
            finally:
                if child.poll() is None:
                    self.kill()
                    child.kill()
        return code if code >= 0 else 128 - code

    def failure(self) -> str:
        """Why the runtime could not start the command; empty when it did start."""
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
        self._command("kill", self._ident, "KILL")

    def _base(self) -> list[str]:
        return [
            self._program,
            *("--root", str(self._root)),
            *("--log", str(self._bundle / "log")),
            *("--log-format", "json"),
        ]

    def _command(self, *args: str) -> str:
        """What the runtime had to say, to be used where it went wrong."""
        try:
            done = subprocess.run([*self._base(), *args], capture_output=True, check=False, timeout=30)
            return done.stderr.decode(errors="replace").strip() or f"exit code {done.returncode}"
        except subprocess.TimeoutExpired:
            log.warning("%s %s of container %s did not end within 30 s", self._program, args[0], self._ident)
            return "no answer within 30 s"

    @contextmanager
    def _forwarding(self, child: subprocess.Popen[bytes], shared: bool) -> Iterator[None]:
        """Pass signals on to ``child``. ``shared``: it is in our process group, the terminal's, which gives it
        interrupts itself."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        timers: list[threading.Timer] = []

        def forward(number: int, frame: FrameType | None) -> None:
            if number in (signal.SIGINT, signal.SIGTERM):
                timer = threading.Timer(GRACE if not timers else 0.0, self.kill)
                timer.daemon = True
                timer.start()
                timers.append(timer)
            if not shared or number not in (signal.SIGINT, signal.SIGQUIT):
                child.send_signal(number)

        before = {number: signal.signal(number, forward) for number in _FORWARDED}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            for timer in timers:
                timer.cancel()
                timer.join()


def _json_line(text: str) -> dict[str, str]:
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


def _need_root() -> None:
    if os.geteuid() != 0:
        raise PrivilegeError("running a container needs root", hint="run with sudo")
