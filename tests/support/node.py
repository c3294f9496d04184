"""A node for chaos tests: one tree mounted by real processes, which are killed, stopped and cleaned up after."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

from bootseer.blocks import tree
from bootseer.blocks.tree import ProfileKey, TreeMount, TreeStatus
from bootseer.config import Config
from bootseer.errors import BootseerError, UnavailableError
from bootseer.kernel import mount as mounts
from support.waits import until
from support.weather import Weather, server


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def kill_group(pid: int) -> None:
    """The process and all of its group, at once."""
    os.killpg(os.getpgid(pid), signal.SIGKILL)
    until(lambda: not alive(pid))


class Node:
    """One node below ``folder``: caches, state and mount points. `close` ends and removes everything."""

    def __init__(self, folder: Path, store_url: str, digest: str, *, rate: float = 0.0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.store_url, self.digest = folder, store_url, digest
        self.rate = rate
        self.weather = folder / "weather"
        self.state = folder / "state"
        self.cache = folder / "cache"
        self.mounted: list[TreeMount] = []
        self._groups: set[int] = set()

    def mount(
        self, name: str = "mnt", *, profile: ProfileKey | None = None, before: str = "", **set: object
    ) -> TreeMount:
        """``set``: settings; ``before``: see `weather.server`."""
        settings = {"background_fill": False, "demand_deadline": 30.0, **set}
        made = tree.mount(
            self.store_url,
            self.digest,
            self.folder / name,
            cache_dir=self.cache,
            state_dir=self.state,
            profile=profile,
            config=Config(**settings),  # type: ignore[arg-type]
            server=server(self.weather, rate=self.rate, before=before),
        )
        self.mounted.append(made)
        with contextlib.suppress(BootseerError, ProcessLookupError):
            self._groups.add(os.getpgid(made.status().pid))
        return made

    @property
    def data(self) -> Path:
        """The folder of the cache file."""
        (found,) = (self.cache / "blocks").iterdir()
        return found

    @property
    def log(self) -> str:
        path = self.state / "trees" / f"{self.digest[:16]}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def forget_cache(self) -> None:
        shutil.rmtree(self.cache, ignore_errors=True)

    def kill_all(self, made: TreeMount) -> None:
        """Supervisor, FUSE server and fetcher at once: nobody is left to start another."""
        group = os.getpgid(made.status().pid)
        os.killpg(group, signal.SIGKILL)
        until(lambda: not _members(group), 10.0, "the death of a block server")

    def left(self) -> list[str]:
        """Mounts, processes and state of running trees that are still there."""
        found = [str(path) for path in (self.state / "trees").glob("*") if path.is_dir()]
        found += [entry.target for entry in mounts.below(self.folder)]
        return found + [f"process {pid}" for group in self._groups for pid in _members(group)]

    def close(self, seconds: float = 20.0) -> None:
        """Whatever happened: unmount, kill, remove. Raises `UnavailableError` when that was not in order."""
        Weather().make(self.weather)
        try:
            for made in self.mounted:
                with contextlib.suppress(UnavailableError):
                    made.unmount(timeout=seconds)
            until(lambda: not self.left(), seconds, f"the end of {', '.join(self.left())}")
        finally:
            for entry in reversed(mounts.below(self.folder)):
                with contextlib.suppress(BootseerError):
                    mounts.unmount(entry.target, lazy=True, force=entry.fstype == "fuse")
            for group in self._groups:
                if _members(group):
                    os.killpg(group, signal.SIGKILL)


def pids(status: TreeStatus) -> dict[str, int]:
    """The processes that serve a tree, by name."""
    return {"supervisor": status.pid, "server": status.server_pid, "fetcher": status.fetcher_pid}


def restarts(status: TreeStatus) -> int:
    """How often any of them was started anew."""
    return status.server_restarts + status.fetcher_restarts + status.supervisor_restarts


def damage(path: Path, how: str, rand: random.Random, *, unit: int = 4096) -> None:
    """Change the content of a file: ``flip`` a bit, ``truncate`` it somewhere, ``duplicate`` a unit over the next one,
    ``swap`` two of them, ``empty`` it, ``extend`` it."""
    raw = bytearray(path.read_bytes())
    before = bytes(raw)
    unit = max(1, min(unit, len(raw) // 3))
    places: Sequence[int] = range(0, len(raw) - 2 * unit + 1, unit)
    at = rand.choice(places)
    while raw == before:
        if how == "flip":
            raw[rand.randrange(len(raw))] ^= 1 << rand.randrange(8)
        elif how == "truncate":
            del raw[rand.randrange(len(raw)) :]
        elif how == "duplicate":
            raw[at + unit : at + 2 * unit] = raw[at : at + unit]
        elif how == "swap":
            other = rand.choice(places) + unit
            raw[at : at + unit], raw[other : other + unit] = raw[other : other + unit], raw[at : at + unit]
        elif how == "empty":
            raw.clear()
        else:
            raw += rand.randbytes(unit)
        at = rand.choice(places)
    path.write_bytes(raw)


def _members(group: int) -> list[int]:
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                if os.getpgid(int(entry)) == group and alive(int(entry)):
                    found.append(int(entry))
    return found
