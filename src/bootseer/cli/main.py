"""The ``bootseer`` command: has its verbs carried out, and turns errors into one line and an exit code.

What it needs is loaded when it is needed: a restore by the node daemon (`bootseer.node.thin`) needs next to nothing.
"""

from __future__ import annotations

import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any, NoReturn

    from bootseer.errors import BootseerError

_ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main() -> None:
    """Entry point. Exit codes: ``docs/reference/exit-codes.md``."""
    while (fd := os.open(os.devnull, os.O_RDWR)) < 3:  # else a file of ours would take a closed one's number
        setattr(sys, ("stdin", "stdout", "stderr")[fd], os.fdopen(fd, "w" if fd else "r", closefd=False))
    os.close(fd)
    carry_out(_command)


def _command() -> None:
    words = sys.argv[1:]
    if words[:2] == ["env", "run"]:
        from bootseer.node import thin

        if thin.done(words):
            return
    from bootseer.cli.verbs import assemble

    if os.environ.get("_BOOTSEER_COMPLETE") == "complete_bash":
        from bootseer.cli._completed import whole_words

        with whole_words(os.environ):
            assemble()(prog_name="bootseer")

    try:
        code = assemble(_verb(words))(prog_name="bootseer", standalone_mode=False)
    except Exception as exc:
        if not hasattr(exc, "format_message"):  # what typer says of a command line
            raise
        _mistaken(exc)
    sys.exit(code or 0)


def _mistaken(exc: Any) -> NoReturn:
    """A mistake in the command line is one line, too; a group without a verb shows its help."""
    from bootseer.cli._shared import say

    path = exc.ctx.command_path if getattr(exc, "ctx", None) else "bootseer"
    if type(exc).__name__ == "NoArgsIsHelpError":
        exc.show()
    else:
        text = exc.format_message().rstrip(".")
        if path == "bootseer run" and type(exc).__name__ == "NoSuchOption":  # docker's
            path = "a command in an image: bootseer image run REF COMMAND; bootseer run"
        say(f"{text[:1].lower()}{text[1:]}; {path} --help says more")
    sys.exit(exc.exit_code)


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
    sys.unraisablehook = _not_raised
    try:
        command()
    except Exception as exc:
        from bootseer.errors import BootseerError, from_os_error

        if isinstance(exc, BootseerError):
            fail(exc)
        if not isinstance(exc, OSError):
            raise
        fail(from_os_error(exc, f"use {exc.filename}" if exc.filename else "finish"))


def _end(number: int, _frame: object) -> None:
    """Leave by an exception, so that everything is undone on the way out; a second signal does not disturb that."""
    for ending in _ENDINGS:
        signal.signal(ending, signal.SIG_IGN)
    sys.exit(128 + number)


def _not_raised(what: sys.UnraisableHookArgs) -> None:
    """The exception of `_end` came where Python passes none on, as in a callback of the import system: once more, a
    moment later."""
    if not isinstance(what.exc_value, SystemExit):
        sys.__unraisablehook__(what)
        return
    code = what.exc_value.code
    signal.signal(signal.SIGALRM, lambda *_: sys.exit(code))
    signal.setitimer(signal.ITIMER_REAL, 0.01)


def fail(exc: BootseerError) -> None:
    if os.environ.get("BOOTSEER_TRACEBACK"):
        raise exc
    from bootseer.cli._shared import say

    say(str(exc))
    try:
        sys.stdout.flush()
    except OSError:  # what it has left would be tried again as Python ends, whose code and lines would be others
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(exc.exit_code)


if __name__ == "__main__":
    main()
