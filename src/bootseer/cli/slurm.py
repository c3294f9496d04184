"""``bootseer slurm``: hooks that have images mounted before a job's first step."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from bootseer.cli._shared import AsJson, answer
from bootseer.errors import BootseerError, PrivilegeError
from bootseer.slurm import site

app = typer.Typer(no_args_is_help=True, help="Images of jobs on the nodes of a Slurm cluster")

Prefix = Annotated[Path, typer.Option("--prefix", metavar="DIR", help="Folder of the scripts, the same on all nodes")]


@app.command()
def install(
    prefix: Prefix = site.PREFIX,
    seconds: Annotated[
        int, typer.Option("--time-limit", min=site.LEAST_SECONDS, metavar="SECONDS", help="Of Prolog and Epilog")
    ] = site.SECONDS,
    as_json: AsJson = False,
) -> None:
    """Write Prolog, Epilog and TaskProlog, and print what to put into slurm.conf.

    Nothing of Slurm is changed. Run it on each node, as root, with the bootseer that the hooks are to use. A settings
    file named with --config is the hooks' own, too.

    Example: bootseer slurm install --time-limit 120
    """
    _root()
    prefix = prefix.absolute()
    paths = site.install(prefix, seconds)
    try:
        wrong = site.check(site.settings(), prefix, seconds)
    except BootseerError as exc:
        wrong = [f"Slurm's settings were not looked at: {exc}"]
    lines = site.lines(prefix, seconds)
    value = {"scripts": [str(path) for path in paths], "slurm_conf": lines, "to_change": wrong}
    said = ["put into slurm.conf, then run scontrol reconfigure:", *(f"  {line}" for line in lines)]
    answer(value, as_json, *(f"wrote {path}" for path in paths), *said, *(f"look: {line}" for line in wrong))


@app.command()
def uninstall(prefix: Prefix = site.PREFIX, as_json: AsJson = False) -> None:
    """Remove the scripts that `slurm install` has written; Slurm must not run them any more."""
    _root()
    paths = site.uninstall(prefix.absolute())
    answer({"removed": [str(path) for path in paths]}, as_json, *(f"removed {path}" for path in paths))


def _root() -> None:
    if os.geteuid() != 0:
        raise PrivilegeError("the hooks of a node are root's", hint="run with sudo")
