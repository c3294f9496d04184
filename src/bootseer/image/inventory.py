"""What of containers and images is on this node, and whether it still belongs to anybody."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import msgspec

from bootseer.folders import adopted, is_owned, trusted
from bootseer.image.bundle import INIT
from bootseer.image.mount import RUNS, STARTS, recorded
from bootseer.mountrecords import Record
from bootseer.wiretypes import loaded

STALE = "stale"
"""State of what is left of a process that was killed."""
DEAD = "dead"
"""State of a mounted image whose block server has died, as reads of what is not on the node fail, or whose mount is
gone. `bootseer unmount` ends it."""


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """A ``container`` (``running``), a ``start`` of a job (``running``) or a mounted image (``mounting``, ``mounted``);
    any of them may be `STALE`, a mount `DEAD`. ``since``, in seconds since 1970, and ``version`` of bootseer: where
    that is known. ``user``: whose it is; empty: of who looks."""

    kind: str
    id: str
    state: str
    what: str
    """The command, the image."""
    folder: str
    """Bundle, folder of the start, mount point."""
    since: float = 0.0
    version: str = ""
    user: str = ""


def listing(state_dir: Path, cache_dir: Path) -> list[Item]:
    """Containers first, then starts, then mounts."""
    state_dir, cache_dir = trusted(state_dir), trusted(cache_dir)
    ours = (state_dir / RUNS, cache_dir / STARTS)
    found = []
    for kind, folders in (("container", state_dir / "containers"), ("start", cache_dir / STARTS)):
        for folder in sorted(folders.glob("[!.]*")):
            if is_owned(folder):
                state = STALE if _is_left(folder) else "running"
                what, since = _command(folder)
                told = Item(kind=kind, id=folder.name, state=state, what=what, folder=str(folder), since=since)
                found.append(told)
    for mounted in recorded(state_dir):
        record = mounted.record
        own, above = state_dir / "images" / record.id, mounted.rootfs.parent
        left = _is_left(own) or (above.parent in ours and _is_left(above))  # elsewhere a file "lock" is somebody's
        state = STALE if left else "mounting" if is_owned(own) else DEAD if mounted.dead() else "mounted"
        found.append(mount_of(record, "mount", state, record.reference, record.target))
    return found


def mount_of(record: Record, kind: str, state: str, what: str, folder: str) -> Item:
    more = {"since": record.since, "version": record.version}
    return Item(kind=kind, id=record.id, state=state, what=what, folder=folder, **more)  # type: ignore[arg-type]


def _is_left(folder: Path) -> bool:
    with adopted(folder) as ours:
        return ours


def _command(bundle: Path) -> tuple[str, float]:
    """What runs there, and since when."""
    with suppress(OSError, ValueError, KeyError):
        since = (path := bundle / "config.json").stat().st_mtime
        words = loaded(json.loads, path.read_text())["process"]["args"]
        return " ".join(words[1:] if words[:1] == [INIT] else words), since
    return "", 0.0
