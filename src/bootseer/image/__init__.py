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
