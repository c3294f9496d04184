"""What the last loads of checkpoints on this node moved: for ``bootseer fs explain --last``.

A process that loads (a mount's server, ``bootseer.torch``, fsspec) leaves a `LoadReport` in the state folder of its
user, where the newest few stay. It is for people only: what goes wrong here is a log line.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from bootseer import config as settings
from bootseer import ranks
from bootseer.backends.engine import engine
from bootseer.errors import BootseerError, doing
from bootseer.folders import private_folder, trusted

_log = logging.getLogger(__name__)

FOLDER = "fs/loads"
_KEPT = 64
"""Reports that stay: two loads of eight ranks, and some more."""
_TOGETHER = 120.0
"""Loads of one checkpoint that begin within these seconds are those of one start."""


class NodeLoad(msgspec.Struct, frozen=True):
    """Bytes that one DataNode gave, and its bytes per second while it gave them (None while unknown)."""

    address: str
    bytes: int
    rate: float | None


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """One load by one process; byte counts in bytes, times in seconds, ``began`` in Unix time.

    ``needed``: what its readers asked for; ``fetched``: read from the store; ``cached``: read from the node cache;
    ``received``: sent by other ranks; ``repeated``: fetched because another rank did not send it in time. ``waited``:
    how long a reader waited. ``plain_seconds``: how long one stream from one DataNode after the other would have taken,
    at the rate of the quickest one seen; None where no DataNode was read.
    """

    url: str
    how: str
    pid: int
    rank: int | None = None
    began: float
    seconds: float
    needed: int = 0
    fetched: int = 0
    cached: int = 0
    received: int = 0
    repeated: int = 0
    waited: float = 0.0
    hedged: int = 0
    hedges_won: int = 0
    nodes: tuple[NodeLoad, ...] = ()
    plain_seconds: float | None = None


class Waited:
    """A clock that runs while at least one thread is inside."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside, self._since, self._seconds = 0, 0.0, 0.0

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._since = time.monotonic()

    def __exit__(self, *exc: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._seconds += time.monotonic() - self._since

    @property
    def seconds(self) -> float:
        with self._lock:
            return self._seconds + (time.monotonic() - self._since if self._inside else 0.0)


class LoadMeter:
    """Measures one load of this process, from now to `report`."""

    def __init__(self, url: str, how: str) -> None:
        self._url, self._how = url, how
        self._began, self._clock = time.time(), time.monotonic()
        self._before = engine.totals()

    def report(self, **counts: int | float) -> LoadReport:
        """The load as it is now; ``counts``: fields of `LoadReport`."""
        now, before = engine.totals(), self._before
        given = ((node, node.served - before.served.get(node.address, 0)) for node in now.nodes)
        nodes = tuple(NodeLoad(node.address, count, node.rate) for node, count in given if count > 0)
        rate = max((node.rate for node in nodes if node.rate), default=None)
        return LoadReport(
            url=self._url,
            how=self._how,
            pid=os.getpid(),
            rank=ranks.first(os.environ, ranks.RANKS),
            began=self._began,
            seconds=time.monotonic() - self._clock,
            hedged=now.hedged - before.hedged,
            hedges_won=now.hedges_won - before.hedges_won,
            nodes=nodes,
            plain_seconds=counts.get("needed", 0) / rate if rate else None,
            **counts,  # type: ignore[arg-type]
        )


def keep(report: LoadReport, state_dir: str = "") -> None:
    """Leave ``report`` for `last`; a later one of the same process and load replaces it."""
    try:
        folder = private_folder(Path(state_dir or settings.load().state_dir), sub=FOLDER)
        with doing(f"write to {folder}"):
            path = folder / f"{report.began:.6f}-{report.pid}.json"
            path.with_suffix(".new").write_bytes(msgspec.json.encode(report))
            os.replace(path.with_suffix(".new"), path)
            for old in sorted(folder.glob("*.json"))[:-_KEPT]:
                old.unlink(missing_ok=True)
    except BootseerError as exc:
        _log.info("this load is not noted for `bootseer fs explain --last`: %s", exc)


def last(state_dir: str) -> list[LoadReport]:
    """The newest load, with those of the other processes that loaded the same at the same time; by rank."""
    found = sorted(_reports(trusted(Path(state_dir)) / FOLDER), key=lambda report: report.began)
    return sorted(
        (one for one in found if one.url == found[-1].url and found[-1].began - one.began < _TOGETHER),
        key=lambda report: (-1 if report.rank is None else report.rank, report.began),
    )


def _reports(folder: Path) -> Iterator[LoadReport]:
    for path in folder.glob("*.json"):
        with contextlib.suppress(OSError, ValueError):  # gone, or of another version
            yield msgspec.json.decode(path.read_bytes(), type=LoadReport)
