"""Lazy trees: publish a directory tree once, mount it anywhere while its bytes still arrive.

A tree is a two-part EROFS image: ``meta`` is local before the mount, ``data`` is served by a block server
(``blocks.serving.server``) that outlives the caller; several mounts with the same ``state_dir`` share it. State of a
running tree, in ``<state_dir>/trees/``: ``<id>/`` (record, control socket, FUSE mount point), ``<id>.log`` and
``<id>.lock`` (held while mounting and unmounting)."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from bootseer.blocks.metadata import localize_manifest, localize_map, localize_meta
from bootseer.blocks.profiles.library import ProfileKey
from bootseer.blocks.serving import client
from bootseer.blocks.serving.client import SERVER
from bootseer.blocks.serving.mount_readahead import note_mount
from bootseer.blocks.serving.protocol import FUSE_FOLDER, ServerSpec, TreeRecord, TreeStatus
from bootseer.chunks.locks import DATA
from bootseer.chunks.manifest import TreeRef
from bootseer.config import Config
from bootseer.errors import BootseerError, NotFoundError, UnavailableError, from_os_error
from bootseer.folders import private_folder
from bootseer.kernel import background
from bootseer.kernel import mount as mounts
from bootseer.objects import Store, open_store, uses
from bootseer.served.client import PATIENCE, alive, await_exit, locked, records, unmount
from bootseer.served.protocol import GoneError

if TYPE_CHECKING:
    from bootseer.blocks.publish.tree import publish
    from bootseer.blocks.without_mount import extract, prefetch

__all__ = [
    "SERVER",
    "ProfileKey",
    "TreeMount",
    "TreeRef",
    "TreeStatus",
    "attach",
    "extract",
    "mount",
    "mounted",
    "prefetch",
    "publish",
    "tell_failed_reads",
]

_LAZY = {"extract": "without_mount", "prefetch": "without_mount", "publish": "publish.tree"}
"""Names that no start of a known job needs, and their modules, which are loaded when a name is first used."""

log = logging.getLogger(__name__)

_EXIT_SECONDS = 60.0
_STILL_SECONDS = 1.0
_ASK_SECONDS = 1.0


class TreeMount:
    """A mounted tree. It stays mounted until `unmount`, also when this process ends (see `attach`)."""

    def __init__(self, target: Path, id: str, digest: str, folder: Path) -> None:
        self.target = target
        self.id = id
        self.digest = digest
        self._folder = folder

    @property
    def points(self) -> list[Path]:
        """What it may have mounted, in that order."""
        return [self._folder / FUSE_FOLDER, self.target]

    def status(self) -> TreeStatus:
        """Counters of the block server. Raises `UnavailableError` when it is gone."""
        return client.ask(self._folder, "status")

    def dead(self) -> bool:
        """Whether its block server has died, and it cannot do without. Nobody is asked."""
        return mounts.is_mounted(self._folder / FUSE_FOLDER) and not alive(self._folder)

    def ready(self) -> None:
        """The job is ready: recording stops and its trace is published, the rest is filled without hesitation."""
        client.ask(self._folder, "ready")

    def unmount(self, *, timeout: float = _EXIT_SECONDS) -> None:
        """Unmount; the last mount of a tree ends its server, which publishes its trace first. Safe to call twice. A
        target in use is detached lazily after 5 s; its server then stays until nobody uses it any more. A server that
        has not ended after ``timeout`` is killed. Both leave a log line. Raises `UnavailableError` when the server
        lives but does not answer: call it again later."""
        with locked(self._folder):
            with contextlib.suppress(BootseerError):  # then the target is in use for a moment, which is waited for
                client.ask(self._folder, "still", self.target, timeout=_STILL_SECONDS)
            unmount(self.target)
            self._leave(timeout)

    def _leave(self, timeout: float) -> None:
        """Tell the server that this mount is gone; after the last one, see it out."""
        if not self._folder.exists():
            return
        try:
            left = client.ask(self._folder, "remove", self.target)
        except GoneError as exc:  # any other error says that it lives, and others may use it
            log.warning("%s; cleaning up after it", exc)
        else:
            if left.targets:
                return
            if left.lingering:
                log.warning("tree %s is still in use somewhere; its server stays until that ends", self.id)
                return
            await_exit(self._folder, timeout)
        client.clear(self._folder)


def mount(
    store_url: str,
    digest: str,
    target: Path,
    *,
    cache_dir: Path,
    state_dir: Path,
    profile: ProfileKey | None = None,
    config: Config | None = None,
    server: Sequence[str] = SERVER,
    store: Store | None = None,
    kin: Sequence[str] = (),
) -> TreeMount:
    """Mount the tree ``digest`` read-only on ``target`` (made when missing), or where that link leads; hot blocks start
    to arrive at once.

    ``profile`` says whose traces to prefetch by and to add to (None: neither). ``config`` gives the time limits, the
    number of streams and whether to fill in the background. ``server``: the command that serves. ``store``: that at
    ``store_url``, when the caller has it open. ``kin``: trees that it is like, for a start without a profile. On any
    failure nothing stays mounted or running. Raises `NotFoundError` (no such tree), `DataError`, `UnavailableError`,
    `PrivilegeError`, `UnsupportedError`, `FullError`."""
    settings = config or Config()
    state_dir, cache_dir = private_folder(state_dir), private_folder(cache_dir)
    made = mounted(target, digest, state_dir)
    target, id, folder = made.target, made.id, made._folder
    with contextlib.ExitStack() as stack:
        stack.enter_context(background.preloaded(server))
        beside = stack.enter_context(ThreadPoolExecutor(1))
        store = store or open_store(store_url)
        tree = localize_manifest(store, digest, cache_dir)
        meta = beside.submit(localize_meta, store, tree)
        localize_map(store, tree)  # the server finds it on the disk
        with locked(folder):
            if mounts.is_mounted(target):
                raise BootseerError(
                    f"cannot mount tree {id} on {target}: something is mounted there", hint="unmount it"
                )
            spec = ServerSpec(
                id=id,
                store_url=store.url,
                digest=digest,
                cache_dir=str(cache_dir),
                target=str(target),
                profile=profile,
                config=settings,
                kin=list(kin),
            )
            served = client.join_or_start(folder, spec, server)
            lazy = served.driver == "fuse"
            try:
                target.mkdir(parents=True, exist_ok=True)
                meta.result()
                place = folder / FUSE_FOLDER if lazy else Path(served.cache_dir, *tree.cache.parts[-2:])
                data = _as_served(place / DATA, served, folder) if tree.manifest.data_size else None
                with note_mount(folder) if lazy else contextlib.nullcontext():
                    mounts.mount_erofs(tree.meta, data, target, direct=lazy)
            except BaseException as exc:
                try:
                    made._leave(_EXIT_SECONDS)
                except BootseerError as more:
                    log.warning("%s", more)
                if isinstance(exc, OSError):
                    raise from_os_error(exc, f"mount tree {id} on {target}") from exc
                raise
        if not lazy:  # else the fetcher does
            uses.note_beside(store, digest)
    return made


def _as_served(data: Path, served: TreeStatus, folder: Path) -> Path:
    """Where the file is that the server calls ``data``. It may have mounts of its own, and this process another file by
    that name; in another pid namespace its number is somebody else's, who does not see its ``folder``."""
    root = f"/proc/{served.pid}/root"
    if not served.pid or _is(data, served.file):
        return data
    same = os.path.exists(f"{root}{folder}") and os.path.samefile(f"{root}{folder}", folder)
    if same and _is(theirs := Path(f"{root}{data}"), served.file):
        return theirs
    raise UnavailableError(
        f"the block server {served.pid} of {folder} reads {data}, which is not seen from here",
        hint="it is in other namespaces: unmount there, or use another state_dir",
    )


