"""Run a command inside a span, as if it had been run without one.

The command inherits stdin, stdout, stderr and every other descriptor; its exit code, or the signal that killed it,
becomes ours. Signals sent to us are passed on; those the terminal sends reach the command by themselves (they go to the
whole foreground group) and are not sent twice. Trouble with events is never the command's.

Concurrency: one thread; signals are blocked and taken one by one with ``sigwaitinfo``, so there are no handlers."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Mapping, Sequence
from typing import NoReturn

from bootseer.errors import BootseerError
from bootseer.kernel import signals
from bootseer.profile import emit
from bootseer.profile.events import AttrValue

_PASSED_ON = frozenset({*signals.PASSED_ON, signal.SIGALRM, signal.SIGWINCH})


class CommandError(BootseerError):
    """The command could not be started: 127 not found, 126 not executable, as shells say it."""

    def __init__(self, message: str, *, code: int) -> None:
        super().__init__(message)
        self.exit_code = code  # type: ignore[misc]  # the shell's convention gives one error two codes


def run(stage: str, argv: Sequence[str], attrs: Mapping[str, AttrValue]) -> int:
    """Run ``argv``; returns its exit code, or minus the signal that killed it. Raises `CommandError`. Of the command
    line only the program's name becomes an attribute: arguments may hold secrets."""
    span = emit.begin(stage, command=os.path.basename(argv[0]))
    if attrs:
        emit.annotate(span, **attrs)
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is ignored, no exit status is kept
    old = signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON | {signal.SIGCHLD})
    try:
        try:
            pid = os.posix_spawnp(
                argv[0],
                list(argv),
                {**os.environ, **emit.child_env(span)},
                setsigmask=old,
                setsigdef=signals.IGNORED_BY_PYTHON,
            )
        except OSError as exc:
            failure = _cannot_run(argv[0], exc)
            emit.end(span, error=type(exc).__name__, exit_code=failure.exit_code)
            raise failure from None
        status = _wait(pid)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)
        signal.signal(signal.SIGCHLD, handler)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        emit.end(span, signal=signal.Signals(-code).name if -code in set(signal.Signals) else str(-code))
    else:
        emit.end(span, exit_code=code)
    return code


def become(argv: Sequence[str]) -> NoReturn:
    """Replace this process by the command, with the signals that a shell would give it. Raises `CommandError`."""
    signals.restore()
    try:
        os.execvp(argv[0], list(argv))
    except OSError as exc:
        raise _cannot_run(argv[0], exc) from None


def _cannot_run(program: str, exc: OSError) -> CommandError:
    code = 127 if isinstance(exc, FileNotFoundError) else 126
    return CommandError(f"cannot run {program}: {exc.strerror}", code=code)


def leave(code: int) -> int:
    """Die of the signal the command died of (no second core file); returns an exit code if that did not kill us."""
    if code >= 0:
        return code
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if -code not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    return 128 - code


def _wait(pid: int) -> int:
    """The status of ``pid`` once it has ended; passes signals on until then."""
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return status
        info = signal.sigwaitinfo(_PASSED_ON | {signal.SIGCHLD})
        # si_code > 0: from the kernel, that is from the terminal, which has told the command as well
        if info.si_signo != signal.SIGCHLD and info.si_code <= 0:
            os.kill(pid, info.si_signo)
