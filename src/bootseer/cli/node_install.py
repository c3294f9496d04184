"""``bootseer node install|uninstall``: the unit of the service, and what containerd and Slurm need of it."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from bootseer.cli._shared import AsJson, answer, settings
from bootseer.errors import (
    BootseerError,
    ConfigError,
    NotFoundError,
    PrivilegeError,
    UnavailableError,
    doing,
    extra,
)
from bootseer.folders import private_folder, trusted_file
from bootseer.kernel import flock
from bootseer.kernel import mount as mounts
from bootseer.node import unit as units
from bootseer.slurm import jobfolder, site
from bootseer.units import count_text
from bootseer.wiretypes import document

Containerd = Annotated[bool, typer.Option("--containerd", help="The snapshotter for containerd")]
Csi = Annotated[bool, typer.Option("--csi", help="The CSI driver: volumes of pods")]
Slurm = Annotated[bool, typer.Option("--slurm", help="Prolog, Epilog and TaskProlog of Slurm")]
Snapshots = Annotated[
    Path, typer.Option("--containerd-root", metavar="DIR", help="State and files of snapshots, on a local disk")
]
Socket = Annotated[Path, typer.Option("--containerd-socket", metavar="FILE", help="Where containerd reaches it")]
Kubelet = Annotated[Path, typer.Option("--kubelet-dir", metavar="DIR", help="The --root-dir of the kubelet")]
SlurmDir = Annotated[Path, typer.Option("--slurm-dir", metavar="DIR", help="Folder of its scripts, on all nodes")]
SNAPSHOTS, SOCKET = Path("/var/lib/bootseer/containerd"), Path("/run/bootseer/containerd.sock")
KUBELET = Path("/var/lib/kubelet")
SCORES = {"node": -500, "containerd": -999, "csi": 0}
"""oom_score_adj of each part; the unit gives the service the least of them."""
_OF_PART = {"--containerd": ("--containerd-root", "--containerd-socket"), "--csi": ("--kubelet-dir",)}
"""Options of the service that only one part has."""
_LOCK, _LOCK_SECONDS = Path("/run/bootseer/unit.lock"), 10.0
"""One for the node, whatever the settings of who installs say: they may differ, and write the same unit."""
_RESTART = f"systemctl daemon-reload && systemctl enable {units.PATH.stem} && systemctl restart {units.PATH.stem}"


def install(
    ctx: typer.Context,
    containerd: Containerd = False,
    csi: Csi = False,
    slurm: Slurm = False,
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit code 78 where something is missing")
    ] = False,
    unit: Annotated[
        Path, typer.Option("--unit", metavar="FILE", help="systemd's unit; `-`: print it, and do nothing else")
    ] = units.PATH,
    containerd_config: Annotated[
        str, typer.Option(metavar="FILE", help="To look at (default: what `containerd config dump` prints)")
    ] = "",
    containerd_root: Snapshots = SNAPSHOTS,
    containerd_socket: Socket = SOCKET,
    kubelet_dir: Kubelet = KUBELET,
    slurm_dir: SlurmDir = site.PREFIX,
    seconds: Annotated[
        int, typer.Option("--slurm-limit", min=site.LEAST_SECONDS, metavar="SECONDS", help="Of Prolog and Epilog")
    ] = site.SECONDS,
    as_json: AsJson = False,
) -> None:
    """Write the unit of the service and the scripts of Slurm, and print what containerd and Slurm must be told.

    Nothing of containerd and Slurm is changed. Run it on each node, as root, with the bootseer that is to be used
    there. A settings file named with --config is that of the service and of the scripts, too. Parts that the unit has
    already and that are not named stay in it, as they are.

    Example: bootseer node install --containerd --csi
    """
    slurm_dir = slurm_dir.absolute()
    paths = {
        "--containerd-root": (containerd_root, SNAPSHOTS),
        "--containerd-socket": (containerd_socket, SOCKET),
        "--kubelet-dir": (kubelet_dir, KUBELET),
    }
    if not check and str(unit) != "-":
        _root()
        ctx.with_resource(_alone(unit))
    words = ["--containerd"] * containerd + ["--csi"] * csi
    words += [f"{name}={path.absolute()}" for name, (path, usual) in paths.items() if path != usual]
    kept = [] if str(unit) == "-" else _without(units.served(unit)[1], {word for word in words if word in _OF_PART})
    kept = [word for word in kept if word.partition("=")[0] not in {other.partition("=")[0] for other in words}]
    program = _program()
    text = _text([*program, "node", "serve"], [*words, *kept])
    if str(unit) == "-":
        typer.echo(text, nl=False)
        return
    wrote: list[Path] = []
    if not check:
        site.check_program()
        trusted_file(Path(program[0]))
        with doing(f"write {unit}"):
            jobfolder.write(unit, text.encode(), 0o644)
        wrote = [unit, *(site.install(slurm_dir, seconds) if slurm else [])]
    put: dict[str, list[str]] = {}
    wrong: list[str] = []
    if containerd:
        put["containerd"], wrong = _of_containerd(containerd_config, containerd_root, containerd_socket)
    if slurm:
        put["slurm_conf"] = site.lines(slurm_dir, seconds)
        try:
            wrong += site.check(site.settings(), slurm_dir, seconds)
        except BootseerError as exc:
            wrong.append(f"Slurm's settings were not looked at: {exc}")
    lines = [f"wrote {path}" for path in wrote]
    if not check:
        lines += [f"the unit keeps what it had: {shlex.join(kept)}"] if kept else []
        lines.append(f"start it: {_RESTART}")
        for name, where in (("containerd", "the configuration of containerd"), ("slurm_conf", "slurm.conf")):
            if name in put:
                lines += [f"put into {where}, then restart it:", *(f"  {line}" for line in put[name])]
    value = {"wrote": [str(path) for path in wrote], "kept": kept, **put, "to_change": wrong}
    answer(value, as_json, *lines, *(f"look: {line}" for line in wrong))
    if check and wrong:
        raise ConfigError(
            f"{count_text(len(wrong), 'setting is', 'settings are')} missing", hint="bootseer node install prints them"
        )


def uninstall(
    ctx: typer.Context,
    containerd: Containerd = False,
    csi: Csi = False,
    slurm: Slurm = False,
    unit: Annotated[Path, typer.Option("--unit", metavar="FILE", help="systemd's unit")] = units.PATH,
    containerd_root: Snapshots = SNAPSHOTS,
    containerd_socket: Socket = SOCKET,
    slurm_dir: SlurmDir = site.PREFIX,
    as_json: AsJson = False,
) -> None:
    """Remove what `install` has written and what the service has left: of the parts that are named, else all.

    Nothing is taken from containers, pods and jobs that need it: what has to go first is said, with exit code 70 or 78.
    While Slurm does not say whether it runs the scripts, it is 69.
    The unit is written without the parts that are named.

    Example: bootseer node uninstall --slurm
    """
    _root()
    if unit.exists():
        ctx.with_resource(_alone(unit))
    config, every = settings(), not (containerd or csi or slurm)
    program, words = units.served(unit)
    stay = _without(words, ["--containerd"] * containerd + ["--csi"] * csi)
    gone: list[Path] = []
    if slurm or every:
        gone += site.uninstall(slurm_dir.absolute())
    if (csi or every) and (left := sorted(Path(config.state_dir, "csi").glob("*"))):
        raise BootseerError(
            f"{count_text(len(left), 'volume of a pod is', 'volumes of pods are')} mounted",
            hint="delete those pods while the service runs, then run this again",
        )
    if (containerd or every) and containerd_root.exists():
        with extra("containerd", "the snapshotter"):
            from bootseer.containerd import uninstall as removal
        lines = removal.needed(containerd_root)
        for line in lines:
            typer.echo(line)
        if lines:
            raise BootseerError(
                f"{count_text(len(lines), 'container or image needs', 'containers and images need')} the snapshotter",
                hint="run what is printed above while it still serves, then this again",
            )
        removal.remove(containerd_root, containerd_socket, config)
        gone.append(containerd_root)
    if every and unit.exists():
        if still := mounts.below(config.node_dir):
            raise BootseerError(
                f"{still[0].target} is mounted", hint="bootseer node drain has the service end after its mounts"
            )
        with doing(f"remove {unit}"):
            unit.unlink()
        gone.append(unit)
    lines = [f"removed {path}" for path in gone]
    if not every and stay != words:
        with doing(f"write {unit}"):
            jobfolder.write(unit, _text(program, stay).encode(), 0o644)
        lines += [f"wrote {unit}", f"have the service run without them: {_RESTART}"]
    answer({"removed": [str(path) for path in gone]}, as_json, *lines)


@contextlib.contextmanager
def _alone(unit: Path) -> Iterator[None]:
    """No other command changes ``unit`` meanwhile, which keeps what it has: two that read it at once would each drop
    the other's part. Raises `UnavailableError`."""
    lock = private_folder(_LOCK.parent) / _LOCK.name  # what others can open, they can lock
    with doing(f"write {unit}"), flock.locked(lock, os.O_RDWR | os.O_CREAT, _LOCK_SECONDS) as alone:
        if not alone:
            raise UnavailableError(f"another bootseer node install or uninstall changes {unit}", hint="try again")
        yield


