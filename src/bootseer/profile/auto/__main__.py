"""``python -m bootseer.profile.auto train.py ...``: ``python train.py ...`` with the hooks. The interpreter starts
itself again with the same options, so that the program runs as it always does."""

from __future__ import annotations

import os
import sys

from bootseer.kernel import signals
from bootseer.profile import auto

_NAME = "bootseer.profile.auto"


def arguments(given: list[str], program: list[str]) -> list[str]:
    """The command line for ``program`` with the interpreter options of ``given``, which ends in ``-m NAME PROGRAM``."""
    options = given[1 : len(given) - len(program)]
    if options and options[-1] == _NAME:
        options.pop()
    elif options and options[-1].endswith(_NAME):  # -mNAME
        options[-1] = options[-1][: -len(_NAME)]
    if options and options[-1].endswith("m"):  # -m, or the last letter of several, such as -um
        options[-1] = options[-1][:-1]
        if options[-1] == "-":
            options.pop()
    return [sys.executable or given[0], *options, *program]


def _options() -> list[str]:
    """The command line of this interpreter."""
    known: list[str] | None = getattr(sys, "orig_argv", None)
    if known:
        return known
    from subprocess import _args_from_interpreter_flags  # type: ignore[attr-defined]  # before Python 3.10

    return [sys.executable, *_args_from_interpreter_flags(), "-m", _NAME, *sys.argv[1:]]


def main() -> None:
    """Replace this process by the program."""
    if not sys.argv[1:]:
        sys.stderr.write("usage: python -m bootseer.profile.auto [-m MODULE | SCRIPT] [ARGUMENT ...]\n")
        sys.exit(2)
    os.environ.update(auto.variables(os.environ.get("PYTHONPATH", "")))
    signals.restore()
    argv = arguments(_options(), sys.argv[1:])
    os.execv(argv[0], argv)


if __name__ == "__main__":
    main()
