"""The block server: one process per lazy tree on a node, serving its data file through FUSE.

Started by ``tree.mount`` as ``python -m bootseer.blocks.server STATE_FOLDER READY_FD`` with its spec in
``STATE_FOLDER/spec.json``. Threads: the FUSE workers read, the fetcher's threads fetch, one thread answers the control
socket, one persists the bitmap, one loads the profile; the main thread waits for the end of the mount or of the
recording. The process ends when its FUSE mount does.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from bootseer.blocks import profiles, standby
from bootseer.blocks.cache import CacheFile
from bootseer.blocks.control import ControlServer, Request, TreeStatus
from bootseer.blocks.fetch import Fetcher
from bootseer.blocks.lazyfile import LazyFile
from bootseer.blocks.manifest import localize
from bootseer.blocks.source import StoreSource
from bootseer.blocks.spec import DATA, FUSE_FOLDER, SPEC, ServerSpec
from bootseer.blocks.trace import Recorder
from bootseer.errors import BootseerError
from bootseer.kernel import fuse
from bootseer.store import Store, open_store

log = logging.getLogger(__name__)

_SYNC_SECONDS = 2.0


class BlockServer:
    """One served tree. `run` returns when it is over."""

    def __init__(self, spec: ServerSpec, folder: Path, store: Store) -> None:
        self._spec = spec
        self._folder = folder
        self._store = store
        self._began = time.monotonic()
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._job_ready = False
        self._targets = [spec.target]
        self._hot: list[int] = []
        self._recording = "off"
        self._tree = localize(store, spec.digest, Path(spec.cache_dir))
        self._cache = CacheFile.open(self._tree.cache, self._tree.map, self._tree.map_digest)
        self._fetcher = Fetcher(
            self._cache,
            [StoreSource(store, self._tree.map)],
            streams=spec.fetch_streams,
            window=spec.demand_window,
            deadline=spec.demand_deadline,
            quiet=spec.fill_quiet,
        )
        self._key = profiles.ProfileKey(spec.profile) if spec.profile is not None else None
        self._recorder: Recorder | None = None
        if self._key is not None and self._tree.map.size:
            self._recorder = Recorder(spec.digest, self._tree.map.size)
            self._recording = "recording"
        self._file = LazyFile(self._cache, self._fetcher, self._recorder)
        locate = self._file.locate
        self._fuse = fuse.Server(
            fuse.SingleFile(DATA, self._tree.map.size, lambda offset, size, ctx: locate(offset, size, ctx.pid)),
            folder / FUSE_FOLDER,
            workers=spec.workers,
            options=fuse.Options(name="bootseer-blocks", max_readahead=spec.max_readahead, allow_other=True),
        )

    def run(self, started: Callable[[], None]) -> None:
        """Mount, call ``started``, serve until the mount ends, leave nothing behind."""
        threads = [threading.Thread(target=self._prefetch, name="profile", daemon=True)]
        control: ControlServer | None = None
        try:
            threads[0].start()
            self._fuse.start()
            control = ControlServer(self._folder, self._handle)
            threads.append(threading.Thread(target=self._sync, name="sync", daemon=True))
            threads[1].start()
            started()
            self._serve()
        finally:
            self._stop.set()
            self._fuse.stop()
            self._end_recording()
            self._fetcher.close()
            for thread in threads:
                if thread.ident is not None:
                    thread.join(10.0)
            self._cache.close()
            if control is not None:
                control.close()

    def stop(self) -> None:
        self._stop.set()
        self._wake.set()

    def _serve(self) -> None:
        while not self._stop.is_set() and not self._fuse.wait(0):
            self._wake.wait(0.2)
            self._wake.clear()
            if self._job_ready or time.monotonic() - self._began >= self._spec.record_seconds:
                self._end_recording()
                self._fetcher.eager()

    def _end_recording(self) -> None:
        recorder, self._recorder, self._file.recorder = self._recorder, None, None
        if recorder is not None and self._key is not None:
            trace = recorder.stop()
            self._recording = profiles.publish(self._store, self._key, trace, self._tree.map)
            log.info("trace of %d touches: %s", len(trace.touches), self._recording)

    def _prefetch(self) -> None:
        try:
            if self._key is not None and not self._cache.complete:
                traces = profiles.load(self._store, self._spec.digest, self._key, self._tree.map.size)
                if traces:
                    self._hot = profiles.merge(traces, self._tree.map)
                    self._fetcher.hot(self._hot)
                    log.info("%d hot blocks from %d traces", len(self._hot), len(traces))
            if self._spec.background_fill:
                self._fetcher.background()
        except Exception:
            log.exception("prefetch failed; blocks come on demand")

    def _sync(self) -> None:
        failed = False
        while not self._stop.wait(_SYNC_SECONDS) and not self._cache.broken:
            try:
                if not self._cache.durable:
                    self._cache.sync()
                failed = False
            except OSError as exc:
                if not failed:
                    log.warning("cannot persist the bitmap of block cache %s: %s", self._cache.folder, exc)
                failed = True

    def _handle(self, request: Request) -> TreeStatus:
        if request.do == "ready":
            self._job_ready = True
            self._wake.set()
        elif request.do == "add":
            if self._stop.is_set():
                raise BootseerError("the block server is stopping")
            if request.target not in self._targets:
                self._targets.append(request.target)
            if (recorder := self._recorder) is not None:
                recorder.mark_incomplete()
        elif request.do == "remove":
            if request.target in self._targets:
                self._targets.remove(request.target)
            if not self._targets:
                self.stop()
        elif request.do == "stop":
            self.stop()
        elif request.do != "status":
            raise BootseerError(f"unknown request {request.do!r}")
        return self._status()

    def _status(self) -> TreeStatus:
        fetched, reads = self._fetcher.stats, self._file.stats
        hot = self._hot
        return TreeStatus(
            id=self._spec.id,
            digest=self._spec.digest,
            pid=os.getpid(),
            targets=list(self._targets),
            blocks_total=self._tree.map.count,
            blocks_ready=self._cache.ready_count,
            complete=self._cache.complete,
            cache_full=self._fetcher.full,
            hot_total=len(hot),
            hot_ready=sum(self._cache.ready[block] for block in hot),
            bytes_demand=fetched.demand_bytes,
            bytes_hot=fetched.hot_bytes,
            bytes_background=fetched.background_bytes,
            slow_faults=reads.slow_faults,
            stall_seconds=reads.stall_seconds,
            failed_reads=reads.failed_reads,
            bad_blocks=fetched.bad_blocks,
            retries=fetched.retries,
            recording=self._recording,
            uptime=time.monotonic() - self._began,
        )


def main(argv: list[str], *, store_for: Callable[[str], Store] = open_store) -> int:
    """Serve until the end. The first process returns at once: the server is nobody's child to wait for.

    ``argv``: the folder with the spec, and the descriptor to answer on; or ``-``, the descriptor and a store's URL:
    wait for the folder on standard input, see `standby`. ``store_for`` opens the store; benchmarks pass one that wraps
    it with a rate limit.
    """
    ready_fd = int(argv[1])
    if os.fork():
        return 0
    if argv[0] == "-":
        standby.warm_up(store_for, argv[2])
        if (found := standby.await_folder()) is None:
            return 0
        folder = found
    else:
        folder = Path(argv[0])
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"
    )

    def answer(text: str) -> None:
        nonlocal ready_fd
        if ready_fd >= 0:
            os.write(ready_fd, text.encode())
            os.close(ready_fd)
            ready_fd = -1

    try:
        (folder / standby.PID).write_text(str(os.getpid()))
        spec = msgspec.json.decode((folder / SPEC).read_bytes(), type=ServerSpec)
        os.chdir("/")
        server = BlockServer(spec, folder, store_for(spec.store_url))
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: server.stop())
        server.run(lambda: answer(f"ok {os.getpid()}\n"))
    except BootseerError as exc:
        log.error("%s", exc)
        answer(f"error {exc.exit_code} {exc}\n")
        return exc.exit_code
    except Exception as exc:
        log.exception("the block server failed")
        answer(f"error 70 {exc!r}\n")
        return 70
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
