"""A file that is being written through a mount: its bytes until they are published.

They lie in a spool, a private file on this node, as long as the spools of the mount have room: there they can be read
back and changed. From `STREAM_FROM` bytes on they are also sent to the store as they come, so that little is left to do
at the close. When the spool must go, the file goes on without: its bytes come in order then, and are not read back.

What was published once does not change: the next version has the same bytes, and more behind them.
"""

from __future__ import annotations

import errno
import logging
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO

from bootseer import faults
from bootseer.backends.interface import FILE_MODE
from bootseer.fsmount.record import SPOOLS
from bootseer.fsmount.refusals import refusal
from bootseer.stripefs.files.readahead import ReadAhead, in_order
from bootseer.stripefs.files.reader import ChunkFile, refuse_unfinished
from bootseer.stripefs.files.stripe import StripeLost
from bootseer.stripefs.files.writer import StripeWriter, Written
from bootseer.stripefs.layout import Pointer
from bootseer.stripefs.store import StripeFS

_log = logging.getLogger(__name__)

STREAM_FROM = 64 << 20
_PIECE = 4 << 20


class Spools:
    """The room that the spools of one mount share: ``limit`` bytes in ``folder``, which only this user can enter."""

    def __init__(self, folder: Path, limit: int = SPOOLS) -> None:
        self.folder, self._left = folder, limit
        self._lock = threading.Lock()

    def take(self, size: int) -> bool:
        """``size`` bytes more (fewer, when negative); False: there is no room."""
        with self._lock:
            if size > self._left:
                return False
            self._left -= size
            return True


