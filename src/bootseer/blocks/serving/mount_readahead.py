"""Wider readahead for the EROFS mounts of a tree that has become complete.

While blocks are missing the kernel's default of 128 KiB holds, as whatever it reads ahead has to be fetched. Reads of a
complete tree only cost the way through FUSE, and a large request costs less per byte (docs/internals/fuse.md). The
kernel calls the readahead of an EROFS mount ``erofs-N`` and says nowhere which mount that is. So the process that
mounts looks which name is new, and leaves it as a file in the tree's state folder; the supervisor takes it from there.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from bootseer.errors import logged

log = logging.getLogger(__name__)

NAMES = "*.readahead"
"""The files in a tree's state folder."""
_DEVICES = Path("/sys/class/bdi")
_KIB = 512


@contextlib.contextmanager
def note_mount(folder: Path) -> Iterator[None]:
    """Around the mount of a tree's image: leave the name of the new mount's readahead in ``folder``. It stays unknown
    when another EROFS image was mounted in the same moment; such a mount keeps 128 KiB."""
    before = _names()
    yield
    new = _names() - before
    if len(new) != 1:
        log.info("the readahead of this mount stays at 128 KiB: %d names of one are new", len(new))
        return
    with logged(log.warning, "the readahead of this mount stays at 128 KiB", kinds=OSError):
        (folder / f"{new.pop()}.readahead").touch()


def widen(folder: Path) -> None:
    """Widen the readahead of the mounts whose names were left in ``folder``. It holds for files opened from now on."""
    for path in folder.glob(NAMES):
        try:
            path.unlink()
            (_DEVICES / path.stem / "read_ahead_kb").write_text(str(_KIB))
        except FileNotFoundError:  # it was unmounted
            continue
        except OSError as exc:
            log.warning("the readahead of %s stays at 128 KiB: %s", path.stem, exc)


def _names() -> set[str]:
    try:
        return {path.name for path in _DEVICES.iterdir() if path.name.startswith("erofs-")}
    except OSError:  # no sysfs
        return set()
