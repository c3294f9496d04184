"""The link between a holder and its fetcher: short notes with descriptors, over a SOCK_SEQPACKET pair.

The holder keeps both ends, so that a restarted fetcher finds the link as it was; so does a front that may have to
become the holder. A fetcher that meets the end of its link is alone.
"""

from __future__ import annotations

import array
import os
import select
import socket
from collections.abc import Sequence

import msgspec

from bootseer.errors import BootseerError, DataError, UnavailableError

_MAX_NOTE = 1 << 14
_MAX_FDS = 8
_SEND_SECONDS = 5.0


class Note(msgspec.Struct, omit_defaults=True):
    """One note; which other fields matter depends on ``do``.

    Holder to fetcher: ``look`` (in the store folder ``path``: its hot packs will be asked for), ``folder`` (serve that:
    ``path``, ``log``), ``serving`` (``driver``; the fanotify group comes along), ``refused`` (``code``, ``text``),
    ``local`` (the tree needs no front any more), ``left`` (the front is gone, finish), ``busy`` (somebody still uses
    the files of a tree that all have left), ``staying``. Fetcher to holder: ``serve`` (``complete``, ``missing`` bytes;
    shared memory, data file and lock come along), ``failed`` (``code``, ``text``), ``started``, ``complete``,
    ``leave``, ``stay`` (a new mount: do not leave), ``behind`` (all is given up and persisted; a hot pack is still
    being made, for which nobody need wait).
    ``number``: of a question (``leave``, ``stay``), and the same in its answer (``left``, ``busy``, ``staying``); 0:
    nobody asked.
    """

    do: str
    text: str = ""
    code: int = 0
    driver: str = ""
    path: str = ""
    log: str = ""
    complete: bool = False
    missing: int = 0
    number: int = 0


class Link:
    """One end. Sends are single packets, from any thread; one thread receives."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    @classmethod
    def pair(cls) -> tuple[Link, Link]:
        """The holder's end and the fetcher's."""
        one, two = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(one), cls(two)

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, note: Note, fds: Sequence[int] = ()) -> bool:
        """Queue ``note`` with duplicates of ``fds``; False when nobody takes it for five seconds, or will."""
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        raw = msgspec.json.encode(note)
        poll = select.poll()
        poll.register(self._sock.fileno(), select.POLLOUT)
        poll.poll(int(_SEND_SECONDS * 1000))
        try:
            self._sock.sendmsg([raw], ancillary, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except (BlockingIOError, ConnectionError):
            return False
        return True

    def receive(self, *, timeout: float = 0.0) -> tuple[Note, list[int]] | None:
        """The next note and its descriptors, now the caller's; None when none came within ``timeout`` seconds.

        Raises `UnavailableError` when each process of the other side is gone, `DataError` for what is no note.
        """
        poll = select.poll()
        poll.register(self._sock.fileno(), select.POLLIN)
        if not poll.poll(int(timeout * 1000)):
            return None
        fds = array.array("i")
        try:
            raw, ancillary, _, _ = self._sock.recvmsg(
                _MAX_NOTE, socket.CMSG_SPACE(_MAX_FDS * fds.itemsize), socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return None
        except ConnectionError:
            raw, ancillary = b"", []
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
        try:
            if not raw:
                raise UnavailableError("the other end of the block server's link is gone")
            try:
                return msgspec.json.decode(raw, type=Note), fds.tolist()
            except msgspec.MsgspecError as exc:
                raise DataError(f"the block server's link carries what is no note: {exc}") from None
        except BootseerError:
            for fd in fds:
                os.close(fd)
            raise

    def close(self) -> None:
        self._sock.close()
