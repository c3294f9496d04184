"""``bootseer image``: convert, mount, run and look at container images."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bootseer.cli._completed import images, values
from bootseer.cli._shared import (
    AsJson,
    Bars,
    DryRun,
    Group,
    JobName,
    PlainHttp,
    Platform,
    Ref,
    RequireSignature,
    StoreUrl,
    VerifyKey,
    Volumes,
    add_verbs,
    answer,
    notice,
    open_shared,
    settings,
    volume_parts,
)
from bootseer.cli.image_look import extract, inspect, ls
from bootseer.cli.image_mount import mount, status, status_lines, sweep
from bootseer.cli.image_touched import touched
from bootseer.errors import BootseerError, ConfigError, DataError, NotFoundError, PrivilegeError, UnavailableError
from bootseer.folders import private_folder
from bootseer.oci.spec import ContainerConfig, ImageConfig
from bootseer.units import count_text, one_line, size_text

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from bootseer.image import ImageMount
    from bootseer.image.runtime import Bind
    from bootseer.node.userimage import UserImage

app = typer.Typer(cls=Group, no_args_is_help=True, help="Container images that start before they have arrived")


def convert(
    ref: Ref,
    store: StoreUrl = "",
    work_dir: Annotated[
        Path | None, typer.Option(help="Disk for temporary files (default: in the cache folder)")
    ] = None,
    platform: Platform = "",
    plain_http: PlainHttp = None,
    repair: Annotated[bool, typer.Option("--repair", help="Convert again, replace what the store has damaged")] = False,
    if_missing: Annotated[
        bool, typer.Option("--if-missing", help="One of the nodes that run this converts, the others wait for it")
    ] = False,
    wait: Annotated[
        float | None, typer.Option(min=0, metavar="SECONDS", help="Longest wait, with --if-missing (default: 1800)")
    ] = None,
    sign_key: Annotated[str, typer.Option(metavar="FILE", help="Private key to sign with (default: settings)")] = "",
    check: Annotated[
        bool, typer.Option("--check", help="Read all of it back and compare each entry with the layers")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Convert an image into the store, once per image; layers stream, nothing is unpacked, no root is needed.

    Blocks that the store has already, from other images, are shared and not stored again.

    Example: bootseer image convert registry:5000/team/torch:2.6 --store /shared/bootseer
    """
    from bootseer import image
    from bootseer.objects.lease import WAIT

    if if_missing and repair:
        raise typer.BadParameter("--if-missing and --repair contradict each other")
    if wait is not None and not if_missing:
        raise typer.BadParameter("--wait is for --if-missing")
    config = settings(store)
    with Bars(quiet=as_json) as bars:
        record, fresh = image.ensure(
            ref,
            config.store_url,
            work_dir=work_dir or Path(config.cache_dir, "work"),
            progress=bars.update,
            platform=platform,
            plain_http=plain_http,
            repair=repair,
            sign_key=Path(key) if (key := sign_key or config.sign_key) else None,
            wait=(WAIT if wait is None else wait) if if_missing else None,
        )
        checked = 0
        if check:
            work, cache = work_dir or Path(config.cache_dir, "work"), Path(config.cache_dir)
            checked = image.check(
                ref, record, config.store_url, work_dir=work, cache_dir=cache, plain_http=plain_http,
                progress=bars.update,
            )  # fmt: skip
    steps = ", ".join(f"{step} {seconds:.1f} s" for step, seconds in record.seconds.items())
    shared = f"{size_text(record.shared_bytes)} shared with other images"
    packs = f" in {count_text(record.packs, 'pack', 'packs')}" if record.packs else ""
    sizes = f"{size_text(record.tree_bytes)} of data{packs}, {size_text(record.stored_bytes)} stored, {shared}"
    answer(
        record,
        as_json,
        f"{'converted' if fresh else 'converted before'}: {ref}",
        f"  image   {record.image} ({one_line(record.platform)})",
        f"  tree    {record.tree}",
        f"  size    {sizes}, layers {size_text(record.layer_bytes)}",
        f"  took    {steps}",
        *([f"  checked {checked} entries, all as in its layers"] if check else []),
    )


