"""The FUSE front of a served tree: it answers the kernel's reads of the one file ``data``, and does nothing else.

One process: a few FUSE workers, and the main thread, which polls the channel to the fetcher and a pidfd of the holder.
No network, no decompression. A read whose blocks are ready is answered at once from the data file; any other is put
off, asked for over the channel, and answered when its blocks came, so waiting readers hold no worker.

The holder opened the mount (`mount`) and keeps its descriptors. When the front is killed readers wait; the next front
finds what was negotiated in ``Shared.note``, and has the kernel send again what its predecessor took (Linux 6.9). When
the holder is killed the front forks another, which only needs the descriptors and never comes near the locks that the
workers may hold at that moment. When that fails, readers get EIO, and the mount fails closed with this process.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import select
import threading
import time
from collections.abc import Callable
from pathlib import Path

from bootseer.blocks.cache.cachelock import DATA
from bootseer.blocks.serving.channel import Channel
from bootseer.blocks.serving.latereads import LateReads
from bootseer.blocks.serving.shared import Count, Shared
from bootseer.errors import BootseerError, UnavailableError
from bootseer.kernel import fuse

log = logging.getLogger(__name__)

WORKERS = 2
"""Threads that answer. None of them ever waits for a block."""
_MAPPED = 32 << 10
"""Reads from here on are answered out of a mapping of the data file: one copy and one system call less, see the table
in docs/internals/fuse.md. Smaller reads of pages that are not in memory would each pull in 128 KiB around them."""
_HANDLE = 1
"""The only file handle `fuse.SingleFile` gives out."""


def options(max_readahead: int) -> fuse.Options:
    """How the mount of a tree's data file is made."""
    return fuse.Options(name="bootseer-blocks", max_readahead=max_readahead, allow_other=True)


def mount(folder: Path, max_readahead: int) -> fuse.Device:
    """In the holder: mount on ``folder``. Uses of the mount wait until a front has answered the kernel's first request.
    Raises what `fuse.Device.open` raises."""
    return fuse.Device.open(folder, options(max_readahead))


