"""Which of several DataNodes answer at all: asked each directly, because a pipeline tells only that it stands still.

A DataNode that is frozen still accepts connections (its kernel does), so each is asked for a block that does not exist;
any answer will do, an error as well as the end of the connection.

Concurrency: one call waits for all its DataNodes in the caller's thread; calls share nothing.
"""

from __future__ import annotations

import errno
import selectors
import socket
import struct
import time
from collections.abc import Sequence

from bootseer.hdfs.proto import hdfs_pb2 as wire
from bootseer.hdfs.records import DataNode

PROBE = 2.0
"""Seconds a DataNode has to answer. One that lives answers within milliseconds, during a long GC pause later."""
_READ_BLOCK = 81
_VERSION = 28


def operation(number: int, message: bytes) -> bytes:
    """The bytes that begin an operation of Hadoop's data transfer protocol, version 28."""
    length = len(message)
    prefix = bytearray()
    while length > 0x7F:
        prefix.append(length & 0x7F | 0x80)
        length >>= 7
    prefix.append(length)
    return struct.pack(">HB", _VERSION, number) + prefix + message


def _question(pool: str) -> bytes:
    block = wire.Block(pool=pool, id=0, generation=0)
    base = wire.BaseHeader(block=block, token=wire.Token(identifier=b"", password=b"", kind="", service=""))
    request = wire.ReadBlock(header=wire.ClientHeader(base=base, client="bootseer-probe"), offset=0, length=0)
    return operation(_READ_BLOCK, request.SerializeToString())


def silent(nodes: Sequence[DataNode], pool: str, *, seconds: float | None = None) -> tuple[int, ...]:
    """Positions of those ``nodes`` that gave no answer within ``seconds`` (None: `PROBE`).

    ``pool`` is that of any block there.
    """
    question = _question(pool)
    missing = set(range(len(nodes)))
    until = time.monotonic() + (PROBE if seconds is None else seconds)
    with selectors.DefaultSelector() as selector:
        waiting: list[socket.socket] = []
        try:
            for position, node in enumerate(nodes):
                sock = socket.socket(socket.AF_INET6 if ":" in node.host else socket.AF_INET)
                waiting.append(sock)
                sock.setblocking(False)
                if sock.connect_ex((node.host, node.port)) in (0, errno.EINPROGRESS):
                    selector.register(sock, selectors.EVENT_WRITE, position)
            while selector.get_map() and (left := until - time.monotonic()) > 0:
                for key, events in selector.select(left):
                    sock = waiting[key.data]
                    try:
                        if events & selectors.EVENT_WRITE:
                            sock.sendall(question)  # some hundred bytes into an empty buffer
                            selector.modify(sock, selectors.EVENT_READ, key.data)
                            continue
                        sock.recv(1)
                        missing.discard(key.data)
                    except OSError as exc:
                        if isinstance(exc, BlockingIOError):
                            continue
                    selector.unregister(sock)
        finally:
            for sock in waiting:
                sock.close()
    return tuple(sorted(missing))
