"""Which of several DataNodes answer at all: asked each directly, because a pipeline tells only that it stands still.

A DataNode that is frozen still accepts connections (its kernel does), so each is asked for a block that does not exist;
any answer will do, an error as well as the end of the connection: one that wants a login closes it unread.

Concurrency: one call waits for a thread per DataNode; calls share who was last found not to answer."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import socket
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
SOON, LATER = 0.3, 10
"""It has less when another one has answered: so many seconds, or so many times as long as that one took, or its own
kernel for the connection: a frozen one's takes it at once; behind a full link, or if a packet is lost, it is late."""

_log = logging.getLogger(__name__)
_found: dict[str, float] = {}  # when a DataNode last gave no answer, by its uuid
_asked: dict[str, socket.socket] = {}  # the connection over which it may still answer, by its uuid
os.register_at_fork(after_in_child=_asked.clear)


def silent(nodes: Sequence[DataNode], pool: str, since: float = math.inf) -> tuple[int, ...]:
    """Positions of those ``nodes`` that gave no answer in time (`PROBE`, `SOON`). ``pool`` is that of any block there.

    Those that another call found so after ``since``, by the monotonic clock, are the answer, and nobody is asked: the
    stripes of a file that wait for one frozen DataNode leave it together.

    One that could not be asked because this process has no socket for it (too many open files, no free port) is not
    among them: nothing is known of it, and a line in the log says so."""
    known = [i for i, node in enumerate(nodes) if _found.get(node.uuid, -math.inf) > since]
    if known := [i for i in known if not thawed(nodes[i].uuid)]:
        return tuple(known)
    block = wire.Block(pool=pool, id=0, generation=0)
    base = wire.BaseHeader(block=block, token=wire.Token(identifier=b"", password=b"", kind="", service=""))
    request = wire.ReadBlock(header=wire.ClientHeader(base=base, client="bootseer-probe"), offset=0, length=0)
    question = operation(READ_BLOCK, request)
    until = time.monotonic() + PROBE
    missing, took = set(range(len(nodes))), list[float]()

    def ask(position: int, node: DataNode) -> None:
        if _answers(node, question, until, took):
            missing.discard(position)

    # not those of a pool, which Python refuses to threads that still write when the main one has ended
    threads = [threading.Thread(target=ask, args=each, name="bootseer-probe") for each in enumerate(nodes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    _found.update((nodes[i].uuid, time.monotonic()) for i in missing)
    return tuple(sorted(missing))


def thawed(uuid: str) -> bool:
    """Whether the DataNode has answered since it was found silent, or its connection has ended."""
    poll = select.poll()
    with contextlib.suppress(ValueError):  # closed meanwhile
        if sock := _asked.get(uuid):
            poll.register(sock, select.POLLIN)
            return bool(poll.poll(0))
    return False


def forget(uuid: str) -> None:
    """Wait no longer for an answer of the DataNode."""
    if sock := _asked.pop(uuid, None):
        sock.close()


def _answers(node: DataNode, question: bytes, until: float, took: list[float]) -> bool:
    """``took``: seconds that those took who have answered."""
    with contextlib.ExitStack() as stack:
        try:
            began = time.monotonic()
            sock = stack.enter_context(dial(node.host, node.port, until))
            asked = time.monotonic()
            sock.sendall(question)
            for again in (False, True):
                patience = LATER * max(took, default=math.inf) if again else max(SOON, LATER * (asked - began))
                with contextlib.suppress(TimeoutError):
                    sock.settimeout(remaining(min(asked + patience, until)))
                    with contextlib.suppress(ConnectionResetError):  # so one ends that wants a login
                        sock.recv(1)
                    took.append(time.monotonic() - began)
                    return True
        except BootseerError:  # its host name cannot be looked up
            return False
        except OSError as exc:
            limit = own_limit(exc)
            if limit:
                _log.warning("cannot ask DataNode %s whether it is there: %s", node.address, limit)
            return bool(limit)
        forget(node.uuid)
        _asked[node.uuid] = sock
        stack.pop_all()
        return False