class Front:
    """Serves ``device`` until the mount ends.

    ``data_fd``: the cache's data file, as long as the tree's data. ``revive`` is called when the holder (process
    ``holder``) has died; it returns the pid of the new one. Without it the end of the holder is the front's too.
    """

    def __init__(
        self,
        shared: Shared,
        device: fuse.Device,
        channel: Channel,
        data_fd: int,
        holder: int,
        *,
        max_readahead: int = 128 << 10,
        revive: Callable[[], int] | None = None,
    ) -> None:
        self._shared, self._device, self._channel, self._data_fd, self._holder = (
            shared,
            device,
            channel,
            data_fd,
            holder,
        )
        self._revive = revive
        self._options = options(max_readahead)
        self._generation = shared.counts[Count.FRONT_STARTS]
        self._wake, self._waker = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._mapped = memoryview(b"")
        if shared.size:
            self._mapped = memoryview(mmap.mmap(data_fd, shared.size, prot=mmap.PROT_READ))
        self._server: fuse.Server | None = None
        self._late = LateReads(shared, channel, data_fd, self._generation, answer=self._answer, rouse=self._rouse)

    def run(self) -> None:
        """Serve; returns when it is over. Raises `BootseerError` when the kernel does not let it serve."""
        server = self._server = self._serve()
        threading.Thread(target=self._await_end, args=(server,), name="end", daemon=True).start()
        self._shared.counts[Count.FRONT_READY] = self._generation
        poll = select.poll()
        poll.register(self._channel.fileno(), select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        holder = self._watch_holder(poll)
        try:
            while not server.wait(0):
                for fd, _ in poll.poll(self._late.timeout() if holder >= 0 else 0):
                    if fd == self._channel.fileno():
                        self._late.messages()
                    elif fd == self._wake:
                        with contextlib.suppress(BlockingIOError):
                            os.read(self._wake, 4096)
                    elif fd == holder:
                        poll.unregister(holder)
                        os.close(holder)
                        holder = -1
                self._late.send()
                self._late.expire()
                if holder < 0:
                    self._next_holder()
                    holder = self._watch_holder(poll)
        except BootseerError as exc:
            log.error("the FUSE front ends: %s", exc)
        finally:
            self._late.fail_all()

    def _watch_holder(self, poll: select.poll) -> int:
        """A descriptor that ``poll`` finds readable when the holder has ended; -1 when it has."""
        try:
            fd = os.pidfd_open(self._holder)
        except ProcessLookupError:
            return -1
        poll.register(fd, select.POLLIN)
        return fd

    def _next_holder(self) -> None:
        """Raises `UnavailableError` when there is none to be had."""
        what = f"the holder {self._holder} of {self._device.mountpoint} died"
        if self._revive is None:
            raise UnavailableError(f"{what}: readers get errors")
        log.warning("%s; starting another", what)
        time.sleep(0.01)  # bounds the rate
        try:
            self._holder = self._revive()
        except OSError as exc:
            raise UnavailableError(f"{what} and no other can be started ({exc.strerror}): readers get errors") from exc

    def _serve(self) -> fuse.Server:
        operations = fuse.SingleFile(DATA, self._shared.size, self._read)
        note = self._shared.note
        if not note:
            server = fuse.Server(
                operations, self._device.mountpoint, workers=WORKERS, options=self._options, device=self._device
            )
            self._server = server
            server.start()
            assert server.negotiated
            self._shared.note = server.negotiated.encode()
            return server
        negotiated = fuse.Negotiated.decode(note)
        log.warning("FUSE front %d takes over %s", self._generation, self._device.mountpoint)
        sizes = {_HANDLE: self._shared.size}
        with self._late.lock:  # reads come before this returns; those that miss wait until there is a `_server`
            self._server = server = fuse.Server.resume(
                operations, self._device, negotiated, workers=WORKERS, options=self._options, sizes=sizes
            )
        return server

    def _await_end(self, server: fuse.Server) -> None:
        server.wait()
        self._rouse()

    def _rouse(self) -> None:
        with contextlib.suppress(OSError):  # full: it is awake
            os.write(self._waker, b".")

    def _answer(self, ctx: fuse.Context, result: fuse.ReadResult | OSError) -> None:
        assert self._server is not None
        self._server.answer(ctx, result)

    # -- in the workers --------------------------------------------------------------------------------------------

    def _read(self, offset: int, size: int, ctx: fuse.Context) -> fuse.ReadResult:
        """The hot path: answer from the data file what is ready."""
        shared = self._shared
        counts = shared.counts
        end = min(offset + size, shared.size)
        if offset >= end:
            return b""
        ahead = ctx.pid == counts[Count.READAHEAD_TID]
        counts[Count.READS] += not ahead
        if ctx.resent:
            counts[Count.TAKEN_OVER] += 1
        if counts[Count.RECORDING]:
            shared.touch(offset, end - offset, ctx.pid)
        first, last = offset >> shared.shift, (end - 1) >> shared.shift
        if shared.ready.find(b"\0", first, last + 1) < 0:
            return self._mapped[offset:end] if end - offset >= _MAPPED else (self._data_fd, offset)
        if ahead:  # by a list that lies: nothing is fetched for it, and the job's own read asks again
            raise OSError(errno.EIO, "not there to be read ahead")
        return self._late.miss(first, last, ctx)


def run(
    shared: Shared,
    device: fuse.Device,
    channel: Channel,
    data_fd: int,
    holder: int,
    *,
    max_readahead: int = 128 << 10,
    revive: Callable[[], int] | None = None,
) -> None:
    """The body of a front process, forked from the holder."""
    Front(shared, device, channel, data_fd, holder, max_readahead=max_readahead, revive=revive).run()
