"""Binds of a container whose source others can replace, mounted by descriptor.

A runtime takes names, and one that lies in a folder of somebody else's may lead elsewhere by the time it is mounted. So
the runtime gets a mount namespace of its own, in which such a source is already mounted at a place that only root can
change. Nothing is left of it when container and runtime have ended."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from bootseer.closing import descriptor
from bootseer.errors import ConfigError, from_os_error
from bootseer.folders import foothold
from bootseer.kernel import beneath, libc
from bootseer.kernel.mount import MS_BIND, MS_REC, MS_SLAVE

_T = TypeVar("_T")


class Pin(NamedTuple):
    """``rest`` below ``base``, which nobody else can replace, is to be seen at ``place``."""

    base: Path
    rest: Path
    place: Path


def pins(document: dict[str, Any], folder: Path) -> list[Pin]:
    """One for each bind of ``document``, a runtime configuration, whose source others can replace: from now on that is
    a place in ``folder``. Raises `ConfigError` where the way there has a link that others can change."""
    found: list[Pin] = []
    for mount in document["mounts"]:
        if mount["type"] != "bind":
            continue
        base, rest = foothold(Path(mount["source"]))
        if rest == Path():
            continue
        pin = Pin(base, rest, folder / str(len(found)))
        with descriptor(_open(pin)) as fd:
            folder.mkdir(exist_ok=True)
            pin.place.mkdir() if stat.S_ISDIR(os.fstat(fd).st_mode) else pin.place.touch()
        mount["source"] = str(pin.place)
        found.append(pin)
    return found


def _open(pin: Pin) -> int:
    path = pin.base / pin.rest
    try:
        with beneath.folder(pin.base) as base:
            fd = beneath.open_at(base, str(pin.rest), os.O_PATH)
        if not stat.S_ISLNK(os.fstat(fd).st_mode):
            return fd
        os.close(fd)
    except OSError as exc:
        if exc.errno != errno.ELOOP:
            raise from_os_error(exc, f"mount {path} in the container") from None
    raise ConfigError(
        f"cannot mount {path} in the container: it has a link in it that others can change",
        hint="name the folder or file that it leads to",
    )


def spawn(pinned: Sequence[Pin], start: Callable[[], _T]) -> _T:
    """``start``, which starts a process, called where all are mounted: in a thread with mounts of its own."""
    if not pinned:
        return start()

    def inside() -> _T:
        libc.unshare(libc.CLONE_NEWNS)
        libc.mount("none", "/", "", MS_REC | MS_SLAVE, "")
        for pin in pinned:
            fd = _open(pin)
            try:
                libc.mount(beneath.shown(fd), str(pin.place), "", MS_BIND | MS_REC, "")
            except OSError as exc:
                raise from_os_error(exc, f"mount {pin.base / pin.rest} in the container") from None
            finally:
                os.close(fd)
        return start()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(inside).result()
