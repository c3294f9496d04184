"""safetensors files in a striped store: tensors, and slices of them, straight into memory. The format: the length of a
header (8 bytes, little-endian), the header (JSON: name -> dtype, shape, data_offsets, and ``__metadata__``), the
elements. A model of several files has an index (``*.safetensors.index.json``) that says which tensor is in which."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from bootseer.backends.interface import exists
from bootseer.backends.pool import parallel
from bootseer.closing import Closing
from bootseer.errors import ConfigError, DataError, NotFoundError, UnsupportedError
from bootseer.stripefs import ChunkFile, Given, locate, open_fs
from bootseer.torch.destination import Request
from bootseer.torch.folder import CheckpointFolder
from bootseer.torch.reads import Stored, TensorReads
from bootseer.wiretypes import json_as

MAX_HEADER = 100_000_000
"""Bytes; the format's own limit."""
_MAX_DIMENSIONS = 64
_INDEX = ".safetensors.index.json"
_FILE = ".safetensors"
_BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
DTYPES = {
    "BOOL": "bool", "F4": "float4_e2m1fn_x2", "U8": "uint8", "I8": "int8", "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn", "F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz", "I16": "int16", "U16": "uint16", "F16": "float16", "BF16": "bfloat16",
    "I32": "int32", "U32": "uint32", "F32": "float32", "C64": "complex64", "F64": "float64", "I64": "int64",
    "U64": "uint64",
}  # fmt: skip


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]
    metadata: msgspec.Raw = msgspec.Raw(b"")


class _Header(NamedTuple):
    tensors: dict[str, _Entry]
    metadata: dict[str, str]
    data: int
    """Offset in the file of the first tensor's elements."""


