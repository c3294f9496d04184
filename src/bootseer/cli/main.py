"""The ``bootseer`` command: assembles the verb groups and turns errors into one line and an exit code."""

from __future__ import annotations

import functools
import importlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from bootseer import __version__
from bootseer.cli._shared import Group
from bootseer.errors import BootseerError, from_os_error
from bootseer.units import one_line

_ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_PANELS = {
    "Start here": ("doctor", "demo"),
    "Jobs": ("run", "exec", "profile"),
    "What a start reads": ("image", "env", "fs", "unmount", "store"),
    "This node": ("cache", "clean", "node"),
}
"""Panel of the help -> groups and verbs, in the order of use."""
_VERBS = {verb: panel for panel, verbs in _PANELS.items() for verb in verbs}


class _Root(Group):
    """The verbs and groups in the order of use, whichever are groups."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [verb for verb in _VERBS if verb in self.commands]


def _version(value: bool) -> None:
    if value:
        typer.echo(f"bootseer {__version__}")
        raise typer.Exit


def _root(
    verbose: Annotated[int, typer.Option("--verbose", "-v", count=True, help="Say more on stderr (twice: debug)")] = 0,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing on stderr but errors")] = False,
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="Settings file (default: /etc/bootseer.toml)")
    ] = None,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it")] = False,
) -> None:
    if quiet and verbose:
        raise typer.BadParameter("--quiet and --verbose contradict each other")
    if config is not None:
        os.environ["BOOTSEER_CONFIG"] = str(config.absolute())  # also for the servers that a verb starts
    level = logging.ERROR if quiet else {0: logging.WARNING, 1: logging.INFO}.get(verbose, logging.DEBUG)
    logging.basicConfig(level=level, format="bootseer: %(levelname)s: %(name)s: %(message)s", stream=sys.stderr)


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
    for name in [verb] if verb in _VERBS else _VERBS:
        module = importlib.import_module(f"bootseer.cli.{name}")
        if hasattr(module, "app"):
            app.add_typer(module.app, name=name, rich_help_panel=_VERBS[name])
        else:
            module.register(app)
            app.registered_commands[-1].rich_help_panel = _VERBS[name]
    return app


Group.whole = staticmethod(assemble)


def main() -> None:
    """Entry point. Exit codes: ``docs/reference/exit-codes.md``."""
    while (fd := os.open(os.devnull, os.O_RDWR)) < 3:  # else a file of ours would take a closed one's number
        pass
    os.close(fd)
    carry_out(functools.partial(assemble(_verb(sys.argv[1:])), prog_name="bootseer"))


def _verb(words: Sequence[str]) -> str:
    """The first of the command line's ``words`` that is no option; empty where the help of all is asked for."""
    rest = iter(words)
    for word in rest:
        if word == "--config":
            next(rest, None)
        elif word in ("-h", "--help"):
            break
        elif not word.startswith("-"):
            return word
    return ""


def carry_out(command: Callable[[], object]) -> None:
    """Run a command line: signals end it by an exception, errors become one line and their exit code."""
    for number in _ENDINGS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, _end)
    try:
        command()
    except BootseerError as exc:
        fail(exc)
    except OSError as exc:
        fail(from_os_error(exc, f"use {exc.filename}" if exc.filename else "finish"))


def _end(number: int, _frame: object) -> None:
    """Leave by an exception, so that everything is undone on the way out; a second signal does not disturb that."""
    for ending in _ENDINGS:
        signal.signal(ending, signal.SIG_IGN)
    sys.exit(128 + number)


def fail(exc: BootseerError) -> None:
    if os.environ.get("BOOTSEER_TRACEBACK"):
        raise exc
    sys.stderr.write(f"bootseer: {one_line(str(exc))}\n")
    sys.exit(exc.exit_code)


if __name__ == "__main__":
    main()
