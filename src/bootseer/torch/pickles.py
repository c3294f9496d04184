"""What is unpickled of a checkpoint, and what is not: `.metadata` of DCP, and a single tensor that torch.save wrote.
Only the functions and classes named here may make its objects, so a checkpoint cannot run code."""

from __future__ import annotations

import collections
import io
import logging
import os
import pathlib
import pickle
import pickletools
import subprocess
import sys
import zipfile
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from bootseer.errors import DataError
from bootseer.torch import weigh
from bootseer.torch.output import EDGE

_log = logging.getLogger(__name__)

_ROOM, _GROWTH = 512 << 20, 64
"""Bytes of memory that decoding a pickle may take, and more for each of its own (DCP's metadata: about 15)."""
_WEIGH_SECONDS = 60.0
"""And so long, besides a second for each MB."""
_LARGEST, _SHARE = 1 << 30, 1 / 4
"""Bytes of a pickle that are read at once, or a share of the machine's memory: on a node of 1 TiB 256 GiB."""


class _Sealed(type):
    """Of what a pickle is given for a class or function: a pickle can set attributes of what it names, and these would
    stay set in the process."""

    def __setattr__(cls, name: str, value: object) -> None:
        raise pickle.UnpicklingError(f"it sets {name} of {cls.__name__}")


def _sealed(make: Callable[..., object]) -> _Sealed:
    """What makes that which ``make`` makes."""
    return _Sealed("maker", (), {"__slots__": (), "__new__": lambda _, *given: make(*given)})


def _instances(kind: type) -> _Sealed:
    """What makes empty instances of ``kind``: their attributes follow in the pickle."""
    return _sealed(lambda: object.__new__(kind))


class _Member:
    """In place of a member of an enumeration, of which there is one in the process: equal to it."""

    __slots__ = ("_member",)

    def __init__(self, value: object) -> None:
        self._member = dcp._MEM_FORMAT_ENCODING(value)

    def __eq__(self, other: object) -> bool:
        return self._member is other

    __hash__ = None  # type: ignore[assignment]


def member(kind: object, name: object) -> object:
    """What Python 3.11 writes for a member of an enumeration: ``getattr`` of its class."""
    members: dict[object, dcp._MEM_FORMAT_ENCODING] = dict(dcp._MEM_FORMAT_ENCODING.__members__)
    if kind is not _FORMATS or name not in members:
        raise pickle.UnpicklingError(f"it holds getattr of {kind!r}")
    return _Member(members[name].value)


_FORMATS = _sealed(_Member)
_GETATTR = _sealed(member)
_NAMES = "torch.distributed.checkpoint.metadata"
CLASSES: dict[tuple[str, str], object] = {
    (_NAMES, "Metadata"): _instances(dcp.Metadata),
    (_NAMES, "MetadataIndex"): _instances(dcp.MetadataIndex),
    (_NAMES, "TensorStorageMetadata"): _instances(dcp.TensorStorageMetadata),
    (_NAMES, "BytesStorageMetadata"): _instances(dcp.BytesStorageMetadata),
    (_NAMES, "ChunkStorageMetadata"): _instances(dcp.ChunkStorageMetadata),
    (_NAMES, "TensorProperties"): _instances(dcp.TensorProperties),
    (_NAMES, "StorageMeta"): _instances(dcp.StorageMeta),
    (_NAMES, "_MEM_FORMAT_ENCODING"): _FORMATS,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _instances(_StorageInfo),
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _sealed(torch.serialization._get_layout),
    ("collections", "OrderedDict"): collections.OrderedDict,
    **{
        (module, name): _sealed(pathlib.PurePath)
        for module in ("pathlib", "pathlib._local")
        for name in ("Path", "PosixPath", "PurePosixPath")
    },
}


