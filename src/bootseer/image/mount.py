"""Mounted images: the lazy tree of a converted image, under an overlay when it is to be writable.

State, one record per mount: ``<state_dir>/images/<id>/mount.json`` beside ``lower/``, the mount point of the tree below
an overlay. It is written before anything is mounted; until all is, the folder is an owned one (`owned_folder`), so that
`sweep` ends what a process that was killed had begun. The overlay's ``upper`` and ``work`` are in
``<cache_dir>/overlays/<id>/`` (disk, not memory), deleted by `ImageMount.unmount`. Folders of an earlier boot are
removed when an image is mounted.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path

from bootseer import config as settings
from bootseer import faults, oci
from bootseer.blocks import tree
from bootseer.blocks.profiles.library import owner_of
from bootseer.errors import BootseerError, ConfigError, NotFoundError, PrivilegeError, doing
from bootseer.folders import (
    clear,
    enterable,
    is_owned,
    owned_folder,
    private_folder,
    release,
    settled,
    spread,
    trusted,
)
from bootseer.image import bundle
from bootseer.image.lookup import resolve
from bootseer.image.record import ImageRecord
from bootseer.kernel import background
from bootseer.kernel import mount as mounts
from bootseer.kernel.removal import discard_tree
from bootseer.mountrecords import Record, Records, end_left
from bootseer.objects import open_store

log = logging.getLogger(__name__)

RUNS = "run"
"""The folder of ``state_dir`` with a folder for each command that runs in a container of its own image mount."""
STARTS = "starts"
"""The folder of ``cache_dir`` with a folder for each start of a job (`bootseer.launch`)."""
SWEEP_SECONDS = 10.0
"""How long a start waits for the end of what is left."""


class MountRecord(Record, kw_only=True):
    """What is known of one mounted image. ``lower`` is the tree's own mount point: ``target`` itself when read-only."""

    target: str
    reference: str
    image: str
    tree: str
    lower: str
    overlay: str
    """Folder with ``upper`` and ``work``; empty when read-only."""
    config: oci.ImageConfig


class ImageMount:
    """A mounted image. It stays mounted until `unmount`, also when this process ends (see `attach`)."""

    def __init__(self, record: MountRecord, state_dir: Path, lookup_seconds: float = 0.0) -> None:
        self.record = record
        self.rootfs = Path(record.target)
        self.upper = Path(record.overlay, "upper") if record.overlay else None
        """What was written on top of the image; None when mounted read-only."""
        self.config = record.config
        self.digest = record.image
        self.lookup_seconds = lookup_seconds
        """How long registry and store took to tell what the image is, for who mounted it."""
        self._state_dir = state_dir

    @property
    def points(self) -> list[Path]:
        """What it has mounted, in that order."""
        return [*self._tree().points, *([self.rootfs] if self.record.overlay else [])]

    def status(self) -> tree.TreeStatus:
        """Counters of the block server. Raises `UnavailableError` when it is gone."""
        return self._tree().status()

    def dead(self) -> bool:
        """Whether it is of an earlier boot, or its reads fail, because its block server has died."""
        return self.record.boot != mounts.boot_id() or self._tree().dead()

    def ready(self) -> None:
        """The job is ready: recording may stop, and its trace be published."""
        self._tree().ready()

    def unmount(self) -> None:
        """Unmount, end the block server if it was the last user, delete what was written on top. Safe to call twice.
        Raises `BootseerError` when the target is in use, `UnavailableError` when the block server lives but does not
        answer; then everything stays."""
        if self.record.overlay and mounts.is_mounted(self.rootfs):
            mounts.unmount(self.rootfs)
        self._tree().unmount()
        _forget(self.record, self._state_dir)

    def _tree(self) -> tree.TreeMount:
        return tree.mounted(self.record.lower, self.record.tree, self._state_dir)


