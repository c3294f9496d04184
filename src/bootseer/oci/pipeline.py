"""Layers as streams of plain tar bytes, several of them on their way at once.

Concurrency: layers of a registry are downloaded in order by a few *download* threads into unlinked spool files; for the
layer being applied one *inflate* thread reads its spool (while it may still grow) and one *hash* thread checks the diff
id; the caller, a single thread, takes the chunks in order. All hand over through bounded queues and watch one stop
event, so leaving the context ends them; downloads end by the registry client's progress deadlines."""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from bootseer.closing import Closing
from bootseer.errors import DataError, FullError, from_os_error
from bootseer.oci.image import Image
from bootseer.oci.inflate import inflate
from bootseer.oci.registry import Registry

_CHUNK = 1 << 20
_DEPTH = 6
_STREAMS = 3
_AHEAD = 64
"""Layers that are downloaded before their turn: each is an open file, of which a process may often have 1024."""
_POLL = 0.2
Progress = Callable[[str, int, int], None]
"""Called as ``progress(step, done, total)`` in bytes (total 0: unknown), from any thread; cheap and never raising.
Steps, which overlap: ``download`` (compressed) and, of a conversion, ``convert`` (data of the tree), ``publish`` (as
stored)."""


class Stopped(Exception):
    """The pipeline is being closed: the thread that sees this ends quietly."""


