"""Passthrough: files that the kernel reads from a local file, without asking the server (Linux 6.9, CAP_SYS_ADMIN).

The kernel wants all open descriptors of one inode alike: the first open of a node decides for those that come while it,
or one of them, is open. A server that takes over must answer with the number that the one before gave a node, as
descriptors of it may still be open. It does not know of how many, so such a number stays until the mount ends."""

from __future__ import annotations

import errno
import fcntl
import logging
import struct
import threading
from collections.abc import Callable, Mapping

_log = logging.getLogger(__name__)
_MAP = struct.Struct("=iIQ")  # fd flags padding
_OPEN, _CLOSE = 0x4010E501, 0x4004E502  # FUSE_DEV_IOC_BACKING_OPEN, FUSE_DEV_IOC_BACKING_CLOSE
_EARLIER = -1
"""Stands for the handles of servers before this one."""


class _Node:
    def __init__(self, fh: int, backing: int = 0) -> None:
        self.backing = backing
        """The kernel's number of its backing file; 0: it is served."""
        self.handles = {fh}
        self.decided = threading.Event()


class Backings:
    """The nodes of one mount that are open. ``passed``, ``served``: how many opens there were of each kind. ``tell`` is
    called with a node and its backing number before the kernel gets that, and with 0 when it is given back."""

    def __init__(self, tell: Callable[[int, int], None]) -> None:
        self.enabled = False
        """Whether the kernel has granted it."""
        self.passed = self.served = 0
        self._tell = tell
        self._lock = threading.Lock()
        self._nodes: dict[int, _Node] = {}

    def resume(self, known: Mapping[int, int]) -> None:
        """Go on after another server: ``known`` has the backing number of each node that it had passed through."""
        self.enabled = True
        for node, backing in known.items():
            self._nodes[node] = held = _Node(_EARLIER, backing)
            held.decided.set()

    def open(self, device: int, node: int, fh: int, local: Callable[[int], int | None]) -> int:
        """The backing number with which the open of ``fh`` is to be answered; 0: it is served. ``local`` gives for a
        handle the descriptor of the local file that has all of its bytes; other opens of the node wait for it."""
        with self._lock:
            known = self._nodes.get(node)
            first = known is None
            if known is None:
                known = self._nodes[node] = _Node(fh)
            known.handles.add(fh)
        if first:
            try:
                fd = local(fh) if self.enabled else None
                if fd is not None and (backing := self._backing(device, fd)):
                    try:
                        self._tell(node, backing)
                    except BaseException:
                        _give_back(device, backing)
                        raise
                    known.backing = backing
            except BaseException:  # the open fails: no release of it will come
                self.release(device, node, fh)
                raise
            finally:
                known.decided.set()
        known.decided.wait()
        with self._lock:
            self.passed += known.backing > 0
            self.served += known.backing == 0
        return known.backing

    def release(self, device: int, node: int, fh: int) -> None:
        with self._lock:
            known = self._nodes.get(node)
            if known is None:
                return
            known.handles.discard(fh)
            if known.handles:
                return
            del self._nodes[node]
        if known.backing:
            self._tell(node, 0)
            _give_back(device, known.backing)

    def _backing(self, device: int, fd: int) -> int:
        try:
            return int(fcntl.ioctl(device, _OPEN, bytearray(_MAP.pack(fd, 0, 0))))
        except OSError as exc:
            if exc.errno in (errno.EPERM, errno.ELOOP, errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL):
                self.enabled = False
            _log.warning("files are read by the server, as the kernel does not read them by itself: %s", exc.strerror)
            return 0


def _give_back(device: int, backing: int) -> None:
    try:
        fcntl.ioctl(device, _CLOSE, struct.pack("=I", backing))
    except OSError as exc:  # the connection has ended
        _log.debug("backing file %d: %s", backing, exc)