def _is(path: Path, file: tuple[int, int]) -> bool:
    """Whether ``path`` exists and, if that is known, is the file with this device and number."""
    try:
        found = path.stat()
    except OSError:
        return False
    return file in ((0, 0), (found.st_dev, found.st_ino))


def mounted(target: str | Path, digest: str, state_dir: Path) -> TreeMount:
    """The tree ``digest`` on ``target``, where `mount` has put it, or had begun to. Its server is not asked."""
    id = digest[:16]
    return TreeMount(Path(mounts.real(target)), id, digest, state_dir / "trees" / id)


def attach(what: str | Path, state_dir: Path) -> TreeMount:
    """The running mount with this target or id (or digest); also one whose server has died, for its `unmount`. Raises
    `NotFoundError` when there is none, `UnavailableError` when a server that may be its own does not answer."""
    base = Path(os.path.abspath(state_dir)) / "trees"
    target = mounts.real(what)
    folders, left_by = sorted(base.glob("*/")) if base.is_dir() else [], records(base, TreeRecord)
    for patience in (_ASK_SECONDS, PATIENCE):  # those that do not answer are waited for last
        silent: dict[Path, BootseerError] = {}
        for folder in folders:
            try:
                status = client.ask(folder, "status", timeout=patience)
            except BootseerError as exc:
                if not isinstance(exc, GoneError):
                    silent[folder] = exc
                elif (left := left_by.find(folder.name)) and left.target == target:
                    return TreeMount(Path(target), left.id, left.digest, folder)
                log.warning("%s", exc)
                continue
            if target in status.targets:
                return TreeMount(Path(target), status.id, status.digest, folder)
            if str(what) in (status.id, status.digest) and status.targets:
                return TreeMount(Path(status.targets[0]), status.id, status.digest, folder)
        folders = list(silent)
    if silent:
        raise next(iter(silent.values()))
    raise NotFoundError(f"no tree is mounted as {what}", hint=f"running ones have their state in {base}")


def tell_failed_reads(status: TreeStatus | None) -> None:
    """A line in the log: what read may say something else, as a kernel does of a program that it could not read."""
    if status and status.failed_reads:
        log.warning(
            "%d reads of tree %s failed, as bytes did not come or were damaged: the log of its block server says why",
            status.failed_reads, status.id,
        )  # fmt: skip


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(importlib.import_module(f"bootseer.blocks.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'bootseer.blocks.tree' has no attribute {name!r}")
