"""What of containers and images is on this node, and whether it still belongs to anybody."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import msgspec

from bootseer.folders import adopted, is_owned, trusted
from bootseer.image.bundle import INIT
from bootseer.image.mount import RUNS, STARTS, recorded
from bootseer.wiretypes import loaded

STALE = "stale"
"""State of what is left of a process that was killed."""
DEAD = "dead"
"""State of a mounted image whose block server has died, as reads of what is not on the node fail, or whose mount is
gone. `bootseer unmount` ends it."""


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """A ``container`` (``running``), a ``start`` of a job (``running``) or a mounted image (``mounting``, ``mounted``);
    any of them may be `STALE`, a mount `DEAD`."""

    kind: str
    id: str
    state: str
    what: str
    """The command, the image."""
    folder: str
    """Bundle, folder of the start, mount point."""


def listing(state_dir: Path, cache_dir: Path) -> list[Item]:
    """Containers first, then starts, then mounts."""
    state_dir, cache_dir = trusted(state_dir), trusted(cache_dir)
    ours = (state_dir / RUNS, cache_dir / STARTS)
    found = []
    for kind, folders in (("container", state_dir / "containers"), ("start", cache_dir / STARTS)):
        for folder in sorted(folders.glob("[!.]*")):
            if is_owned(folder):
                state = STALE if _is_left(folder) else "running"
                found.append(Item(kind=kind, id=folder.name, state=state, what=_command(folder), folder=str(folder)))
    for mounted in recorded(state_dir):
        record = mounted.record
        own, above = state_dir / "images" / record.id, mounted.rootfs.parent
        left = _is_left(own) or (above.parent in ours and _is_left(above))  # elsewhere a file "lock" is somebody's
        state = STALE if left else "mounting" if is_owned(own) else DEAD if mounted.dead() else "mounted"
        found.append(Item(kind="mount", id=record.id, state=state, what=record.reference, folder=record.target))
    return found


def _is_left(folder: Path) -> bool:
    with adopted(folder) as ours:
        return ours


def _command(bundle: Path) -> str:
    with suppress(OSError, ValueError, KeyError):
        words = loaded(json.loads, (bundle / "config.json").read_text())["process"]["args"]
        return " ".join(words[1:] if words[:1] == [INIT] else words)
    return ""
