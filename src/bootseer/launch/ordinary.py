"""The ordinary way of each stage, as a competent user does it today: baselines, and what a switched-off technique does.

Image: ``ctr images pull`` (layers in parallel, ``unpigz`` where installed) into containerd's own snapshotter.
Checkpoint: Hadoop's own client, or a plain copy. Nothing here is slowed on purpose, and the container runtime is the
same in both.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from bootseer.errors import BootseerError, NotFoundError, UnavailableError, UnsupportedError

log = logging.getLogger(__name__)

_DEADLINE = 3600.0


def _ctr(address: str, *args: str, deadline: float = 60.0) -> str:
    if not shutil.which("ctr"):
        raise UnsupportedError(
            "ctr is not installed", hint='apt-get install containerd, or set image.ordinary = "unpack"'
        )
    try:
        done = subprocess.run(
            ["ctr", "--address", address, *args], capture_output=True, text=True, timeout=deadline, check=False
        )
    except subprocess.TimeoutExpired:
        raise UnavailableError(f"ctr {args[0]} {args[1]} did not end within {deadline:.0f} s") from None
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        if "not found" in reason:
            raise NotFoundError(f"containerd cannot pull {args[-1]}: {reason}")
        if "no such file" in reason or "connection refused" in reason or "dial" in reason:
            raise UnavailableError(f"containerd at {address} does not answer: {reason}", hint="start containerd")
        raise BootseerError(f"ctr {' '.join(args)} failed: {reason}")
    return done.stdout


@contextlib.contextmanager
def containerd_rootfs(ref: str, address: str, rootfs: Path, *, plain_http: bool) -> Iterator[None]:
    """An image pulled and unpacked by containerd, mounted writable at ``rootfs``."""
    plain = ["--plain-http"] if plain_http else []
    _ctr(address, "images", "pull", *plain, ref, deadline=_DEADLINE)
    rootfs.mkdir(parents=True, exist_ok=True)
    try:
        _ctr(address, "images", "mount", "--rw", ref, str(rootfs))
        yield
    finally:  # also after a mount that failed or Ctrl-C: containerd may have got as far as that
        try:
            _ctr(address, "images", "unmount", "--rm", str(rootfs))
        except BootseerError as error:
            log.warning("cannot unmount %s: %s", rootfs, error)


def copy_checkpoint(url: str, destination: Path) -> None:
    """Copy every file under ``url`` into the folder ``destination`` with the stock client.

    ``hdfs://``: ``hdfs dfs -get``, or what ``BOOTSEER_HDFS_CLIENT`` names (Hadoop's FsShell where there is no ``hdfs``
    script). A path: a plain copy. Raises `NotFoundError` when there is nothing, `UnsupportedError` without a client.
    """
    destination.mkdir(parents=True, exist_ok=True)
    if not url.startswith("hdfs://"):
        source = Path(url.removeprefix("file://"))
        if not source.is_dir():
            raise NotFoundError(f"no checkpoint at {url}")
        shutil.copytree(source, destination, dirs_exist_ok=True)
        return
    client = shlex.split(os.environ.get("BOOTSEER_HDFS_CLIENT", "hdfs dfs"))
    try:
        done = subprocess.run(
            [*client, "-get", "-f", "-t", "4", f"{url.rstrip('/')}/*", str(destination)],
            capture_output=True, text=True, timeout=_DEADLINE, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        raise UnsupportedError(f"{client[0]} is not installed", hint="set BOOTSEER_HDFS_CLIENT") from None
    except subprocess.TimeoutExpired:
        raise UnavailableError(f"copying {url} did not end within {_DEADLINE:.0f} s") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "WARN" not in line and line.strip()] or ["no message"]
        if "No such file" in done.stderr:
            raise NotFoundError(f"no checkpoint at {url}")
        raise BootseerError(f"copying {url} failed: {lines[-1]}")
