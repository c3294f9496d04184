"""The worker's loop: take a request from a device descriptor, have it answered, write the answer."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

from bootseer.kernel import _fuse_wire as wire
from bootseer.kernel._fuse_answers import Answers
from bootseer.kernel.fuse_ops import LATER, Context, Operations, ReadResult
from bootseer.kernel.fuse_options import Negotiated, Options, negotiate

_log = logging.getLogger(__name__)


class Work:
    """What the workers of one server share. `loop` may run in any number of threads."""

    def __init__(self, operations: Operations, answers: Answers, mountpoint: Path, options: Options) -> None:
        self._ops, self._answers, self._mountpoint, self._options = operations, answers, mountpoint, options
        self.negotiated: Negotiated | None = None
        self.ready = threading.Event()
        """Set when INIT has been answered."""
        self._inflight: dict[int, Context] = {}

    def loop(self, fd: int) -> None:
        """Serve ``fd`` until the connection ends, or something that should not happen does (with a log line)."""
        buffer = bytearray(wire.READ_BUFFER)
        header, inflight, answers = wire.IN_HEADER.unpack_from, self._inflight, self._answers
        read_in, read, size_of = wire.READ_IN.unpack_from, self._ops.read, self._ops.size
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
            _, opcode, unique, node, _, _, pid, _, _ = header(buffer)
            body: ReadResult = b""
            if opcode in (wire.FORGET, wire.BATCH_FORGET, wire.INTERRUPT):
                self._unanswered(fd, opcode, unique, node, buffer)
                continue
            ctx = inflight[unique] = Context(unique, node, pid)
            code = 0
            try:
                if opcode == wire.READ:
                    ctx.fh, ctx.offset, ctx.size = fh, offset, size = read_in(buffer, 40)
                    body = read(fh, offset, size, ctx)
                    if body is LATER:
                        continue
                    if type(body) is tuple:
                        if len(scratch) < size:
                            scratch = bytearray(size)
                        view = memoryview(scratch)[:size]
                        body = view[: os.preadv(body[0], [view], body[1])]
                    length = len(body)  # type: ignore[arg-type]
                    whole = size_of(fh)
                    if length > size or (whole is not None and length < min(size, whole - offset)):
                        raise ValueError(f"read of {size} bytes at {offset} returned {length}")
                elif opcode == wire.INIT:
                    body = self._init(buffer)
                else:
                    body = answers.answer(opcode, ctx, memoryview(buffer)[40:got])
            except OSError as exc:
                code, body = -(exc.errno or errno.EIO), b""
            except BaseException:  # SystemExit too: the reader waits for an answer, others for this worker
                _log.exception("%s: request %d on node %d failed", self._mountpoint, opcode, node)
                code, body = -errno.EIO, b""
            inflight.pop(unique, None)
            if not self._write(fd, unique, code, body):  # type: ignore[arg-type]
                return
            if opcode == wire.INIT:
                self.ready.set()

    def late(self, fd: int, ctx: Context, result: ReadResult | BaseException) -> bool:
        """Answer on ``fd`` a read that returned `LATER`; see `Server.answer`."""
        if self._inflight.pop(ctx.unique, None) is None:
            return False
        code, body = 0, b""
        try:
            body = self._late_body(ctx, result)  # type: ignore[assignment]
        except OSError as exc:
            code = -(exc.errno or errno.EIO)
        except BaseException:
            _log.exception("%s: a read of %d bytes at %d failed", self._mountpoint, ctx.size, ctx.offset)
            code = -errno.EIO
        self._write(fd, ctx.unique, code, body)
        return True

    def _write(self, fd: int, unique: int, code: int, body: bytes | bytearray | memoryview) -> bool:
        """Answer a request; False when the connection has ended."""
        try:
            os.writev(fd, [wire.OUT_HEADER.pack(16 + len(body), code, unique), body])
        except OSError as exc:
            if exc.errno == errno.ENODEV:
                return False
            if exc.errno != errno.ENOENT:  # ENOENT: nobody waits for this answer any more
                _log.error("%s: cannot answer request %d: %s", self._mountpoint, unique, exc.strerror)
                _answer(fd, unique, errno.EIO)
        return True

    def _late_body(self, ctx: Context, result: ReadResult | BaseException) -> bytes | bytearray | memoryview:
        if isinstance(result, BaseException):
            raise result
        if isinstance(result, tuple):
            result = os.pread(result[0], ctx.size, result[1])
        if not isinstance(result, bytes | bytearray | memoryview):
            raise TypeError(f"a late answer cannot be {result!r}")
        whole = self._ops.size(ctx.fh)
        if len(result) > ctx.size or (whole is not None and len(result) < min(ctx.size, whole - ctx.offset)):
            raise ValueError(f"read of {ctx.size} bytes at {ctx.offset} returned {len(result)}")
        return result

    def _init(self, buffer: bytearray) -> bytes:
        self.negotiated, body = negotiate(buffer, self._options)
        if self.negotiated is None:
            raise OSError(errno.EPROTO, os.strerror(errno.EPROTO))
        return body

    def _unanswered(self, fd: int, opcode: int, unique: int, node: int, buffer: bytearray) -> None:
        if opcode == wire.INTERRUPT:
            ctx = self._inflight.get(wire.INTERRUPT_IN.unpack_from(buffer, 40)[0])
            if ctx is None:  # its request is being read by another worker, or done: have the kernel ask again
                _answer(fd, unique, errno.EAGAIN)
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
