"""What ``torch.save`` writes to a striped file."""

from __future__ import annotations

import io
from collections.abc import Callable

from bootseer.errors import BootseerError
from bootseer.stripefs import StripeWriter

EDGE = 4096
"""Bytes at either end of a saved tensor that tell where its elements are."""


class Output(io.RawIOBase):
    """A `StripeWriter` as the file object that ``torch.save`` expects.

    ``head`` and ``tail``: what was written through it, at most `EDGE` bytes of either end.
    """

    def __init__(self, writer: StripeWriter) -> None:
        self._writer = writer
        self.head = self.tail = b""

    def writable(self) -> bool:
        return True

    def write(self, data: bytes | bytearray | memoryview) -> int:  # type: ignore[override]
        view = memoryview(data)
        if len(self.head) < EDGE:
            self.head += bytes(view[: EDGE - len(self.head)])
        self.tail = (self.tail + bytes(view[-EDGE:]))[-EDGE:]
        return self._writer.write(data)


def saved(save: Callable[[Output], object], writer: StripeWriter) -> Output:
    """``save`` (a call of torch.save) into ``writer``, with the writer's own error when that fails."""
    out = Output(writer)
    try:
        save(out)
    except RuntimeError as exc:
        # torch's writer answers a failed write with an error of its own
        raise (exc.__context__ if isinstance(exc.__context__, BootseerError) else exc) from None
    return out