def _header(file: ChunkFile) -> _Header:
    """Read and check the header. `DataError` for what the format does not allow."""
    bad = f"{file.path} is no safetensors file"
    if file.size < 8:
        raise DataError(f"{bad}: it has {file.size} bytes")
    # one request nearly always: the header of a large model is some 100 kB
    head = file.read(0, min(file.size, file.unit))
    length = int.from_bytes(head[:8], "little")
    if length > MAX_HEADER or length > file.size - 8:
        raise DataError(f"{bad}: its header would have {length} bytes")
    text = head[8 : 8 + length]
    text += file.read(8 + len(text), length - len(text))
    try:
        raw = json_as(text, dict[str, msgspec.Raw])
        metadata = raw.pop("__metadata__", None)
        found = {name: json_as(value, _Entry) for name, value in raw.items()}
        said = json_as(metadata, dict[str, str]) if metadata is not None else {}
    except ValueError as exc:
        raise DataError(f"{bad}: {exc}") from None
    end = 0
    for name, entry in sorted(found.items(), key=lambda item: item[1].data_offsets):
        if entry.dtype not in _BITS or len(entry.shape) > _MAX_DIMENSIONS or any(size < 0 for size in entry.shape):
            raise DataError(f"{bad}: tensor {name!r} has dtype {entry.dtype} and shape {entry.shape[:9]}")
        bits = math.prod(entry.shape) * _BITS[entry.dtype]
        if entry.data_offsets != (end, end + bits // 8) or bits % 8:
            raise DataError(f"{bad}: tensor {name!r} cannot be at the bytes {entry.data_offsets}")
        end = entry.data_offsets[1]
    if end != file.size - 8 - length:
        raise DataError(f"{bad}: its tensors have {end} bytes, and the file {file.size - 8 - length}")
    return _Header(found, said, 8 + length)


class LazySlice:
    """A tensor that is read when it is indexed, and then only the part that is asked for."""

    def __init__(
        self, stored: Stored, dtype: str, device: str | torch.device, read: Callable[[Sequence[Request]], object]
    ) -> None:
        self._stored, self._dtype, self._device, self._read = stored, dtype, device, read

    def get_shape(self) -> list[int]:
        return list(self._stored.sizes)

    def get_dtype(self) -> str:
        """The format's name of it, such as ``BF16``."""
        return self._dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        """As ``tensor[index]``. Of integers and slices only that part is read; of what follows another index, all."""
        sizes = self._stored.sizes
        given = index if isinstance(index, tuple) else (index,)
        used = sum(item is not None and item is not Ellipsis and not isinstance(item, bool) for item in given)
        offsets, lengths = [0] * len(sizes), list(sizes)
        rest: list[object] = []
        dim = 0
        for number, item in enumerate(given):
            if item is Ellipsis and Ellipsis not in given[number + 1 :]:
                skipped = max(0, len(sizes) - used)
                dim += skipped
                rest += [slice(None)] * skipped
            elif type(item) is int and dim < len(sizes):
                if not -sizes[dim] <= item < sizes[dim]:
                    raise IndexError(f"index {item} is out of bounds for dimension {dim} with size {sizes[dim]}")
                offsets[dim], lengths[dim] = item % sizes[dim], 1
                rest.append(0)
                dim += 1
            elif isinstance(item, slice) and dim < len(sizes):
                start, stop, step = item.indices(sizes[dim])
                if step < 0:
                    raise ValueError("step must be greater than zero")
                offsets[dim], lengths[dim] = min(start, stop), max(0, stop - start)
                rest.append(slice(None, None, step))
                dim += 1
            else:
                rest += given[number:]
                break
        part = torch.empty(lengths, dtype=self._stored.dtype)
        reads = TensorReads(self._read)
        reads.tensor(self._stored, offsets, lengths, part)
        reads.flush()
        found: torch.Tensor = part[tuple(rest)].to(self._device)
        return found


class SafetensorsFile(Closing):
    """An open safetensors file, or a model of several files; a context manager. Belongs to one thread at a time."""

    def __init__(self, url: Given, device: str | torch.device = "cpu") -> None:
        self._device = device
        with contextlib.ExitStack() as stack:
            folder, names = _files(url)
            stack.push(folder)
            self._folder = folder
            self._where: dict[str, tuple[ChunkFile, _Header]] = {}
            files = parallel(folder.open, names)
            headers = parallel(_header, files)
            for (name, wanted), file, header in zip(names.items(), files, headers, strict=True):
                for tensor in header.tensors if wanted is None else wanted:
                    if tensor not in header.tensors:
                        raise DataError(f"{url} lacks {tensor}: {name} does not have it")
                    self._where[tensor] = file, header
            self._metadata = headers[0].metadata
            stack.pop_all()

    def keys(self) -> list[str]:
        """Names of the tensors, in order."""
        return sorted(self._where)

    def metadata(self) -> dict[str, str]:
        """What the file's ``__metadata__`` says; of several files, that of the first."""
        return dict(self._metadata)

    def get_slice(self, name: str) -> LazySlice:
        stored, dtype = self._stored(name)
        return LazySlice(stored, dtype, self._device, self._folder.read)

    def get_tensor(self, name: str) -> torch.Tensor:
        return self.get_tensors([name])[name]

    def get_tensors(self, names: list[str] | None = None) -> dict[str, torch.Tensor]:
        """Several tensors, all without ``names``, read together."""
        found: dict[str, torch.Tensor] = {}
        reads = TensorReads(self._folder.read)
        for name in self.keys() if names is None else names:
            stored, _ = self._stored(name)
            found[name] = target = torch.empty(tuple(stored.sizes), dtype=stored.dtype, device=self._device)
            reads.tensor(stored, [0] * len(stored.sizes), stored.sizes, target)
        reads.flush()
        return found

    def _stored(self, name: str) -> tuple[Stored, str]:
        try:
            file, header = self._where[name]
        except KeyError:
            raise NotFoundError(f"{self._folder.url} has no tensor {name!r}") from None
        entry = header.tensors[name]
        dtype = getattr(torch, DTYPES.get(entry.dtype, ""), None)
        if dtype is None:
            raise UnsupportedError(f"this version of torch has no dtype {entry.dtype}, which {name!r} has")
        shape = entry.shape
        if entry.dtype == "F4":  # two of them are one element of torch
            if not shape or shape[-1] % 2:
                raise UnsupportedError(f"tensor {name!r} has an odd number of 4-bit elements in a row")
            shape = (*shape[:-1], shape[-1] // 2)
        return Stored(file, header.data + entry.data_offsets[0], dtype, shape), entry.dtype

    def close(self) -> None:
        self._folder.close()


def _files(url: Given) -> tuple[CheckpointFolder, dict[str, list[str] | None]]:
    """The folder of the model at ``url`` and its files, each with the tensors that are wanted of it (None: all)."""
    found = locate(url)
    name = found.name
    if name.endswith(_FILE):
        return CheckpointFolder(found.parent.url, "safetensors"), {name: None}
    try:
        folder = CheckpointFolder(found.parent.url if name.endswith(_INDEX) else url, "safetensors")
    except NotFoundError:
        if name.endswith(_INDEX) or not name or not exists(open_fs(found.parent.url).backend, name):
            raise
        return CheckpointFolder(found.parent.url, "safetensors"), {name: None}  # a file with a name of its user's own
    try:
        if name.endswith(_INDEX):
            return folder, _indexed(folder, name)
        names = [path for path in folder.names() if "/" not in path]
        indexes = [path for path in names if path.endswith(_INDEX)]
        singles = [path for path in names if path.endswith(_FILE)]
        if len(indexes) == 1:
            return folder, _indexed(folder, indexes[0])
        if len(indexes) + len(singles) > 1:
            raise ConfigError(f"{url} has several models", hint=f"name one of {', '.join(indexes or singles)}")
        if not singles:
            raise NotFoundError(f"{url} has no {_FILE} file")
        return folder, {singles[0]: None}
    except BaseException:
        folder.close()
        raise


def _indexed(folder: CheckpointFolder, name: str) -> dict[str, list[str] | None]:
    file = folder.open(name)
    if file.size > MAX_HEADER:
        raise DataError(f"{file.path} is no index of safetensors files: it has {file.size} bytes")
    try:
        index = json_as(file.read(0, file.size), _Index)
    except ValueError as exc:
        raise DataError(f"{file.path} is no index of safetensors files: {exc}") from None
    found: dict[str, list[str] | None] = {}
    for tensor, path in index.weight_map.items():
        if "/" in path or not path.endswith(_FILE):
            raise DataError(f"{file.path} says that {tensor!r} is in {path!r}, which is no {_FILE} file beside it")
        names = found.setdefault(path, [])
        assert names is not None
        names.append(tensor)
    if not found:
        raise DataError(f"{file.path} names no tensor")
    return found
