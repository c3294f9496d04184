"""Which of several DataNodes answer at all: asked each directly, because a pipeline tells only that it stands still.

A DataNode that is frozen still accepts connections (its kernel does), so each is asked for a block that does not exist;
any answer will do, an error as well as the end of the connection.

Concurrency: one call waits for a thread per DataNode; calls share when a DataNode was last found not to answer.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Sequence

from bootseer.errors import BootseerError
from bootseer.hdfs.dial import dial, own_limit, remaining
from bootseer.hdfs.framing import READ_BLOCK, operation
from bootseer.hdfs.proto import hdfs_pb2 as wire
from bootseer.hdfs.records import DataNode

PROBE = 1.5
"""Seconds a DataNode has to answer. One that lives answers within milliseconds, later during a GC pause, and after 1 s
when the first packet of the connection is lost. Behind full links of 10 Mbit/s some answers took 1.4 s."""

_log = logging.getLogger(__name__)
_found: dict[str, float] = {}  # when a DataNode last gave no answer, by its uuid


def silent(nodes: Sequence[DataNode], pool: str, since: float = math.inf) -> tuple[int, ...]:
    """Positions of those ``nodes`` that gave no answer within `PROBE` seconds. ``pool`` is that of any block there.

    Those that another call found so after ``since``, by the monotonic clock, are the answer, and nobody is asked: the
    stripes of a file that wait for one frozen DataNode leave it together.

    One that could not be asked because this process has no socket for it (too many open files, no free port) is not
    among them: nothing is known of it, and a line in the log says so.
    """
    if known := tuple(i for i, node in enumerate(nodes) if _found.get(node.uuid, -math.inf) > since):
        return known
    block = wire.Block(pool=pool, id=0, generation=0)
    base = wire.BaseHeader(block=block, token=wire.Token(identifier=b"", password=b"", kind="", service=""))
    request = wire.ReadBlock(header=wire.ClientHeader(base=base, client="bootseer-probe"), offset=0, length=0)
    question = operation(READ_BLOCK, request)
    until = time.monotonic() + PROBE
    missing = set(range(len(nodes)))

    def ask(position: int, node: DataNode) -> None:
        if _answers(node, question, until):
            missing.discard(position)

    # not those of a pool, which Python refuses to threads that still write when the main one has ended
    threads = [threading.Thread(target=ask, args=each, name="bootseer-probe") for each in enumerate(nodes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    _found.update((nodes[i].uuid, time.monotonic()) for i in missing)
    return tuple(sorted(missing))


def _answers(node: DataNode, question: bytes, until: float) -> bool:
    try:
        with dial(node.host, node.port, until) as sock:
            sock.sendall(question)
            sock.settimeout(remaining(until))
            sock.recv(1)
            return True
    except BootseerError:  # its host name cannot be looked up
        return False
    except OSError as exc:
        limit = own_limit(exc)
        if limit:
            _log.warning("cannot ask DataNode %s whether it is there: %s", node.address, limit)
        return bool(limit)
