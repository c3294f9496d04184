"""The parts that bench/ablate takes away, one at a time; and the block server without one of them.

    python -m bench.image.ablated PART WITH|WITHOUT ...

serves as the product's own server does. Nothing of the product is imported before it serves, so
that it begins as quickly as the product's own.
"""

from __future__ import annotations

import importlib
import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from bootseer.objects import Store

WITH, WITHOUT = "with", "without"
NONE: Mapping[str, str] = MappingProxyType({})
FAR = "-10ms"
"""Ends what reaches the registry with a longer round trip."""
_FROZEN_REQUEST = 3
_FROZEN_SECONDS = 20.0


class Patch(NamedTuple):
    """``value`` takes the place of ``name`` in ``module``, which must be there: what was renamed is not taken away."""

    module: str
    name: str
    value: object

    def apply(self) -> None:
        """Before the server begins."""
        *outer, last = self.name.split(".")
        holder: object = importlib.import_module(self.module)
        for name in outer:
            holder = getattr(holder, name)
        getattr(holder, last)
        setattr(holder, last, self.value)


class Part(NamedTuple):
    """A part of the product, and how a start goes without it: by a patch of its server, or by settings."""

    name: str
    without: str
    """What happens in its place."""
    target: str
    """Of the percentage of a start's time that the part saves."""
    patch: Patch | None = None
    settings: Mapping[str, str] = NONE
    frozen: bool = False
    """Whether all starts of this comparison read from a store that leaves one range unanswered for a while."""
    first: bool = False
    """Whether they are first starts, without a profile."""
    far: bool = False
    """Whether answers of the registry come ``--rtt`` seconds later."""


PARTS = [
    Part("hotpack", "the hot list comes in ranges of the packs", ">= 5",
         patch=Patch("bootseer.blocks.fetch.prefetch", "newest_pack", lambda *args: None)),
    Part("readahead", "nothing is read ahead of the job", ">= 5", settings={"BOOTSEER_READAHEAD": "false"}),
    Part("hung-range", "the hot stream waits for a range that hangs", ">= 5", frozen=True,
         patch=Patch("bootseer.blocks.fetch.watch", "Watch.hung", lambda watch, now: [])),
    Part("silent-range", "readers and the stream wait for a range that is silent", ">= 5", frozen=True,
         patch=Patch("bootseer.blocks.fetch.watch", "_SUSPECT", 3600.0)),
    Part("elsewhere", "the stream leaves a range that is silent after ten seconds, whatever else comes", ">= 5",
         frozen=True, patch=Patch("bootseer.blocks.fetch.watch", "_OTHER_BYTES", 1 << 62)),
    *(Part(f"reach{suffix}", "a miss without a profile fetches 1 MiB", target, first=True, far=bool(suffix),
           patch=Patch("bootseer.blocks.fetch.reach", "MOST", 0))
      for suffix, target in (("", ">= 5"), (FAR, ">= 20"))),
]  # fmt: skip


def freezing(url: str) -> Store:
    """The store at ``url``, where one request for a range of a hot pack is answered after `_FROZEN_SECONDS` only."""
    from bootseer.objects import Source, open_store

    requests = 0
    lock = threading.Lock()

    def delayed(call: Callable[..., Any]) -> Callable[..., Any]:
        def after(*args: Any) -> Any:
            nonlocal requests
            with lock:
                requests += 1
                this = requests
            if this == _FROZEN_REQUEST:
                time.sleep(_FROZEN_SECONDS)
            return call(*args)

        return after

    def reader_of(key: str) -> Source:
        reader = opened(key)
        if key.startswith("profiles/") and key.endswith(".pack"):
            reader.read, reader.pieces = delayed(reader.read), delayed(reader.pieces)  # type: ignore[method-assign]
        return reader

    store = open_store(url)
    opened = store.open
    store.open = reader_of  # type: ignore[method-assign]
    return store


def main() -> int:
    from bootseer.blocks.serving import server
    from bootseer.objects import open_store

    name, how = sys.argv[1:]
    (part,) = (part for part in PARTS if part.name == name)
    if how == WITHOUT and part.patch is not None:
        part.patch.apply()
    return server.main(store_for=freezing if part.frozen else open_store)


if __name__ == "__main__":
    sys.exit(main())
