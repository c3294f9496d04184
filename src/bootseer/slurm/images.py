"""The one place where the hooks mount and unmount images, on this node: through the node daemon, else by themselves.

With a daemon the user of the job must be able to read the image, by the user's own logins, and its block servers are in
the daemon's cgroup: jobs that use one image share them, and no end of a job ends them. The daemon's mounts are those of
the job ``slurm-<job id>.<restart count>``, so that whoever removes the job folder ends them."""

from __future__ import annotations

import logging
from pathlib import Path

from bootseer import image, oci
from bootseer.config import Config
from bootseer.errors import NotFoundError
from bootseer.kernel import mount as mounts
from bootseer.node import client
from bootseer.slurm import jobfolder
from bootseer.slurm.comment import JobImage
from bootseer.slurm.jobfolder import Image

log = logging.getLogger(__name__)


def mount(wish: JobImage, folder: Path, user: int, config: Config) -> Image:
    """Mount the image read-only for the job with this ``folder``, so that its hot set begins to arrive. Raises
    `BootseerError`."""
    jobfolder.note(folder, jobfolder.DAEMON, config.node_dir)
    try:
        made = client.mount_image(wish.reference, config=config, job=_name(folder), user=user, profile=wish.job)
        return _seen(wish, made.config, made.folder)
    except client.AbsentError as exc:
        log.info("%s: mounting %s without it", exc.message, wish.reference)
        jobfolder.note(folder, jobfolder.DAEMON, "")
    jobfolder.note(folder, jobfolder.STATE, config.state_dir)
    mounted = image.mount(
        wish.reference,
        folder / jobfolder.ROOTFS,
        store_url=config.store_url,
        config=config,
        job=wish.job or None,
        owner=user,
        writable=False,
    )
    return _seen(wish, mounted.config.config)


def unmount(folder: Path) -> None:
    """End what `mount` has done, or had begun when it was killed. Raises `BootseerError`, also when the daemon that was
    asked to mount is away and has left mounts."""
    if node_dir := jobfolder.noted(folder, jobfolder.DAEMON):
        try:
            client.unmount_job(_name(folder), config=Config(node_dir=str(node_dir)))
        except client.AbsentError:
            if mounts.below(node_dir):
                raise
    if (state_dir := jobfolder.noted(folder, jobfolder.STATE)) is None:
        return
    target = folder / jobfolder.ROOTFS
    try:
        image.attach(target, state_dir).unmount()
    except NotFoundError:
        image.sweep(state_dir)
    if mounts.is_mounted(target):
        log.warning("detaching %s, which no record of %s names", target, state_dir)
        mounts.unmount(target, lazy=True)


def _seen(wish: JobImage, config: oci.ContainerConfig | None, root: str = "") -> Image:
    config = config or oci.ContainerConfig()
    return Image(wish.reference, config.env or (), config.working_dir, root)


def _name(folder: Path) -> str:
    return f"slurm-{folder.name}"
