"""bootseer cuts and explains the start-up time of large training jobs.

Importing the package is cheap (below 50 ms, asserted by a test): sub-packages load when they are first used, so
``import bootseer; bootseer.image.mount(...)`` works and ``import bootseer`` alone pulls in nothing heavy.
"""

from __future__ import annotations

import importlib
from types import ModuleType

__version__ = "0.1.0"

_LAZY = ("blocks", "env", "image", "launch", "objects", "profile", "stripefs", "torch")

__all__ = ["__version__", *_LAZY]


def build() -> str:
    """The version, and first digits of a hash of its sources: another commit has others."""
    import hashlib
    from pathlib import Path

    top, made = Path(__file__).parent, hashlib.blake2b(digest_size=4)
    for path in sorted(top.rglob("*.py")):
        made.update(b"%s\0%s" % (str(path.relative_to(top)).encode(), path.read_bytes()))
    return f"{__version__} ({made.hexdigest()})"


def __getattr__(name: str) -> ModuleType:
    if name in _LAZY:
        return importlib.import_module(f"bootseer.{name}")
    raise AttributeError(f"module 'bootseer' has no attribute {name!r}")
