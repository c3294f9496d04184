"""The demo's site: one shared folder and one package index, which a node reaches over one link of limited rate.

The folder is a FUSE file system of this process, the index a web server of this process; both count and delay what they
pass on in the same `Link`. What a node writes to the shared folder (snapshots, traces) lies in an overlay of its own
until the end of the start, which puts it where the next node reads it through its link."""

from __future__ import annotations

import contextlib
import functools
import http.server
import math
import os
import shutil
import stat
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from bootseer.kernel import fuse, mount
from bootseer.kernel.fuse import ROOT, Attr, Context, DirEntry, Entry, Operations, ReadResult

_BURST_SECONDS = 0.005
_PIECE = 64 << 10


class Link:
    """A link of ``rate_mbit`` Mbit/s towards the node, for all that it reads together. ``bytes``: passed on so far."""

    def __init__(self, rate_mbit: float) -> None:
        self._rate, self._free, self._lock = rate_mbit * 1e6 / 8, 0.0, threading.Lock()
        self.bytes = 0

    def carry(self, size: int) -> None:
        """Return when the last of ``size`` bytes has arrived."""
        with self._lock:
            now = time.monotonic()
            self.bytes += size
            self._free = max(self._free, now - _BURST_SECONDS) + size / self._rate
            wait = self._free - now
        if wait > 0:
            time.sleep(wait)


class SharedFolder(Operations):
    """The folder ``root``, read-only, over ``link``."""

    def __init__(self, root: Path, link: Link) -> None:
        self._link = link
        self._paths = {ROOT: str(root)}
        self._nodes = {str(root): ROOT}
        self._sizes: dict[int, int] = {}
        self._lock = threading.Lock()

    def _node(self, path: str) -> int:
        with self._lock:
            node = self._nodes.setdefault(path, len(self._nodes) + 1)
            self._paths[node] = path
        return node

    def lookup(self, parent: int, name: str, ctx: Context) -> Entry:
        path = os.path.join(self._paths[parent], name)
        found = _attr(os.lstat(path))
        return Entry(self._node(path), found)

    def getattr(self, node: int, ctx: Context) -> Attr:
        return _attr(os.lstat(self._paths[node]))

    def readdir(self, node: int, ctx: Context) -> Iterable[DirEntry]:
        with os.scandir(self._paths[node]) as found:
            return [DirEntry(e.name, self._node(e.path), e.stat(follow_symlinks=False).st_mode) for e in found]

    def open(self, node: int, flags: int, ctx: Context) -> int:
        fh = os.open(self._paths[node], os.O_RDONLY | os.O_CLOEXEC)
        self._sizes[fh] = os.fstat(fh).st_size
        return fh

    def size(self, fh: int) -> int:
        return self._sizes[fh]

    def read(self, fh: int, offset: int, size: int, ctx: Context) -> ReadResult:
        self._link.carry(max(0, min(size, self._sizes[fh] - offset)))
        return fh, offset

    def release(self, fh: int, ctx: Context) -> None:
        del self._sizes[fh]
        os.close(fh)


def _attr(status: os.stat_result) -> Attr:
    return Attr(
        status.st_mode, status.st_size, status.st_nlink, status.st_mtime_ns, uid=status.st_uid, gid=status.st_gid
    )


class _Index(http.server.SimpleHTTPRequestHandler):
    """Files over the link of the site's present start."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # head and body are written apart: each answer would wait 40 ms

    def __init__(self, site: SharedSite, *args: Any, **options: Any) -> None:
        self._site = site
        super().__init__(*args, **options)

    def copyfile(self, source: Any, outputfile: Any) -> None:
        while piece := source.read(_PIECE):
            self._site.link.carry(len(piece))
            outputfile.write(piece)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class SharedSite:
    """The site of ``folder`` (with a ``store`` in it) and of the index ``wheels``, as a node sees it in ``work``: the
    folder at ``shared``, its store, writable, at ``store``, the index at the URL ``index``."""

    def __init__(self, folder: Path, wheels: Path, work: Path) -> None:
        self._folder, self._written = folder, work / "written"
        self._web = http.server.ThreadingHTTPServer(
            ("127.0.0.1", 0), functools.partial(_Index, self, directory=str(wheels))
        )
        self.index = f"http://127.0.0.1:{self._web.server_port}/simple"
        self.link = Link(math.inf)
        self.shared, self.store = work / "shared", work / "store"

    def __enter__(self) -> SharedSite:
        threading.Thread(target=self._web.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._web.shutdown()
        self._web.server_close()

    @contextlib.contextmanager
    def reached(self, link: Link) -> Iterator[None]:
        """Have a node reach it over ``link``; nothing of it is in the node's page cache before or afterwards."""
        upper, spare = self._written / "upper", self._written / "work"
        for path in (self.shared, self.store, upper, spare):
            path.mkdir(parents=True, exist_ok=True)
        self.link = link
        options = fuse.Options(name="bootseer-demo")
        with fuse.Server(SharedFolder(self._folder, link), self.shared, options=options):
            mount.mount_overlay([self.shared / "store"], self.store, upper=upper, work=spare)
            try:
                yield
            except BaseException:
                mount.unmount(self.store, lazy=True)  # what failed may still use it, and is what there is to say
                raise
            mount.unmount(self.store)
        self._collect()

    def _collect(self) -> None:
        """Move what the node wrote to its store into the site's folder."""
        upper = self._written / "upper"
        for path in sorted(upper.rglob("*")):
            there = self._folder / "store" / path.relative_to(upper)
            mode = path.lstat().st_mode
            if stat.S_ISDIR(mode):
                there.mkdir(exist_ok=True)
            elif stat.S_ISCHR(mode):  # how an overlay says that a file was removed
                there.unlink(missing_ok=True)
            else:
                os.replace(path, there)
        shutil.rmtree(self._written)
