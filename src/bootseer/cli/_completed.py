"""What a shell completes beside verbs and options: values, images and environments of the store, mount points.

Shells evaluate what they are told, and names in a store are others' words: only plain ones are offered.
"""

from __future__ import annotations

import contextlib
import io
import logging
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bootseer.objects import Store

_PLAIN = re.compile(r"[\w.:/@+ -]+", re.ASCII)
_SECONDS = 3
"""A store that does not answer completes nothing."""


@contextlib.contextmanager
def whole_words(environ: MutableMapping[str, str]) -> Iterator[None]:
    """Bash cuts ``REPO:TAG`` and ``--option=value`` in words, and replaces the last one alone: the words are made whole
    in ``environ``, and what is printed within loses what bash keeps."""
    words, whole, kept, cut = environ["COMP_WORDS"].split("\n"), list[str](), "", False
    for word in words[: int(environ["COMP_CWORD"]) + 1]:
        sign, kept = word in (":", "@", "::"), ""
        if word == "=" and whole[-1].startswith("--"):
            whole.append("")
        elif word and (sign or cut) and whole:
            kept = whole[-1] + word * sign
            whole[-1] += word
        elif whole and whole[-1] == "":
            whole[-1] = word
        else:
            whole.append(word)
        cut = sign
    environ.update(COMP_WORDS="\n".join(whole), COMP_CWORD=str(len(whole) - 1))
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            yield
    finally:
        sys.stdout.write("".join(line.removeprefix(kept) for line in printed.getvalue().splitlines(keepends=True)))


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