def run(
    ref: Ref,
    command: Annotated[list[str] | None, typer.Argument(metavar="[CMD]...", help="Default: the image's own")] = None,
    job: JobName = "",
    env: Annotated[list[str] | None, typer.Option("--env", "-e", metavar="K[=V]", help="Set a variable")] = None,
    volume: Volumes = None,
    gpus: Annotated[str, typer.Option(metavar="all|NAMES", help="GPUs by CDI: all this job may use, or 0,1,...")] = "",
    device: Annotated[
        list[str] | None, typer.Option("--device", metavar="VENDOR/CLASS=NAME", help="Give it this device, by CDI")
    ] = None,
    entrypoint: Annotated[
        str | None, typer.Option(metavar="CMD", help="In place of the image's entry point and command")
    ] = None,
    user_name: Annotated[
        str, typer.Option("--user", "-u", metavar="NAME|UID[:GROUP|GID]", help="In place of the image's user")
    ] = "",
    read_only: Annotated[bool, typer.Option("--read-only", help="Only mounts and volumes can be written")] = False,
    interactive: Annotated[
        bool, typer.Option("--interactive", "-i", help="It reads the standard input, also when that is no terminal")
    ] = False,
    tty: Annotated[
        bool, typer.Option("--tty", "-t", help="It gets a terminal of its own, for programs that ask")
    ] = False,
    cwd: Annotated[str, typer.Option("--workdir", "-w", help="Folder in the container to start in")] = "",
    network: Annotated[
        str, typer.Option(help="host: the caller's; none", autocompletion=values("host", "none"))
    ] = "host",
    runtime: Annotated[
        str,
        typer.Option(help="runc or crun (default: the first that works)", autocompletion=values("runc", "crun")),
    ] = "",
    stop_grace: Annotated[
        float | None,
        typer.Option(min=0, metavar="SECONDS", help="From SIGTERM to SIGKILL (default: no limit)"),
    ] = None,
    summary: Annotated[bool, typer.Option("--summary", help="Say at the end what was moved, on stderr")] = False,
    store: StoreUrl = "",
    verify_key: VerifyKey = "",
    require_signature: RequireSignature = False,
    plain_http: PlainHttp = None,
) -> None:
    """Run a command in a container of a converted image and exit with its exit code.

    Options go before REF: what follows REF is the command. Without root the node daemon mounts the image (without a
    daemon all of it is extracted), and what the command writes in the image lies in memory and ends with it.

    Example: bootseer image run --job bert -v /data:/data:ro registry:5000/team/torch:2.6 python train.py
    """
    from bootseer import image
    from bootseer.blocks.tree import tell_failed_reads
    from bootseer.folders import owned_folder
    from bootseer.image import cdi, user
    from bootseer.image.mount import RUNS, STARTS
    from bootseer.kernel import background
    from bootseer.node.client import in_daemon_cgroup
    from bootseer.node.userimage import UserImage

    background.lend()
    root = os.geteuid() == 0
    if not root and (
        gpus or device or runtime or user_name or read_only or network != "host" or plain_http is not None
    ):
        needs = "--gpus, --device, --network, --runtime, --user, --read-only and --plain-http need root"
        raise PrivilegeError(needs, hint="run with sudo")
    if tty and not os.isatty(0):
        raise ConfigError("the standard input is no terminal", hint="leave out --tty")
    config = in_daemon_cgroup(settings(store, verify_key, require_signature))
    words = command[1:] if command and command[0] == "--" else command or []
    variables = {name: value for name, value in map(_variable, env or []) if value is not None}
    binds = [_bind(item) for item in volume or []]
    wanted = None if not gpus else "all" if gpus == "all" else [name for name in gpus.split(",") if name]
    devices = cdi.select(wanted, device or [])
    began = time.monotonic()
    state = Path(config.state_dir)
    code = -1
    with _tidied(lambda: code >= 0), contextlib.ExitStack() as undo:
        sweep(config)
        parent = private_folder(state, sub=RUNS) if root else private_folder(Path(config.cache_dir), sub=STARTS)
        folder = undo.enter_context(owned_folder(parent, "rootfs-"))
        rootfs = folder / "rootfs"
        undo.callback(_remove, rootfs, state)
        mounted: ImageMount | UserImage
        if root:
            mounted = image.mount(
                ref,
                rootfs,
                store_url=config.store_url,
                config=config,
                job=job or None,
                privileged=True,
                plain_http=plain_http,
            )
        else:
            mounted = UserImage(ref, rootfs, config, job=job, own=bool(store or verify_key or require_signature))
        undo.callback(mounted.unmount)
        mount_seconds = time.monotonic() - began
        started = mounted.config
        if entrypoint is not None or user_name:
            started = _changed(started, entrypoint, user_name)
        if root:
            code = image.runtime.run(
                mounted.rootfs,
                started,
                words,
                env=variables,
                mounts=binds,
                cwd=cwd,
                runtime=runtime or None,
                network=network,
                devices=devices,
                stop_grace=stop_grace,
                state_dir=state,
                readonly=read_only,
                stdin=interactive or tty,
                terminal=tty,
            )
        else:
            code = user.run(
                mounted.rootfs,
                started,
                words,
                env=variables,
                mounts=binds,
                cwd=cwd,
                stop_grace=stop_grace,
                stdin=interactive,
            )
        if code:
            with contextlib.suppress(BootseerError):
                tell_failed_reads(mounted.status())
        if summary or logging.getLogger().isEnabledFor(logging.INFO):
            _print_summary(mounted, mount_seconds, time.monotonic() - began)
    raise typer.Exit(code)


