"""Ends of file systems: a mount that was detached ends only with its last user, and no table of mounts has it."""

from __future__ import annotations

import logging
import os
import struct
from pathlib import Path

from bootseer.kernel import libc

log = logging.getLogger(__name__)

_DELETE_SELF, _IGNORED = 0x400, 0x8000  # the first is only to have a watch: each is told of an unmount
_EVENT = struct.Struct("iIII")


class Unmounts:
    """Watches file systems (inotify(7)), which keeps none of them mounted. Where there are too many watchers on the
    machine it sees nothing, with a line in the log."""

    def __init__(self) -> None:
        self._fd = -1
        try:
            self._fd = libc.inotify_init()
        except OSError as exc:
            log.warning("ends of file systems are not seen: %s", exc.strerror)

    def fileno(self) -> int:
        """Readable when `ended` has something to tell; -1: never."""
        return self._fd

    def watch(self, mountpoint: Path) -> int:
        """The number by which `ended` tells that the file system on ``mountpoint`` has; -1: it will not."""
        if self._fd < 0:
            return -1
        try:
            return libc.inotify_add_watch(self._fd, str(mountpoint), _DELETE_SELF)
        except OSError as exc:
            log.warning("the end of the file system on %s is not seen: %s", mountpoint, exc.strerror)
            return -1

    def ended(self) -> list[int]:
        """The numbers of those that have ended since the last call."""
        found = list[int]()
        while self._fd >= 0:
            try:
                data = os.read(self._fd, 1 << 16)
            except BlockingIOError:
                break
            at = 0
            while at < len(data):
                number, mask, _, length = _EVENT.unpack_from(data, at)
                at += _EVENT.size + length
                if mask & _IGNORED:
                    found.append(number)
        return found
