"""safetensors files written one tensor after the other: the model is never in memory a second time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec
import torch

from bootseer.errors import ConfigError, UnsupportedError
from bootseer.torch.reads import memory
from bootseer.torch.safetensors import DTYPES, MAX_HEADER

if TYPE_CHECKING:
    from bootseer.stripefs import StripeWriter

_PIECE = 16 << 20
_ALIGNMENT = 8
"""Bytes at whose multiples the elements begin, after a header filled up with spaces."""


class Encoded:
    """``tensors`` as a file: the header is made at once, a tensor's bytes when they are written."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None) -> None:
        """Raises `ConfigError` and `UnsupportedError` as `bootseer.torch.save_safetensors` says."""
        names = {getattr(torch, name): code for code, name in DTYPES.items() if hasattr(torch, name)}
        header: dict[str, object] = {}
        if metadata is not None:
            if not all(isinstance(text, str) for item in metadata.items() for text in item):
                raise ConfigError("the metadata of a safetensors file are text, by names that are text")
            header["__metadata__"] = dict(metadata)
        for name, tensor in tensors.items():
            if not isinstance(name, str) or name == "__metadata__" or not isinstance(tensor, torch.Tensor):
                raise ConfigError(f"a safetensors file cannot hold {type(tensor).__name__} {name!r}")
            if tensor.layout != torch.strided:
                raise ConfigError(f"{name} is sparse", hint="save it with to_dense()")
            if tensor.device.type == "meta" or type(tensor.detach()) is not torch.Tensor:
                what = "meta tensor" if tensor.device.type == "meta" else type(tensor).__name__
                raise ConfigError(f"{name} is a {what}, whose elements are not here", hint="save a plain tensor of it")
            if tensor.dtype not in names:
                raise UnsupportedError(f"safetensors files have no {tensor.dtype}, which {name} has")
        _refuse_shared(tensors)
        # larger elements first: each begins at a multiple of its size
        self._tensors = sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
        end = 0
        for name, tensor in self._tensors:
            code, shape = names[tensor.dtype], list(tensor.shape)
            if code == "F4":  # one element of torch is two of them
                if not shape:
                    raise UnsupportedError(f"{name} has no dimension, and two 4-bit elements")
                shape[-1] *= 2
            header[name] = {"dtype": code, "shape": shape, "data_offsets": [end, end + _size(tensor)]}
            end += _size(tensor)
        try:
            text = msgspec.json.encode(header)
        except UnicodeEncodeError:
            raise ConfigError("names and metadata of a safetensors file must be valid Unicode") from None
        text += b" " * (-len(text) % _ALIGNMENT)
        if len(text) > MAX_HEADER:
            raise ConfigError(f"the names, shapes and metadata have {len(text)} bytes, more than the format allows")
        self._header = len(text).to_bytes(8, "little") + text

    def write(self, out: StripeWriter) -> None:
        """Write the file. Errors of `StripeWriter.write`."""
        out.write(self._header)
        for _, tensor in self._tensors:
            plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
            data = memory(plain)
            for start in range(0, len(data), _PIECE):
                out.write(data[start : start + _PIECE])


def _size(tensor: torch.Tensor) -> int:
    return int(tensor.nbytes)


def _refuse_shared(tensors: Mapping[str, torch.Tensor]) -> None:
    """What is loaded would not share memory any more, and take more of it than the job had."""
    last: dict[torch.device, tuple[int, str]] = {}
    filled = [(name, tensor) for name, tensor in tensors.items() if tensor.numel()]
    for name, tensor in sorted(filled, key=lambda item: item[1].data_ptr()):
        reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        end, other = last.get(tensor.device, (0, ""))
        if tensor.data_ptr() < end:
            raise ConfigError(
                f"{other} and {name} share memory, which a safetensors file cannot say",
                hint="leave one of them out, or clone() it",
            )
        last[tensor.device] = tensor.data_ptr() + reach * tensor.dtype.itemsize, name
