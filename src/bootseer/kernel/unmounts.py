"""Ends of file systems: a mount that was detached ends only with its last user, and no table of mounts has it."""

from __future__ import annotations

import os
import struct
from pathlib import Path

from bootseer.kernel import libc

_DELETE_SELF, _IGNORED = 0x400, 0x8000  # the first is only to have a watch: each is told of an unmount
_EVENT = struct.Struct("iIII")


class Unmounts:
    """Watches file systems (inotify(7)), which keeps none of them mounted. The caller closes `fileno`, or ends."""

    def __init__(self) -> None:
        """Raises `OSError`."""
        self._fd = libc.inotify_init()

    def fileno(self) -> int:
        """Readable when `ended` has something to tell."""
        return self._fd

    def watch(self, mountpoint: Path) -> int:
        """Tell when the file system on ``mountpoint`` has ended; by this number. Raises `OSError`."""
        return libc.inotify_add_watch(self._fd, str(mountpoint), _DELETE_SELF)

    def ended(self) -> list[int]:
        """The numbers of those that have ended since the last call."""
        found = list[int]()
        while True:
            try:
                data = os.read(self._fd, 1 << 16)
            except BlockingIOError:
                return found
            at = 0
            while at < len(data):
                number, mask, _, length = _EVENT.unpack_from(data, at)
                at += _EVENT.size + length
                if mask & _IGNORED:
                    found.append(number)
