"""``bootseer image mount``, ``unmount`` and ``status``: on a folder as root, or through the node daemon as any user."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bootseer.cli._shared import (
    AsJson,
    JobName,
    PlainHttp,
    Ref,
    RequireSignature,
    StoreUrl,
    VerifyKey,
    answer,
    print_json,
    settings,
)
from bootseer.errors import UnavailableError
from bootseer.units import one_line, size_text

if TYPE_CHECKING:
    from bootseer.blocks.tree import TreeStatus
    from bootseer.config import Config
    from bootseer.image.mount import MountRecord
    from bootseer.node.protocol import Mount


log = logging.getLogger(__name__)


def register(app: typer.Typer) -> None:
    for verb in (mount, unmount, status):
        app.command()(verb)


ForJob = Annotated[
    str, typer.Option("--for-job", metavar="ID", help="Of the node daemon: not for this session, but for this job")
]


def mount(
    ref: Ref,
    target: Annotated[
        Path | None, typer.Argument(metavar="[DIR]", help="Default: a folder that the node daemon makes for you alone")
    ] = None,
    read_only: Annotated[bool, typer.Option("--read-only", help="Without a writable layer on top")] = False,
    privileged: Annotated[
        bool,
        typer.Option("--privileged", help="Set-uid programs and devices work; only root may reach DIR"),
    ] = False,
    job: JobName = "",
    for_job: ForJob = "",
    store: StoreUrl = "",
    verify_key: VerifyKey = "",
    require_signature: RequireSignature = False,
    plain_http: PlainHttp = None,
    as_json: AsJson = False,
) -> None:
    """Mount a converted image on DIR; its bytes arrive as they are read.

    Root is needed. Without DIR the node daemon mounts it read-only for any user and prints the folder. That mount ends
    with `bootseer image unmount`, at the latest with the session (the login, the batch script) of who asked; with
    --for-job it lasts until `bootseer image unmount --for-job ID`.

    Example: root=$(bootseer image mount registry:5000/team/torch:2.6)
    """
    if target is None:
        if store or verify_key or require_signature or privileged or plain_http is not None:
            raise typer.BadParameter(
                "without DIR the node daemon's own settings say how: name a DIR, or leave this out"
            )
        from bootseer.node import client

        made = client.mount_image(ref, config=settings(), job=for_job, profile=job)
        answer(made, as_json, made.folder)
        return
    if for_job:
        raise typer.BadParameter("--for-job is for mounts of the node daemon, without DIR")
    from bootseer import image
    from bootseer.node.client import in_daemon_cgroup

    config = in_daemon_cgroup(settings(store, verify_key, require_signature))
    sweep(config)
    mounted = image.mount(
        ref,
        target,
        store_url=config.store_url,
        config=config,
        job=job or None,
        writable=not read_only,
        privileged=privileged,
        plain_http=plain_http,
    )
    answer(mounted.record, as_json, f"mounted {ref} on {mounted.rootfs}")


def unmount(
    target: Annotated[str, typer.Argument(metavar="[DIR]", help="Mount point or id")] = "",
    for_job: ForJob = "",
    as_json: AsJson = False,
) -> None:
    """Unmount an image and delete what was written on top of it."""
    from bootseer import image

    config = settings()
    if bool(target) == bool(for_job):
        raise typer.BadParameter("name either a DIR or a job")
    if for_job:
        from bootseer.node import client

        ended = client.unmount_job(for_job, config=config)
        answer(ended, as_json, *(f"unmounted {one.folder}" for one in ended))
        return
    if found := _daemon_mounts(config, target):
        from bootseer.node import client

        client.unmount(found[0].id, config=config)
    else:
        image.attach(target, Path(config.state_dir)).unmount()
    answer({"target": target, "mounted": False}, as_json)


def status(
    target: Annotated[str, typer.Argument(metavar="[DIR]", help="Mount point or id (default: all)")] = "",
    as_json: AsJson = False,
) -> None:
    """Show what has arrived of mounted images, and what readers waited for."""
    import msgspec

    from bootseer import image

    config = settings()
    rows: list[tuple[MountRecord | Mount, str, Callable[[], TreeStatus]]]
    if (os.geteuid() != 0 or target) and (
        own := [one for one in _daemon_mounts(config, target) if one.state == "mounted"]
    ):
        from bootseer.node import client

        rows = [(m, m.folder, functools.partial(client.status, m.id, config=config)) for m in own]
    else:
        state = Path(config.state_dir)
        mounts = [image.attach(target, state)] if target else image.mounts(state)
        rows = [(m.record, m.record.target, m.status) for m in mounts]
    if as_json:
        found = [{"mount": msgspec.to_builtins(mount), "status": msgspec.to_builtins(ask())} for mount, _, ask in rows]
        print_json(found[0] if target else found)
        return
    for mount, folder, ask in rows:
        typer.echo(f"{folder}: {one_line(mount.reference)} ({mount.image[7:19]})")
        for line in status_lines(ask()):
            typer.echo(f"  {line}")


def _daemon_mounts(config: Config, target: str = "") -> list[Mount]:
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


def sweep(config: Config, seconds: float = 10.0) -> None:
    """End what killed processes left. Only where starts are left are their parts imported."""
    from bootseer import image
    from bootseer.image.mount import STARTS

    if any(Path(config.cache_dir, STARTS).glob("[!.]*")):
        from bootseer.launch import leftovers

        leftovers.sweep(config, seconds)
    else:
        image.sweep(Path(config.state_dir), seconds)


def status_lines(status: TreeStatus) -> list[str]:
    moved = f"demand {size_text(status.bytes_demand)}, hot {size_text(status.bytes_hot)}"
    return [
        f"blocks {status.blocks_ready}/{status.blocks_total}, hot {status.hot_ready}/{status.hot_total}, "
        f"driver {status.driver}",
        f"moved by {moved}, background {size_text(status.bytes_background)}",
        f"readers waited {status.stall_seconds:.2f} s in {status.slow_faults} slow faults",
        f"recording: {status.recording}",
    ]