def mount(
    ref: oci.Reference | str,
    target: Path,
    *,
    store_url: str,
    config: settings.Config,
    job: str | None = None,
    owner: int = 0,
    writable: bool = True,
    privileged: bool = False,
    plain_http: bool | None = None,
    record: ImageRecord | None = None,
    server: Sequence[str] = tree.SERVER,
) -> ImageMount:
    """Mount the converted image ``ref`` on the folder ``target`` (made when missing).

    ``job`` names the profile to prefetch by and to record into (None: the default one), of the user ``owner``, if root
    mounts for another. Set-uid programs and device nodes of the image work only in a writable mount that is
    ``privileged``, the root of a container. ``record``: what ``ref`` names, when the caller has found that out and made
    sure that it may be read. ``server`` is the command that serves blocks (see `tree.mount`). On any failure nothing
    stays mounted.

    Raises `ConfigError` when others can put something else in the place of ``target``, or reach one that is to be
    privileged, `NotFoundError` (no such image, or not converted), `UnsignedError` (not signed as ``config`` wants),
    `UnavailableError`, `PrivilegeError`, `FullError`, `UnsupportedError` (no FUSE, EROFS or overlayfs).
    """
    if os.geteuid() != 0:
        raise PrivilegeError(f"mounting {ref} needs root", hint="run with sudo, or leave DIR to the node daemon")
    store = open_store(store_url)  # before the copy, which then has the modules that it takes
    with background.preloaded(server):
        began = time.monotonic()
        if record is None:
            record = resolve(ref, store, plain_http=plain_http, config=config)
            oci.preflight(ref, plain_http=plain_http, resolved=True)
        lookup_seconds = round(time.monotonic() - began, 3)
        target = settled(target)  # where nobody else leads the name to another folder of the machine
        state_dir, cache_dir = private_folder(Path(config.state_dir)), private_folder(Path(config.cache_dir))
        if mounts.is_mounted(target):
            raise BootseerError(f"cannot mount {ref} on {target}: something is mounted there", hint="unmount it first")
        if privileged and enterable(target):
            raise ConfigError(
                f"cannot mount {ref} on {target} with its set-uid programs: other users can reach it",
                hint="mount it in a folder that only root can enter (chmod 700)",
            )
        _sweep(cache_dir)
        for old in listing(state_dir):  # else `attach` would find it on this target, not what is mounted there now
            if old.record.target == str(target) and old.record.boot != mounts.boot_id():
                _forget(old.record, state_dir)
        with owned_folder(private_folder(state_dir, sub="images")) as folder, contextlib.ExitStack() as undo:
            overlay = cache_dir / "overlays" / folder.name
            entry = MountRecord(
                id=folder.name,
                target=str(target),
                reference=str(ref),
                image=record.image,
                tree=record.tree,
                lower=str(folder / "lower" if writable else target),
                overlay=str(overlay) if writable else "",
                config=record.config,
            )
            with doing(f"mount {ref} on {target}"):
                undo.callback(_forget, entry, state_dir)
                _records(state_dir).save(entry)
                made = not target.exists()
                target.mkdir(parents=True, exist_ok=True)
                if made:
                    undo.callback(_quietly_rmdir, target)
                mounted = tree.mount(
                    store.url,
                    record.tree,
                    Path(entry.lower),
                    cache_dir=cache_dir,
                    state_dir=state_dir,
                    profile=tree.ProfileKey(job or "default", owner_of(owner)),
                    config=config,
                    server=server,
                    store=store,
                    kin=record.kin,
                )
                undo.callback(mounted.unmount)
                faults.point("image.mount.before-overlay")
                if writable:
                    spread(private_folder(cache_dir, sub="overlays"))  # as in `env.overlay`
                    private_folder(cache_dir, sub=f"overlays/{entry.id}")
                    _mount_overlay(entry, target, privileged)
                    undo.callback(mounts.unmount, target)
                faults.point("image.mount.before-release")
                release(folder)
            undo.pop_all()
    return ImageMount(entry, state_dir, lookup_seconds)


def attach(target: Path | str, state_dir: Path) -> ImageMount:
    """The mounted image with this id, or the newest with this target: those before may have been unmounted by hand.
    Raises `NotFoundError`."""
    wanted = mounts.real(target)
    found = [one for one in listing(state_dir) if one.record.target == wanted or one.record.id == str(target)]
    if found:
        return max(found, key=lambda one: one.record.since)
    raise NotFoundError(f"no image is mounted on {target}", hint="bootseer image status lists what is")


def listing(state_dir: Path) -> list[ImageMount]:
    """The images mounted by this ``state_dir``, by target; not those being mounted, or left so by a killed process."""
    return [found for found in recorded(state_dir) if not is_owned(Path(state_dir, "images", found.record.id))]


def recorded(state_dir: Path) -> list[ImageMount]:
    """All that have a record, by target."""
    state_dir = trusted(Path(state_dir))
    found = [ImageMount(record, state_dir) for record in _records(state_dir).all()]
    return sorted(found, key=lambda item: item.record.target)


def sweep(state_dir: Path, seconds: float = SWEEP_SECONDS) -> None:
    """End what killed launchers of containers left: the containers, the mounts of their images, the block servers. What
    takes longer than ``seconds``, as with a server that does not answer, goes on in the background."""
    state_dir, until = trusted(state_dir), time.monotonic() + seconds
    end_left(state_dir.glob("containers/[!.]*"), bundle.delete, until)

    def end_mounts(folder: Path) -> None:
        unmount_in(folder, state_dir)
        clear(folder)

    for folders in ("images", RUNS):
        end_left((state_dir / folders).glob("[!.]*"), end_mounts, until)


def unmount_in(folder: Path, state_dir: Path) -> None:
    """Unmount the images whose record or mount point is in ``folder``."""
    for found in recorded(state_dir):
        if folder in (found.rootfs.parent, state_dir / "images" / found.record.id):
            found.unmount()


def _mount_overlay(entry: MountRecord, target: Path, privileged: bool) -> None:
    overlay = Path(entry.overlay)
    upper, work = overlay / "upper", overlay / "work"
    for path in (upper, work):
        path.mkdir()
    (overlay / "boot").write_text(entry.boot)
    mounts.copy_root(Path(entry.lower), upper)
    mounts.mount_overlay([Path(entry.lower)], target, upper=upper, work=work, privileged=privileged)


def _records(state_dir: Path) -> Records[MountRecord]:
    return Records(state_dir / "images", MountRecord, "/mount.json")


def _forget(entry: MountRecord, state_dir: Path) -> None:
    """Delete the record and the overlay's folders; not what something is mounted in."""
    if entry.overlay:
        discard_tree(Path(entry.overlay))
    discard_tree(state_dir / "images" / entry.id)


def _sweep(cache_dir: Path) -> None:
    """Remove the overlays of an earlier boot."""
    for folder in cache_dir.glob("overlays/*"):
        try:
            stale = (folder / "boot").read_text() != mounts.boot_id()
        except OSError:
            continue  # being made, or gone
        if stale:
            log.info("removing %s of an earlier boot", folder)
            discard_tree(folder)


def _quietly_rmdir(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.rmdir()
