"""The worker's loop: take a request from a device descriptor, ask the operations, write the answer."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bootseer.kernel import fuse_wire as wire
from bootseer.kernel.fuse_backing import Backings
from bootseer.kernel.fuse_ops import (
    LATER,
    Attr,
    Context,
    DirEntry,
    Entry,
    Negotiated,
    Operations,
    Options,
    ReadResult,
    WritableOperations,
)
from bootseer.kernel.fuse_write import write_handlers

_log = logging.getLogger(__name__)
_BACKGROUND = 64
"""Readahead requests in flight."""
_DOTS = 2
"""`.` and `..` come first."""

Bytes = bytes | bytearray | memoryview


class Loop:
    """What the workers of one server share. `run` may run in any number of threads. Open directories are listings kept
    here, so a directory read in parts stays consistent."""

    def __init__(self, operations: Operations, mountpoint: Path, options: Options) -> None:
        self._ops, self._mountpoint, self._options = operations, mountpoint, options
        self.negotiated: Negotiated | None = None
        self.backings = Backings(operations.backed)
        self._device = -1
        operations.invalidate = self._invalidate
        self.ready = threading.Event()
        """Set when INIT has been answered."""
        self._inflight: dict[int, Context] = {}
        self._dirs: dict[int, Sequence[DirEntry] | None] = {}
        # a directory that was opened in a predecessor of this process must not be taken for another
        self._next_dir = time.monotonic_ns()
        self._lock = threading.Lock()
        self._entry_valid = wire.seconds(options.entry_timeout)
        self._negative_valid = wire.seconds(options.negative_timeout)
        self._attr_valid = wire.seconds(options.attr_timeout)
        self._handlers: dict[int, Callable[[Context, memoryview], bytes]] = {
            wire.INIT: self._init,
            wire.LOOKUP: self._lookup,
            wire.GETATTR: lambda ctx, body: self._attributes(ctx.node, operations.getattr(ctx.node, ctx)),
            wire.OPEN: self._open,
            wire.RELEASE: self._release,
            wire.OPENDIR: self._opendir,
            wire.READDIR: self._readdir,
            wire.READDIRPLUS: self._readdirplus,
            wire.RELEASEDIR: self._releasedir,
            wire.STATFS: self._statfs,
            wire.DESTROY: lambda ctx, body: b"",
        }
        if isinstance(operations, WritableOperations):
            self._handlers |= write_handlers(operations, self._entry, self._attributes)

    def run(self, fd: int) -> None:
        """Serve ``fd`` until the connection ends, or something that should not happen does (with a log line)."""
        self._device = fd
        buffer = bytearray(wire.WRITE_BUFFER if self._options.writable else wire.READ_BUFFER)
        header, inflight = wire.IN_HEADER.unpack_from, self._inflight
        read_in, read, whole = wire.READ_IN.unpack_from, self._ops.read, self._whole
        scratch = bytearray()
        while True:
            try:
                got = os.readv(fd, [buffer])
            except OSError as exc:
                if exc.errno in (errno.ENOENT, errno.EINTR, errno.EAGAIN):  # ENOENT: the request was interrupted
                    continue
                if exc.errno != errno.ENODEV:
                    _log.error("%s: cannot read requests: %s", self._mountpoint, exc.strerror)
                return
            if got < wire.IN_HEADER.size:
                _log.error("%s: a request of %d bytes is none, serving ends", self._mountpoint, got)
                return
            _, opcode, unique, node, uid, gid, pid, _, _ = header(buffer)
            if opcode in (wire.FORGET, wire.BATCH_FORGET, wire.INTERRUPT):
                self._unanswered(fd, opcode, unique, node, buffer)
                continue
            ctx = inflight[unique] = Context(unique, node, pid, uid, gid)
            code = 0
            body: Bytes = b""
            try:
                if opcode == wire.READ:
                    ctx.fh, ctx.offset, ctx.size = fh, offset, size = read_in(buffer, 40)
                    result = read(fh, offset, size, ctx)
                    if result is LATER:
                        continue
                    if type(result) is tuple and len(scratch) < size:
                        scratch = bytearray(size)
                    body = whole(ctx, result, scratch)
                else:
                    body = self.answer(opcode, ctx, memoryview(buffer)[40:got])
            except BaseException as exc:  # SystemExit too: the reader waits for an answer, others for this worker
                code, body = self._code(exc, ctx, opcode), b""
            inflight.pop(unique, None)
            if not self._write(fd, unique, code, body):
                return
            if opcode == wire.INIT:
                self.ready.set()

    def late(self, fd: int, ctx: Context, result: ReadResult | BaseException) -> bool:
        """Answer on ``fd`` a read that returned `LATER`; see `Server.answer`."""
        if self._inflight.pop(ctx.unique, None) is None:
            return False
        code = 0
        body: Bytes = b""
        try:
            if isinstance(result, BaseException):
                raise result
            body = self._whole(ctx, result, bytearray(ctx.size if isinstance(result, tuple) else 0))
        except BaseException as exc:
            code = self._code(exc, ctx, wire.READ)
        self._write(fd, ctx.unique, code, body)
        return True

    def answer(self, opcode: int, ctx: Context, body: memoryview) -> bytes:
        """The reply's body, of all but reads. Raises what the operation raises, ENOSYS for requests without handler."""
        handler = self._handlers.get(opcode)
        if handler is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        return handler(ctx, body)

    def _whole(self, ctx: Context, result: ReadResult, scratch: bytearray) -> Bytes:
        """The bytes of a read, all that there are; ``scratch`` is for what lies in a local file."""
        size = ctx.size
        if type(result) is tuple:
            view = memoryview(scratch)[:size]
            result = view[: os.preadv(result[0], [view], result[1])]
        length = len(result)  # type: ignore[arg-type]
        there = self._ops.size(ctx.fh)
        if length > size or (there is not None and length < min(size, there - ctx.offset)):
            raise ValueError(f"read of {size} bytes at {ctx.offset} returned {length}")
        return result  # type: ignore[return-value]

    def _code(self, exc: BaseException, ctx: Context, opcode: int) -> int:
        if isinstance(exc, OSError):
            return -(exc.errno or errno.EIO)
        _log.error("%s: request %d on node %d failed", self._mountpoint, opcode, ctx.node, exc_info=exc)
        return -errno.EIO

    def _invalidate(self, node: int) -> None:
        body = wire.INVAL_INODE_OUT.pack(node, 0, 0)
        head = wire.OUT_HEADER.pack(wire.OUT_HEADER.size + len(body), wire.NOTIFY_INVAL_INODE, 0)
        with contextlib.suppress(FileNotFoundError):  # it knows no such node
            os.writev(self._device, [head, body])

    def _write(self, fd: int, unique: int, code: int, body: Bytes) -> bool:
        """Answer a request; False when the connection has ended."""
        try:
            os.writev(fd, [wire.OUT_HEADER.pack(16 + len(body), code, unique), body])
        except OSError as exc:
            if exc.errno == errno.ENODEV:
                return False
            if exc.errno != errno.ENOENT:  # ENOENT: nobody waits for this answer any more
                _log.error("%s: cannot answer request %d: %s", self._mountpoint, unique, exc.strerror)
                if code != -errno.EIO:
                    self._write(fd, unique, -errno.EIO, b"")
        return True

    def _unanswered(self, fd: int, opcode: int, unique: int, node: int, buffer: bytearray) -> None:
        if opcode == wire.INTERRUPT:
            ctx = self._inflight.get(wire.INTERRUPT_IN.unpack_from(buffer, 40)[0])
            if ctx is None:  # its request is being read by another worker, or done: have the kernel ask again
                self._write(fd, unique, -errno.EAGAIN, b"")
                return
            ctx.interrupted = True
            if ctx.on_interrupt:
                _guard(ctx.on_interrupt)
        elif opcode == wire.FORGET:
            _guard(self._ops.forget, node, wire.FORGET_IN.unpack_from(buffer, 40)[0])
        else:
            count = wire.BATCH_FORGET_IN.unpack_from(buffer, 40)[0]
            for index in range(count):
                _guard(self._ops.forget, *wire.FORGET_ONE.unpack_from(buffer, 48 + index * wire.FORGET_ONE.size))

    def _init(self, ctx: Context, body: memoryview) -> bytes:
        major, minor, readahead, offered = wire.INIT_IN.unpack_from(body)
        if major != wire.MAJOR or minor < wire.MINOR_MIN:
            _log.error("the kernel speaks FUSE %d.%d", major, minor)
            raise OSError(errno.EPROTO, os.strerror(errno.EPROTO))
        extended = offered & wire.INIT_EXT
        if extended:
            offered |= wire.INIT_IN_FLAGS2.unpack_from(body, wire.INIT_IN.size)[0] << 32
        wanted = wire.INIT_FLAGS | (wire.WRITE_FLAGS if self._options.writable else {})
        wanted |= {"passthrough": wire.PASSTHROUGH} if self._options.passthrough else {}
        wanted |= {"request_timeout": wire.REQUEST_TIMEOUT} if self._options.request_timeout else {}
        granted = {name: bit for name, bit in wanted.items() if offered & bit}
        self.backings.enabled = "passthrough" in granted
        flags = sum(granted.values()) | extended
        self.negotiated = Negotiated(minor, frozenset(granted))
        max_pages = max(1, wire.MAX_READ // os.sysconf("SC_PAGE_SIZE"))
        return wire.INIT_OUT.pack(
            *(7, min(minor, wire.MINOR_WANTED), min(readahead, self._options.max_readahead)),
            *(flags & 0xFFFFFFFF, _BACKGROUND, _BACKGROUND * 3 // 4),
            *(wire.MAX_READ if self._options.writable else 4096, 1, max_pages, 0, flags >> 32),
            *(int(self.backings.enabled), self._options.request_timeout),
        )

    def _attr(self, node: int, attr: Attr) -> bytes:
        mode, size, nlink, mtime_ns, blksize, uid, gid = attr
        sec, nsec = divmod(mtime_ns % (1_000_000_000 << 64), 1_000_000_000)  # as 64 bits, also before 1970
        blocks = (size + 511) // 512
        return wire.ATTR.pack(node, size, blocks, *[sec] * 3, *[nsec] * 3, mode, nlink, uid, gid, 0, blksize, 0)

    def _entry(self, entry: Entry) -> bytes:
        (entry_sec, entry_nsec), (attr_sec, attr_nsec) = self._entry_valid, self._attr_valid
        head = wire.ENTRY_OUT.pack(entry.node, 0, entry_sec, attr_sec, entry_nsec, attr_nsec)
        return head + self._attr(entry.node, entry.attr)

    def _lookup(self, ctx: Context, body: memoryview) -> bytes:
        name = os.fsdecode(bytes(body).split(b"\0", 1)[0])
        try:
            return self._entry(self._ops.lookup(ctx.node, name, ctx))
        except FileNotFoundError:
            seconds, nanoseconds = self._negative_valid
            if not seconds + nanoseconds:
                raise
            return wire.ENTRY_OUT.pack(0, 0, seconds, 0, nanoseconds, 0) + bytes(wire.ATTR.size)

    def _attributes(self, node: int, attr: Attr) -> bytes:
        return wire.ATTR_OUT.pack(*self._attr_valid, 0) + self._attr(node, attr)

    def _statfs(self, ctx: Context, body: memoryview) -> bytes:
        size, free = self._ops.statfs()
        unit = 4096
        return wire.STATFS_OUT.pack(size // unit, free // unit, free // unit, 0, 0, unit, 255, unit, 0, *[0] * 6)

    def _open(self, ctx: Context, body: memoryview) -> bytes:
        flags, _ = wire.OPEN_IN.unpack_from(body)
        if flags & os.O_ACCMODE != os.O_RDONLY:
            if not self._options.writable:
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
            return wire.OPEN_OUT.pack(self._ops.open(ctx.node, flags, ctx), wire.FOPEN_KEEP_CACHE, 0)
        fh = self._ops.open(ctx.node, flags, ctx)
        backing = 0
        if self._options.passthrough:
            try:
                backing = self.backings.open(self._device, ctx.node, fh, self._ops.backing)
            except BaseException:
                self._ops.release(fh, ctx)
                raise
        if backing:
            return wire.OPEN_OUT.pack(fh, wire.FOPEN_NOFLUSH | wire.FOPEN_PASSTHROUGH, backing)
        # without NOFLUSH a close(2) on a dead mount fails, which surprises readers
        bits = wire.FOPEN_NOFLUSH | wire.FOPEN_KEEP_CACHE | (wire.FOPEN_DIRECT_IO if self._options.direct_io else 0)
        return wire.OPEN_OUT.pack(fh, bits, 0)

    def _release(self, ctx: Context, body: memoryview) -> bytes:
        fh = wire.RELEASE_IN.unpack_from(body)[0]
        if self._options.passthrough:
            self.backings.release(self._device, ctx.node, fh)
        self._ops.release(fh, ctx)
        return b""

    def _opendir(self, ctx: Context, body: memoryview) -> bytes:
        with self._lock:
            fh, self._next_dir = self._next_dir, self._next_dir + 1
            self._dirs[fh] = None
        return wire.OPEN_OUT.pack(fh, 0, 0)

    def _releasedir(self, ctx: Context, body: memoryview) -> bytes:
        with self._lock:
            self._dirs.pop(wire.RELEASE_IN.unpack_from(body)[0], None)
        return b""

    def _readdir(self, ctx: Context, body: memoryview) -> bytes:
        fh, offset, size = wire.READ_IN.unpack_from(body)
        return b"".join(self._dirents(self._listing(ctx, fh, offset), offset, size, 0))

    def _readdirplus(self, ctx: Context, body: memoryview) -> bytes:
        fh, offset, size = wire.READ_IN.unpack_from(body)
        entries = self._listing(ctx, fh, offset)
        dirents = self._dirents(entries, offset, size, len(wire.NO_ENTRY))
        names = [entry.name for entry in entries[max(offset, _DOTS) : offset + len(dirents)]]
        found = self._ops.lookups(ctx.node, names, ctx) if names else []
        told = [wire.NO_ENTRY if entry is None else self._entry(entry) for entry in found]
        told = [wire.NO_ENTRY] * (len(dirents) - len(told)) + told
        return b"".join(itertools.chain.from_iterable(zip(told, dirents, strict=True)))

    def _listing(self, ctx: Context, fh: int, offset: int) -> Sequence[DirEntry]:
        """The open directory ``fh``; listed anew from its start, and when a server before this one had it open."""
        entries = self._dirs.get(fh)
        if entries is None or offset == 0:
            dots = [DirEntry(name, ctx.node, stat.S_IFDIR) for name in (".", "..")]
            entries = [*dots, *self._ops.readdir(ctx.node, ctx)]
            with self._lock:
                self._dirs[fh] = entries
        return entries

    def _dirents(self, entries: Sequence[DirEntry], offset: int, size: int, more: int) -> list[bytes]:
        """Those from ``offset`` on that fit into ``size`` bytes, when each has ``more`` bytes before it."""
        parts, total = [], 0
        for index in range(offset, len(entries)):
            entry = entries[index]
            part = wire.dirent(entry.node, index + 1, stat.S_IFMT(entry.mode), os.fsencode(entry.name))
            total += more + len(part)
            if total > size:
                break
            parts.append(part)
        return parts


def _guard(action: Callable[..., None], *args: int) -> None:
    try:
        action(*args)
    except Exception:
        _log.exception("a request without an answer failed")
