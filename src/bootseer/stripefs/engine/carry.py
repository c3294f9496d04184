"""One attempt at bytes of a block: the transfer, where its bytes go, the check; and the copy of a hedge that won.

Nothing here knows of locks or threads; `bootseer.stripefs.engine.engine` calls it in its workers.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import Protocol, cast

from bootseer.errors import BootseerError, DataError
from bootseer.hdfs import datanode
from bootseer.hdfs.records import DataNode, Located
from bootseer.hdfs.replica_errors import Cancelled, CorruptReplica, OwnLimit, StaleReplica, UncheckedReplica
from bootseer.stripefs.engine.direct import Views, spot, views
from bootseer.stripefs.engine.tuning import SLOWEST
from bootseer.stripefs.engine.work import Attempt, Joining, Landing, Outcome
from bootseer.stripefs.storage.backend import DEADLINE

PROBE_DEADLINE = 2.0


class Transfer(Protocol):
    """One read under way; `cancel` from any thread makes it raise `Cancelled` soon. ``received``: bytes so far."""

    received: int

    def cancel(self) -> None: ...


class Transport(Protocol):
    """How bytes of a block are had; `bootseer.hdfs.datanode` is the real one."""

    def transfer(self) -> Transfer: ...

    def read(
        self,
        node: DataNode,
        located: Located,
        offset: int,
        parts: Sequence[memoryview],
        *,
        deadline: float,
        verify: bool,
        transfer: Transfer,
    ) -> None: ...


class DataNodes:
    """The real transport."""

    def transfer(self) -> Transfer:
        return datanode.Transfer()

    def read(
        self,
        node: DataNode,
        located: Located,
        offset: int,
        parts: Sequence[memoryview],
        *,
        deadline: float,
        verify: bool,
        transfer: Transfer,
    ) -> None:
        assert isinstance(transfer, datanode.Transfer)
        datanode.read(node, located, offset, parts, deadline=deadline, verify=verify, transfer=transfer)


def carry(attempt: Attempt, transport: Transport) -> tuple[Outcome, BootseerError | None]:
    """Transfer and check. Other errors than those of the other side and of the bytes are raised."""
    where = spot(attempt.place)
    node = where.nodes.get(attempt.node.key)
    if node is None:  # it has lost the block since
        return Outcome.REFUSED, None
    parts = _memory(attempt)
    try:
        transport.read(
            node,
            where.located,
            attempt.offset,
            parts,
            deadline=PROBE_DEADLINE if attempt.kind == "probe" else DEADLINE + attempt.size / SLOWEST,
            verify=attempt.verify,
            transfer=cast(Transfer, attempt.handle),
        )
        if attempt.run is not None:
            views(attempt.run.lane).check(parts, attempt.run.first)
    except Cancelled:
        return Outcome.CANCELLED, None
    except OwnLimit as exc:
        return Outcome.UNASKED, exc
    except StaleReplica as exc:
        return Outcome.REFUSED, exc
    except UncheckedReplica as exc:
        return Outcome.UNCHECKED, exc
    except CorruptReplica as exc:
        return Outcome.CORRUPT, exc
    except DataError as exc:
        return Outcome.DAMAGED, exc
    except BootseerError as exc:
        return Outcome.FAILED, exc
    finally:
        del parts  # an error keeps this frame, and that the caller's memory
    return Outcome.DONE, None


def _memory(attempt: Attempt) -> list[memoryview]:
    """The caller's for a primary attempt, scratch memory for others."""
    run = attempt.run
    if run is not None and attempt.kind == "primary":
        return views(run.lane).parts[run.first : run.last]
    attempt.tag = buffer = bytearray(attempt.size)
    whole = memoryview(buffer)
    if run is None:
        return [whole]
    starts = run.lane.starts
    return [whole[starts[i] - run.offset : starts[i + 1] - run.offset] for i in range(run.first, run.last)]


def land(landing: Landing) -> None:
    """Copy a hedge's bytes into the caller's memory."""
    run, data, at = landing.run, memoryview(cast(bytearray, landing.attempt.tag)), 0
    for part in views(run.lane).parts[run.first : run.last]:
        part[:] = data[at : at + len(part)]
        at += len(part)


def check_joined(joining: Joining) -> BootseerError | None:
    """What is wrong with a part whose pieces came from several blocks."""
    whole = cast(Views, joining.join.tag)
    try:
        whole.check(whole.parts)
    except BootseerError as exc:
        let_go(exc)
        return exc
    return None


def let_go(error: BaseException) -> None:
    """Drop what the frames of ``error`` hold: memory of which there is a view can be neither resized nor unmapped."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__cause__ or seen.__context__
