"""The nodes of a mount: which path and content each number stands for that the kernel knows.

Each change is told to the journal before the kernel can know of it, and the next server begins with what was told.
How often the kernel looked a node up is not: the FORGETs that a dead server had read are lost, so what it left is kept
until the mount ends. A number is never given twice."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import msgspec

from bootseer.fsmount.memory import Gone, Journal, Known
from bootseer.kernel import fuse

GENERATION_SHIFT = 40
"""Numbers of nodes and file handles: those of a server begin with its own."""


class Nodes:
    """``journal``: is told each change, in their order. ``known``: what earlier servers of the mount told,
    ``generation``: how many there were. Any thread may call anything."""

    def __init__(
        self,
        root: Known | None,
        *,
        known: Iterable[Known] = (),
        journal: Journal | None = None,
        generation: int = 0,
    ) -> None:
        self._journal = journal
        self._lock = threading.Lock()
        self._nodes: dict[int, Known] = {}
        self._numbers: dict[tuple[bytes, str], int] = {}
        self._newest: dict[bytes, int] = {}
        self._lookups: dict[int, int] = {}  # not of those before this server: they are not forgotten
        self._last = generation << GENERATION_SHIFT or fuse.ROOT
        for node in known:
            self._put(node)
        if root is not None:
            self._put(root)
            self._tell(root)

    def _tell(self, message: Known | Gone) -> None:
        if self._journal is None:
            return
        if self._journal.is_old(len(self._nodes)):
            self._journal.rewrite(
                sorted(self._nodes.values(), key=lambda node: self._newest.get(node.path) == node.number)
            )
        self._journal.tell(message)

    def __getitem__(self, number: int) -> Known:
        return self._nodes[number]

    def __contains__(self, number: int) -> bool:
        return number in self._nodes

    def backings(self) -> dict[int, int]:
        """By number, what the kernel reads by itself."""
        return {number: node.backing for number, node in self._nodes.items() if node.backing}

    def find(self, path: bytes, version: str) -> Known | None:
        """The node of this version of the file at ``path``, if it has one."""
        known = self._nodes.get(self._newest.get(path, 0))
        return known if version and known is not None and known.version == version else None

    def enter(self, path: bytes, content: str, version: str, attr: fuse.Attr) -> int:
        """The number of this content at this path, with one more reference."""
        with self._lock:
            number = self._numbers.get((path, content))
            if number is None:
                number = self._last = self._last + 1
                self._lookups[number] = 0
            backing = self._nodes[number].backing if number in self._nodes else 0
            node = Known(number, path, content, version, attr, backing)
            if self._nodes.get(number) != node or self._newest.get(path) != number:
                self._tell(node)
                self._put(node)
            if number in self._lookups:
                self._lookups[number] += 1
            return number

    def make(self, path: bytes, content: str, attr: fuse.Attr) -> int:
        """A new node with one reference."""
        with self._lock:
            self._last += 1
            node = Known(self._last, path, content, "", attr)
            self._tell(node)
            self._put(node)
            self._lookups[node.number] = 1
            return node.number

    def refer(self, number: int) -> None:
        """One more reference."""
        with self._lock:
            if number in self._lookups:
                self._lookups[number] += 1

    def change(self, number: int, **changes: object) -> Known:
        """Other fields of the node."""
        with self._lock:
            node = msgspec.structs.replace(old := self._nodes[number], **changes)
            if node != old:
                self._tell(node)
                if (node.path, node.content) == (old.path, old.content):
                    self._nodes[number] = node
                else:
                    self._drop(old)
                    self._put(node)
            return node

    def move(self, path: bytes, target: bytes) -> list[int]:
        """Nodes at and below ``path`` are at ``target`` now; their numbers."""
        with self._lock:
            below = [node for node in self._nodes.values() if node.path == path or node.path.startswith(path + b"/")]
        for node in below:
            self.change(node.number, path=target + node.path[len(path) :], version="")
        return [node.number for node in below]

    def forget(self, number: int, lookups: int) -> None:
        """The kernel has dropped so many references."""
        with self._lock:
            if number not in self._lookups:
                return
            self._lookups[number] -= lookups
            if self._lookups[number] <= 0:
                self._tell(Gone(number))
                del self._lookups[number]
                self._drop(self._nodes[number])

    def _drop(self, node: Known) -> None:
        del self._nodes[node.number]
        if self._numbers.get((node.path, node.content)) == node.number:
            del self._numbers[node.path, node.content]
        if self._newest.get(node.path) == node.number:
            del self._newest[node.path]

    def _put(self, node: Known) -> None:
        self._nodes[node.number] = node
        self._numbers[node.path, node.content] = self._newest[node.path] = node.number
