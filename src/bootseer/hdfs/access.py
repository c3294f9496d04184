"""Which way to a cluster: *direct*, by this package's own transfers, or *native*, by ``hdfs-native``.

Direct is faster and has deadlines, hedging and several DataNodes at once. A name service that only Hadoop's own rules
resolve needs native, and so may a single file: `FileBlocks.erasure`, `FileBlocks.encrypted`.
"""

from __future__ import annotations

import logging
from typing import Literal, NamedTuple

from bootseer import config
from bootseer.errors import UnsupportedError
from bootseer.hdfs.namenode import NameNode
from bootseer.hdfs.nameservice import split

_log = logging.getLogger(__name__)


class Access(NamedTuple):
    """``reason``: one line for `explain`, without a full stop."""

    kind: Literal["direct", "native"]
    reason: str


def choose(url: str) -> Access:
    """How to reach the cluster of ``url``; asks its NameNode.

    The setting ``hdfs_access`` decides where it is not ``auto``. Raises `ConfigError` for a URL that is no HDFS URL,
    `UnavailableError` when the NameNode does not answer.
    """
    base, wanted = split(url)[0], config.load().hdfs_access
    found = _ask(base) if wanted == "auto" else Access(wanted, f"the setting hdfs_access is {wanted}")
    _log.info("%s: %s access, %s", base, found.kind, found.reason)
    return found


def _ask(base: str) -> Access:
    try:
        namenode = NameNode.connect(base)
    except UnsupportedError as exc:  # a name service that only Hadoop's own rules resolve
        return Access("native", exc.message)
    encrypts = namenode.defaults().encrypt_data_transfer
    if not namenode.login and not encrypts:
        return Access("direct", "neither authentication nor wire encryption")
    return Access("direct", f"{namenode.login or 'no authentication'}{', encrypted transfers' if encrypts else ''}")
