"""State dicts in a striped store: parallel, checked, exact, and safe to load.

The content is the ordinary ``torch.save`` file, so `torch.load` reads it too, from a mount or after `bootseer fs get`.
``load`` unpickles with ``weights_only``, so a checkpoint can hold no code.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
from typing import TYPE_CHECKING

from bootseer.errors import BootseerError, ConfigError, DataError, NotFoundError, UnsupportedError
from bootseer.stripefs import ChunkFile, StripeFS, StripeWriter, layout, open_fs, split_url

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    MapLocation = (
        str | torch.device | dict[str, str] | Callable[[torch.UntypedStorage, str], torch.UntypedStorage] | None
    )

STATE = "state.pt"
"""Name of the file that `save` writes into a checkpoint folder."""
_PIECE = 64 << 20


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
    Errors of `StripeFS.create` and `StripeFS.commit`; after one, the old version is what there is.
    """
    _torch()
    import torch

    folder = url.endswith("/")
    fs, path = _place(url)
    if folder:
        fs.refuse_committed(path)
        path = f"{path}/{STATE}"
    with fs.create(path, width=width, unit=unit) as out:
        try:
            torch.save(state, _Out(out))
        except RuntimeError as exc:
            # torch's writer answers a failed write with an error of its own
            raise (exc.__context__ if isinstance(exc.__context__, BootseerError) else exc) from None
        out.finish()
    if folder:
        fs.commit(path.rpartition("/")[0])


def load(
    url: str,
    map_location: str | torch.device | dict[str, str] | Callable[..., torch.UntypedStorage] | None = None,
    *,
    mmap: bool = True,
) -> object:
    """What `save` (or ``torch.save``) stored at ``url``, read in parallel with every chunk checked.

    ``url`` names a file, or a checkpoint folder with one ``.pt`` file. ``map_location`` as in `torch.load`. With
    ``mmap`` the tensors share one block of memory, which lives as long as any of them; without, each has its own.
    Raises `NotFoundError`, `DataError` for a folder without COMMIT, damaged bytes, and content that is no state dict.
    """
    _torch()
    import torch

    fs, path = _place(url)
    if fs.stat(path).is_dir:
        path = f"{path}/{_only_file(fs, path)}"
    with fs.open(path) as file:
        fd = os.memfd_create("bootseer-checkpoint", os.MFD_CLOEXEC)
        try:
            _fill(fd, file)
            try:
                state: object = torch.load(
                    f"/proc/self/fd/{fd}", map_location=map_location, weights_only=True, mmap=mmap
                )
            except pickle.UnpicklingError as exc:
                raise DataError(f"{url} holds more than tensors, numbers and containers of them; not loaded") from exc
            except (RuntimeError, EOFError, ValueError, KeyError) as exc:
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


def _fill(fd: int, file: ChunkFile) -> None:
    """Read ``file`` into the memory file ``fd``, straight into its pages."""
    import mmap

    if not file.size:
        return
    os.ftruncate(fd, file.size)
    pages = mmap.mmap(fd, file.size)
    view = memoryview(pages)
    try:
        for offset in range(0, file.size, _PIECE):
            file.readinto(offset, view[offset : offset + _PIECE])
    finally:
        view.release()
        with contextlib.suppress(BufferError):  # after a failed read its traceback still holds a piece
            pages.close()
