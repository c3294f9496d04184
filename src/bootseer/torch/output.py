"""What ``torch.save`` writes to a striped file."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import IO, cast

from bootseer.errors import BootseerError
from bootseer.stripefs import StripeWriter

EDGE = 4096
"""Bytes at either end of a saved tensor that tell where its elements are."""
_GATHERED = 256 << 10
"""torch.save writes five times for each tensor, some bytes each: they reach the writer in so large pieces."""


class Output(io.RawIOBase):
    """A `StripeWriter` as the file object that ``torch.save`` expects. ``head`` and ``tail``: what was written through
    it, at most `EDGE` bytes of either end. ``failed``: the save has, and what is still written, as by the end of a
    buffer, goes nowhere."""

    def __init__(self, writer: StripeWriter) -> None:
        self._writer = writer
        self.head = self.tail = b""
        self.failed = False

    def writable(self) -> bool:
        return True

    def write(self, data: bytes | bytearray | memoryview) -> int:  # type: ignore[override]
        view = memoryview(data)
        if self.failed:
            return len(view)
        if len(self.head) < EDGE:
            self.head += bytes(view[: EDGE - len(self.head)])
        self.tail = (self.tail + bytes(view[-EDGE:]))[-EDGE:]
        return self._writer.write(data)


def saved(save: Callable[[IO[bytes]], object], writer: StripeWriter) -> Output:
    """``save`` (a call of torch.save) into ``writer``, with the writer's own error when that fails."""
    out = Output(writer)
    gathered = io.BufferedWriter(cast(io.RawIOBase, out), _GATHERED)
    try:
        save(gathered)
        gathered.detach()
    except BaseException as exc:
        out.failed = True
        if isinstance(exc, RuntimeError) and isinstance(exc.__context__, BootseerError):
            raise exc.__context__ from None  # torch's writer answers a failed write with an error of its own
        raise
    return out


_lock, _loads = threading.Lock(), 0


@contextlib.contextmanager
def no_bytes_allowed() -> Iterator[None]:
    """Have torch.load take ``b""``, which torch.save writes as a call of ``bytes``, also with ``weights_only``; in no
    load of the process that begins later."""
    _count(1)
    try:
        yield
    finally:
        _count(-1)


def _forget() -> None:
    global _lock, _loads
    _lock, _loads = threading.Lock(), 0


os.register_at_fork(after_in_child=_forget)  # in the child nobody gives back what another thread held


def _count(more: int) -> None:
    import torch

    global _loads
    allowed = torch.serialization.safe_globals([(_no_bytes, "builtins.bytes")])
    with _lock:  # one set for all threads, which torch does not guard
        _loads += more
        if more > 0:
            allowed.__enter__()
        elif not _loads:
            allowed.__exit__(None, None, None)


def _no_bytes(*given: object) -> bytes:
    if given:
        raise pickle.UnpicklingError("it makes bytes of something else")
    return b""
