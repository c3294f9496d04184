"""A FUSE server in Python without a library: a raw ``/dev/fuse`` loop, for file systems that are only read, and for
those that are written to (`WritableOperations`). Ways to end, forks and takeovers: ``docs/internals/fuse.md``.

Concurrency: ``workers`` threads read requests from one device descriptor and answer them until it is unmounted. An
operation that waits holds its worker: give as many workers as reads may wait at once, and some more, or return `LATER`.
Operations must not touch their own mount: with each worker waiting for a request that no worker is left to answer, the
mount hangs."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
import weakref
from pathlib import Path

from bootseer.errors import BootseerError, UnavailableError, UnsupportedError, from_os_error, logged
from bootseer.kernel import fuse_device, mount
from bootseer.kernel import fuse_wire as wire
from bootseer.kernel.fuse_device import Device
from bootseer.kernel.fuse_loop import Loop
from bootseer.kernel.fuse_ops import (
    LATER,
    ROOT,
    Attr,
    Change,
    Context,
    DirEntry,
    Entry,
    Negotiated,
    Operations,
    Options,
    ReadResult,
    SingleFile,
    Totals,
    WritableOperations,
)

__all__ = [
    "LATER",
    "ROOT",
    "Attr",
    "Change",
    "Context",
    "Device",
    "DirEntry",
    "Entry",
    "Negotiated",
    "Operations",
    "Options",
    "ReadResult",
    "Server",
    "SingleFile",
    "Totals",
    "WritableOperations",
]

_log = logging.getLogger(__name__)
_START_SECONDS = 10.0
_servers: weakref.WeakSet[Server] = weakref.WeakSet()


class Server:
    """Serves ``operations`` on ``mountpoint`` (an existing folder) from ``start()`` until ``stop()`` or an unmount.
    ``device``: a mount that somebody else made with `Device.open`, whose descriptor the server takes over and
    closes."""

    def __init__(
        self,
        operations: Operations,
        mountpoint: Path,
        *,
        workers: int = 4,
        options: Options | None = None,
        device: Device | None = None,
    ) -> None:
        self.mountpoint, self.options = Path(mountpoint).absolute(), options or Options()
        self._workers, self._device = workers, device
        self._core = Loop(operations, self.mountpoint, self.options)
        self._threads: list[threading.Thread] = []
        self._fd = -1
        self._mount: mount.MountEntry | None = None
        self._closing = threading.Lock()
        self._serving = 0

    @classmethod
    def resume(
        cls,
        operations: Operations,
        device: Device,
        negotiated: Negotiated,
        *,
        workers: int = 4,
        options: Options | None = None,
    ) -> Server:
        """Serve a mount whose server died, through a duplicate of its descriptor: started when this returns.

        The dead process must be gone (waited for), else it may still take requests. The kernel is asked to send those
        again that it took and did not answer; ``operations`` must know the nodes and handles that it gave out. Raises
        `UnsupportedError` where the kernel cannot (before Linux 6.9): then close the descriptor, which gives the
        waiting readers errors."""
        if "has_resend" not in negotiated.flags:
            raise UnsupportedError(
                f"the requests a dead server of {device.mountpoint} took are lost", hint="Linux 6.9 sends them again"
            )
        server = cls(operations, device.mountpoint, workers=workers, options=options, device=device)
        server._core.negotiated = negotiated
        if "passthrough" in negotiated.flags:
            server._core.backings.resume(operations.backings())
        server._core.ready.set()
        head = wire.OUT_HEADER.pack(wire.OUT_HEADER.size, wire.NOTIFY_RESEND, 0)
        try:
            os.writev(device.fd, [head])  # before a worker of ours takes one that would then come twice
        except OSError as exc:
            if exc.errno not in (errno.ENODEV, errno.ENOTCONN):  # unmounted meanwhile: the workers will see it
                raise from_os_error(exc, f"have the requests of {device.mountpoint} sent again") from exc
        server._run(device)
        return server

    @property
    def negotiated(self) -> Negotiated | None:
        """What the kernel granted, once `start` has returned."""
        return self._core.negotiated

    def start(self) -> None:
        """Mount (unless there is a ``device``) and serve; returns once the kernel has finished INIT. Errors as of
        `kernel.mount`."""
        self._run(self._device or Device.open(self.mountpoint, self.options))
        if not self._core.ready.wait(_START_SECONDS):
            self.stop(timeout=0)
            raise UnavailableError(f"the kernel did not finish mounting {self.mountpoint} within {_START_SECONDS:g} s")
        if self.negotiated is None:
            self.stop(timeout=0)
            hint = f"it has to speak 7.{wire.MINOR_MIN}: Linux 5.4 or later"
            raise UnsupportedError("this kernel's FUSE protocol is too old", hint=hint)
        if self.options.max_readahead > 128 << 10:
            self._widen_readahead()

    @property
    def opens(self) -> tuple[int, int]:
        """How many opens there were: of files that the kernel reads by itself, and of others (with
        `Options.passthrough`)."""
        return self._core.backings.passed, self._core.backings.served

    def _run(self, device: Device) -> None:
        self._fd = device.fd
        self._mount = device.entry
        if self._device is None:  # else it is for its owner to say which children keep it
            _servers.add(self)
        self._serving = self._workers
        for number in range(self._workers):
            name = f"fuse-{self.options.name}-{number}"
            thread = threading.Thread(target=self._work, args=(device.fd,), name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def answer(self, ctx: Context, result: ReadResult | BaseException) -> bool:
        """Answer a read for which the operations returned `LATER`, from any thread; False when it was answered before.
        ``result`` is what a read returns (not `LATER`), or an exception: an `OSError` gives its errno, others EIO."""
        with self._closing:  # a descriptor that is closed meanwhile may already be another file
            return self._fd >= 0 and self._core.late(self._fd, ctx, result)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the mount has ended (by `stop`, or by an unmount from elsewhere); False at the timeout."""
        deadline = None if timeout is None else time.monotonic() + timeout
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def stop(self, *, timeout: float = 5.0) -> None:
        """Unmount and end. While the mount is busy this retries up to ``timeout`` seconds, then aborts it: its users
        get ECONNABORTED, with a log line. Safe to call twice."""
        deadline = time.monotonic() + timeout
        while self._mount and not fuse_device.detach(self._mount, force=False):
            if time.monotonic() >= deadline:
                _log.warning("%s is still in use, aborting it: its users get errors", self.mountpoint)
                try:
                    fuse_device.detach(self._mount, force=True)
                except BootseerError as exc:
                    _log.warning("%s", exc)
                break
            time.sleep(0.05)
        if self.wait(max(1.0, timeout)):
            self._close()
        else:  # a daemon thread that still waits in an operation; the kernel aborts the mount when the process ends
            _log.warning("%s: an operation has not ended, its thread is left behind", self.mountpoint)

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def _close(self) -> None:
        with self._closing:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)

    def _widen_readahead(self) -> None:
        with logged(_log.warning, "readahead of %s stays at 128 KiB", self.mountpoint, kinds=OSError):
            path = f"/sys/class/bdi/{self._mount.device if self._mount else '?'}/read_ahead_kb"
            Path(path).write_text(str(self.options.max_readahead >> 10))

    def _work(self, fd: int) -> None:
        try:
            self._core.run(fd)
        finally:
            with self._closing:
                self._serving -= 1
                last = self._serving == 0
            if last:  # nobody is left to answer: abort what is still mounted, rather than let it wait
                self._close()


def _close_in_child() -> None:
    for server in list(_servers):
        server._close()


os.register_at_fork(after_in_child=_close_in_child)
