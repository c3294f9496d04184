"""`examine`: run all checks in a folder of their own beside the cache, and remove it."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from bootseer import build
from bootseer.config import Config, shown
from bootseer.doctor import canary, checks
from bootseer.doctor.checks import Check, DoctorReport, Found
from bootseer.errors import BootseerError, PrivilegeError, logged
from bootseer.folders import settled
from bootseer.kernel import mount

_log = logging.getLogger(__name__)
_NO_LAZY = (
    "images must be unpacked in full before a job starts (ordinary users' commands do it themselves, root calls "
    "bootseer image extract and exec), and environments are unpacked instead of mounted"
)


def examine(config: Config, *, progress: Callable[[Check], None] | None = None) -> DoctorReport:
    """Try all that a fast start needs on this machine; needs no root, and then says what root would add.

    Everything lies in one temporary folder on the cache's file system (else in the system's), gone at the end. Each
    wait has a deadline; the whole takes about a second where everything works. ``progress`` gets each finding as it is
    made."""
    found: dict[str, Check] = {}

    def add(name: str, check: Callable[[], str | Found], cost: str, fix: str = "", *, essential: bool = True) -> None:
        found[name] = attempt(name, check, cost, fix, essential=essential)
        if progress:
            progress(found[name])

    folder, beside = _folder(Path(config.cache_dir))
    try:
        add("kernel", checks.kernel, "no EROFS image in two parts: " + _NO_LAZY)
        cost = "users without root extract whole images at each start"
        add("node daemon", lambda: checks.node_daemon(config), cost, "bootseer node install", essential=False)
        alone = os.geteuid() == 0 or found["node daemon"].status != "ok"  # else the daemon has what mounts need
        add("privileges", checks.privileges, "no EROFS or overlay mounts: " + _NO_LAZY, essential=alone)
        cost = "no lazy images and no mounted striped store: " + _NO_LAZY
        add("fuse", checks.fuse, cost, essential=alone)
        add("fuse takeover", lambda: checks.fuse_takeover(folder), checks.TAKEOVER_COST, "see fuse", essential=False)
        image = _image(folder)
        cost = "no lazy images: " + _NO_LAZY
        add("erofs", lambda: checks.erofs(folder, image), cost, checks.EROFS_FIX, essential=alone)
        cost = "none where EROFS mounts files itself"
        add("loop device", lambda: checks.loop_device(image), cost, "modprobe loop", essential=False)
        cost = "containers get a copy of the image instead of an overlay, and environments are captured by a file scan"
        fix = "modprobe overlay; put cache_dir on ext4, xfs or btrfs"
        add("overlayfs", lambda: checks.overlay(folder), cost, fix, essential=alone)
        cost = "no lazy images: " + _NO_LAZY
        add("fuse canary", lambda: checks.fuse_canary(folder, image), cost, "see the lines above", essential=alone)
        cost = "image run and containers of bootseer run do not start; image mount works"
        add("runtime", lambda: checks.runtimes(folder), cost, essential=False)
        cost = "no checkpoints, images or snapshots in HDFS"
        add("hdfs client", lambda: checks.hdfs(config), cost, "check the store", essential=checks.in_hdfs(config))
        cost = "images of the store do not start, and no environment is restored"
        add("store", lambda: checks.store(config), cost, "set store", essential=bool(config.store))
        if found["store"].status != "missing":
            cost = "images of registries do not start"
            add("registries", lambda: checks.registries(config), cost, essential=False)
        cost = "no lazy images: there is nowhere to keep blocks"
        add("cache", lambda: checks.cache(config, folder if beside else None), cost)
        cost, parts = "no lazy images: " + _NO_LAZY, (found["fuse canary"], found["node daemon"])
        add("lazy images", lambda: checks.lazy_images(config, *parts), cost)
    finally:
        _remove(folder)
    settings = {**msgspec.structs.asdict(config), "store_url": config.store_url}
    settings = {name: shown(value) for name, value in settings.items()}
    return DoctorReport(version=build(), checks=tuple(found.values()), settings=settings)


def attempt(name: str, check: Callable[[], str | Found], cost: str, fix: str, *, essential: bool) -> Check:
    """Run ``check``; an error becomes a finding of what is missing, which goes by ``cost`` and comes by ``fix``."""
    try:
        found = check()
    except BootseerError as exc:
        privilege, detail, fix = isinstance(exc, PrivilegeError), exc.message, exc.hint or fix
    except Exception as exc:
        privilege, detail = False, f"{type(exc).__name__}: {exc}"
        fix = fix or "run with BOOTSEER_TRACEBACK=1 and report it"
    else:
        found = Found("ok", found) if isinstance(found, str) else found
        return Check(name=name, essential=essential, **found._asdict())
    return Check(
        name=name, status="missing", detail=detail, cost=cost, fix=fix, essential=essential, privilege=privilege
    )


def _folder(cache: Path) -> tuple[Path, bool]:
    """A fresh folder beside the cache, or anywhere; and whether it is beside the cache."""
    try:
        near = checks.nearest(Path(os.path.realpath(cache)))  # as a start does (`folders.private_folder`)
        beside = settled(near / "any").parent  # where others lead none of it elsewhere
        return Path(tempfile.mkdtemp(prefix=".bootseer-doctor-", dir=beside)), True
    except (BootseerError, OSError) as exc:
        _log.info("cannot work beside the cache: %s", exc)
        return Path(tempfile.mkdtemp(prefix="bootseer-doctor-")), False


def _image(folder: Path) -> tuple[Path, Path] | None:
    place = folder / "image"
    place.mkdir()
    with logged(_log.info, "no canary image"):
        return canary.make(place)
    return None


def _remove(folder: Path) -> None:
    for entry in reversed(mount.below(folder)):
        try:
            mount.unmount(entry.target, lazy=True)
        except BootseerError as exc:
            _log.warning("%s", exc)
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        _log.warning("%s could not be removed", folder)
