"""Running a command in a container with runc or crun, whichever works on this machine: that is found out by running one
(crun 1.8 refuses hybrid cgroups, for instance) and remembered until the next boot."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from bootseer import config as settings
from bootseer import oci
from bootseer.errors import BootseerError, NotFoundError, PrivilegeError, UnsupportedError
from bootseer.folders import private_folder
from bootseer.image import container
from bootseer.image.bundle import Bundle
from bootseer.image.cdi import Selection
from bootseer.image.container import Bind
from bootseer.kernel import opens
from bootseer.kernel.mount import boot_id
from bootseer.wiretypes import json_as

log = logging.getLogger(__name__)

__all__ = ["Bind", "find", "probe", "run"]

RUNTIMES = ("runc", "crun")
_PROBE_DEADLINE = 20.0


class Probe(msgspec.Struct, frozen=True):
    """Whether ``name`` runs containers here, with a ``seccomp`` profile, and with ``cgroups`` to be seen in them;
    ``reason`` when not, or why one with all failed for something else, so that it is to be tried again."""

    name: str
    path: str
    works: bool
    reason: str = ""
    seccomp: bool = True
    cgroups: bool = True


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
    readonly: bool = False,
    stdin: bool = True,
    terminal: bool = False,
) -> int:
    """Run ``argv`` (or the image's own command) in ``rootfs`` to its end and return its exit code (128+n: signal n).

    Standard streams are the caller's, but for an input that is no terminal where ``stdin`` is false. ``terminal``: it
    gets one of its own, whose other end is the caller's. ``readonly``: only mounts and ``VOLUME`` folders are
    written. SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1 and SIGUSR2 are forwarded (when called in the main thread).
    ``stop_grace``: seconds after SIGINT or SIGTERM until a command that handles them is killed (None: it may take its
    time). ``network`` ``host`` is the network namespace of the caller. ``devices``: see `cdi.select`. The container
    is in the caller's cgroups, and gone when this returns. Raises `PrivilegeError`, `UnsupportedError` (no working
    runtime), `NotFoundError` (no such command in the image), `ConfigError`."""
    state = state_dir or Path(settings.load().state_dir)
    found = find(state, runtime)
    args = container.command_of(config, argv)
    own = []
    for path, there in container.volumes(rootfs, config).items():
        try:
            if not there:
                (rootfs / path).mkdir(0o755, parents=True)
            own += [Bind(str(rootfs.absolute() / path), f"/{path}")] if readonly else []
        except OSError as exc:
            log.warning("the volume /%s of the image is not made: %s", path, exc.strerror)
    document = container.spec(
        rootfs.absolute(),
        config,
        args,
        env=env or {},
        mounts=[*own, *mounts],
        cwd=cwd,
        network=network,
        chosen=devices,
        readonly=readonly,
        terminal=terminal,
    )
    if hook := opens.hook():
        document["hooks"] = {"createRuntime": [{"path": hook[0], "args": hook}]}
    if not found.seccomp:
        log.warning("%s has no seccomp here, the container may use all system calls: %s", found.name, found.reason)
        del document["linux"]["seccomp"]
    if not found.cgroups:
        log.warning("%s shows no cgroups here: %s", found.name, found.reason)
        _without_cgroups(document)
    container.check_command(document)
    with Bundle(found.path, state, document) as started:
        code = started.run(stdin=stdin, terminal=terminal, stop_grace=stop_grace)
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
    reasons: list[str] = []
    for seccomp, cgroups in ((True, True), (False, True), (True, False), (False, False)):
        with tempfile.TemporaryDirectory(prefix="bootseer-probe-") as root:
            document = container.spec(Path(root), empty, ["true"], env={}, mounts=host, cwd="/", network="host")
            if not seccomp:
                del document["linux"]["seccomp"]
            if not cgroups:
                _without_cgroups(document)
            with Bundle(path, state_dir, document) as started:
                code = started.run(quiet=True, deadline=_PROBE_DEADLINE)
                if code == 0:
                    said = "; ".join(reasons)
                    lacks = [word for word in ("seccomp", "cgroup") if word in said.lower()]
                    return Probe(name, path, True, said, "seccomp" not in lacks, cgroups or "cgroup" not in lacks)
                reasons.append(started.failure() or f"exit code {code}")
    return Probe(name, path, False, reasons[-1], False)


def _without_cgroups(document: dict[str, Any]) -> None:
    document["mounts"] = [mount for mount in document["mounts"] if mount["destination"] != container.CGROUPS]


def _program(name: str) -> str:
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin:/usr/local/sbin") or ""


def _remembered(state_dir: Path, name: str) -> Probe:
    """The probe's result, from a note of this boot if the program has not changed since."""
    path = _program(name)
    stamp = f"{boot_id()} {path} "
    stamp += str(os.stat(path).st_mtime_ns) if path else ""
    note = state_dir / f"runtime-{os.path.basename(name)}.json"
    with suppress(OSError, ValueError):
        noted = json_as(note.read_bytes(), _Note)
        if noted.stamp == stamp:
            return noted.probe
    result = probe(name, state_dir)
    if result.works and not (result.reason and result.seccomp and result.cgroups):
        private_folder(state_dir)
        tmp = note.with_suffix(f".{os.getpid()}")
        tmp.write_bytes(msgspec.json.encode(_Note(stamp, result)))
        tmp.replace(note)
    elif result.works:
        log.warning("a probe of %s failed, it is tried again next time: %s", name, result.reason)
    elif path:
        log.info("%s does not run containers here: %s", name, result.reason)
    return result


def _start_error(command: str, reason: str) -> BootseerError:
    if "executable file" in reason or ("no such file" in reason and "exec" in reason):
        text = reason.rsplit(": ", 1)[-1]
        return NotFoundError(f"cannot run {command} in the container: {text}", hint="check the command")
    if "permission denied" in reason and "exec" in reason:
        return BootseerError(f"cannot run {command} in the container: it is not executable")
    return UnsupportedError(f"the container runtime could not start: {reason}", hint="see bootseer doctor")
