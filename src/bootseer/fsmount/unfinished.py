"""A file that is being written through a mount: its bytes until they are published.

They lie in a `Spool` as long as the spools of the mount have room: there they can be read back and changed. From
`STREAM_FROM` bytes on they are also sent to the store as they come, so that little is left to do at the close. When
the spool must go, the file goes on without: its bytes come in order then, and are not read back.

What was published before does not change: the next version has the same bytes, and more behind them. What is in the
spool can, also when it was published: a mapping is written when its descriptor is closed already."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable

from bootseer import faults
from bootseer.backends.interface import FILE_MODE, entry_at
from bootseer.fsmount.record import SPOOLS
from bootseer.fsmount.refusals import refusal
from bootseer.fsmount.spool import Spool, Spools
from bootseer.stripefs.checkpoint.commit import digest_of_open
from bootseer.stripefs.files.readahead import ReadAhead, in_order
from bootseer.stripefs.files.reader import ChunkFile, refuse_unfinished
from bootseer.stripefs.files.stripe import StripeLost
from bootseer.stripefs.files.writer import StripeWriter, Written
from bootseer.stripefs.layout import Pointer
from bootseer.stripefs.store import StripeFS

_log = logging.getLogger(__name__)

STREAM_FROM = 64 << 20
_PIECE = 4 << 20


class Unfinished:
    """The file at ``path``: empty, or with the bytes of ``base``, which stay and can only be added to. Errors are
    `OSError` with the number for the process that writes, and those of the store. Any thread may call."""

    def __init__(
        self,
        fs: StripeFS,
        path: str,
        spools: Spools,
        *,
        width: int,
        unit: int,
        base: ChunkFile | None = None,
        replaces: str = "",
    ) -> None:
        """``replaces``: `content_of` what is at ``path``, "" for nothing."""
        self.path = path
        self.replaces = base.content if base else replaces
        self.exclusive = False
        """Not even the same bytes of another writer are to be there when it is published first."""
        self.mode = FILE_MODE
        """Of what is sent to the store."""
        self.changed = base is None
        """It is not what the store has at its path."""
        self.written = False
        """Its bytes have changed since somebody made this False."""
        self.failed = False
        """It is being published, or could not be and nothing was written since."""
        self.content = ""
        """`content_of` what was published last, also when its attributes have changed since; "": nothing was."""
        self._fs, self._base, self._shape = fs, base, (width, unit)
        self._end = self._fixed = base.size if base else 0
        self._fetching = 0  # bytes that are stored, while they are fetched so that more can be added
        self._spool, self._in_order = Spool(spools), False  # without the spool from now on
        self._writer: StripeWriter | None = None
        self._streamed = 0
        self._hold = False  # bytes may change that were not sent yet, or have changed: send them at the end
        self._broken = self._told = False
        self._digest = ""
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
                if not self._spool.used:
                    raise self._refuse(f"it cannot be cut to {size} bytes: they are not on this node any more")
                self._spool.cut(size)
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
            if self._base is None and self._spool.used:
                return self._spool.read(offset, size)
            if self.changed:
                raise self._refuse("it is too large to be read before it is closed")
            base = self._base or self._reopen()
        return ahead.read(base, offset, size)

    def publish(self, before: Callable[[StripeWriter, Pointer | None], str]) -> Written:
        """Let it appear at its path, as it is now. ``before`` is called with the writer when all is stored, and gives
        `content_of` what will appear."""
        with self.lock:
            self._check()
            try:
                return self._publish(before)
            except StripeLost as exc:
                if not self._spool.used:
                    raise
                _log.warning("storing %s again from its beginning: %s", self.path, exc)
                return self._publish(before)

    def discard(self) -> None:
        """Give up what is not published; the spool goes."""
        with self.lock:
            self._abandon()
            self._spool.drop()
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
        """Before bytes from ``offset`` on change: refuse what is only in the store, have what comes before them in the
        spool."""
        self._check()
        if offset < self._fixed:
            if not self._spool.used:
                raise self._refuse(f"byte {offset} was published already, a striped file can only be added to")
            self._hold = True
        if self.size and not self._spool.used and self._writer is None:
            base = self._base or self._reopen()
            refuse_unfinished(base)
            self._end, self._fetching = 0, base.size
            try:
                for piece in in_order(base):
                    self._put(self._end, memoryview(piece))
                    self._stream()
            except BaseException:
                self._abandon()
                self._spool.drop()
                self._end, self._in_order = base.size, False
                self.changed = self.written = self._broken = False
                raise
            finally:
                self._fetching = 0
        self._base = None

    def _reopen(self) -> ChunkFile:
        """What was published last. ESTALE when another writer has replaced it since by other bytes: they are not to be
        mixed with these."""
        file = self._fs.open(self.path)
        if file.size != self._fixed or (file.content != self.content and digest_of_open(file) != self._digest):
            file.close()
            raise refusal(errno.ESTALE, self.path)
        self.replaces = file.content
        return file

    def _put(self, offset: int, data: memoryview) -> None:
        """To the spool, and to the store where that comes next; ``offset`` is at most the size."""
        end = offset + len(data)
        if not self._in_order and not self._keep(offset, data):
            if offset != self._end:
                self._broken = True
                raise refusal(errno.ENOSPC, self.path)
            self._leave_spool()
        if not self._spool.used:
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

    def _keep(self, offset: int, data: memoryview) -> bool:
        """Put ``data`` into the spool; False: it cannot take it."""
        try:
            return self._spool.keep(offset, data)
        except OSError as exc:
            _log.warning("the spool of %s in %s: %s", self.path, self._spool.folder, exc.strerror)
            return False

    def _extend(self, size: int) -> None:
        """Zeros up to ``size``."""
        try:
            extended = not self._in_order and self._spool.extend(size)
        except OSError:
            self._broken = True
            raise
        if extended:
            self._end, self._hold = size, True  # who makes room so may fill it later
            return
        if size - self._end > SPOOLS:
            raise refusal(errno.EFBIG, self.path)
        while self._end < size:
            self._put(self._end, memoryview(bytes(min(_PIECE, size - self._end))))

    def _stream(self) -> None:
        """Send what is in the spool and was not sent, when the file is large enough for that."""
        if self._spool.used and not self._hold and self._end >= STREAM_FROM:
            self._send_spooled()

    def _send_spooled(self) -> None:
        while self._spool.used and self._streamed < self._end:
            length = min(_PIECE, self._end - self._streamed)
            data = self._spool.read(self._streamed, length)
            if len(data) != length:
                self._broken = True
                raise refusal(errno.EIO, self.path)
            self._send(memoryview(data))

    def _send(self, data: memoryview) -> None:
        if self._writer is None:
            now = entry_at(self._fs.backend, self.path) if self._fixed and self.content else None
            if now is not None and now.version != self.content.partition("-")[2]:  # perhaps only its attributes are
                self._reopen().close()
            width, unit = self._shape
            self._writer = self._fs.create(
                self.path, width=width, unit=unit, mode=self.mode, before=self._before,
                known=self.replaces, exclusive=self.exclusive,
            )  # fmt: skip
        try:
            self._streamed += self._writer.write(data)
        except BaseException:
            self._abandon()
            self._broken = self._broken or not self._spool.used
            raise

    def _before(self, pointer: Pointer | None) -> None:
        assert self._writer is not None
        self._coming = self._last(self._writer, pointer)

    def _publish(self, before: Callable[[StripeWriter, Pointer | None], str]) -> Written:
        self._last = before
        try:
            self._send_spooled()
            self._send(memoryview(b""))  # an empty file needs a writer, too
            assert self._writer is not None
            faults.point("fsmount.publish")
            written = self._writer.finish()
        except BaseException:
            self._abandon()
            self._broken = self._broken or not self._spool.used
            raise
        self._writer, self._streamed, self._fixed, self.content = None, 0, self._end, self._coming
        self._digest, self.replaces, self.exclusive = written.digest, self._coming, False
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
        self._in_order = True  # not sooner: when that fails, the spool still is what has the bytes
        self._spool.drop()

    def _clear(self) -> None:
        self._abandon()
        self._spool.drop()
        self._base, self._in_order, self._hold, self._broken = None, False, False, False
        self._end = self._fixed = 0
