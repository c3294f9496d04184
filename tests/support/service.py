"""Servers in a session of their own that end with whoever started them."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from bootseer.demo.programs import WITH_US
from bootseer.errors import BootseerError, UnsupportedError
from support import forked
from support.waits import until

log = logging.getLogger(__name__)

_READY_DEADLINE = 30.0
_STOP_DEADLINE = 10.0


@contextlib.contextmanager
def service(argv: Sequence[str], logfile: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server in a session of its own, its output in ``logfile``; the whole session is ended on the way out, and
    when this process is killed."""
    if not shutil.which(argv[0]):
        raise UnsupportedError(f"{argv[0]} is not installed", hint="run scripts/setup")
    argv = argv if argv[0] == sys.executable else [*WITH_US, *argv]
    with open(logfile, "ab") as out:
        process = forked.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
    try:
        yield process
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_DEADLINE)
                break
        else:
            log.warning("%s (pid %d) did not stop", argv[0], process.pid)


def free_port(address: str) -> int:
    """A port of this host's ``address`` that nobody listens on."""
    with socket.create_server((address, 0)) as probe:
        return int(probe.getsockname()[1])


def wait_for_port(address: str, port: int, name: str, process: subprocess.Popen[bytes]) -> None:
    """Wait until ``name`` listens. Raises `UnavailableError` after the deadline, `BootseerError` when it has ended."""

    def listens() -> bool:
        found = False
        with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=1):
            found = True
        if process.poll() is not None:  # perhaps it is somebody else who listens there
            raise BootseerError(f"{name} ended at its start with code {process.returncode}")
        return found

    until(listens, _READY_DEADLINE, f"the start of {name} on {address}:{port}", step=0.05)
