"""Which of several DataNodes answer at all: asked each directly, because a pipeline tells only that it stands still.

A DataNode that is frozen still accepts connections (its kernel does), so each is asked for a block that does not exist;
any answer will do, an error as well as the end of the connection.

Concurrency: one call waits for all its DataNodes in the caller's thread; calls share nothing.
"""

from __future__ import annotations

import errno
import logging
import selectors
import socket
import time
from collections.abc import Sequence

from bootseer.hdfs import connections
from bootseer.hdfs.operations import READ_BLOCK, operation
from bootseer.hdfs.proto import hdfs_pb2 as wire
from bootseer.hdfs.records import DataNode

__all__ = ["PROBE", "operation", "silent"]

PROBE = 2.0
"""Seconds a DataNode has to answer. One that lives answers within milliseconds, during a long GC pause later."""

_log = logging.getLogger(__name__)


def _question(pool: str) -> bytes:
    block = wire.Block(pool=pool, id=0, generation=0)
    base = wire.BaseHeader(block=block, token=wire.Token(identifier=b"", password=b"", kind="", service=""))
    request = wire.ReadBlock(header=wire.ClientHeader(base=base, client="bootseer-probe"), offset=0, length=0)
    return operation(READ_BLOCK, request.SerializeToString())


def silent(nodes: Sequence[DataNode], pool: str, *, seconds: float | None = None) -> tuple[int, ...]:
    """Positions of those ``nodes`` that gave no answer within ``seconds`` (None: `PROBE`).

    ``pool`` is that of any block there. One that could not be asked because this process has no socket for it (too many
    open files, no free port) is not among them: nothing is known of it, and a line in the log says so.
    """
    question = _question(pool)
    missing = set(range(len(nodes)))
    until = time.monotonic() + (PROBE if seconds is None else seconds)
    with selectors.PollSelector() as selector:  # the one that needs no file descriptor
        waiting: dict[int, socket.socket] = {}
        try:
            for position, node in enumerate(nodes):
                try:
                    waiting[position] = _begin(node, until)
                    selector.register(waiting[position], selectors.EVENT_WRITE, position)
                except OSError as exc:
                    if limit := connections.own_limit(exc):
                        _log.warning("cannot ask DataNode %s whether it is there: %s", node.address, limit)
                        missing.discard(position)
            while selector.get_map() and (left := until - time.monotonic()) > 0:
                for key, events in selector.select(left):
                    sock = waiting[key.data]
                    try:
                        if events & selectors.EVENT_WRITE:
                            if sock.getsockname() != sock.getpeername():  # else it is connected to itself: nobody there
                                sock.sendall(question)  # some hundred bytes into an empty buffer
                                selector.modify(sock, selectors.EVENT_READ, key.data)
                                continue
                        else:
                            sock.recv(1)
                            missing.discard(key.data)
                    except BlockingIOError:
                        continue
                    except OSError:
                        pass
                    selector.unregister(sock)
        finally:
            for sock in waiting.values():
                sock.close()
    return tuple(sorted(missing))


def _begin(node: DataNode, until: float) -> socket.socket:
    """A socket that is being connected to ``node``."""
    problem = OSError(errno.EHOSTUNREACH, "no address")
    for family, where in connections.resolve((node.host, node.port), until):
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setblocking(False)
        if (error := sock.connect_ex(where)) in (0, errno.EINPROGRESS):
            return sock
        sock.close()
        problem = OSError(error, errno.errorcode.get(error, ""))
    raise problem
