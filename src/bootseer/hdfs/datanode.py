"""Ranges of a block from a DataNode, received into the caller's memory.

`read` chooses a connection and says what went wrong; `bootseer.hdfs.packets` speaks the protocol on it.

Concurrency: any thread; a read uses one connection alone. When `read` has returned or raised, nothing writes to the
caller's memory any more.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from bootseer.errors import UnavailableError
from bootseer.hdfs import connections
from bootseer.hdfs.connection import Connection, Transfer, name
from bootseer.hdfs.packets import Nonsense, Packets
from bootseer.hdfs.records import DataNode, Located
from bootseer.hdfs.replica_errors import Cancelled

__all__ = ["Transfer", "read"]

_log = logging.getLogger(__name__)


def read(
    node: DataNode,
    located: Located,
    offset: int,
    parts: Sequence[memoryview],
    *,
    deadline: float,
    verify: bool,
    transfer: Transfer | None = None,
) -> None:
    """Fill ``parts`` in order with the block's bytes from ``offset`` in the block, as ``node`` has them.

    ``parts`` are writable and contiguous. ``deadline``: seconds from now for everything. ``verify``: ask for HDFS's
    checksums and check them; without, the caller has checksums of its own.

    Raises `StaleReplica` (refresh the locations), `CorruptReplica` and `UncheckedReplica` (only with ``verify``),
    `UnavailableError` (refused, closed, not in time, not understood), `Cancelled`. After an error the parts hold
    anything. A kept connection that the DataNode had closed meanwhile is replaced by a fresh one, once.
    """
    views = [part if part.format == "B" and part.ndim == 1 else part.cast("B") for part in parts if part.nbytes]
    size = sum(map(len, views))
    if offset < 0 or offset + size > located.block.length:
        raise ValueError(f"{offset}+{size} is outside block {located.block.id} of {located.block.length} bytes")
    if not size:
        return
    until, transfer = time.monotonic() + deadline, transfer or Transfer()
    address = (node.host, node.port)
    doing = f"read block {located.block.id} at {offset}"
    try:
        kept = connections.take(address)
        if kept is not None:
            try:
                return _turn(kept, until, transfer, Packets(kept, located, offset, views, verify, transfer))
            except _ClosedBefore as exc:
                _log.debug("kept connection to %s was closed (%s); connecting again", node.address, exc.__cause__)
        fresh = connections.connect(address, until, transfer)
        _turn(fresh, until, transfer, Packets(fresh, located, offset, views, verify, transfer))
    except (OSError, EOFError) as exc:
        raise connections.unavailable(address, exc, doing, deadline) from exc
    except Nonsense as exc:
        raise UnavailableError(
            f"cannot {doing} from DataNode {name(address)}: {exc}",
            hint="is it a DataNode of Hadoop 2 or 3?",
        ) from exc


def _turn(connection: Connection, until: float, transfer: Transfer, packets: Packets) -> None:
    try:
        connection.begin(until, transfer)
        keep = packets.receive()
    except BaseException as exc:
        connection.close()
        if transfer.cancelled and isinstance(exc, OSError | EOFError):
            raise Cancelled("the read was cancelled") from None
        if isinstance(exc, (EOFError, ConnectionError)) and not packets.answered:
            raise _ClosedBefore(str(exc) or type(exc).__name__) from exc
        raise
    if keep:
        connections.give_back(connection)
    else:
        connection.close()


class _ClosedBefore(EOFError):
    """Closed before the first byte of an answer."""

    def __str__(self) -> str:
        return (
            "it closed the connection without an answer (its limit of connections is reached, it is stopping, or it "
            "wants SASL, which only hdfs_access=native speaks)"
        )
