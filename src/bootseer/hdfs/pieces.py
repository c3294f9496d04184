"""Bytes on their way to a socket, as pieces of memory that nobody changes: cut and gathered without copies. Pure
functions; nothing here is shared."""

from __future__ import annotations

from collections.abc import Sequence


def kept(data: bytes | bytearray | memoryview) -> memoryview:
    """``data`` as bytes that nobody changes: itself where it belongs to a `bytes` object, else the one copy of it."""
    view = memoryview(data)
    if view.ndim != 1 or view.format != "B":
        view = view.cast("B")
    return view if isinstance(view.obj, bytes) else memoryview(bytes(view))


def cut(pieces: Sequence[memoryview], length: int) -> tuple[list[memoryview], list[memoryview]]:
    """``pieces`` in two: the first ``length`` bytes, and the rest."""
    for i, piece in enumerate(pieces):
        if len(piece) > length:
            first = [*pieces[:i], piece[:length]] if length else list(pieces[:i])
            return first, [piece[length:], *pieces[i + 1 :]]
        length -= len(piece)
    return list(pieces), []
