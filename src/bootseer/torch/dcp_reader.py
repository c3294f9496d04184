"""`StorageReader`: torch.distributed.checkpoint (DCP) reads a striped checkpoint straight into the tensors of a job."""

from __future__ import annotations

import dataclasses
import io
import logging
import os
import pickle
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from bootseer.backends.pool import parallel
from bootseer.errors import BootseerError, DataError, NotFoundError, UnsupportedError
from bootseer.stripefs import locate
from bootseer.torch.destination import Request
from bootseer.torch.folder import CheckpointFolder
from bootseer.torch.output import EDGE, no_bytes_allowed
from bootseer.torch.pickles import DATA_OFFSET, TensorLayout, load_metadata, refuse_large, tensor_layout
from bootseer.torch.reads import STAGING, Stored, TensorReads
from bootseer.torch.shared_read import read_shared

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from bootseer.stripefs import ChunkFile, Given

_log = logging.getLogger(__name__)
METADATA = ".metadata"


class StorageReader(dcp.StorageReader):  # type: ignore[misc]
    """The checkpoint folder ``url``, for ``dcp.load(state, storage_reader=StorageReader(url))``.

    It reads what `StorageWriter` wrote, and what torch's own writers wrote through a mount or fsspec. Each rank reads
    the chunks of the parts that it needs, each once, into the memory of its tensors where these are contiguous and on
    the CPU; other tensors are copied from there. Every chunk is checked. No code of a checkpoint is run: its metadata,
    and with ``weights_only`` also what is no tensor, may hold only numbers, text and containers of them. With a
    ``group`` (the one of the load) what several ranks need is read once for all of them (`bootseer.torch.shared_read`);
    what is not read straight into its tensor needs memory at once.

    DCP wraps what goes wrong in its `CheckpointException`, on every rank: `NotFoundError` for no checkpoint,
    `DataError` for one whose save did not finish and for damaged bytes, `UnsupportedError` for one written with
    extensions of DCP or with ``use_collectives=False``."""

    def __init__(self, url: Given, *, group: ProcessGroup | None = None, weights_only: bool = True) -> None:
        super().__init__()
        self._url, self._group, self._weights_only = os.fspath(url), group, weights_only
        self.reset()

    @property
    def checkpoint_id(self) -> str:
        return self._url

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return bool(os.fspath(checkpoint_id))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another load, of ``checkpoint_id`` if that is given."""
        self._url = os.fspath(checkpoint_id or self._url)
        locate(self._url)  # a bad one is an error now, and of no other class
        self._load_id = str(uuid.uuid4())
        self._storage: dict[MetadataIndex, _StorageInfo] = {}
        self._tensors: dict[str, TensorStorageMetadata] = {}
        self._version = ""
        """Of the metadata that was read; "" for none."""
        self._trouble: BootseerError | None = None
        """Why there is none."""

    def read_metadata(self, **kwargs: Any) -> Metadata:
        if kwargs and self._trouble is not None:
            return Metadata({})  # a newer torch asks again for a rank, and tells neither error's kind
        self._trouble = None
        try:
            return self._read_metadata()
        except BootseerError as exc:
            self._trouble = exc
            raise

    def _read_metadata(self) -> Metadata:
        with CheckpointFolder(self._url, "DCP") as folder:
            if not folder.has(METADATA):
                if any(name.endswith(METADATA) for name in folder.names()):
                    raise UnsupportedError(
                        f"{self._url} was saved with use_collectives=False",
                        hint="load it with torch's own reader and as many ranks as it was saved with",
                    )
                raise NotFoundError(
                    f"{self._url} is no checkpoint of torch.distributed.checkpoint: no {METADATA} there"
                )
            file, self._version = folder.open(METADATA), folder.version(METADATA)
            refuse_large(file.size, file.path)
            metadata = load_metadata(file.read(0, file.size), file.path)
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self._load_id
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if (trouble := self._trouble) is not None:
            raise trouble
        self._storage = metadata.storage_data
        self._tensors = metadata.state_dict_metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return dataclasses.replace(plan, storage_data=self._version)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        if len({plan.storage_data for plan in plans}) > 1:
            raise self._replaced()
        return plans

    def _replaced(self) -> DataError:
        return DataError(f"{self._url} was replaced while it was loaded", hint="load it again")

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        with CheckpointFolder(self._url, "DCP") as folder:
            if self._version and folder.version(METADATA) != self._version:
                raise self._replaced()
            _Load(folder, self._storage, self._tensors, planner, self._group, self._weights_only).run(plan.items)
        future: Future[None] = Future()
        future.set_result(None)
        return future


@dataclasses.dataclass
class _Item:
    """What one item of the plan wants, and where it is stored; ``whole`` when torch.load has to take it apart."""

    item: ReadItem
    info: _StorageInfo
    file: ChunkFile
    layout: TensorLayout | None = None
    whole: bytes | bytearray | None = None


class _Load:
    def __init__(
        self,
        folder: CheckpointFolder,
        storage: dict[MetadataIndex, _StorageInfo],
        tensors: dict[str, TensorStorageMetadata],
        planner: LoadPlanner,
        group: ProcessGroup | None,
        weights_only: bool,
    ) -> None:
        self._folder, self._storage, self._tensors = folder, storage, tensors
        self._planner, self._group, self._weights_only = planner, group, weights_only

    def _reads(self) -> TensorReads:
        return TensorReads(self._read, staging=STAGING if self._group is None else None)

    def _read(self, requests: Sequence[Request]) -> None:
        if self._group is not None:
            self._folder.load.count(read_shared(requests, self._group).counts)
        else:
            self._folder.read(requests)

    def run(self, plan: list[ReadItem]) -> None:
        """Read everything that ``plan`` wants. With a group every rank makes the same calls of `read_shared`."""
        items = self._located(plan)
        if not all(hasattr(info, DATA_OFFSET) for index, info in self._storage.items() if self._is_tensor(index)):
            self._find_layouts(items)
        for it in items:
            if (offset := getattr(it.info, DATA_OFFSET, None)) is not None:
                it.layout = TensorLayout(offset, *self._chunk(it.item.storage_index))
        reads = self._reads()
        for it in items:
            if it.item.type == LoadItemType.BYTE_IO:
                it.file.check_range(it.info.offset, it.info.length)
                refuse_large(it.info.length, f"{it.item.storage_index.fqn} in {it.file.path}")
                reads.bytes(it.file, it.info.offset, it.info.length, lambda data, it=it: self._give_bytes(it, data))  # type: ignore[misc]
            elif it.layout is not None:
                target = self._target(it)
                stored = Stored(it.file, it.info.offset + it.layout.offset, it.layout.dtype, it.layout.sizes)
                done = lambda it=it, target=target: self._planner.commit_tensor(it.item, target)  # noqa: E731
                reads.tensor(stored, it.item.storage_offsets, it.item.lengths, target, done)
            elif it.whole is not None:
                self._give_whole(it, it.whole)
            else:
                reads.bytes(it.file, it.info.offset, it.info.length, lambda data, it=it: self._give_whole(it, data))  # type: ignore[misc]
        reads.flush()

    def _is_tensor(self, index: MetadataIndex) -> bool:
        return isinstance(self._tensors.get(index.fqn), TensorStorageMetadata)

    def _located(self, plan: list[ReadItem]) -> list[_Item]:
        found: list[tuple[ReadItem, _StorageInfo]] = []
        for item in plan:
            info = self._storage.get(item.storage_index)
            if info is None:
                raise DataError(f"{self._folder.url} does not say where {item.storage_index.fqn} is")
            if getattr(info, "transform_descriptors", None):  # torch 2.6 has none
                raise UnsupportedError(
                    f"{self._folder.url} was written with extensions of DCP: {', '.join(info.transform_descriptors)}",
                    hint="load it with torch's own reader, from `bootseer fs mount`",
                )
            found.append((item, info))
        names = dict.fromkeys(info.relative_path for _, info in found)
        files = dict(zip(names, parallel(self._folder.open, names), strict=True))
        return [_Item(item, info, files[info.relative_path]) for item, info in found]

    def _find_layouts(self, items: list[_Item]) -> None:
        """Of each tensor of which our writer does not say it, where its elements are: its first and last bytes do. One
        of at most a chunk is read whole: that is no more than its edges."""
        reads = self._reads()
        for it in items:
            if it.item.type == LoadItemType.BYTE_IO or hasattr(it.info, DATA_OFFSET):
                continue
            if it.info.length <= it.file.unit:
                reads.bytes(it.file, it.info.offset, it.info.length, lambda data, it=it: setattr(it, "whole", data))  # type: ignore[misc]
                continue
            edges: list[bytearray] = []

            def tell(data: bytearray, it: _Item = it, edges: list[bytearray] = edges) -> None:
                edges.append(data)
                if len(edges) == 2:
                    it.layout = self._told(it, bytes(edges[0]), bytes(edges[1]))

            for start in (0, it.info.length - EDGE):
                reads.bytes(it.file, it.info.offset + start, EDGE, tell)
        reads.flush()

    def _chunk(self, index: MetadataIndex) -> tuple[torch.dtype, tuple[int, ...]]:
        """Type and sizes of a stored tensor, as the metadata has them."""
        known = self._tensors.get(index.fqn)
        if isinstance(known, TensorStorageMetadata):
            hint = index.index
            if hint is not None and hint < len(known.chunks) and known.chunks[hint].offsets == index.offset:
                return known.properties.dtype, tuple(known.chunks[hint].sizes)
            for chunk in known.chunks:
                if index.offset is None or chunk.offsets == index.offset:
                    return known.properties.dtype, tuple(chunk.sizes)
        raise DataError(f"{self._folder.url} does not say what {index.fqn} is")

    def _told(self, it: _Item, head: bytes, tail: bytes) -> TensorLayout | None:
        layout = tensor_layout(head, tail, it.info.length)
        if layout is None:
            _log.warning(
                "%s in %s is read whole: it is not stored as one block", it.item.storage_index.fqn, it.file.path
            )
        elif layout.sizes != (sizes := self._chunk(it.item.storage_index)[1]):
            raise DataError(f"{it.item.storage_index.fqn} in {it.file.path} has the shape {layout.sizes}, not {sizes}")
        return layout

    def _target(self, it: _Item) -> torch.Tensor:
        target = self._planner.resolve_tensor(it.item).detach()
        if tuple(target.shape) != tuple(it.item.lengths):
            raise DataError(
                f"{it.item.storage_index.fqn} in {self._folder.url}: {tuple(it.item.lengths)} elements are stored, the"
                f" job has room for {tuple(target.shape)}"
            )
        return target

    def _give_bytes(self, it: _Item, data: bytearray) -> None:
        name = it.item.storage_index.fqn
        if self._weights_only:
            self._load(data, f"{name} in {it.file.path}")
        self._planner.load_bytes(it.item, io.BytesIO(data))

    def _give_whole(self, it: _Item, data: bytes | bytearray) -> None:
        found = self._load(data, f"{it.item.storage_index.fqn} in {it.file.path}")
        if not isinstance(found, torch.Tensor):
            raise DataError(f"{it.item.storage_index.fqn} in {it.file.path} is no tensor")
        for dim, (start, length) in enumerate(zip(it.item.storage_offsets, it.item.lengths, strict=True)):
            found = found.narrow(dim, start, length)
        target = self._target(it)
        target.copy_(found)
        self._planner.commit_tensor(it.item, target)

    def _load(self, data: bytes | bytearray, name: str) -> object:
        """What torch.load makes of ``data``, which must hold no more than tensors, numbers, text and containers."""
        try:
            with no_bytes_allowed():
                return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as exc:
            if not data.startswith(b"PK"):
                raise DataError(f"{name} is damaged: torch.save did not write it") from exc
            raise DataError(
                f"{name} holds more than tensors, numbers and containers of them; not loaded",
                hint="if you trust the checkpoint, StorageReader(url, weights_only=False) loads it",
            ) from None
        except (RuntimeError, EOFError, ValueError, KeyError) as exc:
            raise DataError(f"{name} is damaged: {str(exc).strip().partition(chr(10))[0]}") from None
