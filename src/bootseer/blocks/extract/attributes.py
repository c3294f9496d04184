"""What an extracted file gets beside its contents: mode, time and extended attributes, but no rights.

A tree is made by others, and a folder is read by programs that trust the owner of what is in it. So all belongs to who
extracts, nothing has set-uid or set-gid, and of the extended attributes only those of ``user.`` are kept: neither
capabilities nor access lists. Any thread; one lock guards the counts of what was left out."""

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
from collections import Counter

from bootseer.erofs import Inode, Reader
from bootseer.errors import from_os_error

log = logging.getLogger(__name__)

_KEPT = b"user."
_OVERLAY = b"trusted.overlay."
_NO_RIGHTS = (errno.EPERM, errno.EACCES, errno.EINVAL, errno.ENOTSUP)
_NO_FIT = (errno.ERANGE, errno.E2BIG, errno.ENOSPC, errno.ENAMETOOLONG)
"""Of setxattr(2): names of more than 255 bytes, values of more than 64 KiB, and on ext4 more than a block in all."""
_TOO_LARGE = "large extended attributes"


class Attributes:
    """Those of the files of ``reader`` in ``dest``. What cannot be kept is counted, see `report`."""

    def __init__(self, reader: Reader, dest: bytes) -> None:
        self._reader = reader
        self._dest = os.fsdecode(dest)
        self._lock = threading.Lock()
        self.lost: Counter[str] = Counter()

    def put_on(self, what: int | bytes, inode: Inode, path: bytes) -> None:
        """All of ``inode`` on a file (its descriptor or path), in an order in which none undoes another."""
        try:
            self._put_on(what, inode, path)
        except OSError as exc:
            raise from_os_error(exc, f"set the attributes of {_show(path)} in {self._dest}") from exc

    def _put_on(self, what: int | bytes, inode: Inode, path: bytes) -> None:
        follow = isinstance(what, int)
        mode = stat.S_IMODE(inode.mode) & ~(stat.S_ISUID | stat.S_ISGID)
        if os.geteuid() and (inode.uid, inode.gid) != (os.geteuid(), os.getegid()):
            self.lose("owners")
        for name, value in self._reader.xattrs(inode).items():
            if name.startswith(_KEPT):
                try:
                    os.setxattr(what, name, value, follow_symlinks=follow)
                except OSError as exc:
                    if exc.errno not in (*_NO_FIT, *_NO_RIGHTS):
                        raise
                    self.lose(*((_TOO_LARGE, path) if exc.errno in _NO_FIT else ("extended attributes",)))
            elif not name.startswith(_OVERLAY):
                self.lose("extended attributes")
        if not inode.is_symlink:
            os.chmod(what, mode)
        os.utime(what, ns=(inode.mtime_ns, inode.mtime_ns), follow_symlinks=follow)

    def lose(self, what: str, path: bytes | None = None) -> None:
        """``what``, a plural, is not kept once more; of that of ``path`` the first is named at once."""
        with self._lock:
            self.lost[what] += 1
            if path is not None and self.lost[what] == 1:
                log.warning("%s of %s do not fit in this file system", what, _show(path))

    def report(self) -> None:
        """Say what was left out."""
        if large := self.lost.pop(_TOO_LARGE, 0):
            log.warning("extracted %s without %d %s", self._dest, large, _TOO_LARGE)
        if self.lost:
            counts = ", ".join(f"{count} {what}" for what, count in sorted(self.lost.items()))
            log.warning("extracted %s without %s", self._dest, counts)


def _show(path: bytes) -> str:
    return repr(os.fsdecode(path))
