"""``bootseer image``: convert, mount, run and look at container images."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bootseer import config as settings
from bootseer.errors import BootseerError, ConfigError, NotFoundError, PrivilegeError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from rich.progress import TaskID

    from bootseer.blocks.tree import TreeStatus
    from bootseer.image import ImageMount
    from bootseer.image.runtime import Bind

app = typer.Typer(no_args_is_help=True, help="Container images that start before they have arrived")
profile_app = typer.Typer(no_args_is_help=True, help="What earlier starts of an image touched")
app.add_typer(profile_app, name="profile")

Ref = Annotated[str, typer.Argument(metavar="REF", help="HOST[:PORT]/NAME[:TAG] or oci:DIR[:TAG]")]
StoreUrl = Annotated[str, typer.Option("--store", metavar="URL", help="Folder, hdfs:// or s3:// (default: settings)")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document")]
PlainHttp = Annotated[
    bool | None, typer.Option("--plain-http/--https", help="Default: HTTP for loopback and private addresses")
]
JobName = Annotated[str, typer.Option("--job", metavar="NAME", help="Whose earlier starts to prefetch by")]


@app.command()
def convert(
    ref: Ref,
    store: StoreUrl = "",
    work_dir: Annotated[Path | None, typer.Option(help="Disk for temporary files (default: beside the cache)")] = None,
    plain_http: PlainHttp = None,
    repair: Annotated[bool, typer.Option("--repair", help="Convert again, replace what the store has damaged")] = False,
    as_json: AsJson = False,
) -> None:
    """Convert an image into the store, once per image; needs root."""
    from bootseer import image

    config = settings.load()
    began = time.monotonic()
    with _terminable(), _Bars(quiet=as_json) as bars:
        record = image.convert(
            ref,
            store or config.store_url,
            work_dir=work_dir or Path(config.cache_dir, "work"),
            progress=bars.update,
            plain_http=plain_http,
            repair=repair,
        )
    if as_json:
        _print_json(record)
        return
    steps = ", ".join(f"{step} {seconds:.1f} s" for step, seconds in record.seconds.items())
    fresh = time.monotonic() - began >= sum(record.seconds.values())
    typer.echo(f"{'converted' if fresh else 'converted before'}: {ref}")
    typer.echo(f"  image   {record.image} ({record.platform})")
    typer.echo(f"  tree    {record.tree}")
    sizes = f"{_size(record.tree_bytes)} of data, {_size(record.stored_bytes)} stored"
    typer.echo(f"  size    {sizes}, layers {_size(record.layer_bytes)}")
    typer.echo(f"  took    {steps}")


@app.command()
def mount(
    ref: Ref,
    target: Annotated[Path, typer.Argument(metavar="DIR")],
    read_only: Annotated[bool, typer.Option("--read-only", help="Without a writable layer on top")] = False,
    job: JobName = "",
    store: StoreUrl = "",
    plain_http: PlainHttp = None,
    as_json: AsJson = False,
) -> None:
    """Mount a converted image on DIR; its bytes arrive as they are read."""
    from bootseer import image

    config = settings.load()
    with _terminable():
        mounted = image.mount(
            ref,
            target,
            store_url=store or config.store_url,
            config=config,
            job=job or None,
            writable=not read_only,
            plain_http=plain_http,
        )
    if as_json:
        _print_json(mounted.record)
    else:
        typer.echo(f"mounted {ref} on {mounted.rootfs}")


@app.command()
def unmount(target: Annotated[str, typer.Argument(metavar="DIR", help="Mount point or id")]) -> None:
    """Unmount an image and delete what was written on top of it."""
    from bootseer import image

    image.unmount(target, settings.load().state_dir)


@app.command()
def run(
    ref: Ref,
    command: Annotated[list[str] | None, typer.Argument(metavar="-- CMD...", help="Default: the image's own")] = None,
    job: JobName = "",
    env: Annotated[list[str] | None, typer.Option("--env", "-e", metavar="K[=V]", help="Set a variable")] = None,
    volume: Annotated[list[str] | None, typer.Option("--volume", "-v", metavar="SRC:DST[:ro]")] = None,
    cwd: Annotated[str, typer.Option("--workdir", "-w", help="Folder in the container to start in")] = "",
    network: Annotated[str, typer.Option(help="host: the caller's; none")] = "host",
    runtime: Annotated[str, typer.Option(help="runc or crun (default: the first that works)")] = "",
    summary: Annotated[bool, typer.Option("--summary", help="Say at the end what was moved, on stderr")] = False,
    store: StoreUrl = "",
    plain_http: PlainHttp = None,
) -> None:
    """Run a command in a container of a converted image and exit with its exit code."""
    import logging
    import tempfile

    from bootseer import image

    if os.geteuid() != 0:
        raise PrivilegeError(f"running {ref} needs root", hint="run with sudo")
    config = settings.load()
    variables = dict(_variable(item) for item in env or [])
    binds = [_bind(item) for item in volume or []]
    began = time.monotonic()
    folder = Path(config.state_dir, "run")
    folder.mkdir(parents=True, exist_ok=True)
    target = Path(tempfile.mkdtemp(prefix="rootfs-", dir=folder))
    with _terminable(), contextlib.ExitStack() as undo:
        undo.callback(_remove, target)
        mounted = image.mount(
            ref, target, store_url=store or config.store_url, config=config, job=job or None, plain_http=plain_http
        )
        undo.callback(mounted.unmount)
        mount_seconds = time.monotonic() - began
        code = image.runtime.run(
            mounted.rootfs,
            mounted.config,
            command or [],
            env=variables,
            mounts=binds,
            cwd=cwd,
            runtime=runtime or None,
            network=network,
            state_dir=Path(config.state_dir),
        )
        if summary or logging.getLogger().isEnabledFor(logging.INFO):
            _print_summary(mounted, mount_seconds, time.monotonic() - began)
    raise typer.Exit(code)


@app.command()
def ls(store: StoreUrl = "", as_json: AsJson = False) -> None:
    """List the converted images of a store."""
    from bootseer import image
    from bootseer.store import open_store

    records = list(image.records(open_store(store or settings.load().store_url)))
    if as_json:
        _print_json(records)
        return
    for record in records:
        sizes = f"{_size(record.tree_bytes):>9} {_size(record.stored_bytes):>9}"
        typer.echo(f"{record.image[7:19]} {record.platform:<12} {sizes}  {record.reference}")


@app.command()
def status(
    target: Annotated[str, typer.Argument(metavar="[DIR]", help="Mount point or id (default: all)")] = "",
    as_json: AsJson = False,
) -> None:
    """Show what has arrived of mounted images, and what readers waited for."""
    import msgspec

    from bootseer import image

    state = Path(settings.load().state_dir)
    mounts = [image.attach(target, state)] if target else image.mounts(state)
    if as_json:
        found = [{"mount": msgspec.to_builtins(m.record), "status": msgspec.to_builtins(m.status())} for m in mounts]
        _print_json(found[0] if target else found)
        return
    for mounted in mounts:
        typer.echo(f"{mounted.rootfs}: {mounted.record.reference} ({mounted.digest[7:19]})")
        for line in _status_lines(mounted.status()):
            typer.echo(f"  {line}")


@profile_app.command("show")
def profile_show(ref: Ref, store: StoreUrl = "", plain_http: PlainHttp = None, as_json: AsJson = False) -> None:
    """List the traces known of an image, by job."""
    from bootseer import image
    from bootseer.blocks.trace import UNIT, Trace
    from bootseer.store import open_store

    url = store or settings.load().store_url
    record = image.resolve(ref, url, plain_http=plain_http)
    opened = open_store(url)
    rows = []
    for info in opened.list(f"profiles/{record.tree}"):
        trace = Trace.decode(opened.get(info.key))
        rows.append(
            {
                "job": info.key.split("/")[2],
                "key": info.key,
                "began": trace.began,
                "complete": trace.complete,
                "driver": trace.driver,
                "touches": len(trace.touches),
                "bytes": sum(touch.count for touch in trace.touches) * UNIT,
                "seconds": max((touch.ms for touch in trace.touches), default=0) / 1000,
            }
        )
    if as_json:
        _print_json(rows)
        return
    if not rows:
        typer.echo(f"no start of {ref} has been recorded yet")
    for row in rows:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(str(row["began"]))))
        state = "" if row["complete"] else "  incomplete"
        amount = f"{_size(int(str(row['bytes']))):>9} in {row['touches']} touches over {row['seconds']} s"
        typer.echo(f"{row['job']:<20} {when}  {amount}{state}")


class _Bars:
    """Progress bars on stderr for steps of more than two seconds; safe to update from any thread."""

    def __init__(self, *, quiet: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

        self._bars = Progress(
            TextColumn("{task.description:<9}"),
            BarColumn(),
            DownloadColumn(binary_units=False),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
            disable=quiet or not sys.stderr.isatty(),
        )
        self._tasks: dict[str, TaskID] = {}
        self._began = time.monotonic()

    def update(self, step: str, done: int, total: int) -> None:
        if self._bars.disable or (not self._tasks and time.monotonic() - self._began < 2.0):
            return
        if not self._bars.live.is_started:
            self._bars.start()
        if step not in self._tasks:
            self._tasks[step] = self._bars.add_task(step)
        self._bars.update(self._tasks[step], completed=done, total=total or None)

    def __enter__(self) -> _Bars:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bars.live.is_started:
            self._bars.stop()


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Inside, SIGTERM ends the command like Ctrl-C does: everything is undone on the way out."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _remove(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


def _print_summary(mounted: ImageMount, mount_seconds: float, seconds: float) -> None:
    typer.echo(f"bootseer: mounted in {mount_seconds:.2f} s, ended after {seconds:.2f} s", err=True)
    try:
        for line in _status_lines(mounted.status()):
            typer.echo(f"bootseer: {line}", err=True)
    except BootseerError as exc:
        typer.echo(f"bootseer: {exc}", err=True)


def _status_lines(status: TreeStatus) -> list[str]:
    moved = f"demand {_size(status.bytes_demand)}, hot {_size(status.bytes_hot)}"
    return [
        f"blocks {status.blocks_ready}/{status.blocks_total}, hot {status.hot_ready}/{status.hot_total}",
        f"moved by {moved}, background {_size(status.bytes_background)}",
        f"readers waited {status.stall_seconds:.2f} s in {status.slow_faults} slow faults",
        f"recording: {status.recording}",
    ]


def _variable(text: str) -> tuple[str, str]:
    name, sep, value = text.partition("=")
    if not name:
        raise ConfigError(f"bad variable {text!r}", hint="write NAME=VALUE")
    return name, value if sep else os.environ.get(name, "")


def _bind(text: str) -> Bind:
    from bootseer.image import runtime

    parts = text.split(":")
    if len(parts) not in (2, 3) or (len(parts) == 3 and parts[2] not in ("ro", "rw")):
        raise ConfigError(f"bad volume {text!r}", hint="write SRC:DST or SRC:DST:ro")
    if not Path(parts[0]).exists():
        raise NotFoundError(f"no file or folder {parts[0]} to show in the container")
    return runtime.Bind(str(Path(parts[0]).absolute()), parts[1], parts[2:] == ["ro"])


def _size(count: int) -> str:
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    raise AssertionError("unreachable")


def _print_json(value: object) -> None:
    import msgspec

    typer.echo(json.dumps(msgspec.to_builtins(value), indent=2))
