"""Mounts of bench/checkpoint: ours, by the command line as a user makes it, and those of another FUSE library."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from bench.common import peers
from bootseer.demo.programs import BOOTSEER, run
from bootseer.errors import BootseerError, UnavailableError, UnsupportedError
from bootseer.kernel import mount as mounts

READAHEAD_KIB = 4096
"""What our mount asks of the kernel, as far as root may; the others get as much."""
_PREFETCH_SECONDS = 300.0


@contextlib.contextmanager
def ours(url: str, place: Path, *, options: Sequence[str] = (), keep: bool = False) -> Iterator[Path]:
    """`bootseer fs mount`; mount point, node cache and state are in the folder ``place``, which goes unless ``keep``.

    Raises `UnsupportedError` when this version has not the ``options``.
    """
    for option in options:
        if option.startswith("--") and option not in _options():
            raise UnsupportedError(f"could not run: `bootseer fs mount` has no {option}")
    target = place / "mount"
    environ = _environ(place)
    try:
        run([*BOOTSEER, "fs", "mount", url, str(target), *options], env=environ)
        try:
            if "--prefetch" in options:
                _await_prefetch(target, environ)
            yield target
        finally:
            run([*BOOTSEER, "unmount", str(target)], env=environ)
    finally:
        if mounts.is_mounted(target):  # it was interrupted on the way
            mounts.unmount(target, lazy=True)
        if not keep:
            shutil.rmtree(place, ignore_errors=True)


@cache
def _options() -> str:
    return run([*BOOTSEER, "fs", "mount", "--help"], env={"COLUMNS": "120"})


def fetched(target: Path, place: Path) -> int:
    """Bytes that the mount of `ours` at ``target`` took from the store."""
    status = json.loads(run([*BOOTSEER, "fs", "inspect", str(target), "--json"], env=_environ(place)))
    return int(status["fetched_demand"] + status["fetched_ahead"])


def _environ(place: Path) -> dict[str, str]:
    return {"BOOTSEER_CACHE_DIR": str(place / "cache"), "BOOTSEER_STATE_DIR": str(place / "state")}


def _await_prefetch(target: Path, environ: dict[str, str]) -> None:
    until = time.monotonic() + _PREFETCH_SECONDS
    while (state := json.loads(run([*BOOTSEER, "fs", "inspect", str(target), "--json"], env=environ))["prefetch"]) != (
        "done"
    ):
        if state != "running":
            raise BootseerError(f"prefetch into {target}: {state}")
        if time.monotonic() > until:
            raise UnavailableError(f"prefetch into {target} was not done within {_PREFETCH_SECONDS:.0f} s")
        time.sleep(0.2)


@contextlib.contextmanager
def peer(kind: str, source: str, place: Path) -> Iterator[Path]:
    """A mount with one file, by ``kind`` of `peer_mounts`; yields the path of the file."""
    target = place / "mount"
    target.mkdir(parents=True)
    try:
        with peers.mounted(kind, source, target):
            device = os.stat(target).st_dev
            readahead = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb")
            readahead.write_text(str(READAHEAD_KIB))
            yield target / "file"
    finally:
        shutil.rmtree(place, ignore_errors=True)
