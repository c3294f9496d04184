"""Servers the demo starts beside the registry and HDFS: the package index, and a node's containerd.

Both are the ordinary programs (the standard library's file server, Debian's ``containerd``), started in sessions of
their own and stopped on the way out, also after Ctrl-C.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from bootseer.errors import UnavailableError, UnsupportedError

log = logging.getLogger(__name__)

WITH_US = ("setpriv", "--pdeathsig", "TERM", "--")
_READY_DEADLINE = 30.0
_STOP_DEADLINE = 10.0


@contextlib.contextmanager
def service(argv: Sequence[str], logfile: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server in a session of its own, its output in ``logfile``; the whole session is ended on the way out.

    When this process is killed the kernel ends the server (``PR_SET_PDEATHSIG``).
    """
    if not shutil.which(argv[0]):
        raise UnsupportedError(f"{argv[0]} is not installed", hint="run scripts/setup")
    with open(logfile, "ab") as out:
        process = subprocess.Popen(
            [*WITH_US, *argv], stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
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


def wait_for_port(address: str, port: int, name: str, process: subprocess.Popen[bytes]) -> None:
    """Wait until ``name`` listens. Raises `UnavailableError` after the deadline, or at once when it has ended."""
    end = time.monotonic() + _READY_DEADLINE
    while time.monotonic() < end:
        if process.poll() is not None:
            raise UnavailableError(f"{name} ended at its start with code {process.returncode}")
        with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=1):
            if process.poll() is None:  # else it is somebody else who listens there
                return
        time.sleep(0.05)
    raise UnavailableError(f"{name} did not listen on {address}:{port} within {_READY_DEADLINE:.0f} s")


@contextlib.contextmanager
def file_server(folder: Path, address: str, logs: Path) -> Iterator[str]:
    """Serve ``folder`` over HTTP/1.1 on a free port of ``address``; yields its URL."""
    with socket.create_server((address, 0)) as probe:
        port = int(probe.getsockname()[1])
    argv = [sys.executable, "-m", "http.server", str(port), "--bind", address, "--directory", str(folder),
            "--protocol", "HTTP/1.1"]  # fmt: skip
    with service(argv, logs / "index.log") as process:
        wait_for_port(address, port, "package index", process)
        yield f"http://{address}:{port}"


_CONTAINERD = """version = 2
root = "{root}"
state = "{state}"
disabled_plugins = ["io.containerd.grpc.v1.cri"]
[grpc]
  address = "{socket}"
"""


def _answers(address: Path) -> bool:
    try:
        argv = ["ctr", "--address", str(address), "version"]
        return subprocess.run(argv, capture_output=True, timeout=5, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False


@contextlib.contextmanager
def containerd(folder: Path, prefix: Sequence[str], logs: Path) -> Iterator[Path]:
    """A containerd of one node (``prefix`` puts it into the node's network); yields its socket."""
    folder.mkdir(parents=True, exist_ok=True)
    address = folder / "containerd.sock"
    config = folder / "config.toml"
    config.write_text(_CONTAINERD.format(root=folder / "root", state=folder / "state", socket=address))
    if not shutil.which("containerd"):
        raise UnsupportedError("containerd is not installed", hint="run scripts/setup")
    with service([*prefix, "containerd", "--config", str(config)], logs / "containerd.log") as process:
        end = time.monotonic() + _READY_DEADLINE
        while not _answers(address):
            if process.poll() is not None or time.monotonic() > end:
                raise UnavailableError(f"containerd did not start; see {logs / 'containerd.log'}")
            time.sleep(0.1)
        yield address
