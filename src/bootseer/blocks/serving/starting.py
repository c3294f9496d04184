"""How a block server starts: from a bare process to a holder with a fetcher and a front.

The fetcher is forked first and does all that needs the network: it localizes the tree, opens the cache file (before any
mark is on it: its own writes must raise no events) and makes the shared memory. It hands these to the holder, which
chooses the driver, guards the data file or mounts FUSE, forks the front, and answers "ok": only then is the tree
mounted.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from bootseer.blocks.serving import driver, standby
from bootseer.blocks.serving.child import Child
from bootseer.blocks.serving.fetcherd import FetcherProcess
from bootseer.blocks.serving.fronts import FanotifyFront, Front, FuseFront, group_of
from bootseer.blocks.serving.holder import Holder
from bootseer.blocks.serving.kept import Ends, Kept, calm
from bootseer.blocks.serving.link import Note
from bootseer.blocks.serving.pulse import beat
from bootseer.blocks.serving.shared import Count, Shared
from bootseer.blocks.serving.spec import SPEC, ServerSpec
from bootseer.errors import BootseerError, UnavailableError
from bootseer.store import Store

log = logging.getLogger(__name__)

_START_SECONDS = 60.0

StoreFor = Callable[[str], Store]


def serve(answer: Callable[[str], None], store_for: StoreFor, folder: Path | None, url: str = "") -> int:
    """Serve the tree whose state is in ``folder`` until the end, and return the exit code. None: wait until standard
    input names it, meet the store at ``url`` meanwhile. ``answer`` takes one line, once; an empty one only closes it.
    """
    ends = Ends.make()

    def prepare() -> None:
        calm()
        answer("")
        ends.keep_fetchers()

    fetcher = Child("fetcher", lambda: _first_fetcher(ends, store_for, folder, url), prepare)
    try:
        if folder is None:
            found = standby.await_folder(lambda profile: ends.link.send(Note("look", path=profile)))
            if found is None:
                return 0
            folder, logfile = found
            # Its command line does not name the folder: who clears up after a start that fails must find it.
            with contextlib.suppress(OSError):
                standby.write_pid(folder)
            ends.link.send(Note("folder", path=str(folder), log=str(logfile)))
        spec = read_spec(folder)
        os.chdir("/")
        holder = _begin(spec, folder, store_for, ends, fetcher)
    except BootseerError as exc:
        log.error("%s", exc)
        ends.link.send(Note("refused", code=exc.exit_code, text=str(exc)))
        fetcher.end(3.0)
        answer(f"error {exc.exit_code} {exc}\n")
        return exc.exit_code
    answer(f"ok {os.getpid()} {holder.driver}\n")
    return holder.run()


def read_spec(folder: Path) -> ServerSpec:
    return msgspec.json.decode((folder / SPEC).read_bytes(), type=ServerSpec)


def _begin(spec: ServerSpec, folder: Path, store_for: StoreFor, ends: Ends, fetcher: Child) -> Holder:
    note, (shared_fd, data_fd, lock_fd) = _expect("serve", ends, fetcher)
    shared = Shared.attach(shared_fd)
    cache = Path(note.path)
    chosen = driver.choose(spec.driver, cache, data_fd, folder.parents[1], complete=note.complete, missing=note.missing)
    front: Front | None = None
    if chosen == "fanotify":
        try:
            front = FanotifyFront(shared, data_fd, cache)
        except (BootseerError, OSError) as exc:
            # In use: a mount without a guard may be reading the file, and blocks that came would not reach it.
            if spec.driver == "fanotify" or isinstance(exc, driver.InUseError):
                raise
            log.warning("serving through FUSE: %s", exc)
            chosen = "fuse"
    if chosen == "fuse":
        front = FuseFront(shared, data_fd, folder, spec)
    holder = Holder(Kept(spec, folder, store_for, ends, shared, data_fd, lock_fd), chosen, front, fetcher)
    standby.write_pid(folder)
    try:
        group = group_of(front)
        ends.link.send(Note("serving", driver=chosen), [group.fileno()] if group is not None else [])
        _expect("started", ends, fetcher)
        fetcher.succeeded()
        until = time.monotonic() + _START_SECONDS
        while front is not None and not shared.counts[Count.FRONT_READY]:
            if holder.front_dead or time.monotonic() >= until:
                raise UnavailableError(f"the {front.name} of tree {spec.id} did not start")
            time.sleep(0.001)
    except BaseException:
        holder.abandon()
        raise
    beat(shared.counts, Count.HOLDER_BEAT)  # from now on it is expected to
    log.info("tree %s is served by the %s driver", spec.id, chosen)
    return holder


def _expect(do: str, ends: Ends, fetcher: Child) -> tuple[Note, list[int]]:
    until = time.monotonic() + _START_SECONDS
    while time.monotonic() < until:
        got = ends.link.receive(timeout=0.05)
        if got is not None and got[0].do == do:
            return got
        if got is not None and got[0].do == "failed":
            raise _FetcherError(got[0].code, got[0].text)
        if got is None and fetcher.dead:
            raise UnavailableError("the fetcher of a block server ended while it started")
    raise UnavailableError(f"the fetcher of a block server is not ready after {_START_SECONDS:g} s")


class _FetcherError(BootseerError):
    """What kept the fetcher from starting, with its own exit code."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.exit_code = code  # type: ignore[misc]


def _first_fetcher(ends: Ends, store_for: StoreFor, folder: Path | None, url: str) -> int:
    """In the fetcher."""
    link = ends.far_link
    if folder is None:
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        met = standby.Met(store_for, url)
        try:
            while (got := link.receive(timeout=1 << 20)) is not None and got[0].do == "look":
                continue
        except UnavailableError:
            return 0
        if got is None:
            return 0
        folder = Path(got[0].path)
        standby.turn_to(Path(got[0].log))
        store_for = met.store
    try:
        spec = read_spec(folder)
        os.chdir("/")
        store = store_for(spec.store_url)
        process = FetcherProcess(spec, folder, store, link, ends.far_channel, None)
    except BootseerError as exc:
        link.send(Note("failed", code=exc.exit_code, text=str(exc)))
        return exc.exit_code
    except Exception as exc:
        log.exception("the fetcher failed")
        link.send(Note("failed", code=70, text=repr(exc)))
        return 70
    process.run()
    return 0
