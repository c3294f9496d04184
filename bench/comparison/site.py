"""Servers the demo starts beside the registry and HDFS: the package index, and a node's containerd.

Both are the ordinary programs (the standard library's file server, Debian's ``containerd``).
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from bootseer.errors import UnavailableError, UnsupportedError
from support.service import free_port, service, wait_for_port
from support.waits import until


@contextlib.contextmanager
def file_server(folder: Path, address: str, logs: Path, prefix: Sequence[str] = ()) -> Iterator[str]:
    """Serve ``folder`` over HTTP/1.1 on a free port of ``address``, in the network that ``prefix`` puts it into; yields
    its URL."""
    port = 8000 if prefix else free_port(address)
    argv = [*prefix, sys.executable, "-m", "http.server", str(port), "--bind", address, "--directory", str(folder),
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
        log = logs / "containerd.log"
        until(
            lambda: process.poll() is not None or _answers(address), 30.0, f"the start of containerd ({log})", step=0.1
        )
        if process.poll() is not None:
            raise UnavailableError(f"containerd did not start; see {log}")
        yield address
