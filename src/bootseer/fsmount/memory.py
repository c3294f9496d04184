"""What outlives each process of a mount: descriptors, and shared memory that the one that serves fills for the next."""

from __future__ import annotations

import errno
import mmap
import os
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from bootseer.errors import doing
from bootseer.fsmount.record import SERVER, ServerSpec
from bootseer.kernel import fuse
from bootseer.kernel.mount import MountEntry
from bootseer.served.control import ControlServer
from bootseer.served.note import Note
from bootseer.wiretypes import json_as, known

_PARTS = mmap.PAGESIZE, mmap.PAGESIZE, 1 << 16, 64 << 20
_FRAME = struct.Struct("<I")
_AREA = 1 << 40
"""More bytes than an area of the journal has: the cell says area and length in one number."""


class Count:
    """Cells of `MountMemory.counts`. The server writes them, but for those of the supervisor."""

    JOURNAL = 0
    """Of `Journal`: its area, and behind that how long it is."""
    UNFINISHED = 1
    """Files that are being written."""
    RELEASED = 2
    """1 once a prefetch that was held back may begin."""
    SUPERVISOR_PID, SUPERVISOR_STARTS = 3, 4
    SERVER_PID, SERVER_STARTS, SERVER_READY, SERVER_BEAT = range(8, 12)
    """See `bootseer.served.keeper.Kept`."""


class MountMemory:
    """Three memfds, ``fds``: this, and the areas of the journal. ``negotiated``: what INIT granted, ``status``: the
    figures, ``accessed``: what readers have read, as JSON; ``journal``: the nodes. A process may be killed between any
    two instructions."""

    def __init__(self, fds: Sequence[int] = ()) -> None:
        if not fds:
            with doing("make shared memory"):
                fds = [os.memfd_create("bootseer-fs", os.MFD_CLOEXEC) for _ in range(3)]
                os.ftruncate(fds[0], sum(_PARTS))
        ends = [sum(_PARTS[:number]) for number in range(len(_PARTS))]
        counts, *notes = (mmap.mmap(fds[0], size, offset=at) for size, at in zip(_PARTS, ends, strict=True))
        self.fds = tuple(fds)
        self.counts = memoryview(counts).cast("Q")
        self.negotiated, self.status, self.accessed = map(Note, notes)
        self.journal = Journal(self.fds[1:], self.counts)


class Known(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """A node. ``content``: `ChunkFile.content`, "" of a folder; ``version``: of what lies at ``path`` in the storage
    (`bootseer.backends.interface.Entry`). ``path`` as bytes: names need not be UTF-8. ``backing``: the kernel's number
    of the file that it reads by itself, 0 for none."""

    number: int
    path: bytes
    content: str
    version: str
    attr: fuse.Attr
    backing: int = 0


class Gone(msgspec.Struct, tag=2, array_like=True, frozen=True):
    """The kernel has dropped its last reference to the node."""

    number: int


class Journal:
    """What the servers of a mount have told of its nodes, in that order, one thread at a time; in one of two memfds,
    and written anew in the other when most of it is old. What is told counts once the cell says how long the journal
    is."""

    def __init__(self, areas: Sequence[int], counts: memoryview) -> None:
        self._areas, self._counts = areas, counts
        self._told = 0

    def read(self) -> list[Known]:
        """The nodes that the kernel may know; the newest of a path is behind others of it."""
        found: dict[int, Known] = {}
        area, length = divmod(self._counts[Count.JOURNAL], _AREA)
        data, at = os.pread(self._areas[area], length, 0), 0
        while at < length:
            (size,) = _FRAME.unpack_from(data, at)
            at += _FRAME.size + size
            message = _decode(data[at - size : at])
            found.pop(message.number, None)
            if isinstance(message, Known):
                found[message.number] = message
            self._told += 1
        return list(found.values())

    def tell(self, message: Known | Gone) -> None:
        """Raises `OSError` where there is no memory for it."""
        area, length = divmod(self._counts[Count.JOURNAL], _AREA)
        self._write(area, length, _frame(message))
        self._told += 1

    def is_old(self, nodes: int) -> bool:
        """Whether it is much longer than ``nodes`` nodes need."""
        return self._told > 2 * nodes + 10_000

    def rewrite(self, nodes: Sequence[Known]) -> None:
        """Tell ``nodes`` in place of all that was told."""
        area = self._counts[Count.JOURNAL] // _AREA
        self._write(1 - area, 0, b"".join(map(_frame, nodes)))
        os.ftruncate(self._areas[area], 0)  # gives the memory back
        self._told = len(nodes)

    def _write(self, area: int, at: int, data: bytes) -> None:
        if os.pwrite(self._areas[area], data, at) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._counts[Count.JOURNAL] = area * _AREA + at + len(data)


def _frame(message: Known | Gone) -> bytes:
    raw = msgspec.msgpack.encode(message)
    return _FRAME.pack(len(raw)) + raw


_decode = msgspec.msgpack.Decoder(known(Known | Gone)).decode


class Inherited(NamedTuple):
    """What a process of a mount has from the one before it."""

    spec: ServerSpec
    folder: Path
    lock: int
    """See `bootseer.served.entry.Begun`."""
    device: fuse.Device
    control: ControlServer
    memory: MountMemory

    def start_supervisor(self) -> int:
        """In a server: start another supervisor; its process number. It is a program of its own: a fork of this process
        would have its locks and libraries, without their threads, and so would each server that it starts."""
        fds = (self.lock, self.device.fd, self.control.fileno(), *self.memory.fds)
        with open(os.memfd_create("bootseer-fs-inherited"), "w+b") as said:  # a pipe may be full until it is read
            said.write(msgspec.json.encode((self.spec, str(self.folder), self.device.entry, fds)))
            said.seek(0)
            return subprocess.Popen([*SERVER, "again"], stdin=said, pass_fds=fds).pid

    @classmethod
    def read(cls, said: bytes) -> Inherited:
        """In that supervisor, what it finds on its standard input."""
        spec, folder, entry, fds = json_as(said, _Said)
        lock, device, control, *memory = fds
        return cls(
            spec, Path(folder), lock, fuse.Device(Path(spec.mountpoint), entry, device),
            ControlServer(Path(folder), control), MountMemory(memory),
        )  # fmt: skip


class _Said(NamedTuple):
    spec: ServerSpec
    folder: str
    entry: MountEntry | None
    fds: tuple[int, ...]
