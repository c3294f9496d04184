"""Places: the folders of this host that targets are, opened so that no name leads elsewhere.

Root follows a link on the way to a target only where nobody else can change it (`bootseer.folders.settled`), and below
a folder that a container sees (`Target.within`) none at all. What is then mounted, read and written goes by descriptor.
Each use opens the target anew, and so finds what is mounted on it by then."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from collections.abc import Container, Iterable, Iterator
from pathlib import Path

from blake3 import blake3

from bootseer import folders
from bootseer.closing import descriptor
from bootseer.env import scan
from bootseer.env.scan import Mark
from bootseer.env.spec import Target
from bootseer.errors import ConfigError, doing, from_os_error
from bootseer.kernel import beneath

_FOLDER = os.O_PATH | os.O_DIRECTORY
_BLOCK = 1 << 20
_HELD = 10.0
log = logging.getLogger(__name__)


@contextlib.contextmanager
def opened(target: Target, *, make: bool = False) -> Iterator[Path]:
    """A path that leads to the folder, and to what is mounted on it now, for as long as the context lasts. ``make``: a
    missing folder is made, with those above it. Raises `FileNotFoundError`, `ConfigError` when somebody else could lead
    the name elsewhere, and the errors of the file system."""
    with descriptor(_open(target, make)) as fd:
        yield Path(beneath.shown(fd))


@contextlib.contextmanager
def name_of(target: Target) -> Iterator[Path]:
    """A path that is that very name, link or not, for calls that follow none: to look at a mount and to end it. As
    nothing but a mount of ours is ended by it, whose the folders on the way are does not matter."""
    with contextlib.ExitStack() as stack:
        with doing(f"use the target {target.host}"):
            if inner := _inner(target):
                base = stack.enter_context(beneath.folder(target.within))
                fd, name = stack.enter_context(beneath.parent(base, inner))
            else:
                real = os.path.realpath(target.host)
                fd, name = stack.enter_context(beneath.folder(os.path.dirname(real))), os.path.basename(real)
        yield Path(beneath.shown(fd), name)


def check(targets: Iterable[Target], sources: Container[str] = ()) -> None:
    """Raise what `opened` raises, but not for missing folders; and, as root, `ConfigError` when somebody else can
    replace a target below one of ``sources``, folders of this host that a container is shown."""
    for target in targets:
        with contextlib.suppress(FileNotFoundError):
            os.close(_open(target, False))
        if os.geteuid() == 0 and target.within in sources:
            folders.settled(target.host)


def rows(target: Target) -> dict[str, str]:
    """`scan.rows` of the folder."""
    try:
        with opened(target) as host:
            return scan.rows(host)
    except FileNotFoundError:
        return {}


class Held:
    """What targets hold: `rows`, with the BLAKE3 of what files hold. 60,000 files of 1 GB take 3 s, for which the
    command waits: so a target is read again only when it is not as it was, and after `_HELD` seconds `rows` must do."""

    def __init__(self) -> None:
        self._known: dict[Target, tuple[dict[str, Mark], dict[str, str]]] = {}

    def of(self, target: Target) -> dict[str, str]:
        now = marks(target)
        was, found = self._known.get(target, ({}, {}))
        if now != was:
            found = _held(target)
            self._known[target] = now, found
        return found


def _held(target: Target) -> dict[str, str]:
    found, until = rows(target), time.monotonic() + _HELD
    sizes = dict(found)
    if found:
        with opened(target) as host, beneath.folder(host) as root:
            for path in found:
                with contextlib.suppress(OSError), open(beneath.open_regular(path, root=root), "rb") as file:
                    hasher = blake3()
                    while time.monotonic() < until and (block := file.read(_BLOCK)):
                        hasher.update(block)
                    if time.monotonic() >= until:
                        log.warning("%s has more than is compared in %.0f s: sizes must do", target.host, _HELD)
                        return sizes
                    found[path] += hasher.hexdigest()
    return found


def marks(target: Target) -> dict[str, Mark]:
    """`scan.snapshot_marks` of the folder."""
    try:
        with opened(target) as host:
            return scan.snapshot_marks(host)
    except FileNotFoundError:
        return {}


def _inner(target: Target) -> str:
    """The way from ``within`` to the target; empty when there is no such folder, or it is the target itself."""
    inner = os.path.relpath(target.host, target.within) if target.within else "."
    return "" if inner == "." else inner


def _open(target: Target, make: bool) -> int:
    try:
        inner = _inner(target)
        if not inner:
            real = _real(target.host)
            if make:
                real.mkdir(parents=True, exist_ok=True)
                real = _real(target.host)  # it may be another one that somebody made
            return os.open(real, _FOLDER | os.O_NOFOLLOW | os.O_CLOEXEC)
        with beneath.folder(_real(Path(target.within))) as base:
            return beneath.make_folders(base, inner) if make else beneath.open_at(base, inner, _FOLDER)
    except FileNotFoundError:
        raise
    except OSError as exc:
        if exc.errno in (errno.ELOOP, errno.ENOTDIR):
            raise ConfigError(
                f"the target {target.host} is a link or no folder, or lies behind one", hint="name the folder itself"
            ) from None
        raise from_os_error(exc, f"use the target {target.host}") from exc


def _real(path: Path) -> Path:
    return folders.settled(path) if os.geteuid() == 0 else Path(os.path.realpath(path))
