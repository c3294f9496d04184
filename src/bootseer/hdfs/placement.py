"""Which DataNodes new blocks go to: stripes written together begin on different ones, and none on one that just failed.

The NameNode chooses the DataNodes of a block; a client may name one that it would like, name some to leave out, and
choose the order in which the data passes them. The first of them has the most to do with the client.

Concurrency: any thread may call anything; a lock guards the counts, and is never held during a request. Another one has
all wait for the first answer of a NameNode, at most `_ASK` seconds.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from bootseer.errors import BootseerError
from bootseer.hdfs.pace import Pace

if TYPE_CHECKING:
    from bootseer.hdfs.namenode import NameNode
    from bootseer.hdfs.records import DataNode, Located

_log = logging.getLogger(__name__)

SHUNNED = 60.0
"""Seconds for which new blocks avoid a DataNode after it failed in a pipeline, unless it answers again."""
ASK_AGAIN = 10.0
"""Seconds after which a DataNode that is avoided may be asked whether it answers again."""
_ASK = 5.0
_KNOWN = 60.0
"""Seconds for which a list of the DataNodes is good enough."""

_shunned: dict[str, _Shunned] = {}
_live: dict[str, tuple[float, list[DataNode]]] = {}
_lock, _asking = threading.Lock(), threading.Lock()


def _forget() -> None:
    global _lock, _asking
    _lock, _asking = threading.Lock(), threading.Lock()  # a forked child may have inherited them locked


os.register_at_fork(after_in_child=_forget)


@dataclass
class _Shunned:
    node: DataNode
    until: float
    ask: float


def shun(nodes: Iterable[DataNode], *, slow: bool = False) -> None:
    """Leave ``nodes`` out of new blocks of this process for `SHUNNED` seconds. Slow ones answer, so none is asked."""
    now = time.monotonic()
    with _lock:
        for node in nodes:
            _shunned[node.uuid] = _Shunned(node, now + SHUNNED, now + (2 * SHUNNED if slow else ASK_AGAIN))


def forgive(node: DataNode) -> None:
    """``node`` works again."""
    with _lock:
        _shunned.pop(node.uuid, None)


def shunned() -> list[DataNode]:
    """The DataNodes to leave out now."""
    now = time.monotonic()
    with _lock:
        for uuid in [uuid for uuid, kept in _shunned.items() if kept.until <= now]:
            del _shunned[uuid]
        return [kept.node for kept in _shunned.values()]


def due() -> list[DataNode]:
    """Those of them that should be asked whether they answer again; another caller gets them `ASK_AGAIN` later."""
    now = time.monotonic()
    with _lock:
        found = [kept for kept in _shunned.values() if kept.ask <= now]
        for kept in found:
            kept.ask = now + ASK_AGAIN
        return [kept.node for kept in found]


def live(namenode: NameNode) -> list[DataNode]:
    """The DataNodes that ``namenode`` counts as alive; none where it tells only its superuser, or does not answer."""
    with _lock:
        known = _live.get(namenode.url)
        if known and time.monotonic() - known[0] < _KNOWN:
            return known[1]
        if known:
            _live[namenode.url] = (time.monotonic(), known[1])  # others go on with what there is
    if known:
        return _ask_live(namenode)
    with _asking:  # the stripes of a process's first file begin together: without a list two would share a DataNode
        with _lock:
            known = _live.get(namenode.url)
        return known[1] if known else _ask_live(namenode)


def _ask_live(namenode: NameNode) -> list[DataNode]:
    try:
        nodes = namenode.live_nodes(deadline=_ASK)
    except BootseerError as exc:
        _log.info("blocks begin wherever the NameNode says: %s", exc)
        nodes = []
    with _lock:
        _live[namenode.url] = (time.monotonic(), nodes)
    return nodes


class Placement:
    """Shared by files that are written at the same time, so that they burden all DataNodes alike.

    ``pace`` tells which DataNode holds them up.

    What the NameNode tells of its DataNodes needs superuser rights; without them, the choice is only which of the
    DataNodes of a block comes first.
    """

    def __init__(self) -> None:
        self._first: Counter[str] = Counter()  # blocks that begin there
        self._used: Counter[str] = Counter()  # blocks of which it has, or is wished to have, a replica
        self._pairs: Counter[frozenset[str]] = Counter()  # wishes in which two were together, over all the time
        self._lock = threading.Lock()
        self.pace = Pace()

    def wish(self, namenode: NameNode, replicas: int) -> list[DataNode]:
        """The DataNodes that had best have the next block: those with the fewest now. They count until `begin`.

        Racks as HDFS chooses them: the second replica on another rack than the first, the third beside the second.
        """
        avoided = {node.uuid for node in shunned()}
        able = [node for node in live(namenode) if node.uuid not in avoided]
        random.shuffle(able)  # else every process would begin with the same ones
        chosen: list[DataNode] = []
        with self._lock:
            while able and len(chosen) < replicas:
                chosen.append(min(able, key=lambda node: self._cost(node, chosen)))
                able.remove(chosen[-1])
            self._used.update(node.uuid for node in chosen)
            self._pairs.update(_pairs(chosen))
        return chosen

    def _cost(self, node: DataNode, chosen: Sequence[DataNode]) -> tuple[bool, int, int]:
        # different companions: so one slow DataNode can be told from those that share a pipeline with it
        met = sum(self._pairs[frozenset((node.uuid, other.uuid))] for other in chosen)
        return (not _fits(node, chosen), self._used[node.uuid], met)

    def begin(self, located: Located, wished: Iterable[DataNode] = ()) -> Located:
        """``located`` in the order in which its data had best pass its DataNodes; it counts until `end`."""
        with self._lock:
            self._used.subtract(node.uuid for node in wished)
            self._used.update(node.uuid for node in located.nodes)
            start = min(range(len(located.nodes)), key=lambda i: self._first[located.nodes[i].uuid])
            self._first[located.nodes[start].uuid] += 1
        return moved_first(located, start)

    def dismiss(self, wished: Iterable[DataNode]) -> None:
        """There will be no block for what `wish` gave."""
        with self._lock:
            self._used.subtract(node.uuid for node in wished)

    def end(self, nodes: Sequence[DataNode]) -> None:
        """The block that `begin` gave these DataNodes, in this order, is written, or given up."""
        with self._lock:
            self._first[nodes[0].uuid] -= 1
            self._used.subtract(node.uuid for node in nodes)


def _pairs(nodes: Sequence[DataNode]) -> list[frozenset[str]]:
    return [frozenset((a.uuid, b.uuid)) for i, a in enumerate(nodes) for b in nodes[:i]]


def _fits(node: DataNode, chosen: Sequence[DataNode]) -> bool:
    """Whether the rack of ``node`` is right for the next replica after ``chosen``."""
    if len(chosen) == 1:
        return node.rack != chosen[0].rack
    return len(chosen) != 2 or chosen[0].rack == chosen[1].rack or node.rack == chosen[1].rack


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
