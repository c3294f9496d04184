"""Image and checkpoint brought whole before the job starts, where their techniques are switched off."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from bootseer import oci, stripefs
from bootseer.stripefs import localcopy
from bootseer.stripefs.checkpoint.commit import NAME as COMMIT


@contextlib.contextmanager
def unpacked(ref: str, rootfs: Path) -> Iterator[oci.Image]:
    """The image ``ref``, pulled and unpacked into the folder ``rootfs``."""
    with oci.open_image(ref) as pulled:
        oci.unpack(pulled, rootfs)
    yield pulled


def copy_checkpoint(url: str, destination: Path) -> None:
    """Copy every file below ``url``, striped or plain, into the folder ``destination``. Raises `NotFoundError` where
    there is none, `DataError` for bytes that are not those of its COMMIT."""
    fs = stripefs.open_fs(url, shown=True)
    names = fs.files()
    if COMMIT in names:
        fs.checkpoint("")  # else a file that is missing would not be missed
    for target, name in ((destination / name, name) for name in names if name != COMMIT):
        localcopy.folder(target.parent)
        fs.get(name, target)
