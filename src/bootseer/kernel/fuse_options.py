"""What is asked of the kernel for a FUSE mount (`Options`), and what it granted (`Negotiated`)."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass

from bootseer.errors import DataError
from bootseer.kernel import _fuse_wire as wire

_log = logging.getLogger(__name__)
MAX_READ = 1 << 20
"""Largest read request."""
_BACKGROUND = 64
"""Readahead requests in flight."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """How the kernel treats the mount. Sizes in bytes, times in seconds."""

    name: str = "bootseer"
    """Shown in the mount table, as ``fuse.<name>``."""
    max_readahead: int = 128 << 10
    """Readahead of buffered reads. More than 128 KiB is set through sysfs after the mount, which needs root."""
    entry_timeout: float = 3600.0
    """How long the kernel believes a name."""
    attr_timeout: float = 3600.0
    """How long the kernel believes attributes."""
    allow_other: bool = False
    """Other users may use it; without root this needs ``user_allow_other`` in /etc/fuse.conf."""
    keep_cache: bool = True
    """Pages survive the close of a file (right for bytes that never change)."""
    direct_io: bool = False
    """Reads bypass the page cache. Not for a file under EROFS, which needs its pages."""


@dataclass(frozen=True)
class Negotiated:
    """What the kernel granted in INIT."""

    kernel_minor: int
    flags: frozenset[str]
    max_readahead: int

    def encode(self) -> bytes:
        """For the process that may have to serve the mount after this one."""
        return json.dumps([self.kernel_minor, sorted(self.flags), self.max_readahead]).encode()

    @classmethod
    def decode(cls, data: bytes) -> Negotiated:
        """Raises `DataError` for anything but what `encode` gave."""
        try:
            minor, flags, readahead = json.loads(data)
            return cls(int(minor), frozenset(map(str, flags)), int(readahead))
        except (ValueError, TypeError) as exc:
            raise DataError("the note of what FUSE negotiated is not understood") from exc


def negotiate(request: bytearray, options: Options) -> tuple[Negotiated | None, bytes]:
    """What to grant, and the body of the answer, for an INIT request with its header; None where the kernel's protocol
    is too old."""
    major, minor, readahead, offered = wire.INIT_IN.unpack_from(request, 40)
    if major != wire.MAJOR or minor < wire.MINOR_MIN:
        _log.error("the kernel speaks FUSE %d.%d", major, minor)
        return None, b""
    extended = offered & wire.INIT_EXT
    if extended:
        offered |= wire.INIT_IN_FLAGS2.unpack_from(request, 40 + wire.INIT_IN.size)[0] << 32
    granted = {name: bit for name, bit in wire.INIT_FLAGS.items() if offered & bit}
    flags = sum(granted.values()) | extended
    readahead = min(readahead, options.max_readahead)
    max_pages = max(1, MAX_READ // os.sysconf("SC_PAGE_SIZE"))
    body = wire.INIT_OUT.pack(
        *(7, min(minor, wire.MINOR_WANTED), readahead, flags & 0xFFFFFFFF, _BACKGROUND, _BACKGROUND * 3 // 4),
        *(4096, 1, max_pages, 0, flags >> 32, *[0] * 7),
    )
    return Negotiated(minor, frozenset(granted), readahead), body
