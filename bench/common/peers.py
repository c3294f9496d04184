"""The programs of other projects that benchmarks compare with, as ``scripts/bench-peers`` builds them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from bootseer.errors import UnavailableError, UnsupportedError
from bootseer.kernel import mount as mounts
from support import devcache
from support.service import free_port, service, wait_for_port

NYDUS = "2.2.0"
_START_SECONDS = 30.0


def program(name: str) -> Path:
    """Path of ``name`` in the development cache. Raises `UnsupportedError` when it has not been built."""
    path = devcache.folder("peers/bin", name)
    if not os.access(path, os.X_OK):
        raise UnsupportedError(f"{path.name} is not built", hint="run scripts/bench-peers")
    return path


_CONTAINERD = """version = 2
root = "{root}"
state = "{state}"
disabled_plugins = ["io.containerd.grpc.v1.cri", "io.containerd.nri.v1.nri"]
[grpc]
  address = "{socket}"
[ttrpc]
  address = "{socket}.ttrpc"
"""


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


@contextlib.contextmanager
def containerd(folder: Path, prefix: Sequence[str] = (), *, built: bool = True) -> Iterator[list[str]]:
    """An empty containerd with all it keeps in ``folder``, deleted at the end; yields its ``ctr``'s command line, which
    ends with its address. ``prefix`` puts it into the network of a node; not ``built``: it is the system's."""
    daemon, ctr = [program(name) if built else Path("/usr/bin", name) for name in ("containerd", "ctr")]
    folder.mkdir(parents=True)
    socket, config = folder / "sock", folder / "config.toml"
    config.write_text(_CONTAINERD.format(root=folder / "root", state=folder / "state", socket=socket))
    prefix = [*prefix, "env", f"PATH={daemon.parent}:{os.environ['PATH']}"]
    base = [str(ctr), "--address", str(socket)]
    try:
        with service([*prefix, str(daemon), "--config", str(config)], folder.with_suffix(".log")) as process:
            end = time.monotonic() + _START_SECONDS
            while subprocess.run([*base, "version"], capture_output=True, timeout=10, check=False).returncode:
                if process.poll() is not None or time.monotonic() > end:
                    raise UnavailableError(f"containerd did not start; see {folder.with_suffix('.log')}")
                time.sleep(0.1)
            yield base
    finally:
        for entry in list(mounts.entries()):
            if str(entry.target).startswith(f"{folder}/"):
                mounts.unmount(entry.target, lazy=True)
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _served(name: str, argv: list[str], target: Path, log: Path) -> Iterator[Path]:
    """The program mounts and serves ``target`` while the context is open."""
    try:
        with service(argv, log) as process:
            end = time.monotonic() + _START_SECONDS
            while not mounts.is_mounted(target):
                if process.poll() is not None or time.monotonic() > end:
                    words = (log.read_text(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
                    raise UnavailableError(f"{name} did not mount: {words}")
                time.sleep(0.005)
            yield target
    finally:
        if mounts.is_mounted(target):
            mounts.unmount(target, lazy=True)


def mounted(kind: str, source: str, target: Path) -> AbstractContextManager[Path]:
    """A FUSE library for Python serves ``source`` on ``target`` while the context is open; see `peer_mounts`."""
    script = Path(__file__).parents[1] / "checkpoint/peer_mounts.py"
    argv = [str(program("../fuse/bin/python")), "-P", str(script), kind, source, str(target)]
    return _served(kind, argv, target, target.with_suffix(".log"))


def nydus(
    work: Path, *, registry: str, repository: str, bootstrap: str, prefetch: str = ""
) -> AbstractContextManager[Path]:
    """nydusd serves ``bootstrap`` below ``work`` while the context is open; blob from ``registry``, cached in ``work``.
    It is the mount point. ``prefetch`` (``yes`` or empty): it fetches the files of the bootstrap's prefetch table on
    its own."""
    target, cache, config, log = work / "nydus", work / "nydus-cache", work / "nydus.json", work / "nydusd.log"
    for folder in (target, cache):
        folder.mkdir(exist_ok=True)
    backend = {"scheme": "http", "host": registry, "repo": repository, "timeout": 30, "connect_timeout": 5}
    settings = {
        "device": {
            "backend": {"type": "registry", "config": backend},
            "cache": {"type": "blobcache", "config": {"work_dir": str(cache)}},
        },
        "mode": "direct",
        "digest_validate": False,
        "enable_xattr": True,
        "fs_prefetch": {"enable": bool(prefetch), "threads_count": 8, "merging_size": 1 << 20},
    }
    config.write_text(json.dumps(settings))
    argv = [str(program("nydusd")), "fuse", "--mountpoint", str(target), "--bootstrap", bootstrap]
    argv += ["--config", str(config), "--log-level", "warn", "--fuse-threads", "4", "--rlimit-nofile", "0"]
    return _served("nydusd", argv, target, log)
