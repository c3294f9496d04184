"""What an extracted file gets beside its contents: owner, extended attributes, mode with set-uid and set-gid, time.

As far as this process may: a file whose owner it cannot give loses set-uid and set-gid.

Concurrency: any thread; one lock guards the counts of what was left out.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
from collections import Counter

from bootseer.erofs import Inode, Reader
from bootseer.errors import doing

log = logging.getLogger(__name__)

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
        self._root = os.geteuid() == 0
        self._lock = threading.Lock()
        self._lost: Counter[str] = Counter()

    def put_on(self, what: int | bytes, inode: Inode, path: bytes) -> None:
        """All of ``inode`` on a file (its descriptor or path), in an order in which none undoes another."""
        with doing(f"set the attributes of {_show(path)} in {self._dest}"):
            self._put_on(what, inode, path)

    def _put_on(self, what: int | bytes, inode: Inode, path: bytes) -> None:
        follow = isinstance(what, int)
        mode = stat.S_IMODE(inode.mode)
        if self._root or (inode.uid, inode.gid) != (os.geteuid(), os.getegid()):
            try:
                os.chown(what, inode.uid, inode.gid, follow_symlinks=follow)
            except OSError as exc:
                self._tolerate(exc, "owners")
                mode &= ~(stat.S_ISUID | stat.S_ISGID)
        for name, value in self._reader.xattrs(inode).items():
            if not name.startswith(_OVERLAY):
                try:
                    os.setxattr(what, name, value, follow_symlinks=follow)
                except OSError as exc:
                    if exc.errno in _NO_FIT:
                        self.lose(_TOO_LARGE, path)
                    else:
                        self._tolerate(exc, "extended attributes")
        if not inode.is_symlink:
            os.chmod(what, mode)
        os.utime(what, ns=(inode.mtime_ns, inode.mtime_ns), follow_symlinks=follow)

    def _tolerate(self, exc: OSError, what: str) -> None:
        if exc.errno not in _NO_RIGHTS:
            raise exc
        self.lose(what)

    def lose(self, what: str, path: bytes | None = None) -> None:
        """``what``, a plural, is not kept once more; of that of ``path`` the first is named at once."""
        with self._lock:
            self._lost[what] += 1
            if path is not None and self._lost[what] == 1:
                log.warning("%s of %s do not fit in this file system", what, _show(path))

    def report(self) -> None:
        """Say what was left out."""
        if large := self._lost.pop(_TOO_LARGE, 0):
            log.warning("extracted %s without %d %s", self._dest, large, _TOO_LARGE)
        if self._lost:
            counts = ", ".join(f"{count} {what}" for what, count in sorted(self._lost.items()))
            log.warning("extracted %s without %s: keeping these needs root", self._dest, counts)


def _show(path: bytes) -> str:
    return repr(os.fsdecode(path))
