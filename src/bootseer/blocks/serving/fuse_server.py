"""The FUSE server of a tree: it answers the kernel's reads of the one file ``data``, and does nothing else.

One process: a few FUSE workers, and the main thread, which polls the channel to the fetcher and a pidfd of the
supervisor. A read whose blocks are ready is answered at once from the data file; any other is put off, asked for over
the channel, and answered when its blocks came, so waiting readers hold no worker.

When this process is killed readers wait for the next one (`_serve`). When the supervisor is killed this process forks
the next one, which never comes near the locks that the workers may hold at that moment."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import logging
import mmap
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, NoReturn

from bootseer.blocks.serving.ipc import Came, Channel, Repeat, Wanted, request_id
from bootseer.blocks.serving.shared_memory import Count, SharedMemory
from bootseer.chunks.locks import DATA
from bootseer.errors import BootseerError, UnavailableError, logged
from bootseer.kernel import fuse, procfs
from bootseer.kernel import mount as mounts
from bootseer.served.keeper import Heir

log = logging.getLogger(__name__)

WORKERS = 2
"""Threads that answer. None of them ever waits for a block."""
_MAPPED = 32 << 10
"""Reads from here on are answered out of a mapping of the data file: one copy and one system call less, see the table
in docs/internals/fuse.md. Smaller reads of pages that are not in memory would each pull in 128 KiB around them."""
_SLACK = 5.0
"""The fetcher has this many seconds more than its own deadline to say that it failed."""


OPTIONS = fuse.Options(name="bootseer-blocks", max_readahead=128 << 10, allow_other=True)
"""Of the mount of a tree's data file. The kernel reads through its page cache: without a readahead each 4 KiB would be
a request."""


_PATIENCE = 10
"""Times the deadline of a read: seconds until the kernel ends a mount in a mount namespace of its own that does not
answer. When all processes of such a namespace are killed, the last of them unmounts the tree. It waits for the answer
to a read and has the device still open, so no server can come, and nobody else can end the mount. A job that is
suspended for longer, in the middle of a read, gets errors for what it has not read; so others are not limited."""


def mount(folder: Path) -> fuse.Device:
    """In the supervisor: mount on ``folder``. Uses of the mount wait until a server has answered the kernel's first
    request. Raises what `fuse.Device.open` raises."""
    return fuse.Device.open(folder, OPTIONS)


class FuseServer:
    """Serves ``device`` until the mount ends. ``data_fd``: the cache's data file, as long as the tree's data. When the
    supervisor (process ``supervisor``) has died, ``succeed`` is called in a child of this process, to be the next one;
    without it the end of the supervisor is this process's too."""

    def __init__(
        self,
        shared: SharedMemory,
        device: fuse.Device,
        channel: Channel,
        data_fd: int,
        supervisor: int,
        *,
        succeed: Callable[[], NoReturn] | None = None,
    ) -> None:
        self._shared, self._device, self._channel, self._data_fd = shared, device, channel, data_fd
        self._heir, self._succeed = Heir(supervisor, self._fork_supervisor), succeed
        self._generation = shared.counts[Count.SERVER_STARTS]
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._map = mmap.mmap(data_fd, shared.size, prot=mmap.PROT_READ)
        self._mapped = memoryview(self._map)
        self._server: fuse.Server | None = None
        self._pending = PendingReads(shared, channel, data_fd, answer=self._answer, rouse=self._rouse)

    def run(self) -> None:
        """Serve; returns when it is over. Raises `BootseerError` when the kernel does not let it serve."""
        server = self._server = self._serve()
        threading.Thread(target=self._await_end, args=(server,), name="end", daemon=True).start()
        self._shared.counts[Count.SERVER_READY] = self._generation
        with logged(log.error, "the FUSE server ends", kinds=BootseerError):
            while not server.wait(0):
                poll = select.poll()
                poll.register(self._channel.fileno(), select.POLLIN)
                poll.register(self._wake, select.POLLIN)
                soon = self._heir.register(poll)
                for fd, _ in poll.poll(self._pending.timeout() if soon is None else soon):
                    if fd == self._channel.fileno():
                        self._pending.take_messages()
                    elif fd == self._wake:
                        os.eventfd_read(self._wake)
                self._pending.send()
                self._pending.expire()
                self._heir.look()
        # After any other exception the readers are left to the next server.
        self._pending.fail_all()

    def _fork_supervisor(self) -> int:
        if self._succeed is None:
            raise UnavailableError(f"the supervisor of {self._device.mountpoint} died: readers get errors")
        if pid := os.fork():
            return pid
        os.close(self._wake)
        with contextlib.suppress(BufferError):  # a worker was reading from it in the moment of the fork
            self._mapped.release()
            self._map.close()
        self._succeed()

    def _serve(self) -> fuse.Server:
        """Begin, or go on after a server that died: the kernel sends again what that took (Linux 6.9)."""
        operations = fuse.SingleFile(DATA, self._shared.size, self._read)
        patience = min(0xFFFF, max(1, _PATIENCE * self._shared.counts[Count.DEADLINE_MS] // 1000))
        options = dataclasses.replace(OPTIONS, request_timeout=patience if mounts.in_own_namespace() else 0)
        note = self._shared.negotiated.read()
        if not note:
            server = fuse.Server(
                operations, self._device.mountpoint, workers=WORKERS, options=options, device=self._device
            )
            self._server = server
            server.start()
            assert server.negotiated
            self._shared.negotiated.write(server.negotiated.encode())
            return server
        negotiated = fuse.Negotiated.decode(note)
        log.warning("FUSE server %d takes over %s", self._generation, self._device.mountpoint)
        with self._pending.lock:  # reads come before this returns; those that miss wait until there is a `_server`
            self._server = server = fuse.Server.resume(
                operations, self._device, negotiated, workers=WORKERS, options=options
            )
        return server

    def _await_end(self, server: fuse.Server) -> None:
        server.wait()
        self._rouse()

    def _rouse(self) -> None:
        os.eventfd_write(self._wake, 1)

    def _answer(self, ctx: fuse.Context, result: fuse.ReadResult | OSError) -> None:
        assert self._server is not None
        self._server.answer(ctx, result)

    def _read(self, offset: int, size: int, ctx: fuse.Context) -> fuse.ReadResult:
        """In the workers, the hot path: answer from the data file what is ready."""
        shared = self._shared
        counts = shared.counts
        end = min(offset + size, shared.size)
        if offset >= end:
            return b""
        ahead = ctx.pid == counts[Count.READAHEAD_TID] != 0  # 0: of a process that cannot be seen from here
        counts[Count.READS] += not ahead
        if ctx.resent:
            counts[Count.TAKEN_OVER] += 1
        if counts[Count.RECORDING]:
            shared.trace.touch(offset, end - offset, ctx.pid)
        first, last = offset >> shared.shift, (end - 1) >> shared.shift
        if shared.ready.find(b"\0", first, last + 1) < 0:
            return self._mapped[offset:end] if end - offset >= _MAPPED else (self._data_fd, offset)
        if ahead:  # by a list that lies: nothing is fetched for it, and the job's own read asks again
            raise OSError(errno.EIO, "not there to be read ahead")
        return self._pending.miss(first, last, ctx)


class _Waiting(NamedTuple):
    ctx: fuse.Context
    first: int
    last: int
    began: int


class PendingReads:
    """Reads that wait for blocks: asked for over ``channel``, answered when these came, or with an error. Workers call
    `miss`, the main thread the rest; one lock, of the table and of the counters of slow reads. ``answer`` tells the
    kernel; ``rouse`` wakes the main thread, which has a deadline to mind then; ``clock`` is monotonic, in ns."""

    def __init__(
        self,
        shared: SharedMemory,
        channel: Channel,
        data_fd: int,
        *,
        answer: Callable[[fuse.Context, fuse.ReadResult | OSError], object],
        rouse: Callable[[], None],
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._shared, self._channel, self._data_fd = shared, channel, data_fd
        self._answer_kernel, self._rouse, self._clock = answer, rouse, clock
        self._generation = shared.counts[Count.SERVER_STARTS]
        self._numbers = itertools.count()
        self._patience = shared.counts[Count.DEADLINE_MS] * 1_000_000 + int(_SLACK * 1e9)
        self.lock = threading.Lock()
        """While it is held no read is entered."""
        self._waiting: dict[int, _Waiting] = {}
        self._unsent: deque[int] = deque()
        self._end_wait()  # of those who waited for a server that died

    # -- in the workers --------------------------------------------------------------------------------------------

    def miss(self, first: int, last: int, ctx: fuse.Context) -> fuse.ReadResult:
        """A read of blocks ``first`` to ``last``, some of which are missing."""
        if self._shared.counts[Count.HOPELESS]:
            self._shared.counts[Count.FAILED_READS] += 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        id = request_id(self._generation, next(self._numbers))
        ctx.on_interrupt = lambda: self._interrupted(id)
        with self.lock:
            self._waiting[id] = waiting = _Waiting(ctx, first, last, self._clock())
            idle = len(self._waiting) == 1
            if idle:
                self._shared.counts[Count.WAITING_SINCE_NS] = waiting.began
        if not self._channel.send(Wanted(id, first, last, ctx.pid)):
            self._unsent.append(id)
            idle = True
        if ctx.interrupted:  # before there was somebody to tell
            self._interrupted(id)
        if idle:  # the main thread has to mind a deadline now
            self._rouse()
        return fuse.LATER

    def _interrupted(self, id: int) -> None:
        """A reader got a signal. Let it go if that is the end of it; else EINTR would turn into EIO on its way up
        through EROFS, and a mere SIGCHLD would fail a read."""
        with self.lock:
            waiting = self._waiting.get(id)
            if waiting is None or not _is_dying(waiting.ctx.pid):
                return
            self._remove(id)
        self._answer_kernel(waiting.ctx, InterruptedError(errno.EINTR, os.strerror(errno.EINTR)))

    def _remove(self, id: int) -> _Waiting | None:
        """Under the lock: the read ``id``, which waits no more."""
        waiting = self._waiting.pop(id, None)
        if not self._waiting:
            self._end_wait()
        return waiting

    def _end_wait(self) -> None:
        """Under the lock: no reader waits any more. Count the time in which at least one did."""
        counts = self._shared.counts
        since, counts[Count.WAITING_SINCE_NS] = counts[Count.WAITING_SINCE_NS], 0
        if since:
            counts[Count.WAITED_NS] += max(0, self._clock() - since)

    # -- in the main thread ----------------------------------------------------------------------------------------

    def take_messages(self) -> None:
        """See to what the fetcher says."""
        while (got := self._channel.receive()) is not None:
            message, fd = got
            try:
                if isinstance(message, Came):
                    self._came(message, fd)
                elif isinstance(message, Repeat):
                    with self.lock:
                        self._unsent = deque(self._waiting)
            finally:
                if fd >= 0:
                    os.close(fd)

    def _came(self, message: Came, fd: int) -> None:
        with self.lock:
            waiting = self._remove(message.id)
        if waiting is None:
            return
        ctx, number = waiting.ctx, message.errno
        result: fuse.ReadResult | OSError = (self._data_fd, ctx.offset)
        if not number and fd >= 0:
            result = (fd, ctx.offset - (waiting.first << self._shared.shift))
        elif not number and self._shared.ready.find(b"\0", waiting.first, waiting.last + 1) >= 0:
            log.error("blocks %d..%d came but are not in the cache", waiting.first, waiting.last)
            number = errno.EIO
        if number:
            result = OSError(number, os.strerror(number))
        self._settle(waiting, result)

    def _settle(self, waiting: _Waiting, result: fuse.ReadResult | OSError) -> None:
        counts = self._shared.counts
        counts[Count.SLOW_FAULTS] += 1
        counts[Count.STALL_NS] += max(0, self._clock() - waiting.began)
        if isinstance(result, OSError):
            counts[Count.FAILED_READS] += 1
        self._answer_kernel(waiting.ctx, result)

    def send(self) -> None:
        """Ask for what could not be asked for before."""
        unsent = self._unsent
        while unsent:
            waiting = self._waiting.get(unsent[0])
            if waiting is not None:
                message = Wanted(unsent[0], waiting.first, waiting.last, waiting.ctx.pid)
                if not self._channel.send(message):
                    return  # no room, or no fetcher: `timeout` brings us back
            unsent.popleft()

    def expire(self) -> None:
        """Errors for who has waited for too long, or waits without hope."""
        now = self._clock()
        hopeless = self._shared.counts[Count.HOPELESS]
        with self.lock:
            late = [id for id, waiting in self._waiting.items() if hopeless or now - waiting.began >= self._patience]
            expired = [waiting for id in late if (waiting := self._remove(id))]
        for waiting in expired:
            log.error("blocks %d..%d did not come; a read fails", waiting.first, waiting.last)
            self._shared.counts[Count.DENIED] += 1
            self._settle(waiting, OSError(errno.EIO, os.strerror(errno.EIO)))

    def timeout(self) -> int | None:
        """Milliseconds until something is due; a second at most while readers wait: there may be no hope any more."""
        if self._unsent:
            return 20
        with self.lock:
            oldest = next(iter(self._waiting.values()), None)
        if oldest is None:
            return None
        left = (self._patience - (self._clock() - oldest.began)) // 1_000_000
        return max(1, min(left + 1, 1000))

    def fail_all(self) -> None:
        """This process ends: errors for who still waits."""
        with self.lock:
            found = list(self._waiting.values())
            self._waiting.clear()
            self._end_wait()
        for waiting in found:
            self._answer_kernel(waiting.ctx, OSError(errno.EIO, os.strerror(errno.EIO)))


def _is_dying(pid: int) -> bool:
    """Whether SIGKILL is pending for thread ``pid``: the kernel turns every fatal signal into that."""
    try:
        return any(mask & 1 << 8 for mask in procfs.masks(pid, "SigPnd:", "ShdPnd:"))
    except (OSError, ValueError):
        return False
