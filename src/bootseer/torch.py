"""State dicts in a striped store: parallel, checked, exact, and safe to load.

The content is the ordinary ``torch.save`` file, so `torch.load` reads it too, from a mount or after `bootseer fs get`.
``load`` unpickles with ``weights_only``, so a checkpoint can hold no code.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import pickle
import re
from typing import TYPE_CHECKING

from bootseer.errors import BootseerError, ConfigError, DataError, NotFoundError, UnsupportedError
from bootseer.stripefs import ChunkFile, StripeFS, StripeWriter, layout, open_fs, split_url
from bootseer.stripefs.files.reader import PlainFile
from bootseer.stripefs.files.stripe import StripeLost
from bootseer.stripefs.torch.shared_read import read_shared

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

_log = logging.getLogger(__name__)

STATE = "state.pt"
"""Name of the file that `save` writes into a checkpoint folder."""
_FORMAT_ERROR = re.compile(
    r"PytorchStreamReader|inline_container|hasRecord|zip archive|corrupt|Invalid (magic number|protocol version)"
    r"|unexpected EOF|wrong byte size|record size|Unknown saved id|mmap can only be used with files saved"
    r"|legacy \.tar format|TorchScript archive"
)
"""What torch says of a file that is none of its own. Its other RuntimeErrors are of devices and of the caller."""
_BEGINNINGS = (b"PK\x03\x04", b"\x80")
"""Of a ``torch.save`` file: a zip archive, or (before torch 1.6) a pickle."""


class _Out(io.RawIOBase):
    """A `StripeWriter` as the file object that ``torch.save`` expects."""

    def __init__(self, writer: StripeWriter) -> None:
        self._writer = writer

    def writable(self) -> bool:
        return True

    def write(self, data: bytes | bytearray | memoryview) -> int:  # type: ignore[override]
        return self._writer.write(data)


def _torch() -> None:
    try:
        import torch  # noqa: F401
    except ImportError:
        raise UnsupportedError("torch is not installed", hint="pip install bootseer[torch]") from None


def save(state: object, url: str, *, width: int = layout.WIDTH, unit: int = layout.UNIT) -> None:
    """Store ``state`` (anything ``torch.save`` takes: nested dicts, tensors, numbers) at ``url``, atomically.

    ``url`` names a file; or, with a slash at its end, a checkpoint folder: then ``state`` is its file ``state.pt`` and
    COMMIT is published after it. A file is replaced; a complete checkpoint is not (`NotWritableError`).
    When the storage loses a stripe while it is written, everything is written once more, under fresh names.
    Errors of `StripeFS.create`, `StripeFS.save` and `Save.commit`; after one, the old version is what there is.
    """
    _torch()
    import torch

    folder = url.endswith("/")
    fs, path = _place(url)
    saving = fs.save(path) if folder else None
    if saving is None:
        fs.refuse_committed(path)

    def attempt() -> None:
        with saving.create(STATE, width=width, unit=unit) if saving else fs.create(path, width=width, unit=unit) as out:
            try:
                torch.save(state, _Out(out))
            except RuntimeError as exc:
                # torch's writer answers a failed write with an error of its own
                raise (exc.__context__ if isinstance(exc.__context__, BootseerError) else exc) from None
            out.finish()

    try:
        attempt()
    except StripeLost as exc:
        _log.warning("storing %s again from its beginning: %s", url, exc)
        attempt()
    if saving:
        saving.commit()


def load(
    url: str,
    map_location: str | torch.device | dict[str, str] | Callable[..., torch.UntypedStorage] | None = None,
    *,
    mmap: bool = True,
    group: torch.distributed.ProcessGroup | None = None,
) -> object:
    """What `save` (or ``torch.save``) stored at ``url``, read in parallel and checked.

    ``url`` names a file, or a checkpoint folder with one ``.pt`` file. ``map_location`` as in `torch.load`. With
    ``mmap`` the tensors share one block of memory, which lives as long as any of them; without, each has its own.
    With a ``group`` (such as ``torch.distributed.group.WORLD``) all its ranks call this, and each byte is read from the
    store once for all of them; see `bootseer.stripefs.torch.shared_read`. Without, this process reads by itself.
    Every chunk of a striped file is checked, and of a plain (small) one the digest that the COMMIT of its folder says;
    a plain file outside of a checkpoint has nothing to check it with.
    Raises `NotFoundError`, `DataError` for a folder without COMMIT, damaged bytes, and content that is no state dict.
    Errors of devices (no such one, out of memory) are those of `torch.load`.
    """
    _torch()
    import torch

    fs, path = _place(url)
    if fs.stat(path).is_dir:
        path = f"{path}/{_only_file(fs, path)}"
    with fs.open(path) as file:
        fd = os.memfd_create("bootseer-checkpoint", os.MFD_CLOEXEC)
        try:
            _fill(fd, file, fs.committed_digest(path) if isinstance(file, PlainFile) else "", group)
            try:
                state: object = torch.load(
                    f"/proc/self/fd/{fd}", map_location=map_location, weights_only=True, mmap=mmap
                )
            except pickle.UnpicklingError as exc:
                if not os.pread(fd, 4, 0).startswith(_BEGINNINGS):
                    raise DataError(f"{url} is no file of torch.save: it begins like something else") from exc
                raise DataError(f"{url} holds more than tensors, numbers and containers of them; not loaded") from exc
            except (RuntimeError, EOFError, ValueError, KeyError) as exc:
                # an empty message is torch's own for a file cut short
                if isinstance(exc, RuntimeError) and str(exc) and not _FORMAT_ERROR.search(str(exc)):
                    raise
                raise DataError(f"{url} is no file of torch.save: {str(exc).strip().partition(chr(10))[0]}") from exc
            return state
        finally:
            os.close(fd)


def _place(url: str) -> tuple[StripeFS, str]:
    base, name = split_url(url)
    return open_fs(base), name


def _only_file(fs: StripeFS, folder: str) -> str:
    found = [file.path for file in fs.checkpoint(folder).files if file.path.endswith((".pt", ".pth", ".bin"))]
    if not found:
        raise NotFoundError(f"checkpoint {fs.url}/{folder} has no .pt file")
    if len(found) > 1:
        raise ConfigError(f"checkpoint {fs.url}/{folder} has several files", hint=f"name one of {', '.join(found)}")
    return found[0]


def _fill(fd: int, file: ChunkFile, digest: str, group: torch.distributed.ProcessGroup | None) -> None:
    """Read ``file`` into the memory file ``fd``, straight into its pages; its BLAKE3 must be ``digest``, if given."""
    import mmap

    from blake3 import blake3

    if not file.size:
        if group is not None:
            read_shared([], group)  # the other ranks call it, too
        return
    os.ftruncate(fd, file.size)
    pages = mmap.mmap(fd, file.size)
    view = memoryview(pages)
    try:
        read_shared([(file, 0, view)], group)
        if digest and blake3(view).hexdigest() != digest:
            raise DataError(f"{file.path} does not have the digest of its COMMIT", hint="restore it from a copy")
    finally:
        view.release()
        with contextlib.suppress(BufferError):  # after a failed read its traceback still holds a piece
            pages.close()