def _text(program: Sequence[str], words: Sequence[str]) -> str:
    """The unit that runs ``program`` with these ``words``."""
    return units.systemd_unit([*program, *words], SCORES["containerd" if "--containerd" in words else "node"])


def _without(words: Sequence[str], parts: Collection[str]) -> list[str]:
    """The ``words`` of a unit that are not about ``parts``."""
    gone = {*parts, *(option for part in parts for option in _OF_PART[part])}
    return [word for word in words if word.partition("=")[0] not in gone]


def _of_containerd(file: str, root: Path, socket: Path) -> tuple[list[str], list[str]]:
    """The lines that belong into containerd's configuration, and what that lacks now."""
    from bootseer import oci
    from bootseer.containerd import settings as containerd_settings

    wrong, platform = [], oci.host_platform()
    try:
        name, content = _configuration(file)
        wrong = containerd_settings.missing(content, root, socket, platform, name)
    except NotFoundError as exc:
        content, wrong = "", [f"containerd's settings were not looked at: {exc}"]
    version = "2" if re.search(r"^version *= *3", content, re.MULTILINE) else "1.6"
    return containerd_settings.text(version, root, socket, platform).splitlines(), wrong


def _configuration(file: str) -> tuple[str, str]:
    """The name of a configuration of containerd, and what is in it."""
    if file:
        with doing(f"read {file}"):
            return file, document(file).decode(errors="replace")
    try:
        done = subprocess.run(["containerd", "config", "dump"], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as exc:
        raise NotFoundError(f"`containerd config dump` failed: {exc}") from None
    return "containerd's configuration", done.stdout


def _program() -> list[str]:
    """The command line by which the service is to be run."""
    chosen = os.environ.get("BOOTSEER_CONFIG")
    words = [os.path.abspath(shutil.which(sys.argv[0]) or sys.argv[0]), "-v"]
    return [*words, "--config", os.path.abspath(chosen)] if chosen else words


def _root() -> None:
    if os.geteuid() != 0:
        raise PrivilegeError("the service of a node is root's", hint="run with sudo")
