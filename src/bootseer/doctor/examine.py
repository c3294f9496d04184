"""`examine`: run all checks in a folder of their own beside the cache, and remove it."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from bootseer import __version__
from bootseer.config import Config
from bootseer.doctor import canary, checks, lazy
from bootseer.doctor.report import Check, Report
from bootseer.errors import BootseerError
from bootseer.kernel import mount

_log = logging.getLogger(__name__)


def examine(config: Config, *, progress: Callable[[Check], None] | None = None) -> Report:
    """Try all that a fast start needs on this machine; needs no root, and then says what root would add.

    Everything lies in one temporary folder on the cache's file system (else in the system's), which is empty of mounts
    and gone at the end. Each wait has a deadline; the whole takes about a second where everything works. ``progress``
    gets each finding as it is made. Never raises for something missing.
    """
    found: list[Check] = []

    def add(name: str, check: Callable[[], Check]) -> None:
        found.append(checks.attempt(name, check))
        if progress:
            progress(found[-1])

    folder, beside = _folder(Path(config.cache_dir))
    try:
        add("kernel", checks.kernel)
        add("privileges", checks.privileges)
        add("fuse", checks.fuse)
        add("fuse takeover", lambda: lazy.fuse_takeover(folder))
        image = _image(folder)
        add("erofs", lambda: checks.erofs(folder, image))
        add("loop device", lambda: checks.loop_device(image))
        add("overlayfs", lambda: checks.overlay(folder))
        add("fuse canary", lambda: lazy.whole_way(folder, image))
        add("runtime", lambda: checks.runtimes(folder))
        add("hdfs client", lambda: checks.hdfs(config))
        add("cache", lambda: checks.cache(config, folder if beside else None))
        add("lazy images", lambda: lazy.lazy_images(config, found))
    finally:
        _remove(folder)
    settings = msgspec.structs.asdict(config)
    return Report(version=__version__, checks=tuple(found), settings={**settings, "store_url": config.store_url})


def _folder(cache: Path) -> tuple[Path, bool]:
    """A fresh folder beside the cache, or anywhere; and whether it is beside the cache."""
    try:
        return Path(tempfile.mkdtemp(prefix=".bootseer-doctor-", dir=checks.nearest(cache.absolute()))), True
    except OSError as exc:
        _log.info("cannot work beside the cache: %s", exc)
        return Path(tempfile.mkdtemp(prefix="bootseer-doctor-")), False


def _image(folder: Path) -> tuple[Path, Path] | None:
    place = folder / "image"
    place.mkdir()
    try:
        return canary.make(place)
    except (BootseerError, OSError) as exc:
        _log.info("no canary image: %s", exc)
        return None


def _remove(folder: Path) -> None:
    for entry in reversed(list(mount.entries())):
        if entry.target.startswith(f"{folder}/"):
            try:
                mount.unmount(entry.target, lazy=True)
            except BootseerError as exc:
                _log.warning("%s", exc)
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        _log.warning("%s could not be removed", folder)
