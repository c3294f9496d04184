"""Checkpoints of torch in a striped store: parallel, checked, exact, and safe to load.

`save` and `load` have the content of an ordinary ``torch.save`` file, so `torch.load` reads it too, from a mount or
after `bootseer fs get`; ``load`` unpickles with ``weights_only``, so a checkpoint can hold no code. `StorageWriter` and
`StorageReader` are for torch.distributed.checkpoint (DCP); `save_safetensors`, `load_safetensors` and `safe_open` for
safetensors. torch is imported when the first of them is used."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
from typing import TYPE_CHECKING

from bootseer.closing import descriptor
from bootseer.errors import ConfigError, DataError, NotFoundError, UnsupportedError
from bootseer.stripefs import ChunkFile, Given, StripeFS, StripeWriter, layout, place
from bootseer.stripefs.checkpoint.commit import other_digest
from bootseer.stripefs.files.reader import PlainFile
from bootseer.stripefs.files.stripe import again_when_lost
from bootseer.stripefs.local import Load
from bootseer.torch.output import no_bytes_allowed, saved
from bootseer.torch.shared_read import SharedReadReport, read_shared

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from bootseer.torch.dcp_reader import StorageReader as StorageReader
    from bootseer.torch.dcp_writer import StorageWriter as StorageWriter
    from bootseer.torch.safetensors import SafetensorsFile

STATE = "state.pt"
"""Name of the file that `save` writes into a checkpoint folder."""
MODEL = "model.safetensors"
"""Name of the file that `save_safetensors` writes into one."""
METADATA = ".metadata"
_FORMAT_ERROR = re.compile(
    r"PytorchStreamReader|inline_container|hasRecord|zip archive|corrupt|Invalid (magic number|protocol version)"
    r"|unexpected EOF|wrong byte size|record size|Unknown saved id|mmap can only be used with files saved"
    r"|legacy \.tar format|TorchScript archive"
)
"""What torch says of a file that is none of its own. Its other RuntimeErrors are of devices and of the caller."""
_BEGINNINGS = (b"PK\x03\x04", b"\x80")
"""Of a ``torch.save`` file: a zip archive, or (before torch 1.6) a pickle."""


def _torch() -> None:
    try:
        import torch  # noqa: F401
    except ImportError:
        raise UnsupportedError("torch is not installed", hint="pip install bootseer[torch]") from None


def __getattr__(name: str) -> object:
    if name not in ("StorageReader", "StorageWriter"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _torch()
    from bootseer.torch import dcp_reader, dcp_writer

    return dcp_reader.StorageReader if name == "StorageReader" else dcp_writer.StorageWriter


def save(state: object, url: Given, *, width: int = layout.WIDTH, unit: int = layout.UNIT) -> None:
    """Store ``state`` (anything ``torch.save`` takes: nested dicts, tensors, numbers) at ``url``, atomically.

    ``url`` names a file, which is replaced; or, with a slash at its end, a checkpoint folder: then ``state`` is its
    file ``state.pt`` and COMMIT is published after it. A complete checkpoint is not replaced (`NotWritableError`). When
    the storage loses a stripe meanwhile, everything is written once more, under fresh names. Errors of
    `StripeFS.create`, `StripeFS.save` and `Save.commit`; after one, the old version is what there is."""
    _torch()
    import torch

    def write(out: StripeWriter) -> None:
        saved(lambda sink: torch.save(state, sink), out)

    _store(url, STATE, write, width, unit)


def _store(url: Given, name: str, write: Callable[[StripeWriter], object], width: int, unit: int) -> None:
    """``write`` the file ``url``, or ``name`` in the checkpoint folder ``url`` when that ends with a slash."""
    fs, path = place(url)
    folder = os.fsdecode(url).endswith("/")
    saving = fs.save(path) if folder else None
    if saving is None:
        fs.refuse_committed(path)

    def store() -> None:
        with saving.create(name, width=width, unit=unit) if saving else fs.create(path, width=width, unit=unit) as out:
            write(out)
            out.finish()

    again_when_lost(store, str(url))
    if saving:
        saving.commit()


def load(
    url: Given,
    map_location: str | torch.device | dict[str, str] | Callable[..., torch.UntypedStorage] | None = None,
    *,
    mmap: bool = True,
    group: torch.distributed.ProcessGroup | None = None,
) -> object:
    """What `save` (or ``torch.save``) stored at ``url``, read in parallel and checked.

    ``url`` names a file, or a checkpoint folder with one ``.pt`` file. ``map_location`` as in `torch.load`. With
    ``mmap`` the tensors share one block of memory, which lives as long as any of them; without, each has its own. A
    file in the format from before torch 1.6 needs ``mmap=False`` (else `ConfigError`). With a ``group`` (such as
    ``torch.distributed.group.WORLD``) all its ranks call this, and each byte is read from the store once for all of
    them; see `bootseer.torch.shared_read`. Every chunk of a striped file is checked, and of a plain (small) one the
    digest that the COMMIT of its folder says, if there is one. Raises `NotFoundError`, `DataError` for a folder without
    COMMIT, damaged bytes, and content that is no state dict. Errors of devices (no such one, out of memory) are those
    of `torch.load`."""
    _torch()
    import torch

    fs, path = place(url)
    _refuse_other(url, path)
    if fs.stat(path).is_dir:
        path = f"{path}/{_only_file(fs, path)}"
    with (
        Load(fs.url, "torch.load") as load,
        load.use(fs.open(path)) as file,
        descriptor(os.memfd_create("bootseer-checkpoint", os.MFD_CLOEXEC)) as fd,
    ):
        moved = _fill(fd, file, fs.committed_digest(path) if isinstance(file, PlainFile) else "", group)
        load.count(moved.counts)
        beginning = os.pread(fd, 4, 0)
        if mmap and beginning.startswith(_BEGINNINGS[1]):
            raise ConfigError(f"{url} has the format from before torch 1.6", hint="load it with mmap=False")
        try:
            with no_bytes_allowed():
                return torch.load(f"/proc/self/fd/{fd}", map_location=map_location, weights_only=True, mmap=mmap)
        except pickle.UnpicklingError as exc:
            if not beginning.startswith(_BEGINNINGS):
                raise DataError(f"{url} is no file of torch.save: it begins like something else") from exc
            raise DataError(
                f"{url} holds more than tensors, numbers and containers of them; not loaded",
                hint="who trusts it opens it by fsspec or a mount, for torch.load(file, weights_only=False)",
            ) from exc
        except (RuntimeError, EOFError, ValueError, KeyError) as exc:
            # an empty message is torch's own for a file cut short
            if isinstance(exc, RuntimeError) and str(exc) and not _FORMAT_ERROR.search(str(exc)):
                raise
            raise DataError(f"{url} is no file of torch.save: {str(exc).strip().partition(chr(10))[0]}") from exc


def save_safetensors(
    tensors: Mapping[str, torch.Tensor],
    url: Given,
    metadata: Mapping[str, str] | None = None,
    *,
    width: int = layout.WIDTH,
    unit: int = layout.UNIT,
) -> None:
    """Store ``tensors`` at ``url`` as a safetensors file, atomically, one tensor after the other. ``url`` names a file;
    or, with a slash at its end, a checkpoint folder: then it is its file ``model.safetensors``, and COMMIT is published
    after it. Errors of `save`, `ConfigError` for what is no tensor, tensors that share memory or are sparse, and names
    and metadata that are no text, `UnsupportedError` for a dtype that the format has not."""
    _torch()
    from bootseer.torch.safetensors_writer import Encoded

    encoded = Encoded(tensors, metadata)
    _store(url, MODEL, encoded.write, width, unit)


def load_safetensors(url: Given, device: str | torch.device = "cpu") -> dict[str, torch.Tensor]:
    """All tensors of the safetensors model at ``url``, read in parallel and checked, straight into their memory.
    ``url`` names a file, an index (``*.safetensors.index.json``) or a folder with one of them. `NotFoundError`;
    `DataError` for damaged bytes, a header that the format does not allow, and a folder whose save did not finish;
    `ConfigError` for a folder with several models."""
    with safe_open(url, device=device) as file:
        return file.get_tensors()


def safe_open(url: Given, framework: str = "pt", device: str | torch.device = "cpu") -> SafetensorsFile:
    """The safetensors model at ``url`` (as of `load_safetensors`), to read single tensors and slices of it: a context
    manager with the methods of ``safetensors.safe_open``: ``keys``, ``metadata``, ``get_tensor``, ``get_slice``. A
    slice reads the chunks of its rows only."""
    _torch()
    from bootseer.torch.safetensors import SafetensorsFile

    if framework not in ("pt", "torch", "pytorch"):
        raise ConfigError(f"safe_open gives tensors of torch, not of {framework!r}", hint="leave framework out")
    return SafetensorsFile(url, device)


_OTHERS = {
    (METADATA, ".distcp"): (
        "torch.distributed.checkpoint",
        "load it with dcp.load(state, storage_reader=bootseer.torch.StorageReader(url)), url being the folder",
    ),
    (".safetensors", ".safetensors.index.json"): (
        "safetensors",
        "load it with bootseer.torch.load_safetensors(url)",
    ),
}
"""How names end of what other functions load, what that is, and how."""


def _refuse_other(url: Given, *names: str) -> None:
    for ends, (what, hint) in _OTHERS.items():
        if any(name.endswith(ends) for name in names):
            raise ConfigError(f"{url} is of {what}", hint=hint)


def _only_file(fs: StripeFS, folder: str) -> str:
    names = [file.path for file in fs.checkpoint(folder).files]
    found = [name for name in names if name.endswith((".pt", ".pth", ".bin"))]
    if not found:
        _refuse_other(f"{fs.url}/{folder}", *names)
        raise NotFoundError(f"checkpoint {fs.url}/{folder} has no .pt file")
    if len(found) > 1:
        raise ConfigError(f"checkpoint {fs.url}/{folder} has several files", hint=f"name one of {', '.join(found)}")
    return found[0]


def _fill(fd: int, file: ChunkFile, digest: str, group: torch.distributed.ProcessGroup | None) -> SharedReadReport:
    """Read ``file`` into the memory file ``fd``, straight into its pages; its BLAKE3 must be ``digest``, if given."""
    import mmap

    from blake3 import blake3

    if not file.size:
        return read_shared([], group)  # the other ranks call it, too
    os.ftruncate(fd, file.size)
    pages = mmap.mmap(fd, file.size)
    view = memoryview(pages)
    try:
        report = read_shared([(file, 0, view)], group)
        if digest and blake3(view).hexdigest() != digest:
            raise other_digest(file.path)
        return report
    finally:
        view.release()
        with contextlib.suppress(BufferError):  # after a failed read its traceback still holds a piece
            pages.close()
