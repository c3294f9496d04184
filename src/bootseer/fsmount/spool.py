"""Spools: bytes of files that are being written through a mount, on this node, where they are read back and changed."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import IO

from bootseer import faults
from bootseer.backends.engine.memory import ByteBudget
from bootseer.fsmount.record import SPOOLS


class Spools(ByteBudget):
    """The room that the spools of one mount share: ``limit`` bytes in ``folder``, which only this user can enter."""

    def __init__(self, folder: Path, limit: int = SPOOLS) -> None:
        super().__init__(limit)
        self.folder = folder


class Spool:
    """That of one file: a private file of this node, from the first byte. One thread at a time. Raises `OSError`."""

    def __init__(self, spools: Spools) -> None:
        self.folder, self._spools = spools.folder, spools
        self._file: IO[bytes] | None = None
        self._taken = 0  # bytes of the spools' room

    @property
    def used(self) -> bool:
        """Whether it has the bytes of the file."""
        return self._file is not None

    def keep(self, offset: int, data: memoryview) -> bool:
        """Put ``data`` at ``offset``; False: there is no room."""
        more = max(0, offset + len(data) - self._taken)
        if not self._spools.try_take(more):
            return False
        self._taken += more
        faults.point("fsmount.spool")
        fd, done = self._open(), 0
        while done < len(data):
            done += os.pwrite(fd, data[done:], offset + done)
        return True

    def extend(self, size: int) -> bool:
        """Zeros up to ``size``; False: there is no room."""
        if not self._spools.try_take(max(0, size - self._taken)):
            return False
        self._taken = max(self._taken, size)
        os.ftruncate(self._open(), size)
        return True

    def cut(self, size: int) -> None:
        """Keep the first ``size`` bytes only."""
        os.ftruncate(self._open(), size)

    def read(self, offset: int, size: int) -> bytes:
        """At most ``size`` bytes at ``offset``, fewer at the end."""
        return os.pread(self._open(), size, offset)

    def drop(self) -> None:
        """Give up the bytes and the room; it may be used anew."""
        file, self._file = self._file, None
        if file is not None:
            file.close()
        self._spools.give(self._taken)
        self._taken = 0

    def _open(self) -> int:
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self.folder, buffering=0)  # noqa: SIM115
        return self._file.fileno()
