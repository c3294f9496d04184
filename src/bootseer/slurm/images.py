"""The one place where the hooks mount and unmount images: as root, on this node."""

from __future__ import annotations

import logging
from pathlib import Path

from bootseer import image
from bootseer.config import Config
from bootseer.errors import NotFoundError
from bootseer.kernel import mount as mounts
from bootseer.slurm.comment import Wish
from bootseer.slurm.jobfolder import Image

log = logging.getLogger(__name__)


def mount(wish: Wish, target: Path, config: Config) -> Image:
    """Mount the image read-only on ``target``, so that its hot set begins to arrive. Raises `BootseerError`."""
    mounted = image.mount(
        wish.reference, target, store_url=config.store_url, config=config, job=wish.job or None, writable=False
    )
    found = mounted.config.config
    return Image(wish.reference, (found.env or ()) if found else (), found.working_dir if found else "")


def unmount(target: Path, state_dir: Path) -> None:
    """End what `mount` has done, or had begun when it was killed. Raises `BootseerError`."""
    try:
        image.attach(target, state_dir).unmount()
    except NotFoundError:
        image.sweep(state_dir)
    if mounts.is_mounted(target):
        log.warning("detaching %s, which no record of %s names", target, state_dir)
        mounts.unmount(target, lazy=True)
