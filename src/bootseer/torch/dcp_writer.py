"""`StorageWriter`: torch.distributed.checkpoint (DCP) saves into a striped store, as one checkpoint with COMMIT.

The files are those of torch's own writer: ``.metadata``, and for rank N ``__N_0.distcp`` with one torch.save of each
item behind the other. So torch's reader reads them too, from a mount or a copy. The coordinator begins the save and
tells the others its epoch in their plans; each rank publishes its file; when all have, the coordinator publishes
``.metadata`` and then COMMIT."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import uuid
from typing import Any

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from bootseer.backends.interface import exists, join
from bootseer.errors import NotFoundError, NotWritableError, UnsupportedError
from bootseer.stripefs import Given, Save, StripeWriter, layout, locate, place
from bootseer.stripefs.checkpoint import claim
from bootseer.stripefs.files.stripe import again_when_lost
from bootseer.torch.dcp_reader import METADATA
from bootseer.torch.output import saved
from bootseer.torch.pickles import DATA_OFFSET, tensor_layout


@dataclasses.dataclass(frozen=True)
class _Share:
    """What a rank is told in its plan: the save to join, and the name of its file."""

    epoch: int
    file: str


class StorageWriter(dcp.StorageWriter):  # type: ignore[misc]
    """A new checkpoint folder ``url``, for ``dcp.save(state, storage_writer=StorageWriter(url))`` and ``async_save``.

    All ranks name the same ``url``. The checkpoint is complete, and found by `bootseer fs ls --latest`, when the call
    returns (of ``async_save``, when its future is done); before that it is none, also when a rank or the job is killed.
    Another try may use the same folder. ``width`` and ``unit`` (bytes) are the shape of the files.

    DCP wraps what goes wrong in its `CheckpointException`, on every rank: `NotWritableError` for a folder that has a
    checkpoint already, `FullError`, `UnavailableError`, and `UnsupportedError` for ``use_collectives=False``.
    A planner that caches plans must not be used for a folder in which an earlier save was interrupted."""

    def __init__(self, url: Given, *, width: int = layout.WIDTH, unit: int = layout.UNIT) -> None:
        super().__init__()
        layout.check_shape(width, unit)
        self._url, self._width, self._unit = os.fspath(url), width, unit
        self._saving: Save | None = None
        """Of the coordinator, from its plan to `finish`."""
        self.reset()

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_saving": None}

    @property
    def checkpoint_id(self) -> str:
        return self._url

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return bool(os.fspath(checkpoint_id))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another save, to ``checkpoint_id`` if that is given."""
        self._url, self._saving = os.fspath(checkpoint_id or self._url), None
        locate(self._url)  # a bad one is an error now, and of no other class
        self._save_id = str(uuid.uuid4())

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self._url, save_id=self._save_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            raise UnsupportedError(
                "a striped checkpoint is saved by all ranks together", hint="leave use_collectives as it is"
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        fs, path = place(self._url)
        metadata = join(path, METADATA)
        theirs = exists(fs.backend, metadata) and not claim.claimed(fs.backend, path)
        if theirs:
            raise NotWritableError(
                f"{self._url} has a checkpoint already, which another program wrote", hint="save to a new folder"
            )
        self._saving = fs.save(path)
        # of an interrupted save, and not of the files that follow
        with contextlib.suppress(NotFoundError):
            fs.remove(metadata)
        return [
            dataclasses.replace(plan, storage_data=_Share(self._saving.epoch, f"__{rank}_0{DEFAULT_SUFFIX}"))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        future: Future[list[WriteResult]] = Future()
        share: _Share = plan.storage_data
        future.set_result(self._write(share, plan.items, planner) if plan.items else [])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        assert self._saving is not None
        metadata.version = getattr(filesystem, "CURRENT_DCP_VERSION", None)  # torch 2.6 has none
        metadata.storage_data = {result.index: result.storage_data for found in results for result in found}
        metadata.storage_meta = self.storage_meta()
        with self._saving.create(METADATA, width=self._width, unit=self._unit) as out:
            out.write(pickle.dumps(metadata))
        self._saving.commit()
        self._saving = None

    def _write(self, share: _Share, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        saving = self._saving
        if saving is None:
            fs, path = place(self._url)
            saving = fs.save(path, epoch=share.epoch)
        # those that are no tensors first, as torch's writer has them: small and needed first
        ordered = sorted(items, key=lambda item: item.type != WriteItemType.BYTE_IO)

        def write() -> list[WriteResult]:
            with saving.create(share.file, width=self._width, unit=self._unit) as out:
                return [_write_item(out, share.file, item, planner) for item in ordered]

        return again_when_lost(write, f"{share.file} of {self._url}")


def _write_item(out: StripeWriter, name: str, item: WriteItem, planner: SavePlanner) -> WriteResult:
    data, start = planner.resolve_data(item), out.size
    if item.type == WriteItemType.BYTE_IO:
        out.write(data.getvalue())
        return WriteResult(item.index, out.size - start, _StorageInfo(name, start, out.size - start))
    tensor = data.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if tensor.untyped_storage().nbytes() != tensor.nbytes:
        tensor = tensor.clone()  # or all of the storage would be written
    sink = saved(lambda sink: torch.save(tensor, sink), out)
    info = _StorageInfo(name, start, out.size - start)
    stored = tensor_layout(sink.head, sink.tail, info.length)
    known = item.tensor_data
    if stored and known and (stored.dtype, stored.sizes) == (known.properties.dtype, tuple(known.chunk.sizes)):
        setattr(info, DATA_OFFSET, stored.offset)
    return WriteResult(item.index, info.length, info)