def _dtype(module: str, name: str) -> torch.dtype | None:
    found = getattr(torch, name, None) if module == "torch" else None
    return found if isinstance(found, torch.dtype) else None


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if (module, name) == ("builtins", "getattr"):
            return _GETATTR
        found = CLASSES.get((module, name)) or _dtype(module, name)
        if found is None:
            raise pickle.UnpicklingError(f"it holds {module}.{name}")
        return found

    def persistent_load(self, pid: object) -> object:
        raise pickle.UnpicklingError("it refers to other objects")


def refuse_large(size: int, name: str) -> None:
    """`DataError` for a pickle of more bytes than are taken into memory: a file of holes has any number of them."""
    most = max(_LARGEST, int(_SHARE * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")))
    if size > most:
        raise DataError(f"{name} is not loaded: it has {size} bytes, and this machine's memory is for {most} of such")


def load_metadata(data: bytes, name: str) -> dcp.Metadata:
    """Decode the ``.metadata`` of DCP in file ``name``. `DataError` for what is none, holds anything else, or would
    take far more memory than it is long."""
    _weigh(data, name)
    try:
        found = _MetadataUnpickler(io.BytesIO(data)).load()
    except pickle.UnpicklingError as exc:
        raise DataError(f"{name} is not loaded: {exc}", hint="it is damaged, or was made by another program") from None
    except Exception as exc:
        raise DataError(f"{name} is damaged: {type(exc).__name__}: {exc}") from None
    if not isinstance(found, dcp.Metadata) or not isinstance(found.state_dict_metadata, dict):
        raise DataError(f"{name} is no metadata of a checkpoint")
    version = getattr(found, "version", None)
    if version is not None and str(version).partition(".")[0] != "1":
        raise DataError(f"{name} has version {version} of DCP's format; this version of bootseer reads 1")
    storage = getattr(found, "storage_data", None)
    if not isinstance(storage, dict):
        raise DataError(f"{name} does not say in which files the tensors are")
    for index, info in storage.items():
        if not isinstance(index, dcp.MetadataIndex) or not isinstance(info, _StorageInfo):
            raise DataError(f"{name} does not say in which files the tensors are")
        numbers = (info.offset, info.length, getattr(info, DATA_OFFSET, 0))
        if not isinstance(info.relative_path, str) or not all(isinstance(n, int) and n >= 0 for n in numbers):
            raise DataError(f"{name} is damaged: {index.fqn} is nowhere")
    return found


def _weigh(data: bytes, name: str) -> None:
    """Decode ``data`` in another process first, whose memory is limited. `DataError` when that is not enough."""
    command = [sys.executable, "-I", "-S", weigh.__file__, str(_ROOM + _GROWTH * len(data))]
    seconds = _WEIGH_SECONDS + len(data) / 1e6
    try:
        code = subprocess.run(command, input=data, stderr=subprocess.DEVNULL, timeout=seconds, check=False).returncode
    except subprocess.TimeoutExpired:
        raise DataError(f"{name} is not loaded: it takes more than {seconds:.0f} s to decode") from None
    except OSError as exc:
        _log.warning("%s is decoded without a look at how much memory that takes: %s", name, exc)
        return
    if code == weigh.TOO_MUCH or code < 0:
        raise DataError(
            f"{name} is not loaded: decoding its {len(data)} bytes takes more memory than any metadata does",
            hint="it is damaged, or was made by another program",
        )
    if code:
        _log.warning("%s is decoded without a look at how much memory that takes: exit code %d", name, code)


DATA_OFFSET = "bootseer_data_offset"
"""Attribute that our writer adds to a tensor's `_StorageInfo`: where in its bytes the contiguous elements begin."""


class TensorLayout(NamedTuple):
    """Where in the bytes of a saved tensor its elements are: at byte ``offset``, contiguous, in order."""

    offset: int
    dtype: torch.dtype
    sizes: tuple[int, ...]


class _Storage(NamedTuple):
    dtype: torch.dtype | None
    key: str


def tensor_v2(storage: _Storage, offset: int, size: object, stride: object, *rest: object) -> tuple[object, ...]:
    return storage, offset, size, stride, storage.dtype, rest[2:]  # grad and hooks are no data


def _tensor_v3(storage: _Storage, offset: int, size: object, stride: object, *rest: object) -> tuple[object, ...]:
    return storage, offset, size, stride, rest[2], rest[3:]


def _parameter(data: object, *rest: object) -> object:
    return data


MAKERS: dict[tuple[str, str], Callable[..., object]] = {
    ("torch._utils", "_rebuild_tensor_v2"): _sealed(tensor_v2),
    ("torch._utils", "_rebuild_tensor_v3"): _sealed(_tensor_v3),
    ("torch._utils", "_rebuild_parameter"): _sealed(_parameter),
    ("collections", "OrderedDict"): collections.OrderedDict,
}


class _TensorUnpickler(pickle.Unpickler):
    """Reads how a tensor is to be made, and makes none."""

    def find_class(self, module: str, name: str) -> object:
        if (found := MAKERS.get((module, name)) or _dtype(module, name)) is not None:
            return found
        if (module, name) == ("torch.storage", "UntypedStorage"):
            return _Storage(None, "")
        if module == "torch" and name.endswith("Storage") and isinstance(kind := getattr(torch, name, None), type):
            return _Storage(kind._dtype, "")  # type: ignore[attr-defined]  # ``dtype`` warns
        raise pickle.UnpicklingError(f"{module}.{name}")

    def persistent_load(self, pid: object) -> object:
        if not isinstance(pid, tuple) or not isinstance(storage := pid[1], _Storage):
            raise pickle.UnpicklingError("no storage")
        return storage._replace(key=pid[2])


class _Edges(io.RawIOBase):
    """The bytes of a saved tensor, of which only the first and the last are known; a read of others fails."""

    def __init__(self, head: bytes, tail: bytes, length: int) -> None:
        self._head, self._tail, self._length, self._position = head, tail, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        if self._position < 0:
            raise OSError("before the beginning")
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        begin = self._position
        end = self._length if size is None or size < 0 else min(begin + size, self._length)
        if end <= len(self._head):
            data = self._head[begin:end]
        elif begin >= (tail := self._length - len(self._tail)):
            data = self._tail[begin - tail : end - tail]
        else:
            raise OSError("not at hand")
        self._position = max(begin, end)
        return data


def _small(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bytes:
    """The pickle of one tensor. ValueError for one that is larger, or numbers more objects than it can have."""
    data = archive.read(entry) if entry.file_size <= EDGE else b""
    if any(op.name.endswith("PUT") and int(arg or 0) > EDGE for op, arg, _ in pickletools.genops(data)):
        raise ValueError("it is no pickle of a tensor")
    return data


def tensor_layout(head: bytes, tail: bytes, length: int) -> TensorLayout | None:
    """Where the elements are in a tensor that torch.save wrote as ``length`` bytes, of which ``head`` and ``tail`` are
    the first and the last. None when that cannot be told: then torch.load has to read it."""
    try:
        with zipfile.ZipFile(_Edges(head, tail, length)) as archive:
            entries = {info.filename.partition("/")[2]: info for info in archive.infolist()}
            if archive.read(entries["byteorder"]) != b"little":
                return None
            content = _TensorUnpickler(io.BytesIO(_small(archive, entries["data.pkl"]))).load()
            storage, start, sizes, strides, dtype, rest = content
            data = entries[f"data/{storage.key}"]
            at = data.header_offset
            header = head[at : at + 30]
            offset = at + 30 + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
            if len(header) < 30 or data.compress_type != zipfile.ZIP_STORED or any(rest):
                return None
            count = 1
            for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
                if size < 0 or (size > 1 and stride != count):
                    return None
                count *= size
            if start < 0 or (start + count) * dtype.itemsize > data.file_size:
                return None
            return TensorLayout(offset + start * dtype.itemsize, dtype, tuple(sizes))
    except Exception:
        return None
