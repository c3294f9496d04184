"""Which DataNodes new blocks go to: stripes written together begin on different ones, and none on one that just failed.

The NameNode chooses the DataNodes of a block; a client may name one that it would like, name some to leave out, and
choose the order in which the data passes them. The first of them has the most to do with the client.

Concurrency: any thread may call anything; a lock guards the counts, and is never held during a request.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bootseer.hdfs.records import DataNode, Located

SHUNNED = 60.0
"""Seconds for which new blocks avoid a DataNode after it failed in a pipeline, or until it answered again."""

_shunned: dict[str, tuple[float, DataNode]] = {}
_lock = threading.Lock()


def _forget() -> None:
    global _lock
    _lock = threading.Lock()  # a forked child may have inherited it locked


os.register_at_fork(after_in_child=_forget)


def shun(nodes: Iterable[DataNode]) -> None:
    """Leave ``nodes`` out of new blocks of this process for `SHUNNED` seconds."""
    with _lock:
        for node in nodes:
            _shunned[node.uuid] = (time.monotonic() + SHUNNED, node)


def forgive(node: DataNode) -> None:
    """``node`` works again."""
    with _lock:
        _shunned.pop(node.uuid, None)


def shunned() -> list[DataNode]:
    """The DataNodes to leave out now."""
    now = time.monotonic()
    with _lock:
        for uuid in [uuid for uuid, (until, _) in _shunned.items() if until <= now]:
            del _shunned[uuid]
        return [node for _, node in _shunned.values()]


class Placement:
    """Shared by files that are written at the same time, so that they begin on different DataNodes.

    ``nodes``: the DataNodes in service, as far as the NameNode tells (its list needs superuser rights on many
    clusters; without it the choice is among the DataNodes it gave).
    """

    def __init__(self, nodes: Sequence[DataNode] = ()) -> None:
        self._nodes = list(nodes)
        self._first: Counter[str] = Counter()
        self._lock = threading.Lock()

    def know(self, nodes: Sequence[DataNode]) -> None:
        """Tell which DataNodes there are, unless that is known already."""
        with self._lock:
            self._nodes = self._nodes or list(nodes)

    @property
    def known(self) -> bool:
        return bool(self._nodes)

    def wish(self) -> DataNode | None:
        """The DataNode at which the next block had best begin: the one at which fewest do now."""
        avoided = {node.uuid for node in shunned()}
        with self._lock:
            able = [node for node in self._nodes if node.uuid not in avoided]
            return min(able, key=lambda node: self._first[node.uuid], default=None)

    def begin(self, located: Located) -> Located:
        """``located`` in the order in which its data had best pass its DataNodes; it counts until `end`."""
        with self._lock:
            start = min(range(len(located.nodes)), key=lambda i: self._first[located.nodes[i].uuid], default=0)
            if located.nodes:
                self._first[located.nodes[start].uuid] += 1
        return moved_first(located, start)

    def end(self, first: DataNode) -> None:
        """A block that began at ``first`` is written."""
        with self._lock:
            self._first[first.uuid] -= 1


def moved_first(located: Located, index: int) -> Located:
    """``located`` with the DataNode at ``index`` in front."""
    if not index:
        return located
    order = [index, *(i for i in range(len(located.nodes)) if i != index)]
    return picked(located, order)


def picked(located: Located, order: Sequence[int]) -> Located:
    """``located`` with only the DataNodes at the positions ``order``, in that order."""
    return replace(
        located,
        nodes=tuple(located.nodes[i] for i in order),
        storage_types=tuple(located.storage_types[i] for i in order) if located.storage_types else (),
        storage_ids=tuple(located.storage_ids[i] for i in order) if located.storage_ids else (),
    )