class Layers(Closing):
    """Opens an image's layers for reading in order, downloading some ahead into files under ``spool``. `FullError` when
    the disk of ``spool`` has not room for these and ``more`` bytes."""

    def __init__(self, image: Image, spool: Path, *, more: int = 0, progress: Progress | None = None) -> None:
        self._image = image
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._spools: list[_Spool] = []
        self._progress = progress
        self._total = sum(layer.size for layer in image.layers)
        self._done = 0
        self._lock = threading.Lock()
        self._room = threading.Semaphore(_AHEAD)
        self.waited = 0.0
        """Seconds that `apply` has waited for bytes."""
        remote = isinstance(image.source, Registry)
        check_space(spool, more + (self._total if remote else 0), f"the layers of {image.ref}")
        if remote:
            self._spools = [_Spool(spool, self._stop) for _ in image.layers]
            self._next = iter(range(len(image.layers)))
            for _ in range(min(_STREAMS, len(image.layers))):
                self._start(self._download, "download")

    def apply(self, index: int, put: Callable[[Iterator[bytes]], None], doing: str) -> None:
        """Give the plain tar bytes of layer ``index`` to ``put``, which consumes them; call in order. Raises
        `DataError` naming the layer when its digest, size, compression or diff id is wrong, and for what ``put``
        raises: ``doing`` is a verb."""
        digest = self._image.layers[index].digest
        what = f"layer {digest} of {self._image.ref}"
        try:
            put(self._tar_chunks(index, what))
        except DataError as exc:
            raise exc if digest in exc.message else DataError(f"{what} is corrupt: {exc.message}") from None
        except OSError as exc:
            raise from_os_error(exc, f"{doing} {what}") from exc
        if self._spools:
            self._spools[index].close()
            self._room.release()

    def _tar_chunks(self, index: int, what: str) -> Iterator[bytes]:
        source = self._spools[index].chunks() if self._spools else self._counted(self._image.layer_chunks(index))
        wanted = self._image.config.rootfs.diff_ids[index]
        chunks = self._ahead(_with_diff_id(self._ahead(inflate(source, what), "inflate"), wanted, what), "hash")
        while True:
            began = time.monotonic()
            chunk = next(chunks, None)
            self.waited += time.monotonic() - began
            if chunk is None:
                return
            yield chunk

    def _ahead(self, chunks: Iterator[bytes], name: str) -> Iterator[bytes]:
        """The same chunks, which a thread takes a few of ahead."""
        out: queue.Queue[bytes | BaseException | None] = queue.Queue(_DEPTH)
        self._start(self._pump, name, chunks, out)
        while not self._stop.is_set():
            try:
                item = out.get(timeout=_POLL)
            except queue.Empty:
                continue
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            yield item
        raise Stopped

    def _pump(self, chunks: Iterator[bytes], out: queue.Queue[bytes | BaseException | None]) -> None:
        last: BaseException | None = None
        try:
            for chunk in chunks:
                self._give(out, chunk)
        except BaseException as exc:
            last = exc
        with contextlib.suppress(Stopped):
            self._give(out, last)

    def _give(self, out: queue.Queue[bytes | BaseException | None], item: bytes | BaseException | None) -> None:
        while not self._stop.is_set():
            with contextlib.suppress(queue.Full):
                out.put(item, timeout=_POLL)
                return
        raise Stopped

    def close(self) -> None:
        """Stop every thread. A download that waits for its server is left to end at its own deadline, unseen."""
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=1.0)
        for spool in self._spools:
            spool.close()

    def _start(self, target: Callable[..., None], name: str, *args: object) -> None:
        thread = threading.Thread(target=target, args=args, name=f"oci-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _counted(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
        for chunk in chunks:
            if self._stop.is_set():
                raise Stopped
            with self._lock:
                self._done += len(chunk)
                done = self._done
            if self._progress:
                self._progress("download", done, self._total)
            yield chunk

    def _download(self) -> None:
        while True:
            while not self._room.acquire(timeout=_POLL):
                if self._stop.is_set():
                    return
            with self._lock:
                index = next(self._next, None)
            if index is None:
                return
            spool = self._spools[index]
            try:
                for chunk in self._counted(self._image.layer_chunks(index)):
                    spool.append(chunk)
                spool.finish(None)
            except Stopped:
                return
            except OSError as exc:
                spool.finish(from_os_error(exc, f"spool layer {self._image.layers[index].digest}"))
            except BaseException as exc:
                spool.finish(exc)


def check_space(folder: Path, wanted: int, what: str) -> None:
    """`FullError` when less than ``wanted`` bytes are free around ``folder``."""
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize
    if free < wanted:
        raise FullError(
            f"no space for {what}: {folder} has {free / 1e9:.1f} GB free, {wanted / 1e9:.1f} GB are needed",
            hint="free some space there or choose another place (image convert: --work-dir)",
        )


class _Spool:
    """An unlinked file that one thread appends to and another reads from the start, waiting for more."""

    def __init__(self, folder: Path, stop: threading.Event) -> None:
        self._folder = folder
        self._file: IO[bytes] | None = None
        self._size = 0
        self._finished = False
        self._error: BaseException | None = None
        self._stop = stop
        self._changed = threading.Condition()

    def append(self, chunk: bytes) -> None:
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 - lives as long as the spool
        view = memoryview(chunk)
        at = self._size
        while view:
            wrote = os.pwrite(self._file.fileno(), view, at)
            view, at = view[wrote:], at + wrote
        with self._changed:
            self._size = at
            self._changed.notify_all()

    def finish(self, error: BaseException | None) -> None:
        with self._changed:
            self._finished, self._error = True, error
            self._changed.notify_all()

    def chunks(self) -> Iterator[bytes]:
        at = 0
        while True:
            with self._changed:
                while self._size == at and not self._finished:
                    if self._stop.is_set():
                        raise Stopped
                    self._changed.wait(_POLL)
                if self._size == at:
                    if self._error:
                        raise self._error
                    return
                upto = self._size
                assert self._file is not None
            while at < upto:
                chunk = os.pread(self._file.fileno(), min(_CHUNK, upto - at), at)
                at += len(chunk)
                yield chunk

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _with_diff_id(chunks: Iterator[bytes], wanted: str, what: str) -> Iterator[bytes]:
    hasher = hashlib.sha256()
    for chunk in chunks:
        hasher.update(chunk)
        yield chunk
    if f"sha256:{hasher.hexdigest()}" != wanted:
        raise DataError(f"{what} unpacks to other bytes than the image configuration says (diff id)")
