"""What the daemon knows of its mounts, kept so that the next daemon adopts them: ``<node_dir>/records/<id>.json``."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import msgspec

from bootseer.node.protocol import Mount

log = logging.getLogger(__name__)


class Session(msgspec.Struct, frozen=True):
    """The leader of a session, or another process, which a mount ends with. ``inode``: of its pidfd, which since Linux
    6.9 no other process has until the next boot; before, all have the same."""

    pid: int
    inode: int

    @classmethod
    def of(cls, pid: int, *, alone: bool) -> tuple[Session, int]:
        """The session of process ``pid``, or this process ``alone``, and a pidfd of its leader. Raises `OSError` when
        one of them has ended."""
        leader = pid if alone else os.getsid(pid)
        pidfd = os.pidfd_open(leader)  # the number is nobody else's while the session has a process
        return cls(leader, os.fstat(pidfd).st_ino), pidfd

    def reopened(self) -> int:
        """A pidfd of the leader. Raises `OSError` when it has ended."""
        pidfd = os.pidfd_open(self.pid)
        if os.fstat(pidfd).st_ino == self.inode:
            return pidfd
        os.close(pidfd)
        raise ProcessLookupError(f"process {self.pid} is another one now")


class Record(msgspec.Struct, kw_only=True):
    """``session`` None: the mount is a job's."""

    mount: Mount
    session: Session | None = None


class Records:
    """In ``folder``, which is root's alone. Methods raise `OSError`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def save(self, record: Record) -> None:
        temp = self._temporary(record.mount.id)
        temp.write_bytes(msgspec.json.encode(record))
        temp.replace(self._folder / f"{record.mount.id}.json")

    def delete(self, id: str) -> None:
        self._temporary(id).unlink(missing_ok=True)  # what a full disk took of the last one
        (self._folder / f"{id}.json").unlink(missing_ok=True)

    def _temporary(self, id: str) -> Path:
        return self._folder / f".{id}"

    def load(self) -> list[Record]:
        """All that can be read; others are left out with a line in the log. Removes what killed daemons had begun to
        write."""
        found = []
        for path in self._folder.glob(".*"):
            path.unlink()
        for path in sorted(self._folder.glob("*.json")):
            try:
                found.append(msgspec.json.decode(path.read_bytes(), type=Record))
            except (OSError, ValueError) as exc:
                log.warning("ignoring the record %s: %s", path, exc)
        return found
