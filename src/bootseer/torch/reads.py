"""Reads of parts of tensors: their bytes go from the storage straight into the tensor's memory.

A stored tensor is an array of rows at an offset of a file. A part of it is one range of bytes where it lies in one
piece, else several. Ranges that lie further apart than a chunk are read one by one; what is nearer to each other would
touch the same chunks anyway and is read as one, into memory of its own. So is what goes to another device, to another
dtype, or into a tensor that is not contiguous, or whose memory another part has, too (tied weights); it is copied from
there, in order."""

from __future__ import annotations

import bisect
import ctypes
import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from bootseer.stripefs import ChunkFile
from bootseer.torch.destination import Request

STAGING = 1 << 30
"""Bytes that are held at a time for what is not read straight into its tensor."""
_BLOCK = 64 << 20
"""Most bytes of one range that is read for a part of them."""


class Stored(NamedTuple):
    """A tensor in a file: its rows begin at byte ``offset``, one behind the other (the last dimension moves fastest).
    ``sizes`` in elements of ``dtype``."""

    file: ChunkFile
    offset: int
    dtype: torch.dtype
    sizes: Sequence[int]


class TensorReads:
    """Collects what is to be read into tensors; `flush` reads it with ``read``. With ``staging`` (bytes) it also reads
    whenever that much memory besides that of the tensors is needed; None: only when it is told to, as it must be for a
    ``read`` that the processes of a job call together."""

    def __init__(self, read: Callable[[Sequence[Request]], object], *, staging: int | None = STAGING) -> None:
        self._read, self._staging = read, staging
        self._ranges: list[Request] = []
        self._kept: list[torch.Tensor] = []  # their memory is in the ranges
        self._taken: list[int] = []  # where in memory each of them begins and ends, ascending
        self._after: list[Callable[[], object]] = []
        self._staged = 0

    def tensor(
        self,
        stored: Stored,
        offsets: Sequence[int],
        lengths: Sequence[int],
        target: torch.Tensor,
        done: Callable[[], object] = lambda: None,
    ) -> None:
        """Read the part of ``stored`` from ``offsets`` on with the shape ``lengths`` into ``target`` of that shape."""
        if math.prod(lengths):
            self._part(stored, offsets, lengths, target)
        self._after.append(done)

    def bytes(self, file: ChunkFile, offset: int, length: int, done: Callable[[bytearray], object]) -> None:
        """Read ``length`` bytes and give them to ``done``."""
        file.check_range(offset, length)  # before there is memory for it
        data = bytearray(length)
        self._ranges.append((file, offset, memoryview(data)))
        self._after.append(lambda: done(data))
        self._stage(length)

    def flush(self) -> None:
        """Read everything that is wanted, copy what was not read into its place, and call each ``done``, in order."""
        ranges, after = self._ranges, self._after
        self._ranges, self._after, self._taken, self._staged = [], [], [], 0
        self._read(ranges)
        for step in after:
            step()
        self._kept = []

    def _stage(self, size: int) -> None:
        self._staged += size
        if self._staging is not None and self._staged >= self._staging:
            self.flush()

    def _part(self, stored: Stored, offsets: Sequence[int], lengths: Sequence[int], target: torch.Tensor) -> None:
        sizes, width = stored.sizes, stored.dtype.itemsize
        strides = [math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]
        inner = len(sizes) - 1  # what is behind it is wanted whole
        while inner > 0 and lengths[inner] == sizes[inner]:
            inner -= 1
        outer = 0  # before it, one index and the next are further apart than a chunk
        while outer < inner and strides[outer] * width >= stored.file.unit:
            outer += 1
        start = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
        for index in itertools.product(*(range(length) for length in lengths[:outer])):
            first = start + sum(i * stride for i, stride in zip(index, strides, strict=False))
            rows, shape, steps = target[index] if index else target, lengths[outer:], strides[outer:]
            if math.prod(lengths[outer:inner]) == 1 and _is_memory(rows, stored.dtype) and self._take(rows):
                self._kept.append(rows)
                self._ranges.append((stored.file, stored.offset + first * width, memory(rows)))
                continue
            height = max(1, _BLOCK // (steps[0] * width)) if shape else 1
            for row in range(0, shape[0] if shape else 1, height):
                block = [min(height, shape[0] - row), *shape[1:]] if shape else []
                part = rows[row : row + height] if shape else rows
                self._staged_part(stored, first + (row * steps[0] if shape else 0), block, steps, part)

    def _take(self, rows: torch.Tensor) -> bool:
        """Whether nothing else is read to the memory of ``rows``: it would be overwritten while it is checked."""
        start, end = rows.data_ptr(), rows.data_ptr() + rows.nbytes
        at = bisect.bisect(self._taken, start)
        if at % 2 or (at < len(self._taken) and self._taken[at] < end):
            return False
        self._taken[at:at] = start, end
        return True

    def _staged_part(
        self, stored: Stored, first: int, shape: Sequence[int], strides: Sequence[int], target: torch.Tensor
    ) -> None:
        span = 1 + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
        data = torch.empty(span, dtype=stored.dtype)
        self._ranges.append((stored.file, stored.offset + first * stored.dtype.itemsize, memory(data)))
        self._after.append(lambda: target.copy_(data.as_strided(tuple(shape), tuple(strides))))
        self._stage(data.nbytes)


def _is_memory(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    plain = not (tensor.is_conj() or tensor.is_neg())
    return bool(tensor.device.type == "cpu" and tensor.dtype == dtype and tensor.is_contiguous() and plain)


_view = ctypes.pythonapi.PyMemoryView_FromMemory
_view.restype, _view.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_WRITABLE = 0x200


def memory(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU. They are valid as long as the caller keeps ``tensor``."""
    if not tensor.nbytes:
        return memoryview(bytearray())
    view: memoryview = _view(tensor.data_ptr(), tensor.nbytes, _WRITABLE)
    return view
