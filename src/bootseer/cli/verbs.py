"""The verbs of the ``bootseer`` command, assembled out of the modules of this package."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from bootseer import build
from bootseer.cli._shared import Group, add_verbs
from bootseer.loglimit import OneLine

_PANELS = {
    "Start here": ("doctor", "demo"),
    "Jobs": ("run", "exec", "profile"),
    "What a start reads": ("image", "env", "fs", "unmount", "store"),
    "This node": ("cache", "clean", "node"),
}
"""Panel of the help -> groups and verbs, in the order of use."""
VERBS = {verb: panel for panel, verbs in _PANELS.items() for verb in verbs}


class _Root(Group):
    """The verbs and groups in the order of use, whichever are groups."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [verb for verb in VERBS if verb in self.commands]


def _version(value: bool) -> None:
    if value:
        typer.echo(f"bootseer {build()}")
        raise typer.Exit


def _root(
    verbose: Annotated[int, typer.Option("--verbose", "-v", count=True, help="Say more on stderr (twice: debug)")] = 0,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing on stderr but errors")] = False,
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="Settings file (default: /etc/bootseer.toml)")
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it, and which sources")
    ] = False,
) -> None:
    if quiet and verbose:
        raise typer.BadParameter("--quiet and --verbose contradict each other")
    if config is not None:
        os.environ["BOOTSEER_CONFIG"] = str(config.absolute())  # also for the servers that a verb starts
    level = logging.ERROR if quiet else {0: logging.WARNING, 1: logging.INFO}.get(verbose, logging.DEBUG)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLine("bootseer: %(levelname)s: %(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])


def assemble(verb: str = "") -> typer.Typer:
    """The command line with all verbs, or with ``verb`` alone, where that is one: each takes time to load."""
    app = typer.Typer(
        name="bootseer",
        help="Cut and explain the start-up time of large training jobs",
        cls=_Root,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        callback=_root,
    )
    for name in [verb] if verb in VERBS else VERBS:
        module = importlib.import_module(f"bootseer.cli.{name}")
        if hasattr(module, "app"):
            app.add_typer(module.app, name=name, rich_help_panel=VERBS[name])
        else:
            add_verbs(app, {VERBS[name]: [getattr(module, name, None) or getattr(module, f"{name}_")]})
    return app


Group.whole = staticmethod(assemble)
