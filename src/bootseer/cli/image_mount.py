"""``bootseer image mount`` and ``status``: on a folder as root, or through the node daemon as any user."""

from __future__ import annotations

import contextlib
import os
import pwd
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bootseer.cli._shared import (
    AsJson,
    ForJob,
    JobName,
    PlainHttp,
    Ref,
    RequireSignature,
    StoreUrl,
    VerifyKey,
    answer,
    answer_table,
    print_json,
    settings,
    time_text,
)
from bootseer.cli.unmount import daemon_mounts, mount_points, others
from bootseer.units import one_line, size_text

if TYPE_CHECKING:
    from bootseer.blocks.tree import TreeStatus
    from bootseer.config import Config
    from bootseer.image.mount import MountRecord
    from bootseer.node.protocol import Mount


def mount(
    ref: Ref,
    target: Annotated[
        Path | None, typer.Argument(metavar="[DIR]", help="Default: a folder that the node daemon makes for you alone")
    ] = None,
    rw: Annotated[
        bool, typer.Option("--rw", help="With a writable layer on top, which is deleted when it is unmounted")
    ] = False,
    privileged: Annotated[
        bool,
        typer.Option("--privileged", help="With --rw: set-uid programs and devices work; only root may reach DIR"),
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
    with `bootseer unmount`, at the latest with the session (the login, the batch script) of who asked; with
    --for-job it lasts until `bootseer unmount --for-job ID`.

    Example: root=$(bootseer image mount registry:5000/team/torch:2.6)
    """
    if target is None:
        if store or verify_key or require_signature or privileged or rw or plain_http is not None:
            raise typer.BadParameter(
                "only --job and --for-job go without DIR, where the node daemon's own settings say how: name a DIR"
            )
        from bootseer.node import client

        made = client.mount_image(ref, config=settings(), job=for_job, profile=job)
        answer(made, as_json, made.folder)
        return
    if privileged and not rw:
        raise typer.BadParameter("--privileged is for a mount with --rw")
    if for_job:
        raise typer.BadParameter("--for-job is for mounts of the node daemon, without DIR")
    from bootseer import image
    from bootseer.kernel import background
    from bootseer.node.client import in_daemon_cgroup

    background.lend()
    config = in_daemon_cgroup(settings(store, verify_key, require_signature))
    sweep(config)
    mounted = image.mount(
        ref,
        target,
        store_url=config.store_url,
        config=config,
        job=job or None,
        writable=rw,
        privileged=privileged,
        plain_http=plain_http,
    )
    answer(mounted.record, as_json, f"mounted {ref} on {mounted.rootfs}")


def status(
    target: Annotated[
        str,
        typer.Argument(metavar="[DIR]", help="Mount point or id (default: all)", autocompletion=mount_points),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """List containers, starts, mounted images, environments and striped folders of this node: whose, since when, by
    which version. Of the image on DIR say what has arrived.

    `stale` is what killed processes left: the next start ends it, and so does `bootseer clean`. Reads of a `dead` mount
    fail, because its block server was killed: `bootseer unmount` ends it.
    """
    import msgspec

    from bootseer import image
    from bootseer.image import inventory
    from bootseer.node import client

    config = settings()
    own = [one for one in daemon_mounts(config, target) if one.state == "mounted"]
    if not target:
        found = []
        with contextlib.suppress(PermissionError):  # what is not this user's
            found = inventory.listing(Path(config.state_dir), Path(config.cache_dir))
            found += others(Path(config.state_dir))
        found += [
            inventory.Item(
                kind="mount", id=one.id, state=one.state, what=one.reference, folder=one.folder, since=one.made
            )
            for one in own
            if one.id not in {item.id for item in found}
        ]
        users = {one.id: one.uid for one in own}
        found = [msgspec.structs.replace(x, user=_named(users.get(x.id, os.geteuid()))) for x in found]
        columns = ("kind", "id", "user", "state", "since", "version", "what", "folder")
        rows = [
            (x.kind, x.id, x.user, x.state, time_text(x.since) if x.since else "", x.version, x.what, x.folder)
            for x in found
        ]
        answer_table(found, as_json, columns, rows, columns, "nothing of bootseer runs or is mounted on this node")
        return
    mounted: MountRecord | Mount
    if own:
        mounted, folder, moved = own[0], own[0].folder, client.status(own[0].id, config=config)
    else:
        attached = image.attach(target, Path(config.state_dir))
        mounted, folder, moved = attached.record, attached.record.target, attached.status()
    if as_json:
        print_json({"mount": msgspec.to_builtins(mounted), "status": msgspec.to_builtins(moved)})
        return
    typer.echo(f"{folder}: {one_line(mounted.reference)} ({mounted.image[7:19]})")
    for line in status_lines(moved):
        typer.echo(f"  {line}")


def _named(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


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
    copied = f"; this node had {size_text(status.bytes_copied)}" if status.bytes_copied else ""
    return [
        f"blocks {status.blocks_ready}/{status.blocks_total}, hot {status.hot_ready}/{status.hot_total}, "
        f"driver {status.driver}",
        f"moved by {moved}, background {size_text(status.bytes_background)}{copied}",
        f"readers waited {status.stall_seconds:.2f} s in {status.slow_faults} slow faults, "
        f"{status.failed_reads} reads failed",
        f"recording: {status.recording}",
    ]
