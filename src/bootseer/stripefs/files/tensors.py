"""Where the tensors of a safetensors file end: how far whoever touches one of them is likely to read.

This is advice from the file itself: where it is wrong, bytes are fetched for nobody, or late.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from bootseer.wiretypes import json_as

SUFFIX = ".safetensors"
_LENGTH = 8
_LARGEST = 4 << 20
"""Bytes of a header that is looked at: some ten thousand tensors."""


class _Tensor(msgspec.Struct, frozen=True):
    data_offsets: tuple[int, int]


def ends_of(size: int, read: Callable[[int, int], bytes]) -> list[int]:
    """The offsets at which the tensors of a file of ``size`` bytes end, in order, ``read(offset, length)`` being what
    it has there; none where it has no header that says so."""
    if size < _LENGTH or (length := int.from_bytes(read(0, _LENGTH), "little")) > min(_LARGEST, size - _LENGTH):
        return []
    try:
        said = json_as(read(_LENGTH, length), dict[str, msgspec.Raw])
        said.pop("__metadata__", None)
        found = {json_as(value, _Tensor).data_offsets[1] for value in said.values()}
    except ValueError:
        return []
    data = _LENGTH + length
    return sorted(data + end for end in found if 0 < end <= size - data)
