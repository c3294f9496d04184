"""One file, read-only, on a mount that pyfuse3 serves: what bench/checkpoint compares mounts with.

    PYTHON -P peer_mounts.py pyfuse3 FILE MOUNTPOINT
    PYTHON -P peer_mounts.py hdfs-native hdfs://HOST:PORT/FILE MOUNTPOINT

``PYTHON`` is that of the environment that ``scripts/bench-peers fuse`` makes; nothing here needs bootseer. The server
is as small as the library allows. It ends when it is unmounted, or with SIGTERM.
"""

# mypy: ignore-errors

from __future__ import annotations

import errno
import os
import stat
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor

NAME = "file"
PIECE = 16 << 20
"""Bytes that one call of hdfs-native reads: a call looks for a DataNode and connects to it, so it is to be worth it."""


class LocalFile:
    """Reads of a local file, the kernel's page cache behind them."""

    def __init__(self, path):
        self._fd = os.open(path, os.O_RDONLY)
        self.size = os.fstat(self._fd).st_size

    def read(self, offset, size):
        return os.pread(self._fd, size, offset)


class HdfsFile:
    """Reads of one HDFS file through hdfs-native, in pieces, the next of which is fetched while one is served."""

    def __init__(self, url):
        import hdfs_native

        base, _, path = url.removeprefix("hdfs://").partition("/")
        self._reader = hdfs_native.Client(f"hdfs://{base}").read(f"/{path}")
        self.size = len(self._reader)
        self._pool = ThreadPoolExecutor(1)
        self._pieces: dict[int, Future] = {}
        self._lock = threading.Lock()

    def read(self, offset, size):
        size = max(0, min(size, self.size - offset))
        first, at = divmod(offset, PIECE)
        data = memoryview(self._piece(first).result())[at : at + size]
        if len(data) == size:
            return data
        return bytes(data) + bytes(self.read(offset + len(data), size - len(data)))

    def _piece(self, number):
        with self._lock:
            for wanted in (number, number + 1):
                if wanted not in self._pieces and wanted * PIECE < self.size:
                    length = min(PIECE, self.size - wanted * PIECE)
                    self._pieces[wanted] = self._pool.submit(self._reader.read_range, wanted * PIECE, length)
            for old in [key for key in self._pieces if not number - 1 <= key <= number + 1]:
                del self._pieces[old]
            return self._pieces[number]


def with_pyfuse3(file, mountpoint, *, waits):
    """``waits``: reads may wait for the network, so that they are made in threads."""
    import pyfuse3
    import trio

    def attributes(inode):
        entry = pyfuse3.EntryAttributes()
        entry.st_ino = inode
        entry.st_mode = stat.S_IFDIR | 0o755 if inode == pyfuse3.ROOT_INODE else stat.S_IFREG | 0o444
        entry.st_size = 0 if inode == pyfuse3.ROOT_INODE else file.size
        entry.entry_timeout = entry.attr_timeout = 3600
        return entry

    class Operations(pyfuse3.Operations):
        async def getattr(self, inode, ctx=None):
            return attributes(inode)

        async def lookup(self, parent, name, ctx=None):
            if name != NAME.encode():
                raise pyfuse3.FUSEError(errno.ENOENT)
            return attributes(pyfuse3.ROOT_INODE + 1)

        async def open(self, inode, flags, ctx):
            return pyfuse3.FileInfo(fh=inode, direct_io=False, keep_cache=False)

        async def read(self, fh, off, size):
            if waits:
                return await trio.to_thread.run_sync(file.read, off, size)
            return file.read(off, size)

    pyfuse3.init(Operations(), mountpoint, {*pyfuse3.default_options, "fsname=peer"})
    try:
        trio.run(pyfuse3.main)
    finally:
        pyfuse3.close()


def main():
    kind, source, mountpoint = sys.argv[1:]
    if kind == "pyfuse3":
        with_pyfuse3(LocalFile(source), mountpoint, waits=False)
    else:
        with_pyfuse3(HdfsFile(source), mountpoint, waits=True)


if __name__ == "__main__":
    main()
