"""``bootseer unmount``: ends a mount of an image, an environment or a striped store."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bootseer.cli._completed import completion
from bootseer.cli._shared import AsJson, ForJob, answer, settings
from bootseer.errors import BootseerError, NotFoundError, NotWritableError, PrivilegeError, UnavailableError
from bootseer.folders import trusted

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from bootseer.config import Config
    from bootseer.env.overlay import Group
    from bootseer.fsmount import FsMount
    from bootseer.image import ImageMount
    from bootseer.image.inventory import Item
    from bootseer.node.protocol import Mount

log = logging.getLogger(__name__)
_SECONDS = 60.0
"""How long it waits for an `env run` on the same target."""


def others(state: Path) -> list[Item]:
    """Environments and striped folders that this user has mounted."""
    from bootseer.env import overlay
    from bootseer.fsmount.record import MountRecord
    from bootseer.image.inventory import DEAD, mount_of
    from bootseer.kernel.mount import boot_id
    from bootseer.served.client import alive, records

    found = [
        mount_of(group.record, "environment", "mounted", group.record.key[:12], str(one.host))
        for group in overlay.groups(state)
        for one in group.record.targets
    ]
    for one in records(state / "fs", MountRecord).all():
        serves = one.boot == boot_id() and alive(state / "fs" / one.id)
        found.append(mount_of(one, "striped", "mounted" if serves else DEAD, one.url, one.mountpoint))
    return found


@completion
def mount_points(_store: str) -> Iterable[tuple[str, str]]:
    from bootseer.image import inventory

    config = settings()
    state = Path(config.state_dir)
    for one in (*inventory.listing(state, Path(config.cache_dir)), *others(state)):
        if one.kind not in ("container", "start"):
            yield one.folder, one.what


def unmount(
    target: Annotated[
        list[str] | None,
        typer.Argument(metavar="[DIR]...", help="Mount points, or ids", autocompletion=mount_points),
    ] = None,
    environments: Annotated[
        bool, typer.Option("--environments", help="Everything that env run mounted on this node")
    ] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="These, and images and striped folders that this user mounted on a DIR")
    ] = False,
    for_job: ForJob = "",
    force: Annotated[bool, typer.Option("--force", help="Also environments that running processes use")] = False,
    as_json: AsJson = False,
) -> None:
    """Unmount an image, an environment or a folder of a striped store; what was written on top of it is deleted.

    What was in a target of env run before the first run shows again. An environment that processes use stays, with exit
    code 73, and with --all so does any mount; starts, containers, pods and users of the node daemon then keep what they
    have. Another DIR that is named goes from its place after five seconds, with a warning: who uses an image keeps it,
    who uses a striped folder gets errors.

    Example: bootseer unmount /mnt/torch
    """
    from bootseer.env import overlay
    from bootseer.kernel import mount as mounts

    if [bool(target), environments, everything, bool(for_job)].count(True) != 1:
        raise typer.BadParameter("name a DIR, or say --environments, --all or --for-job")
    config, done, left = settings(), list[str](), list[str]()
    if for_job:
        from bootseer.node import client

        done = [one.folder for one in client.unmount_job(for_job, config=config)]
    else:
        state, paths = Path(config.state_dir), [Path(os.path.abspath(item)) for item in target or []]
        groups = overlay.groups(state, os.getppid())[::-1] if environments or everything else None
        groups = overlay.groups_on(paths, state, os.getppid()) if groups is None else groups
        covered = {mounts.real(item.host) for group in groups for item in group.record.targets}
        _end_environments(groups, state, force, done, left)
        for item, path in zip(target or [], paths, strict=True):
            if mounts.real(path) not in covered:
                _end_other(item, config)
                done.append(item)
        if everything:
            _end_all(config, done, left)
    lines = [f"unmounted {shown}" for shown in done] or ["nothing was unmounted"]
    answer([{"target": shown, "mounted": False} for shown in done], as_json, *lines)
    if left:
        how = "end that" if everything else "end that, or unmount it with --force"
        raise NotWritableError(f"still in use: {', '.join(left)}", hint=how)


def _end_environments(groups: Sequence[Group], state: Path, force: bool, done: list[str], left: list[str]) -> None:
    from bootseer.env import lock

    for group in groups:
        shown = " ".join(str(item.host) for item in group.record.targets)
        with lock.locked(tuple(group.record.targets), state, wait=_SECONDS), lock.groups_locked(state):
            if not force and (who := group.freed()):
                left.append(f"{shown} ({who})")
                continue
            group.take_down()
        done.append(shown)


def _end_all(config: Config, done: list[str], left: list[str]) -> None:
    """Images and striped folders with a mount point outside of our own folders: in those they are a start's, a
    container's or a pod's."""
    from bootseer import fsmount
    from bootseer.fsmount.record import MountRecord
    from bootseer.image.mount import listing
    from bootseer.kernel import mount as mounts
    from bootseer.served.client import records

    state = trusted(Path(config.state_dir))
    own = [mounts.real(one) for one in (state, config.cache_dir, config.node_dir)]
    found: dict[str, ImageMount | FsMount] = {one.record.target: one for one in listing(state)}
    for record in records(state / "fs", MountRecord).all():
        if striped := fsmount.find(Path(record.mountpoint), config=config):
            found[record.mountpoint] = striped
    for target, mounted in sorted(found.items(), reverse=True):  # what is mounted in another one first
        if any(Path(mounts.real(target)).is_relative_to(one) for one in own):
            continue
        top = mounts.find(target)
        if top and top.fstype != "erofs" and not top.source.startswith("bootseer"):
            left.append(f"{target} ({top.source} is mounted on it)")
            continue
        try:
            if top:  # by itself it is detached under those who use it
                mounts.unmount(target)
        except PrivilegeError:
            raise
        except BootseerError:
            left.append(target)
            continue
        mounted.unmount()
        done.append(target)


def _end_other(target: str, config: Config) -> None:
    from bootseer import fsmount, image
    from bootseer.node import client

    if found := daemon_mounts(config, target):
        client.unmount(found[0].id, config=config)
    elif striped := fsmount.find(Path(target), config=config):
        striped.unmount()
    else:
        try:
            mounted = image.attach(target, Path(config.state_dir))
        except NotFoundError:
            hint = "bootseer image status lists images"
            raise NotFoundError(f"nothing of bootseer is mounted on {target}", hint=hint) from None
        mounted.unmount()


def daemon_mounts(config: Config, target: str = "") -> list[Mount]:
    """What the node daemon, if there is one, has mounted for this user; only ``target``, if it is given."""
    from bootseer.node import client

    wanted = (target, os.path.abspath(target))
    try:
        found = client.mounts(config=config)
    except client.AbsentError:
        return []
    except UnavailableError as exc:
        log.warning("%s; looking without it", exc)
        return []
    return [one for one in found if not target or one.id in wanted or one.folder in wanted]
