"""Writing an EROFS image of two devices while its contents stream by: `Writer`."""

from __future__ import annotations

from collections.abc import Iterable

from bootseer.erofs import format as fmt
from bootseer.erofs.data import Buffer, DataSink, Hole, Stream
from bootseer.erofs.meta import assemble
from bootseer.erofs.node import Node
from bootseer.erofs.tree import Tree


class Writer(Tree):
    """Builds an EROFS image (docs/internals/erofs.md): contents go to a sink at once, the tree of inodes stays in
    memory until `finish`. Memory never grows with contents. Needs no root and no tool; the same calls give the same
    bytes."""

    def __init__(self, sink: DataSink, *, align: int = 65536) -> None:
        """``sink`` (empty) takes the data device. ``align`` is a power of two of at least 4096: files of that size or
        more start at a multiple of it, and zeros are left out in whole units of it."""
        super().__init__()
        if align < fmt.BLOCK or align & (align - 1):
            raise ValueError(f"alignment {align} is not a power of two of at least {fmt.BLOCK}")
        self._align = align
        self._stream = Stream(sink, align)

    @property
    def position(self) -> int:
        """Bytes of the data device written so far."""
        return self._stream.position

    def begin_layer(self) -> None:
        """Pad the data device to a multiple of ``align``: what follows gives the same blocks in every image."""
        self._stream.pad(self._align)

    def _store(self, node: Node, chunks: Iterable[Buffer | Hole], extents: int | None) -> None:
        node.start, node.chunks, node.chunk_bits = self._stream.file(node.size, chunks, extents)

    def dead_ranges(self) -> list[tuple[int, int]]:
        """Ranges ``(offset, length)`` of the data device, in order and apart, that belong to no file: removed or
        replaced contents and padding. Nobody reads them. They may change until `finish`."""
        live: list[tuple[int, int]] = []
        stack, seen = [self.root], set()
        while stack:
            children = stack.pop().children
            for node in children.values() if children else ():
                if node.children is not None:
                    stack.append(node)
                elif node.start >= 0 and id(node) not in seen:
                    seen.add(id(node))
                    live.append((node.start, node.start + _stored(node)))
        live.sort()
        dead, at = [], 0
        for start, end in [*live, (self.position, self.position)]:
            if start > at:
                dead.append((at, start - at))
            at = end
        return dead

    def finish(self) -> bytes:
        """Pad the data device to whole blocks of 4 KiB and return the meta device. The writer is done then."""
        self._stream.pad(fmt.BLOCK)
        return assemble(self.root, self._stream.position)


def _stored(node: Node) -> int:
    """Bytes of the data device that a file's content takes, whole blocks."""
    size = -(-node.size // fmt.BLOCK) * fmt.BLOCK
    if not node.chunks:
        return size
    unit = fmt.BLOCK << node.chunk_bits
    stored = sum(block != fmt.HOLE for block in node.chunks) * unit
    if node.chunks[-1] != fmt.HOLE:
        stored -= len(node.chunks) * unit - size
    return stored
