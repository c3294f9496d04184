"""Which way to a cluster: *direct*, by this package's own transfers, or *native*, by ``hdfs-native``.

Direct is faster and has deadlines, hedging and several DataNodes at once, but speaks to clusters without Kerberos and
without wire encryption only. A single file may need native all the same: `FileBlocks.erasure`, `FileBlocks.encrypted`.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Literal

from bootseer import config
from bootseer.errors import UnsupportedError
from bootseer.hdfs.client import split
from bootseer.hdfs.namenode import NameNode

KEEP = 300.0
"""Seconds for which a cluster's answer is believed."""

_log = logging.getLogger(__name__)
_seen: dict[tuple[str, str], tuple[float, Access]] = {}


@dataclass(frozen=True, slots=True)
class Access:
    """``reason``: one line for `explain`, without a full stop."""

    kind: Literal["direct", "native"]
    reason: str


def choose(url: str, *, deadline: float | None = None) -> Access:
    """How to reach the cluster of ``url``; asks its NameNode, at most every `KEEP` seconds.

    The setting ``hdfs_access`` decides where it is not ``auto``. Raises `ConfigError` for a URL that is no HDFS URL,
    `UnavailableError` when the NameNode does not answer within ``deadline`` seconds.
    """
    base, wanted = split(url)[0], config.load().hdfs_access
    known = _seen.get((base, wanted))
    if known and time.monotonic() - known[0] < KEEP:
        return known[1]
    found = _ask(base, deadline) if wanted == "auto" else Access(wanted, f"the setting hdfs_access is {wanted}")
    _seen[base, wanted] = time.monotonic(), found
    if found != (known and known[1]):
        _log.info("%s: %s access, %s", base, found.kind, found.reason)
    return found


def forget() -> None:
    """Ask again at the next `choose`."""
    _seen.clear()


def _ask(base: str, deadline: float | None) -> Access:
    try:
        defaults = NameNode.connect(base).defaults(deadline=deadline)
    except UnsupportedError as exc:  # SaslRequired, or a name service that only Hadoop's own rules resolve
        return Access("native", exc.message)
    if defaults.encrypted:
        return Access("native", "the cluster encrypts data transfer (dfs.encrypt.data.transfer)")
    return Access("direct", "neither authentication nor wire encryption")
