"""``bootseer completion``."""

from __future__ import annotations

import os
from enum import StrEnum
from typing import Annotated

import typer

_VARIABLE = "_BOOTSEER_COMPLETE"


class Shell(StrEnum):
    """A shell that can complete the verbs and options."""

    bash = "bash"
    zsh = "zsh"
    fish = "fish"
    powershell = "powershell"


def register(app: typer.Typer) -> None:
    """Add the command, and the answer to the printed script where that is what asks."""
    app.command("completion")(completion)
    if _VARIABLE in os.environ:
        from typer._completion_classes import completion_init

        completion_init()


def completion(shell: Annotated[Shell, typer.Argument(help="The shell to complete in", show_default=False)]) -> None:
    """Print the script that completes bootseer's verbs and options in a shell.

    For bash: `eval "$(bootseer completion bash)"`. The shell is named, not guessed: guessing reads the parent
    processes, which fails in a container and under `sh`.
    """
    from typer._completion_shared import get_completion_script  # typer has no public name for it; the tests run it

    print(get_completion_script(prog_name="bootseer", complete_var=_VARIABLE, shell=shell.value))
