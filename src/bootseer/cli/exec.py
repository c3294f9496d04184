"""``bootseer exec``: a command in an image that is mounted already, as an ordinary user."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bootseer.cli._shared import Volumes, volume_parts
from bootseer.errors import NotFoundError

if TYPE_CHECKING:
    from bootseer.kernel.enter import Shown

_OF_THE_USER = ("HOME", "USER", "LOGNAME")


def exec_(
    command: Annotated[list[str], typer.Argument(metavar="CMD...", help="The command, after all options")],
    image: Annotated[
        str, typer.Option(metavar="DIR", help="Folder of an image (default: the image that the Slurm job names)")
    ] = "",
    volumes: Volumes = None,
    cwd: Annotated[str, typer.Option("--workdir", "-w", help="Folder to start in (default: the current one)")] = "",
) -> None:
    """Run a command in an image that is mounted or extracted already; no root is needed.

    It sees the image, and of this host /dev, /proc, /sys, /tmp, the home folder and the current folder, with the same
    user, network and limits as without. Set-uid programs have no effect. The image itself cannot be changed: what is
    written into one of the user's own lies in memory, and ends with the command.

    Example: srun bootseer exec python train.py
    """
    from bootseer import rootless
    from bootseer.kernel.enter import Shown

    words = command[1:] if command[0] == "--" else command
    if not words:
        raise typer.BadParameter("name a command", param_hint="CMD")
    root, variables, folder = _image(image)
    here = os.getcwd()
    rootless.become(
        rootless.Command(
            root=str(root),
            argv=words,
            env={**os.environ, **variables},
            shown=[*_usual(here), *(Shown(*volume_parts(text)) for text in volumes or [])],
            folders=[cwd] if cwd else [here, folder or "/"],
            must=bool(cwd),
        )
    )


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
    from bootseer.rootless import SYSTEM

    found: list[str] = []
    home = os.path.normpath(os.path.expanduser("~"))
    for path in (*SYSTEM, "/tmp", home, os.path.realpath(home), here):
        covered = any(f"{path}/".startswith(f"{other}/") for other in found)
        if path != "/" and not covered and os.path.isdir(path):
            found.append(path)
    return [Shown(path, path) for path in found]
