"""Answers to FUSE requests other than READ and INIT: decode the body, ask the operations, encode what they return."""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from bootseer.kernel import _fuse_wire as wire
from bootseer.kernel.fuse_ops import Attr, Context, DirEntry, Entry, Operations

if TYPE_CHECKING:
    from bootseer.kernel.fuse_options import Options

_NO_ATTR = bytes(wire.ENTRY_OUT.size + wire.ATTR.size)


class Answers:
    """Handlers by opcode. Open directories are listings kept here, so a directory read in parts stays consistent."""

    def __init__(self, operations: Operations, options: Options, sizes: Mapping[int, int] | None = None) -> None:
        self._ops, self._options = operations, options
        self._kept = dict(sizes or {})
        self.sizes: dict[int, int] = dict(self._kept)
        """Sizes of open files by handle, where the operations gave them; those of a predecessor stay for good, as
        nobody counts its opens."""
        self._opens: dict[int, int] = {}
        self._dirs: dict[int, Sequence[DirEntry] | None] = {}
        # a directory that was opened in a predecessor of this process must not be taken for another
        self._next_dir = time.monotonic_ns()
        self._lock = threading.Lock()
        self._entry_valid = wire.seconds(options.entry_timeout)
        self._attr_valid = wire.seconds(options.attr_timeout)
        self._handlers: dict[int, Callable[[Context, memoryview], bytes]] = {
            wire.LOOKUP: self._lookup,
            wire.GETATTR: self._getattr,
            wire.READLINK: lambda ctx, _: os.fsencode(self._ops.readlink(ctx.node, ctx)),
            wire.OPEN: self._open,
            wire.RELEASE: self._release,
            wire.OPENDIR: self._opendir,
            wire.READDIR: lambda ctx, body: self._readdir(ctx, body, plus=False),
            wire.READDIRPLUS: lambda ctx, body: self._readdir(ctx, body, plus=True),
            wire.RELEASEDIR: self._releasedir,
            wire.STATFS: self._statfs,
            wire.GETXATTR: self._getxattr,
            wire.LISTXATTR: self._listxattr,
            wire.DESTROY: lambda ctx, body: b"",
        }

    def answer(self, opcode: int, ctx: Context, body: memoryview) -> bytes:
        """The reply's body. Raises what the operation raises, ENOSYS for requests of a writable file system."""
        handler = self._handlers.get(opcode)
        if handler is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        return handler(ctx, body)

    def _attr(self, node: int, attr: Attr) -> bytes:
        mode, size, nlink, uid, gid, mtime_ns, rdev, blksize = attr
        sec, nsec = divmod(mtime_ns, 1_000_000_000)
        blocks = (size + 511) // 512
        return wire.ATTR.pack(
            node, size, blocks, sec, sec, sec, nsec, nsec, nsec, mode, nlink, uid, gid, rdev, blksize, 0
        )

    def _entry(self, entry: Entry) -> bytes:
        (entry_sec, entry_nsec), (attr_sec, attr_nsec) = self._entry_valid, self._attr_valid
        head = wire.ENTRY_OUT.pack(entry.node, 0, entry_sec, attr_sec, entry_nsec, attr_nsec)
        return head + self._attr(entry.node, entry.attr)

    def _lookup(self, ctx: Context, body: memoryview) -> bytes:
        name = os.fsdecode(bytes(body).split(b"\0", 1)[0])
        try:
            return self._entry(self._ops.lookup(ctx.node, name, ctx))
        except OSError as exc:
            if exc.errno != errno.ENOENT or not self._options.negative_timeout:
                raise
            sec, nsec = wire.seconds(self._options.negative_timeout)
            return wire.ENTRY_OUT.pack(0, 0, sec, 0, nsec, 0) + bytes(wire.ATTR.size)

    def _getattr(self, ctx: Context, body: memoryview) -> bytes:
        return wire.ATTR_OUT.pack(*self._attr_valid, 0) + self._attr(ctx.node, self._ops.getattr(ctx.node, ctx))

    def _open(self, ctx: Context, body: memoryview) -> bytes:
        flags, _ = wire.OPEN_IN.unpack_from(body)
        if flags & os.O_ACCMODE != os.O_RDONLY:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        opened = self._ops.open(ctx.node, flags, ctx)
        keep, direct, fh = self._options.keep_cache, self._options.direct_io, opened
        if not isinstance(opened, int):
            fh = opened.fh
            keep = keep if opened.keep_cache is None else opened.keep_cache
            direct = direct if opened.direct_io is None else opened.direct_io
            if opened.size is not None:
                with self._lock:
                    self._opens[fh] = self._opens.get(fh, 0) + 1
                    self.sizes[fh] = opened.size
        # without NOFLUSH a close(2) on a dead mount fails, which surprises readers
        bits = wire.FOPEN_NOFLUSH
        bits |= (wire.FOPEN_KEEP_CACHE if keep else 0) | (wire.FOPEN_DIRECT_IO if direct else 0)
        return wire.OPEN_OUT.pack(fh, bits, 0)

    def _release(self, ctx: Context, body: memoryview) -> bytes:
        fh = wire.RELEASE_IN.unpack_from(body)[0]
        with self._lock:
            # operations may hand out one handle many times: forget its size with the last of them
            left = self._opens.get(fh, 0) - 1
            if left > 0:
                self._opens[fh] = left
            else:
                self._opens.pop(fh, None)
                if fh not in self._kept:
                    self.sizes.pop(fh, None)
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

    def _readdir(self, ctx: Context, body: memoryview, *, plus: bool) -> bytes:
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
            if plus:
                known = entry.attr is not None and index >= 2
                part = (self._entry(Entry(entry.node, entry.attr)) if known and entry.attr else _NO_ATTR) + part
            total += len(part)
            if total > size:
                break
            parts.append(part)
        return b"".join(parts)

    def _statfs(self, ctx: Context, body: memoryview) -> bytes:
        it = self._ops.statfs(ctx)
        return wire.STATFS_OUT.pack(
            it.blocks, it.bfree, it.bavail, it.files, it.ffree, it.bsize, it.namelen, it.bsize, 0, *[0] * 6
        )

    def _getxattr(self, ctx: Context, body: memoryview) -> bytes:
        size, _ = wire.GETXATTR_IN.unpack_from(body)
        name = os.fsdecode(bytes(body[wire.GETXATTR_IN.size :]).split(b"\0", 1)[0])
        return _sized(self._ops.getxattr(ctx.node, name, ctx), size)

    def _listxattr(self, ctx: Context, body: memoryview) -> bytes:
        size, _ = wire.GETXATTR_IN.unpack_from(body)
        names = self._ops.listxattr(ctx.node, ctx)
        return _sized(b"".join(os.fsencode(name) + b"\0" for name in names), size)


def _sized(value: bytes, size: int) -> bytes:
    """An xattr answer: its length where the caller asks for that (size 0), ERANGE where its buffer is too small."""
    if size == 0:
        return wire.GETXATTR_OUT.pack(len(value), 0)
    if len(value) > size:
        raise OSError(errno.ERANGE, os.strerror(errno.ERANGE))
    return value
