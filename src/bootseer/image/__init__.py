"""Container images that start before they have arrived: convert once, mount lazily, record, prefetch, run."""

from bootseer.image import runtime
from bootseer.image.convert import Ensured, convert, ensure, resolve
from bootseer.image.mount import ImageMount, attach, mount, sweep
from bootseer.image.mount import listing as mounts
from bootseer.image.record import ImageRecord, remove
from bootseer.image.record import listing as records

__all__ = [
    "Ensured",
    "ImageMount",
    "ImageRecord",
    "attach",
    "convert",
    "ensure",
    "mount",
    "mounts",
    "records",
    "remove",
    "resolve",
    "runtime",
    "sweep",
]


def unmount(target: str, state_dir: str) -> None:
    """Unmount the image mounted on ``target`` (or with that id) and delete what was written on top of it."""
    from pathlib import Path

    attach(target, Path(state_dir)).unmount()
