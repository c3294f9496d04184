"""Container images that start before they have arrived: convert once, mount lazily, record, prefetch, run. The code
that converts is loaded when it is first used, since no start of a converted image needs it."""

import importlib
from typing import TYPE_CHECKING

from bootseer.image import runtime
from bootseer.image.lookup import converted_from, named, only, resolve
from bootseer.image.mount import ImageMount, attach, mount, sweep
from bootseer.image.mount import listing as mounts
from bootseer.image.record import ImageRecord, remove
from bootseer.image.record import listing as records

if TYPE_CHECKING:
    from bootseer.image.comparison import check
    from bootseer.image.conversion import Ensured, ensure

__all__ = [
    "Ensured",
    "ImageMount",
    "ImageRecord",
    "attach",
    "check",
    "converted_from",
    "ensure",
    "mount",
    "mounts",
    "named",
    "only",
    "records",
    "remove",
    "resolve",
    "runtime",
    "sweep",
]


def __getattr__(name: str) -> object:
    if name == "check":
        return getattr(importlib.import_module("bootseer.image.comparison"), name)
    if name in ("Ensured", "ensure"):
        return getattr(importlib.import_module("bootseer.image.conversion"), name)
    raise AttributeError(f"module 'bootseer.image' has no attribute {name!r}")