def _changed(config: ImageConfig, entrypoint: str | None, user: str) -> ImageConfig:
    """The configuration with another entry point, which the image's command does not belong to, or user."""
    import msgspec

    inner = config.config or ContainerConfig()
    if entrypoint is not None:
        inner = msgspec.structs.replace(inner, entrypoint=(entrypoint,) if entrypoint else None, cmd=None)
    return msgspec.structs.replace(config, config=msgspec.structs.replace(inner, user=user or inner.user))


@contextlib.contextmanager
def _tidied(ended: Callable[[], bool]) -> Iterator[None]:
    """Once the command has ``ended``, its exit code counts: what could not be taken away then is logged, and swept by
    a later start."""
    try:
        yield
    except (BootseerError, OSError) as exc:
        if not ended():
            raise
        log.warning("what the container left is tidied later: %s", exc)


def rm(
    refs: Annotated[
        list[str],
        typer.Argument(
            metavar="REF...", help="Converted images, or what `bootseer store ls` calls them", autocompletion=images
        ),
    ],
    platform: Platform = "",
    dry_run: DryRun = False,
    store: StoreUrl = "",
    plain_http: PlainHttp = None,
    as_json: AsJson = False,
) -> None:
    """Remove converted images from the store: REF must be converted again before its next start.

    A digest, or first digits of it, means all its platforms. What is mounted goes on. `bootseer store gc` deletes what
    nothing needs of them any more.
    """
    from bootseer import image

    config, shared = settings(store), open_shared(store)
    taken, missing = dict[tuple[str, str], image.ImageRecord](), list[BootseerError]()
    for ref in refs:
        try:
            try:
                these = image.named(ref, shared, platform=platform, plain_http=plain_http, config=config)
            except (NotFoundError, UnavailableError, DataError) as exc:  # its source is gone, or has another one now
                try:
                    these = image.converted_from(ref, shared, platform)
                except NotFoundError:
                    raise exc from None
            taken |= {(one.image, one.platform): one for one in these}
        except BootseerError as exc:
            missing.append(exc)
    found = list(taken.values())
    if not dry_run:
        image.remove(shared, found)
    done = "would remove" if dry_run else "removed"
    lines = [f"{done} {one_line(record.reference)} ({record.image[7:19]})" for record in found]
    answer({"dry_run": dry_run, "removed": found}, as_json, *lines)
    for one in missing[:-1]:
        notice(str(one))
    if missing:
        raise missing[-1]


def _remove(rootfs: Path, state: Path) -> None:
    """It stays where its mount could not be ended: so a later start finds what is left."""
    from bootseer.image.mount import recorded

    with contextlib.suppress(OSError):
        if os.geteuid() or all(one.rootfs != rootfs for one in recorded(state)):
            rootfs.rmdir()


def _print_summary(mounted: ImageMount | UserImage, mount_seconds: float, seconds: float) -> None:
    typer.echo(f"bootseer: mounted in {mount_seconds:.2f} s, ended after {seconds:.2f} s", err=True)
    try:
        status = mounted.status()
        for line in status_lines(status) if status else ["all of the image was extracted"]:
            typer.echo(f"bootseer: {line}", err=True)
    except BootseerError as exc:
        typer.echo(f"bootseer: {one_line(str(exc))}", err=True)


def _variable(text: str) -> tuple[str, str | None]:
    """Its name and value; a name alone means the caller's, who may have none."""
    name, sep, value = text.partition("=")
    if not name:
        raise ConfigError(f"bad variable {text!r}", hint="write NAME=VALUE")
    return name, value if sep else os.environ.get(name)


def _bind(text: str) -> Bind:
    from bootseer.image import runtime

    bind = runtime.Bind(*volume_parts(text))
    if not os.path.exists(bind.source):
        raise NotFoundError(f"no file or folder {bind.source} to show in the container")
    return bind


add_verbs(
    app,
    {
        "Convert and use": (convert, run, mount, status),
        "Images of a store": (ls, inspect, extract, touched, rm),
    },
)
