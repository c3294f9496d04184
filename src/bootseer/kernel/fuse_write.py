"""The requests of a FUSE file system that is written to: what they say, and the answers to them."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Mapping

from bootseer.kernel import fuse_wire as wire
from bootseer.kernel.fuse_ops import Attr, Change, Context, Entry, WritableOperations

Handler = Callable[[Context, memoryview], bytes]


def write_handlers(
    ops: WritableOperations, encode_entry: Callable[[Entry], bytes], encode_attr: Callable[[int, Attr], bytes]
) -> Mapping[int, Handler]:
    """By request, what answers it from ``ops``. The kernel takes what is missing (ENOSYS) for unsupported for good."""

    def create(ctx: Context, body: memoryview) -> bytes:
        flags, mode, _, _ = wire.CREATE_IN.unpack_from(body)
        name = _names(body[wire.CREATE_IN.size :], 1)[0]
        entry, fh = ops.create(ctx.node, name, flags, mode & 0o7777, ctx)
        return encode_entry(entry) + wire.OPEN_OUT.pack(fh, wire.FOPEN_KEEP_CACHE, 0)

    def write(ctx: Context, body: memoryview) -> bytes:
        fh, offset, size, *_ = wire.WRITE_IN.unpack_from(body)
        data = body[wire.WRITE_IN.size :]
        if len(data) != size:
            raise ValueError(f"a write of {size} bytes came with {len(data)}")
        ops.write(fh, offset, data, ctx)
        return wire.WRITE_OUT.pack(size, 0)

    def with_handle(operation: Callable[[int, Context], None]) -> Handler:
        def handle(ctx: Context, body: memoryview) -> bytes:
            operation(wire.FH_IN.unpack_from(body)[0], ctx)
            return b""

        return handle

    def with_name(operation: Callable[[int, str, Context], None]) -> Handler:
        def handle(ctx: Context, body: memoryview) -> bytes:
            operation(ctx.node, _names(body, 1)[0], ctx)
            return b""

        return handle

    def setattr(ctx: Context, body: memoryview) -> bytes:
        return encode_attr(ctx.node, ops.setattr(ctx.node, _change(body), ctx))

    def mkdir(ctx: Context, body: memoryview) -> bytes:
        mode, _ = wire.MKDIR_IN.unpack_from(body)
        name = _names(body[wire.MKDIR_IN.size :], 1)[0]
        return encode_entry(ops.mkdir(ctx.node, name, mode & 0o7777, ctx))

    def rename(ctx: Context, body: memoryview) -> bytes:
        return _rename(ctx, wire.RENAME_IN.unpack_from(body)[0], 0, body[wire.RENAME_IN.size :])

    def rename2(ctx: Context, body: memoryview) -> bytes:
        to, flags, _ = wire.RENAME2_IN.unpack_from(body)
        return _rename(ctx, to, flags, body[wire.RENAME2_IN.size :])

    def _rename(ctx: Context, to: int, flags: int, names: memoryview) -> bytes:
        if flags & ~wire.RENAME_NOREPLACE:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        name, to_name = _names(names, 2)
        ops.rename(ctx.node, name, to, to_name, ctx, overwrite=not flags)
        return b""

    def link(ctx: Context, body: memoryview) -> bytes:
        (node,) = wire.LINK_IN.unpack_from(body)
        return encode_entry(ops.link(node, ctx.node, _names(body[wire.LINK_IN.size :], 1)[0], ctx))

    def refuse(ctx: Context, body: memoryview) -> bytes:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))  # what POSIX says for a file system without such files

    return {
        wire.CREATE: create,
        wire.WRITE: write,
        wire.FLUSH: with_handle(ops.flush),
        wire.FSYNC: with_handle(ops.fsync),
        wire.FSYNCDIR: lambda ctx, body: b"",
        wire.SETATTR: setattr,
        wire.MKDIR: mkdir,
        wire.UNLINK: with_name(ops.unlink),
        wire.RMDIR: with_name(ops.rmdir),
        wire.RENAME: rename,
        wire.RENAME2: rename2,
        wire.SYMLINK: refuse,
        wire.LINK: link,
        wire.MKNOD: refuse,
    }


def _names(body: memoryview, count: int) -> list[str]:
    return [os.fsdecode(part) for part in bytes(body).split(b"\0")[:count]]


def _change(body: memoryview) -> Change:
    valid, _, fh, size, _, _, mtime, _, _, mtime_nsec, _, mode, _, uid, gid, _ = wire.SETATTR_IN.unpack_from(body)
    modified = None
    if valid & wire.FATTR_MTIME:
        modified = time.time_ns() if valid & wire.FATTR_MTIME_NOW else mtime * 1_000_000_000 + mtime_nsec
    return Change(
        mode & 0o7777 if valid & wire.FATTR_MODE else None,
        uid if valid & wire.FATTR_UID else None,
        gid if valid & wire.FATTR_GID else None,
        size if valid & wire.FATTR_SIZE else None,
        modified,
        fh if valid & wire.FATTR_FH else None,
    )
