"""What a mount of the node daemon ends with: a session, or a process."""

from __future__ import annotations

import os

import msgspec


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
