"""What a shell completes beside verbs and options: values, images and environments of the store, mount points.

Shells evaluate what they are told, and names in a store are others' words: only plain ones are offered.
"""

from __future__ import annotations

import contextlib
import logging
import re
import signal
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bootseer.objects import Store

_PLAIN = re.compile(r"[\w.:/@+ -]+", re.ASCII)
_SECONDS = 3
"""A store that does not answer completes nothing."""


def values(*names: str) -> Callable[[str], list[str]]:
    """Of an option that takes one of ``names``."""
    return lambda incomplete: [name for name in names if name.startswith(incomplete)]


def completion(look: Callable[[str], Iterable[tuple[str, str]]]) -> Callable[[Any, str], list[tuple[str, str]]]:
    """``look(store)`` gives names and what each is."""

    def complete(ctx: Any, incomplete: str) -> list[tuple[str, str]]:
        logging.disable()
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # a handler waits for a call that hangs in a folder
        signal.alarm(_SECONDS)
        found: list[tuple[str, str]] = []
        with contextlib.suppress(Exception):
            for name, what in look(ctx.params.get("store") or ""):
                if name.startswith(incomplete) and _PLAIN.fullmatch(name):
                    found.append((name, what if _PLAIN.fullmatch(what) else ""))
        return found

    return complete


def _store(url: str) -> Store:
    from bootseer import config
    from bootseer.objects import open_store

    return open_store(url or config.load().store_url)


@completion
def images(store: str) -> Iterable[tuple[str, str]]:
    from bootseer.image import record

    for one in record.listing(_store(store)):
        yield one.reference, one.platform
        yield one.image[7:19], one.reference


@completion
def environments(store: str) -> Iterable[tuple[str, str]]:
    from bootseer.env import snapshots

    for name in snapshots.names(_store(store)):
        yield name[:12], "environment"


def caches(incomplete: str) -> list[str]:
    from bootseer.env import cachekinds

    return values("auto", *cachekinds.KINDS)(incomplete)
