"""The supervisor: parent of the FUSE server and the fetcher of one tree. It keeps every descriptor and restarts both.
One process, one thread, one poll loop; no network, no store. It answers the control socket and decides alone who may
join and when the server ends. When it is killed, the FUSE server forks the next one
(``docs/internals/blocks-concurrency.md``)."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import msgspec

from bootseer.blocks.fetch.figures import Fetched
from bootseer.blocks.metadata import LocalTree, localize
from bootseer.blocks.serving import client, fuse_server, mount_readahead
from bootseer.blocks.serving.fetcher_process import FetcherProcess
from bootseer.blocks.serving.ipc import Channel, Finish
from bootseer.blocks.serving.protocol import (
    FUSE_FOLDER,
    FetcherStatus,
    ServerSpec,
    TreeStatus,
    Users,
)
from bootseer.blocks.serving.shared_memory import Count, SharedMemory
from bootseer.chunks import eviction
from bootseer.chunks.blockmap import BlockMap
from bootseer.chunks.cachefile import CacheFile
from bootseer.errors import BootseerError, UnavailableError, UnsupportedError
from bootseer.kernel import bounds, fuse, mount
from bootseer.kernel.child import BEAT_SECONDS, wait
from bootseer.objects import Store
from bootseer.served.client import remove_unwatched
from bootseer.served.control import ControlServer
from bootseer.served.entry import Begun
from bootseer.served.keeper import SIGNALS, Kept, supervise
from bootseer.served.protocol import Request
from bootseer.wiretypes import known

log = logging.getLogger(__name__)

_START_SECONDS = 60.0
_FINISH_SECONDS = 60.0
"""For the fetcher to publish and persist, once the last mount is gone."""
_LEAVE_SECONDS = 0.3
"""The kernel may need a moment to let go of what was just unmounted."""
_RETRY_SECONDS = 0.25
_LOOK_SECONDS = 0.01
_STILL_SECONDS = 1.0
_SERVER_SILENCE = 10.0
_FETCHER_SILENCE = 20.0
"""Seconds without a heartbeat after which a process is killed, and another takes its place."""
_STORES = 4
"""So many of the stores that mounts have named are tried; a site moves its store seldom."""
_HOPELESS = 4
"""After so many starts in a row that came to nothing, readers get errors at once instead of waiting."""


class Inherited(NamedTuple):
    """What outlives each process of a server: every one of them has it by fork."""

    spec: ServerSpec
    begun: Begun
    store_for: Callable[[str], Store]
    tree: LocalTree
    shared: SharedMemory
    cache: CacheFile[BlockMap]
    """Opened, for its descriptors; the fetcher goes on with it by `CacheFile.resume`."""
    control: ControlServer
    reads: tuple[Channel, Channel]
    """FUSE server's end, which the supervisor only sends `Finish` through, and the fetcher's end."""
    device: fuse.Device | None
    """None: every block was here from the beginning, and no FUSE is needed."""


def start(spec: ServerSpec, begun: Begun, store_for: Callable[[str], Store]) -> Supervisor:
    """Open the node's copy of the tree, mount FUSE unless every block is here, start the processes; returns when the
    tree may be mounted. Raises `UnavailableError` (another server owns the cache), `DataError`, `FullError`,
    `UnsupportedError` (no FUSE)."""
    cache_dir = Path(spec.cache_dir)
    tree = localize(None, spec.digest, cache_dir, meta=False)
    limits = eviction.Limits(spec.config.cache_limit, spec.config.cache_keep_free)
    eviction.make_room(cache_dir, limits, coming=eviction.missing_bytes(tree.map, tree.cache), keep=tree.cache.name)
    blocks = tree.map
    shared = SharedMemory(blocks.count, size=blocks.size, block_size=blocks.block_size)
    cache = CacheFile.open(tree.cache, blocks, tree.map_digest, ready=shared.ready)
    device = None
    try:
        control = ControlServer(begun.folder)
        if not cache.complete:
            (begun.folder / FUSE_FOLDER).mkdir(mode=0o700)
            device = fuse_server.mount(begun.folder / FUSE_FOLDER)
        inherited = Inherited(spec, begun, store_for, tree, shared, cache, control, Channel.pair(), device)
        supervisor = Supervisor(inherited, Users([spec.target], []))
        supervisor.begin()
    except BaseException:
        if device is not None:
            with contextlib.suppress(BootseerError):
                mount.unmount(device.mountpoint, lazy=True, force=True)
        cache.close()
        raise
    log.info("tree %s is served by the %s driver", spec.id, supervisor.driver)
    return supervisor


class Supervisor:
    """Supervises one served tree for its ``users``: `begin`, then `run` until it is over. ``adopt``: the others run
    already."""

    def __init__(self, inherited: Inherited, users: Users, *, adopt: bool = False) -> None:
        self._inherited = inherited
        self._spec = inherited.spec
        self._counts = counts = inherited.shared.counts
        self._device = inherited.device
        self._targets, self._stores = users.targets, users.stores
        self._server: Kept | None = None
        self._fetcher: Kept | None = None
        if self._device is not None:
            server, fetcher = (counts[first : first + 4] for first in (Count.SERVER_PID, Count.FETCHER_PID))
            self._server = Kept("FUSE server", self._serve_fuse, server, _SERVER_SILENCE, adopt=adopt)
            self._fetcher = Kept("fetcher", self._fetch, fetcher, _FETCHER_SILENCE, adopt=adopt)
        self._leaving = self._lingering = adopt and not users.targets
        self._finishing = False
        self._next_try = 0.0
        self._pid = counts[Count.SUPERVISOR_PID] = os.getpid()
        counts[Count.SUPERVISOR_STARTS] += 1

    @property
    def driver(self) -> str:
        return "local" if self._inherited.device is None else "fuse"

    def begin(self) -> None:
        """Start the other processes. Raises `UnavailableError` when the FUSE server does not come up."""
        counts, spec = self._counts, self._spec
        counts[Count.BEGAN_NS] = time.monotonic_ns()
        counts[Count.BEGAN_UNIX] = int(time.time())
        counts[Count.DEADLINE_MS] = int(spec.config.demand_deadline * 1000)
        self._keep_users()
        if self._server is None or self._fetcher is None:
            if spec.profile is not None and self._inherited.shared.size:
                log.info("tree %s is complete on this node: this start is not recorded, see trace.md", spec.id)
            return
        counts[Count.RECORDING] = counts[Count.RECORDED] = 0
        if spec.profile is not None and self._inherited.shared.size:
            counts[Count.RECORDING] = 1
        try:
            self._server.start()  # which the mount waits for
            self._fetcher.start()
            until = time.monotonic() + _START_SECONDS
            while not counts[Count.SERVER_READY]:
                self._restart()
                if self._server is None or time.monotonic() >= until:
                    raise UnavailableError(f"the FUSE server of tree {spec.id} did not start")
                time.sleep(0.0005)
        except BaseException:
            for one in (self._server, self._fetcher):
                if one is not None:
                    one.child.end()
            raise

    def run(self) -> int:
        """Keep the others running until the tree is left or its FUSE mount is gone. The exit code."""
        supervise(f"tree {self._spec.id}", self._step, self.end)
        if self._fetcher is None:
            self._inherited.cache.close()
        else:
            os.close(self._inherited.cache.lock_fd)  # the next mount waits for no more than this
        if not self._targets:
            remove_unwatched(self._inherited.begun.folder, *client.MORE)
        return 0

    # -- the loop --------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Leave the tree, whoever uses it; also as a signal handler."""
        if not self._finishing:
            self._leaving = True
            self._next_try = 0.0

    def _step(self) -> bool:
        """Wait for something, see to it. Whether this was the end."""
        children = [one.child for one in (self._fetcher, self._server) if one is not None]
        if self._finishing:
            wait(children, _LOOK_SECONDS)
            return self._finished()
        seconds = 2 * BEAT_SECONDS
        if self._leaving:
            seconds = min(seconds, max(0.0, self._next_try - time.monotonic()))
        wait(children, seconds, self._inherited.control.fileno())
        self._inherited.control.answer(self._handle)
        if self._leaving and time.monotonic() >= self._next_try:
            self._leave()
        if self._device is not None and self._inherited.shared.ready.find(b"\0") < 0:
            mount_readahead.widen(self._inherited.begun.folder)
        if not self._finishing:  # else the fetcher may have ended already, as it was told to
            self._restart()
        return False

    def _restart(self) -> None:
        counts, fetcher, server = self._counts, self._fetcher, self._server
        if fetcher is not None:
            dead = fetcher.dead()
            if not fetcher.child.failures:
                counts[Count.HOPELESS] = 0
            if dead:
                counts[Count.READAHEAD_OPEN] = counts[Count.READAHEAD_TID] = 0  # may be another thread's soon
                if fetcher.child.failures >= _HOPELESS and not counts[Count.HOPELESS]:
                    log.error("no fetcher stays alive: reads of missing blocks fail until one does")
                    counts[Count.HOPELESS] = 1
                if fetcher.child.wait_seconds <= 0:
                    fetcher.start()
        if server is None or not server.dead():
            return
        if not self._mounted:
            log.info("the FUSE mount of tree %s is gone", self._spec.id)
            self._finish()
            return
        child = server.child
        if child.ended_well or child.failures >= _HOPELESS or child.code == UnsupportedError.exit_code:
            why = "the FUSE connection was aborted" if child.ended_well else "no FUSE server stays alive"
            log.error("%s: readers get errors from now on", why)
            self._close_device()
            self._server = None
        elif child.wait_seconds <= 0:
            server.start()

    # -- children --------------------------------------------------------------------------------------------------

    def _in_child(self) -> None:
        self._inherited.begun.answer.forget()
        for number in SIGNALS:  # signals to the process group are the supervisor's business
            signal.signal(number, signal.SIG_IGN)
        for one in (self._fetcher, self._server):
            if one is not None:
                one.child.forget()

    def _fetch(self) -> int:
        """In a fetcher."""
        self._in_child()
        bounds.limit_memory()
        kept = self._inherited
        for end in (kept.reads[0], kept.control):  # they must end with those that use them
            end.close()
        self._close_device()
        FetcherProcess(
            kept.spec, kept.tree, kept.store_for, kept.shared, kept.cache, kept.reads[1],
            detach=lambda: os.close(kept.begun.lock),
        ).run()  # fmt: skip
        return 0

    def _serve_fuse(self) -> int:
        """In a FUSE server."""
        self._in_child()
        assert self._device is not None
        kept = self._inherited
        try:
            fuse_server.FuseServer(
                kept.shared, self._device, kept.reads[0], kept.cache.fileno(), self._pid, succeed=self._succeed
            ).run()
        except BootseerError as exc:
            log.error("%s", exc)
            return exc.exit_code
        return 0

    def _succeed(self) -> NoReturn:
        """In a child of the FUSE server, whose supervisor died: be the next one."""
        code = 70
        try:
            self._inherited.shared.trace.forked()
            raw = self._inherited.shared.users.read()
            users = msgspec.msgpack.decode(raw, type=known(Users)) if raw else Users([self._spec.target], [])
            successor = Supervisor(self._inherited, users, adopt=True)
            log.warning("process %d supervises tree %s from now on", os.getpid(), self._spec.id)
            code = successor.run()
        except BaseException:
            log.exception("the supervisor failed")
        finally:
            os._exit(code)

    # -- requests --------------------------------------------------------------------------------------------------

    def _handle(self, request: Request) -> TreeStatus:
        if request.do == "ready":
            self._counts[Count.JOB_READY] = 1
        elif request.do == "add":
            self._leaving = self._lingering = False
            self._counts[Count.INCOMPLETE] = 1
            if request.target not in self._targets:
                self._targets.append(request.target)
            if request.store not in ("", *(self._stores or [self._spec.store_url])[:1]):
                self._stores = [request.store, *(url for url in self._stores if url != request.store)][:_STORES]
            self._keep_users()
        elif request.do == "remove":
            self._targets = [target for target in self._targets if target != request.target]
            self._keep_users()
            if not self._targets:
                self._leave(_LEAVE_SECONDS)
        elif request.do == "still":
            self._keep_still(request.target)
        elif request.do != "status":
            raise BootseerError(f"unknown request {request.do!r}")
        return self._status()

    def _keep_still(self, target: str) -> None:
        """The readahead of the mount on ``target`` has no file open when this returns, nor later; but for one that is
        being read from a disk that takes longer than a second."""
        if target != self._spec.target:
            return
        self._counts[Count.STILL] = 1
        until = time.monotonic() + _STILL_SECONDS
        while self._counts[Count.READAHEAD_OPEN] and time.monotonic() < until:
            time.sleep(0.001)

    def _status(self) -> TreeStatus:
        counts, shared = self._counts, self._inherited.shared
        data = os.fstat(self._inherited.cache.fileno())
        fetched: dict[str, Any] = {cell.name.lower(): counts[Count.FETCHED + cell] for cell in Fetched}
        fetched["cache_full"] = bool(fetched["cache_full"])
        here, hot = bytes(shared.ready[:]), bytes(shared.hot[:])
        ready = here.count(1)
        raw = shared.said.read()
        said = msgspec.msgpack.decode(raw, type=known(FetcherStatus)) if raw else FetcherStatus()
        now, since = time.monotonic_ns(), counts[Count.WAITING_SINCE_NS]
        return TreeStatus(
            id=self._spec.id,
            digest=self._spec.digest,
            pid=os.getpid(),
            server_pid=counts[Count.SERVER_PID] if self._server is not None else 0,
            fetcher_pid=counts[Count.FETCHER_PID],
            driver=self.driver,
            cache_dir=self._spec.cache_dir,
            file=(data.st_dev, data.st_ino) if self._device is None else (0, 0),
            server_restarts=max(0, counts[Count.SERVER_STARTS] - 1),
            fetcher_restarts=max(0, counts[Count.FETCHER_STARTS] - 1),
            supervisor_restarts=counts[Count.SUPERVISOR_STARTS] - 1,
            lingering=self._lingering,
            targets=list(self._targets),
            blocks_total=len(shared.ready),
            blocks_ready=ready,
            hot_known=bool(counts[Count.HOT_KNOWN]),
            hot_total=hot.count(1),
            hot_ready=(int.from_bytes(here) & int.from_bytes(hot)).bit_count(),
            complete=ready == len(shared.ready),
            reads=counts[Count.READS],
            slow_faults=counts[Count.SLOW_FAULTS],
            stall_seconds=counts[Count.STALL_NS] / 1e9,
            waited_seconds=(counts[Count.WAITED_NS] + (max(0, now - since) if since else 0)) / 1e9,
            failed_reads=counts[Count.FAILED_READS],
            denied=counts[Count.DENIED],
            taken_over=counts[Count.TAKEN_OVER],
            read_ahead_bytes=counts[Count.READ_AHEAD],
            uptime=(now - counts[Count.BEGAN_NS]) / 1e9,
            **fetched,
            **msgspec.structs.asdict(said),
        )

    def _keep_users(self) -> None:
        """Leave the mounts and their stores for the next supervisor, and for the fetcher."""
        self._inherited.shared.users.write(msgspec.msgpack.encode(Users(self._targets, self._stores)))

    # -- the end ---------------------------------------------------------------------------------------------------

    @property
    def _mounted(self) -> bool:
        return self._device is not None and self._device.mounted

    def _leave(self, patience: float = 0.0) -> None:
        """All targets are gone, or a signal said to end: finish once nobody uses the FUSE mount any more. A mount that
        was detached while in use would give its users errors without us."""
        self._leaving = True
        until = time.monotonic() + patience
        while self._mounted and self._device is not None:
            with contextlib.suppress(BootseerError):
                mount.unmount(self._device.mountpoint)
                break
            if time.monotonic() >= until:
                if not self._lingering:
                    log.warning("tree %s is still in use; its server stays until that ends", self._spec.id)
                self._lingering = True
                self._next_try = time.monotonic() + _RETRY_SECONDS
                return
            time.sleep(0.01)
        self._finish()

    def _finish(self) -> None:
        """Nobody reads any more: end the FUSE server, have the fetcher publish and persist."""
        self._leaving = self._finishing = True
        self._inherited.control.close()
        if self._server is not None:
            self._server.child.end()
        self._server = None
        self._close_device()
        self._next_try = time.monotonic() + _FINISH_SECONDS
        if self._fetcher is not None:
            self._inherited.reads[0].send(Finish(), timeout=1.0)

    def _finished(self) -> bool:
        if self._fetcher is None or self._counts[Count.DETACHED] or self._fetcher.child.dead:
            return True
        if time.monotonic() >= self._next_try:
            log.warning("the fetcher does not finish; killing it")
            self._fetcher.child.end()
        return False

    def _close_device(self) -> None:
        device, self._device = self._device, None
        if device is not None:
            with contextlib.suppress(OSError):
                device.close()
