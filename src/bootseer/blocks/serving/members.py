"""The processes of one block server, found from outside."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from bootseer.blocks.serving.standby import PID

_MODULE = b"bootseer.blocks.serving.server"
_BEHIND = "bootseer-pack"
"""Name (``comm``) of a fetcher that is no member any more and finishes a hot pack."""


def secede() -> None:
    """This process is no member of its server from now on: nobody waits for it, or ends it with the others."""
    os.setsid()
    Path("/proc/self/comm").write_text(_BEHIND)


def members(folder: Path) -> list[int]:
    """Live processes of the block server of ``folder``: those of the process group that its `PID` file names, and any
    with ``folder`` as an argument of its own."""
    own = b"\0" + os.fsencode(folder) + b"\0"
    groups: set[int] = set()
    with contextlib.suppress(OSError, ValueError):
        _, group = map(int, (folder / PID).read_text().split())
        groups.add(group)
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            with contextlib.suppress(OSError):
                line = Path("/proc", entry, "cmdline").read_bytes()
                # Other commands than ours may serve (see `tree.mount`), but the number may have passed to another one.
                known = os.getpgid(int(entry)) in groups and (own in line or (b"\0-\0" in line and _MODULE in line))
                if (known or (own in line and _MODULE in line)) and not _seceded(entry):
                    found.append(int(entry))
    return found


def _seceded(entry: str) -> bool:
    return Path("/proc", entry, "comm").read_text().rstrip("\n") == _BEHIND
