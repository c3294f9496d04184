"""Answers to FUSE requests other than READ and INIT: decode the body, ask the operations, encode what they return."""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from bootseer.kernel import _fuse_wire as wire
from bootseer.kernel.fuse_ops import Attr, Context, DirEntry, Entry, Operations

if TYPE_CHECKING:
    from bootseer.kernel.fuse_options import Options
_TOTALS = wire.STATFS_OUT.pack(0, 0, 0, 0, 0, 4096, 255, 4096, 0, *[0] * 6)
"""Of a file system that counts nothing."""


class Answers:
    """Handlers by opcode. Open directories are listings kept here, so a directory read in parts stays consistent."""

    def __init__(self, operations: Operations, options: Options) -> None:
        self._ops, self._options = operations, options
        self._dirs: dict[int, Sequence[DirEntry] | None] = {}
        # a directory that was opened in a predecessor of this process must not be taken for another
        self._next_dir = time.monotonic_ns()
        self._lock = threading.Lock()
        self._entry_valid = wire.seconds(options.entry_timeout)
        self._attr_valid = wire.seconds(options.attr_timeout)
        self._handlers: dict[int, Callable[[Context, memoryview], bytes]] = {
            wire.LOOKUP: self._lookup,
            wire.GETATTR: self._getattr,
            wire.OPEN: self._open,
            wire.RELEASE: self._release,
            wire.OPENDIR: self._opendir,
            wire.READDIR: self._readdir,
            wire.RELEASEDIR: self._releasedir,
            wire.STATFS: lambda ctx, body: _TOTALS,
            wire.DESTROY: lambda ctx, body: b"",
        }

    def answer(self, opcode: int, ctx: Context, body: memoryview) -> bytes:
        """The reply's body. Raises what the operation raises, ENOSYS for requests without a handler."""
        handler = self._handlers.get(opcode)
        if handler is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        return handler(ctx, body)

    def _attr(self, node: int, attr: Attr) -> bytes:
        mode, size, nlink, mtime_ns, blksize, uid, gid = attr
        sec, nsec = divmod(mtime_ns, 1_000_000_000)
        blocks = (size + 511) // 512
        return wire.ATTR.pack(node, size, blocks, *[sec] * 3, *[nsec] * 3, mode, nlink, uid, gid, 0, blksize, 0)

    def _entry(self, entry: Entry) -> bytes:
        (entry_sec, entry_nsec), (attr_sec, attr_nsec) = self._entry_valid, self._attr_valid
        head = wire.ENTRY_OUT.pack(entry.node, 0, entry_sec, attr_sec, entry_nsec, attr_nsec)
        return head + self._attr(entry.node, entry.attr)

    def _lookup(self, ctx: Context, body: memoryview) -> bytes:
        name = os.fsdecode(bytes(body).split(b"\0", 1)[0])
        return self._entry(self._ops.lookup(ctx.node, name, ctx))

    def _getattr(self, ctx: Context, body: memoryview) -> bytes:
        return wire.ATTR_OUT.pack(*self._attr_valid, 0) + self._attr(ctx.node, self._ops.getattr(ctx.node, ctx))

    def _open(self, ctx: Context, body: memoryview) -> bytes:
        flags, _ = wire.OPEN_IN.unpack_from(body)
        if flags & os.O_ACCMODE != os.O_RDONLY:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        fh = self._ops.open(ctx.node, flags, ctx)
        # without NOFLUSH a close(2) on a dead mount fails, which surprises readers
        bits = wire.FOPEN_NOFLUSH
        bits |= wire.FOPEN_KEEP_CACHE if self._options.keep_cache else 0
        bits |= wire.FOPEN_DIRECT_IO if self._options.direct_io else 0
        return wire.OPEN_OUT.pack(fh, bits, 0)

    def _release(self, ctx: Context, body: memoryview) -> bytes:
        self._ops.release(wire.RELEASE_IN.unpack_from(body)[0], ctx)
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
        entries = self._dirs.get(fh)
        if entries is None or offset == 0:
            dots = [DirEntry(name, ctx.node, stat.S_IFDIR) for name in (".", "..")]
            entries = [*dots, *self._ops.readdir(ctx.node, ctx)]
            with self._lock:
                self._dirs[fh] = entries
        parts, total = [], 0
        for index in range(offset, len(entries)):
            entry = entries[index]
            part = wire.dirent(entry.node, index + 1, stat.S_IFMT(entry.mode), os.fsencode(entry.name))
            total += len(part)
            if total > size:
                break
            parts.append(part)
        return b"".join(parts)
