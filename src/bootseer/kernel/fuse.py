"""A FUSE server in Python without a library: a raw ``/dev/fuse`` loop for read-only file systems.

Concurrency: ``workers`` threads read requests from one device descriptor, answer them, and end when the kernel says
ENODEV (unmounted or aborted). The kernel wakes one waiting worker per request. An operation that waits holds its
worker: give as many workers as reads may wait at once, and some more. When the process dies the kernel answers every
reader with ECONNABORTED or ENOTCONN: it fails closed. A child made by ``os.fork`` closes its copy of the descriptor, as
it would otherwise keep a dead server's mount waiting for ever.

Operations must not touch their own mount: with each worker waiting for a request that no worker is left to answer, the
mount hangs.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from bootseer.errors import BootseerError, UnavailableError, UnsupportedError
from bootseer.kernel import _fuse_device, mount
from bootseer.kernel import _fuse_wire as wire
from bootseer.kernel._fuse_answers import Answers
from bootseer.kernel.fuse_ops import (
    ROOT,
    Attr,
    Context,
    DirEntry,
    Entry,
    OpenFile,
    Operations,
    ReadResult,
    SingleFile,
    StatFS,
)

__all__ = [
    "ROOT",
    "Attr",
    "Context",
    "DirEntry",
    "Entry",
    "Negotiated",
    "OpenFile",
    "Operations",
    "Options",
    "ReadResult",
    "Server",
    "SingleFile",
    "StatFS",
]

_log = logging.getLogger(__name__)
_servers: weakref.WeakSet[Server] = weakref.WeakSet()


@dataclass(frozen=True, kw_only=True)
class Options:
    """How the kernel treats the mount. Sizes in bytes, times in seconds."""

    name: str = "bootseer"
    """Shown in the mount table, as ``fuse.<name>``."""
    max_read: int = 1 << 20
    """Largest read request."""
    max_readahead: int = 128 << 10
    """Readahead of buffered reads. More than 128 KiB is set through sysfs after the mount, which needs root."""
    max_background: int = 64
    """Readahead requests in flight."""
    entry_timeout: float = 3600.0
    """How long the kernel believes a name."""
    attr_timeout: float = 3600.0
    """How long the kernel believes attributes."""
    negative_timeout: float = 0.0
    """How long the kernel believes that a name does not exist."""
    allow_other: bool = False
    """Other users may use it; without root this needs ``user_allow_other`` in /etc/fuse.conf."""
    default_permissions: bool = True
    """The kernel checks modes."""
    keep_cache: bool = True
    """Pages survive the close of a file (right for bytes that never change)."""
    direct_io: bool = False
    """Reads bypass the page cache. Not for a file under EROFS, which needs its pages."""


@dataclass(frozen=True)
class Negotiated:
    """What the kernel granted in INIT."""

    kernel_minor: int
    flags: frozenset[str]
    max_readahead: int


class Server:
    """Serves ``operations`` on ``mountpoint`` (an existing folder) from ``start()`` until ``stop()`` or an unmount."""

    def __init__(
        self, operations: Operations, mountpoint: Path, *, workers: int = 4, options: Options | None = None
    ) -> None:
        self.mountpoint, self.options = Path(mountpoint).absolute(), options or Options()
        self.negotiated: Negotiated | None = None
        self._ops, self._workers = operations, workers
        self._answers = Answers(operations, self.options)
        self._threads: list[threading.Thread] = []
        self._fd = -1
        self._mount: mount.MountEntry | None = None
        self._ready = threading.Event()
        self._inflight: dict[int, Context] = {}
        self._closing = threading.Lock()
        self._serving = 0

    def start(self, *, timeout: float = 10.0) -> None:
        """Mount and serve; returns once the kernel has finished INIT. Errors as of `kernel.mount`."""
        if self._threads:
            raise RuntimeError("a server starts once")
        opts = self.options
        self._fd = _fuse_device.open_and_mount(
            self.mountpoint,
            name=opts.name,
            allow_other=opts.allow_other,
            default_permissions=opts.default_permissions,
            max_read=opts.max_read,
        )
        self._mount = mount.find(self.mountpoint)
        _servers.add(self)
        self._serving = self._workers
        for number in range(self._workers):
            thread = threading.Thread(target=self._work, name=f"fuse-{opts.name}-{number}", daemon=True)
            thread.start()
            self._threads.append(thread)
        if not self._ready.wait(timeout):
            self.stop(timeout=0)
            raise UnavailableError(f"the kernel did not finish mounting {self.mountpoint} within {timeout:g} s")
        if self.negotiated is None:
            self.stop(timeout=0)
            hint = f"it has to speak 7.{wire.MINOR_MIN}: Linux 5.4 or later"
            raise UnsupportedError("this kernel's FUSE protocol is too old", hint=hint)
        if opts.max_readahead > 128 << 10:
            self._widen_readahead()

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
        while self._mount and not _fuse_device.detach(self._mount, force=False):
            if time.monotonic() >= deadline:
                _log.warning("%s is still in use, aborting it: its users get errors", self.mountpoint)
                try:
                    _fuse_device.detach(self._mount, force=True)
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

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def invalidate(self, node: int, offset: int = 0, length: int = 0) -> None:
        """Drop the kernel's cached attributes and pages of ``node`` (``length`` 0: to the end).

        Not from within an operation on that node: the kernel waits for it."""
        body = wire.NOTIFY_INVAL_INODE_OUT.pack(node, offset, length)
        head = wire.OUT_HEADER.pack(wire.OUT_HEADER.size + len(body), wire.NOTIFY_INVAL_INODE, 0)
        try:
            os.writev(self._fd, [head, body])
        except OSError as exc:
            if exc.errno != errno.ENOENT:  # ENOENT: the kernel holds nothing of it
                raise

    def _close(self) -> None:
        with self._closing:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)

    def _widen_readahead(self) -> None:
        try:
            path = f"/sys/class/bdi/{self._mount.device if self._mount else '?'}/read_ahead_kb"
            Path(path).write_text(str(self.options.max_readahead >> 10))
        except OSError as exc:
            _log.warning("readahead of %s stays at 128 KiB: %s", self.mountpoint, exc)

    def _work(self) -> None:
        try:
            self._loop()
        finally:
            with self._closing:
                self._serving -= 1
                last = self._serving == 0
            if last:  # nobody is left to answer: abort what is still mounted, rather than let it wait
                self._close()

    def _loop(self) -> None:
        fd, buffer = self._fd, bytearray(wire.READ_BUFFER)
        header, out, inflight, answers = wire.IN_HEADER.unpack_from, wire.OUT_HEADER.pack, self._inflight, self._answers
        read_in, read, sizes = wire.READ_IN.unpack_from, self._ops.read, self._answers.sizes
        scratch = bytearray()
        while True:
            try:
                got = os.readv(fd, [buffer])
            except OSError as exc:
                if exc.errno in (errno.ENOENT, errno.EINTR, errno.EAGAIN):  # ENOENT: the request was interrupted
                    continue
                if exc.errno != errno.ENODEV:
                    _log.error("%s: cannot read requests: %s", self.mountpoint, exc.strerror)
                return
            if got < wire.IN_HEADER.size:
                _log.error("%s: a request of %d bytes is none, serving ends", self.mountpoint, got)
                return
            _, opcode, unique, node, uid, gid, pid, _, _ = header(buffer)
            body: bytes | bytearray | memoryview = b""
            if opcode in (wire.FORGET, wire.BATCH_FORGET, wire.INTERRUPT):
                self._unanswered(opcode, unique, node, buffer)
                continue
            ctx = inflight[unique] = Context(unique, node, uid, gid, pid)
            code = 0
            try:
                if opcode == wire.READ:
                    fh, offset, size = read_in(buffer, 40)
                    result = read(fh, offset, size, ctx)
                    if type(result) is tuple:
                        if len(scratch) < size:
                            scratch = bytearray(size)
                        view = memoryview(scratch)[:size]
                        body = view[: os.preadv(result[0], [view], result[1])]
                    else:
                        body = result  # type: ignore[assignment]
                    whole = sizes.get(fh)
                    if len(body) > size or (whole is not None and len(body) < min(size, whole - offset)):
                        raise ValueError(f"read of {size} bytes at {offset} returned {len(body)}")
                elif opcode == wire.INIT:
                    body = self._init(buffer)
                else:
                    body = answers.answer(opcode, ctx, memoryview(buffer)[40:got])
            except OSError as exc:
                code, body = -(exc.errno or errno.EIO), b""
            except BaseException:  # whatever it is, the reader waits for an answer
                _log.exception("%s: request %d on node %d failed", self.mountpoint, opcode, node)
                code, body = -errno.EIO, b""
            inflight.pop(unique, None)
            try:
                os.writev(fd, [out(16 + len(body), code, unique), body])
            except OSError as exc:
                if exc.errno == errno.ENODEV:
                    return
                if exc.errno != errno.ENOENT:  # ENOENT: nobody waits for this answer any more
                    _log.error("%s: cannot answer request %d: %s", self.mountpoint, opcode, exc.strerror)
                    _answer(fd, unique, errno.EIO)
            if opcode == wire.INIT:
                self._ready.set()

    def _unanswered(self, opcode: int, unique: int, node: int, buffer: bytearray) -> None:
        if opcode == wire.INTERRUPT:
            ctx = self._inflight.get(wire.INTERRUPT_IN.unpack_from(buffer, 40)[0])
            if ctx is None:  # its request is being read by another worker, or done: have the kernel ask again
                _answer(self._fd, unique, errno.EAGAIN)
                return
            ctx.interrupted = True
            if ctx.on_interrupt:
                _guard(ctx.on_interrupt)
        elif opcode == wire.FORGET:
            lookups = wire.FORGET_IN.unpack_from(buffer, 40)[0]
            _guard(lambda: self._ops.forget(node, lookups))
        else:
            count = wire.BATCH_FORGET_IN.unpack_from(buffer, 40)[0]
            for index in range(count):
                which, lookups = wire.FORGET_ONE.unpack_from(buffer, 48 + index * wire.FORGET_ONE.size)
                _guard(lambda which=which, lookups=lookups: self._ops.forget(which, lookups))  # type: ignore[misc]

    def _init(self, buffer: bytearray) -> bytes:
        major, minor, readahead, offered = wire.INIT_IN.unpack_from(buffer, 40)
        if major != wire.MAJOR or minor < wire.MINOR_MIN:
            _log.error("the kernel speaks FUSE %d.%d", major, minor)
            raise OSError(errno.EPROTO, os.strerror(errno.EPROTO))
        opts = self.options
        granted = {name: bit for name, bit in wire.INIT_FLAGS.items() if offered & bit}
        readahead = min(readahead, opts.max_readahead)
        self.negotiated = Negotiated(minor, frozenset(granted), readahead)
        flags = sum(granted.values())
        background = opts.max_background
        max_pages = max(1, opts.max_read // os.sysconf("SC_PAGE_SIZE"))
        minor = min(minor, wire.MINOR_WANTED)
        return wire.INIT_OUT.pack(
            7, minor, readahead, flags, background, background * 3 // 4, 4096, 1, max_pages, 0, 0, *[0] * 7
        )


def _answer(fd: int, unique: int, code: int) -> None:
    try:
        os.writev(fd, [wire.OUT_HEADER.pack(wire.OUT_HEADER.size, -code, unique)])
    except OSError as exc:
        if exc.errno not in (errno.ENOENT, errno.ENODEV):
            _log.error("cannot answer request with error %d: %s", code, exc.strerror)


def _guard(action: Callable[[], None]) -> None:
    try:
        action()
    except Exception:
        _log.exception("a request without an answer failed")


def _close_in_child() -> None:
    for server in list(_servers):
        server._close()


os.register_at_fork(after_in_child=_close_in_child)