class Unfinished:
    """The file at ``path``: empty, or with the bytes of ``base``, which stay and can only be added to.

    Errors are `OSError` with the number for the process that writes, and those of the store. Any thread may call.
    """

    def __init__(
        self, fs: StripeFS, path: str, spools: Spools, *, width: int, unit: int, base: ChunkFile | None = None
    ) -> None:
        self.path = path
        self.mode = FILE_MODE
        """Of what is sent to the store."""
        self.changed = base is None
        """It is not what the store has at its path."""
        self.written = False
        """Its bytes have changed since somebody made this False."""
        self.failed = False
        """It is being published, or could not be and nothing was written since."""
        self._fs, self._spools, self._base, self._shape = fs, spools, base, (width, unit)
        self._end = self._fixed = base.size if base else 0
        self._fetching = 0  # bytes that are stored, while they are fetched so that more can be added
        self._spool: IO[bytes] | None = None
        self._spooled = 0  # bytes of the spools' room
        self._spoolable = True
        self._writer: StripeWriter | None = None
        self._streamed = 0
        self._hold = False  # bytes may change that were not sent yet, or have changed: send them at the end
        self._broken = self._told = False
        self.lock = threading.RLock()
        """Held while anything changes; who takes it keeps the file from being published."""

    @property
    def size(self) -> int:
        return max(self._end, self._fetching)

    def write(self, offset: int, data: memoryview) -> None:
        """Put ``data`` at ``offset``; a gap before it is filled with zeros."""
        with self.lock:
            self._begin(offset)
            if offset > self.size:
                self._extend(offset)
            self._put(offset, data)
            self._stream()

    def truncate(self, size: int) -> None:
        """Cut it to nothing, or to where nothing is fixed yet, or fill it up with zeros."""
        with self.lock:
            if size == self.size:
                return
            if size == 0:
                self._clear()
            elif size > self.size:
                self._begin(size)
                self._extend(size)
            else:
                self._begin(size)
                if self._spool is None:
                    raise self._refuse(f"it cannot be cut to {size} bytes: they are not on this node any more")
                os.ftruncate(self._spool.fileno(), size)
                self._restart(size)
                self._end = size
            self.changed = self.written = True
            self.failed = False

    def read(self, ahead: ReadAhead, offset: int, size: int) -> bytes | memoryview | tuple[int, int]:
        """At most ``size`` bytes at ``offset``, fewer at the end."""
        with self.lock:
            size = min(size, self.size - offset)
            if size <= 0:
                return b""
            if self._base is None and self._spool is not None:
                return os.pread(self._spool.fileno(), size, offset)
            if self.changed:
                raise self._refuse("it is too large to be read before it is closed")
            base = self._base or self._reopen()
        return ahead.read(base, offset, size)

    def publish(self, before: Callable[[StripeWriter, Pointer | None], None]) -> Written:
        """Let it appear at its path, as it is now. ``before`` is called with the writer when all is stored."""
        with self.lock:
            self._check()
            try:
                return self._publish(before)
            except StripeLost as exc:
                if self._spool is None:
                    raise
                _log.warning("storing %s again from its beginning: %s", self.path, exc)
                return self._publish(before)

    def discard(self) -> None:
        """Give up what is not published; the spool goes."""
        with self.lock:
            self._abandon()
            self._drop_spool()
            self._broken = True

    # -- with the lock ------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._broken:
            raise refusal(errno.EIO, self.path)

    def _refuse(self, why: str) -> OSError:
        if not self._told:
            self._told = True
            _log.warning("%s: %s", self.path, why)
        return refusal(errno.EOPNOTSUPP, self.path)

    def _begin(self, offset: int) -> None:
        """Before bytes from ``offset`` on change: refuse what is fixed, have in the spool what comes before them."""
        self._check()
        if offset < self._fixed:
            raise self._refuse(f"byte {offset} was published already, a striped file can only be added to")
        if self.size and self._spool is None and self._writer is None:
            base = self._base or self._reopen()
            refuse_unfinished(base)
            self._end, self._fetching = 0, base.size
            try:
                for piece in in_order(base):
                    self._put(self._end, memoryview(piece))
                    self._stream()
            except BaseException:
                self._abandon()
                self._drop_spool()
                self._end, self._spoolable = base.size, True
                self.changed = self.written = self._broken = False
                raise
            finally:
                self._fetching = 0
        self._base = None

    def _reopen(self) -> ChunkFile:
        file = self._fs.open(self.path)
        if file.size != self._end:
            raise refusal(errno.ESTALE, self.path)
        return file

    def _put(self, offset: int, data: memoryview) -> None:
        """To the spool, and to the store where that comes next; ``offset`` is at most the size."""
        end = offset + len(data)
        if self._spoolable and not self.keep(offset, data):
            if offset != self._end:
                self._broken = True
                raise refusal(errno.ENOSPC, self.path)
            self._leave_spool()
        if self._spool is None:
            if offset != self._end:
                raise self._refuse(f"byte {offset} is stored already, a file this large is written in order")
            self._send(data)
        else:
            if offset < self._streamed:
                self._restart(offset)
            elif offset == self._streamed and self._writer is not None:
                self._send(data)
        self._end = max(self._end, end)
        self.changed = self.written = True
        self.failed = False

    def keep(self, offset: int, data: memoryview) -> bool:
        """Put ``data`` into the spool; False: it has no room."""
        more = max(0, offset + len(data) - self._spooled)
        if not self._spools.take(more):
            return False
        self._spooled += more
        try:
            faults.point("fsmount.spool")
            if self._spool is None:
                self._spool = tempfile.TemporaryFile(dir=self._spools.folder, buffering=0)  # noqa: SIM115
            done = 0
            while done < len(data):
                done += os.pwrite(self._spool.fileno(), data[done:], offset + done)
        except OSError as exc:
            _log.warning("the spool of %s in %s: %s", self.path, self._spools.folder, exc.strerror)
            return False
        return True

    def _extend(self, size: int) -> None:
        """Zeros up to ``size``."""
        if self._spoolable and self._spools.take(max(0, size - self._spooled)):
            self._spooled = max(self._spooled, size)
            try:
                if self._spool is None:
                    self._spool = tempfile.TemporaryFile(dir=self._spools.folder, buffering=0)  # noqa: SIM115
                os.ftruncate(self._spool.fileno(), size)
            except OSError:
                self._broken = True
                raise
            self._end, self._hold = size, True  # who makes room so may fill it later
            return
        if size - self._end > SPOOLS:
            raise refusal(errno.EFBIG, self.path)
        while self._end < size:
            self._put(self._end, memoryview(bytes(min(_PIECE, size - self._end))))

    def _stream(self) -> None:
        """Send what is in the spool and was not sent, when the file is large enough for that."""
        if self._spool is not None and not self._hold and self._end >= STREAM_FROM:
            self._send_spooled()

    def _send_spooled(self) -> None:
        while self._spool is not None and self._streamed < self._end:
            length = min(_PIECE, self._end - self._streamed)
            data = os.pread(self._spool.fileno(), length, self._streamed)
            if len(data) != length:
                self._broken = True
                raise refusal(errno.EIO, self.path)
            self._send(memoryview(data))

    def _send(self, data: memoryview) -> None:
        if self._writer is None:
            self._fs.refuse_committed(self.path)
            width, unit = self._shape
            self._writer = self._fs.create(self.path, width=width, unit=unit, mode=self.mode, before=self._before)
        try:
            self._streamed += self._writer.write(data)
        except BaseException:
            self._abandon()
            self._broken = self._broken or self._spool is None
            raise

    def _before(self, pointer: Pointer | None) -> None:
        assert self._writer is not None
        self._last(self._writer, pointer)

    def _publish(self, before: Callable[[StripeWriter, Pointer | None], None]) -> Written:
        self._last = before
        try:
            self._send_spooled()
            self._send(memoryview(b""))  # an empty file needs a writer, too
            assert self._writer is not None
            faults.point("fsmount.publish")
            written = self._writer.finish()
        except BaseException:
            self._abandon()
            self._broken = self._broken or self._spool is None
            raise
        self._writer, self._streamed, self._fixed = None, 0, self._end
        self.changed = self.failed = False
        return written

    def _restart(self, offset: int) -> None:
        """Bytes from ``offset`` on change: what was sent of them is void."""
        self._hold = True
        if self._streamed > offset:
            self._abandon()

    def _abandon(self) -> None:
        writer, self._writer, self._streamed = self._writer, None, 0
        if writer is not None:
            writer.abandon()

    def _leave_spool(self) -> None:
        """Go on without the spool: all of it goes to the store now."""
        _log.warning(
            "%s goes on without a spool on this node: it is written in order, and read when it is closed", self.path
        )
        self._send_spooled()
        self._spoolable = False  # not sooner: when that fails, the spool still is what has the bytes
        self._drop_spool()

    def _drop_spool(self) -> None:
        spool, self._spool = self._spool, None
        if spool is not None:
            spool.close()
        self._spools.take(-self._spooled)
        self._spooled = 0

    def _clear(self) -> None:
        self._abandon()
        self._drop_spool()
        self._base, self._spoolable, self._hold, self._broken = None, True, False, False
        self._end = self._fixed = 0
