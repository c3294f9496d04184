"""``bootseer exec``: a command in an image that is mounted already, as an ordinary user."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bootseer.cli._shared import COMMAND_LAST
from bootseer.errors import ConfigError, NotFoundError

if TYPE_CHECKING:
    from bootseer.kernel.enter import Shown

_ALWAYS = ("/dev", "/proc", "/sys", "/tmp")
_OF_THE_USER = ("HOME", "USER", "LOGNAME")
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("exec", context_settings=COMMAND_LAST)(enter)


def enter(
    command: Annotated[list[str], typer.Argument(metavar="CMD...")],
    image: Annotated[
        str, typer.Option(metavar="REF|DIR", help="Folder of an image (default: the image that the Slurm job names)")
    ] = "",
    volume: Annotated[list[str] | None, typer.Option("--volume", "-v", metavar="SRC:DST[:ro]")] = None,
    cwd: Annotated[str, typer.Option("--workdir", "-w", help="Folder to start in (default: the current one)")] = "",
) -> None:
    """Run a command in an image that is mounted or extracted already; no root is needed.

    It sees the image, and of this host /dev, /proc, /sys, /tmp, the home folder and the current folder, with the same
    user, network and limits as without. Set-uid programs have no effect. The image itself cannot be changed.

    Example: srun bootseer exec python train.py
    """
    from bootseer.kernel import enter as entering
    from bootseer.profile.wrap import CommandError  # now: later this host's Python is out of sight

    words = command[1:] if command[0] == "--" else command
    if not words:
        raise typer.BadParameter("name a command", param_hint="CMD")
    root, variables, folder = _image(image)
    here = os.getcwd()
    shown = [*_usual(here), *map(_volume, volume or [])]
    user = _files(root)
    os.environ.update(variables)
    entering.enter(root, shown, user)
    for place in (cwd, here, folder, "/"):
        try:
            os.chdir(place or here)
            break
        except OSError as exc:
            if place and place == cwd:
                raise NotFoundError(f"there is no folder {cwd} in the image: {exc.strerror}") from None
    for number in _IGNORED_BY_PYTHON:
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(words[0], words)
    except OSError as exc:
        code = 127 if isinstance(exc, FileNotFoundError) else 126
        raise CommandError(f"cannot run {words[0]} in the image: {exc.strerror}", code=code) from None


def _image(name: str) -> tuple[Path, dict[str, str], str]:
    """Root folder, variables and working folder of the image with this name; empty: the Slurm job's."""
    from bootseer.slurm import jobfolder

    if name.startswith(("/", ".")) or os.path.isdir(name):
        return Path(name).absolute(), {}, ""
    root, found = jobfolder.image(jobfolder.Attempt.of(os.environ))
    if name not in ("", found.reference):
        raise NotFoundError(f"{name} is not mounted for this job, but {found.reference}", hint="leave --image out")
    pairs = (item.partition("=") for item in found.env)
    return root, {key: value for key, sign, value in pairs if sign and key not in _OF_THE_USER}, found.working_dir


def _usual(here: str) -> list[Shown]:
    """What every command sees of this host."""
    from bootseer.kernel.enter import Shown

    found: list[str] = []
    home = os.path.normpath(os.path.expanduser("~"))
    for path in (*_ALWAYS, home, os.path.realpath(home), here):
        covered = any(f"{path}/".startswith(f"{other}/") for other in found)
        if path != "/" and not covered and os.path.isdir(path):
            found.append(path)
    return [Shown(path, path) for path in found]


def _volume(text: str) -> Shown:
    from bootseer.kernel.enter import Shown

    parts = text.split(":")
    if len(parts) not in (2, 3) or not parts[0] or (len(parts) == 3 and parts[2] not in ("ro", "rw")):
        raise ConfigError(f"bad volume {text!r}", hint="write SRC:DST or SRC:DST:ro")
    return Shown(os.path.abspath(parts[0]), parts[1], parts[2:] == ["ro"])


def _files(root: Path) -> dict[str, bytes]:
    """Files in place of the image's: this host's names of machines, and an entry for the user."""
    import grp
    import pwd

    found = {}
    for path in ("/etc/hosts", "/etc/resolv.conf"):
        found[path] = _content(Path(path))
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
        lines = _content(root / path[1:]).decode(errors="replace").splitlines()
        if not any(entry.split(":")[2:3] == [str(number)] for entry in lines):
            found[path] = "\n".join([*lines, line, ""]).encode()
    return {path: content for path, content in found.items() if content}


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
