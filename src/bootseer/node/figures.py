"""What the servers and the cache of this user on this node say, whether there is a node daemon or not."""

from __future__ import annotations

import logging
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec

from bootseer.blocks.serving.protocol import FUSE_FOLDER, TreeRecord, TreeStatus
from bootseer.chunks import inventory
from bootseer.chunks.eviction import Limits
from bootseer.config import Config
from bootseer.errors import BootseerError
from bootseer.folders import trusted
from bootseer.fsmount.record import FsStatus, MountRecord
from bootseer.hdfs.deadline import Workers
from bootseer.kernel.mount import is_mounted
from bootseer.prometheus import labels, metric
from bootseer.served.client import ask, records
from bootseer.served.protocol import GoneError, Request

log = logging.getLogger(__name__)
_SECONDS = 5.0
_AT_ONCE = 16
_looks = Workers("mount points")


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """``servers``: how many are ``serving``, ``dead`` or ``silent`` (they live and do not answer), by kind: those of a
    ``tree`` (an image, an environment) and those of a striped mount, ``fs``. The rest is of those that serve: bytes by
    source, reads that failed and seconds that readers waited."""

    cache_bytes: int
    cache_limit_bytes: int
    servers: dict[str, dict[str, int]]
    bytes: dict[str, int]
    failed_reads: int
    waited_seconds: float

    def count(self, state: str) -> int:
        return sum(states[state] for states in self.servers.values())

    def metrics(self) -> str:
        """In the text format of Prometheus."""
        lines: list[str] = []
        for name, text, value in (
            ("cache_bytes", "What the node cache takes on disk.", self.cache_bytes),
            ("cache_limit_bytes", "What it may take (cache_limit); 0: no limit.", self.cache_limit_bytes),
            ("failed_reads", "Reads of trees that failed, of the servers that serve now.", self.failed_reads),
            ("waited_seconds", "Seconds that readers waited for bytes of those.", self.waited_seconds),
        ):
            lines += metric(f"bootseer_node_{name}", "gauge", text, [("", value)])
        moved = [(labels(source=source), value) for source, value in self.bytes.items()]
        lines += metric("bootseer_node_moved_bytes", "gauge", "What the servers that serve now have fetched.", moved)
        servers = [
            (labels(kind=kind, state=state), count)
            for kind, states in self.servers.items()
            for state, count in states.items()
        ]
        lines += metric("bootseer_node_servers", "gauge", "Servers of mounts; reads of a dead one fail.", servers)
        return "\n".join(lines) + "\n"


def look(config: Config) -> Figures:
    """Each server has some seconds to answer, all at once. Raises `ConfigError` for a state folder of others."""
    state, cache = trusted(Path(config.state_dir)), Path(config.cache_dir)
    trees, striped = state / "trees", state / "fs"
    places = [(trees / one.id, trees / one.id / FUSE_FOLDER) for one in records(trees, TreeRecord).all()]
    points = [(striped / one.id, Path(one.mountpoint)) for one in records(striped, MountRecord).all()]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        of_trees, of_fs = pool.map(partial(_ask, TreeStatus), places), pool.map(partial(_ask, FsStatus), points)
        said = {"tree": list(of_trees), "fs": list(of_fs)}
    servers = {}
    for kind, answers in said.items():
        states = Counter(one if isinstance(one, str) else "serving" for one in answers)
        servers[kind] = {state: states[state] for state in ("serving", "dead", "silent")}
    moved, failed, waited = Counter({"demand": 0, "hot": 0, "background": 0, "ahead": 0}), 0, 0.0
    for one in [*said["tree"], *said["fs"]]:
        if isinstance(one, TreeStatus):
            moved.update(demand=one.bytes_demand, hot=one.bytes_hot, background=one.bytes_background)
            failed, waited = failed + one.failed_reads, waited + one.waited_seconds
        elif isinstance(one, FsStatus):
            moved.update(demand=one.fetched_demand, ahead=one.fetched_ahead)
            waited += one.waited_seconds
    return Figures(
        cache_bytes=inventory.used(cache),
        cache_limit_bytes=Limits(config.cache_limit).most_bytes(cache),
        servers=servers,
        bytes=dict(moved),
        failed_reads=failed,
        waited_seconds=round(waited, 3),
    )


def _ask(kind: type[TreeStatus] | type[FsStatus], place: tuple[Path, Path]) -> TreeStatus | FsStatus | str:
    """What the server says whose state is in the first folder of ``place``, or its state: ``gone`` where nothing is
    mounted any more in the second one either. That may lie below a file system that does not answer."""
    folder, mounted = place
    try:
        return ask(folder, Request("status"), kind, timeout=_SECONDS)
    except GoneError:
        try:
            return "dead" if _looks.call(partial(is_mounted, mounted), _SECONDS) else "gone"
        except (BootseerError, OSError):
            log.warning("nobody knows whether %s is still mounted: a folder above it does not answer", mounted)
    except (BootseerError, OSError):
        pass
    return "silent"
