"""One start on the node, as a process of its own inside the node's network: `Order` in, `Outcome` out, both JSON.

    nsenter --net=... python -m bench.image.node ORDER

The clock runs from the moment a start is asked for (this process and its imports are there, the page cache is empty) to
the job's line ``ready``; what the link moved and the processors did is taken at that moment too. Everything the start
needs lies below ``Order.work``, which must be empty; nothing stays mounted or running.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from bench.common import peers
from bootseer import config as settings
from bootseer import image, oci
from bootseer.blocks import tree
from bootseer.blocks.extract.tree import extract
from bootseer.demo.programs import run
from bootseer.errors import BootseerError
from bootseer.image.record import ImageRecord
from bootseer.kernel import background
from bootseer.kernel import mount as mounts
from bootseer.objects import open_store

_RECORDED_SECONDS = 15.0
_PACK_SECONDS = 300.0
_JOB_SECONDS = 900.0
_WATCH_SECONDS = 10.0


class Order(msgspec.Struct, kw_only=True):
    """What to start and how. ``how``: ``local``, ``lazy``, ``written``, ``containerd``, ``nydus`` or ``peer``."""

    how: str
    work: str
    link: str
    """Host's end of the node's link."""
    command: list[str]
    ref: str
    record: str
    """File with the `ImageRecord`."""
    store: str = ""
    job: str | None = None
    """Profile to prefetch by and record into; None: neither."""
    environ: dict[str, str] = {}
    """Settings of this start: ``BOOTSEER_...``."""
    settle: bool = False
    """Whether to wait for the hot pack to be made from the recording."""
    cache: str = ""
    """Node cache to use (default: an empty one below ``work``)."""
    server: list[str] = []
    """The command that serves (default: the product's own)."""
    options: dict[str, str] = {}
    """What a peer needs to know; or where a local tree's ``meta`` and ``data`` are, and whether the page cache is to be
    ``warm`` (not empty)."""


class Outcome(msgspec.Struct, kw_only=True):
    """What came of it. Times in seconds, bytes as the link counted them; ``cpu``: busy seconds of the whole machine."""

    seconds: float
    link_bytes: int
    cpu: float
    stages: dict[str, float] = {}
    details: dict[str, Any] = {}


def busy_seconds() -> float:
    """Of all processors of the machine, since its start."""
    user, nice, system = map(int, Path("/proc/stat").read_text().split(None, 4)[1:4])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


class Clock:
    """From `start` to the first line ``ready`` on standard output, which it stands in for while it is open."""

    def __init__(self, link: str) -> None:
        self._counter = Path("/sys/class/net", link, "statistics/tx_bytes")
        self._at: tuple[float, int, float] | None = None
        self.stages: dict[str, float] = {}

    def __enter__(self) -> Clock:
        sys.stdout.flush()
        self._stdout = os.dup(1)
        reading, writing = os.pipe()
        self._result, result = os.pipe()
        # No thread: as the command line does, this process lends itself to the servers, which takes a single one.
        self._watcher = os.fork()
        if not self._watcher:
            os.close(writing)
            self._watch(reading, result)
            os._exit(0)
        os.dup2(writing, 1)
        for fd in (reading, writing, result):
            os.close(fd)
        return self

    def __exit__(self, *exc: object) -> None:
        os.dup2(self._stdout, 1)
        os.close(self._stdout)
        if select.select([self._result], [], [], _WATCH_SECONDS)[0] and (raw := os.read(self._result, 4096)):
            self._at = msgspec.json.decode(raw, type=tuple[float, int, float])
        os.close(self._result)
        os.kill(self._watcher, signal.SIGKILL)  # a server that was left behind may have the other end
        os.waitpid(self._watcher, 0)

    def start(self, *, warm: bool = False) -> None:
        """Empty the page cache, or leave it ``warm``, then begin."""
        os.sync()
        if not warm:
            Path("/proc/sys/vm/drop_caches").write_text("3\n")
        self._began = self._now()

    def lap(self, stage: str) -> None:
        """Note how long everything so far took."""
        self.stages[stage] = round(time.monotonic() - self._began[0], 3)

    def outcome(self, details: dict[str, Any]) -> Outcome:
        if self._at is None:
            raise BootseerError("the job never said that it is ready")
        seconds, link, cpu = (after - before for after, before in zip(self._at, self._began, strict=True))
        return Outcome(
            seconds=round(seconds, 3), link_bytes=int(link), cpu=round(cpu, 2), stages=self.stages, details=details
        )

    def _now(self) -> tuple[float, int, float]:
        return time.monotonic(), int(self._counter.read_text()), busy_seconds()

    def _watch(self, reading: int, result: int) -> None:
        """In a process of its own, until nobody has the other end."""
        said = False
        with open(reading, errors="replace") as lines:
            for line in lines:
                if line.strip() == "ready" and not said:
                    said = True
                    os.write(result, msgspec.json.encode(self._now()))


@contextlib.contextmanager
def overlay(lower: Path, work: Path) -> Iterator[Path]:
    """A writable overlay on ``lower``."""
    target, upper, inner = work / "rootfs", work / "upper", work / "inner"
    for folder in (target, upper, inner):
        folder.mkdir()
    mounts.mount_overlay([lower], target, upper=upper, work=inner)
    try:
        yield target
    finally:
        mounts.unmount(target)


def run_job(rootfs: Path, order: Order, config: oci.ImageConfig) -> None:
    """The job in a container on ``rootfs``, by the runtime that all variants but containerd's own use."""
    if code := image.runtime.run(rootfs, config, order.command, state_dir=Path(order.work, "state")):
        raise BootseerError(f"the job ended with code {code}")


def local(order: Order, record: ImageRecord, clock: Clock) -> dict[str, Any]:
    """Plain EROFS over data that is all on this node."""
    warm = bool(order.options.get("warm"))
    if warm:
        with _local(order) as rootfs, _silence():
            run_job(rootfs, order, record.config)
    clock.start(warm=warm)
    with _local(order) as rootfs:
        clock.lap("mounted")
        run_job(rootfs, order, record.config)
    return {}


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Nobody hears what the job says on standard output."""
    heard = os.dup(1)
    try:
        with open(os.devnull, "wb") as null:
            os.dup2(null.fileno(), 1)
        yield
    finally:
        os.dup2(heard, 1)
        os.close(heard)


@contextlib.contextmanager
def _local(order: Order) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=order.work) as folder:
        lower = Path(folder, "lower")
        lower.mkdir()
        mounts.mount_erofs(Path(order.options["meta"]), Path(order.options["data"]), lower)
        try:
            with overlay(lower, Path(folder)) as rootfs:
                yield rootfs
        finally:
            mounts.unmount(lower)


def lazy(order: Order, record: ImageRecord, clock: Clock) -> dict[str, Any]:
    """Ours: with ``job`` as ``bootseer image run`` does it, without one on demand."""
    work = Path(order.work)
    config = settings.load(
        {
            "BOOTSEER_CACHE_DIR": order.cache or str(work / "cache"),
            "BOOTSEER_STATE_DIR": str(work / "state"),
            "BOOTSEER_STORE": order.store,
            **order.environ,
        }
    )
    server = tuple(order.server) or tree.SERVER
    with contextlib.ExitStack() as undo:
        mounted: image.ImageMount | tree.TreeMount
        clock.start()
        if order.job is not None:
            mounted = image.mount(
                order.ref, work / "rootfs", store_url=order.store, config=config, job=order.job, server=server
            )
            undo.callback(mounted.unmount)
            rootfs = mounted.rootfs
        else:
            mounted = tree.mount(
                order.store, record.tree, work / "lower", cache_dir=Path(config.cache_dir),
                state_dir=Path(config.state_dir), profile=None, config=config, server=server,
            )  # fmt: skip
            undo.callback(mounted.unmount)
            rootfs = undo.enter_context(overlay(work / "lower", work))
        clock.lap("mounted")
        run_job(rootfs, order, record.config)
        status = mounted.status()
        after = _recorded(mounted, pack=order.settle) if order.job is not None else status
    said: dict[str, Any] = msgspec.to_builtins(status)
    if status.bytes_hot and not order.cache and not status.read_ahead_bytes:
        said["waste"] = round(after.hot_unused_bytes / status.bytes_hot, 4)
    said |= {"recording": after.recording, "new_hot_pack": after.hot_pack if order.settle else ""}
    return {key: value for key, value in said.items() if key not in ("id", "digest", "targets") and "pid" not in key}


def _recorded(mounted: image.ImageMount | tree.TreeMount, *, pack: bool) -> tree.TreeStatus:
    """Say that the job is ready; the status when the trace is published, and the hot ``pack`` made, or after a while.

    A real job goes on for hours, with its node at leisure to make the pack; this one has ended already.
    """
    mounted.ready()
    end = time.monotonic() + (_PACK_SECONDS if pack else _RECORDED_SECONDS)
    while time.monotonic() < end:
        status = mounted.status()
        if status.recording not in ("recording", "publishing") and not (pack and status.hot_pack in ("", "being made")):
            break
        time.sleep(0.1)
    return status


def written(order: Order, record: ImageRecord, clock: Clock) -> dict[str, Any]:
    """All of it in a plain folder: from the layers of the image or, with a store, from the converted one."""
    rootfs = Path(order.work, "rootfs")
    clock.start()
    if order.store:
        extract(open_store(order.store), record.tree, rootfs)
    else:
        with oci.open_image(order.ref) as opened:
            oci.unpack(opened, rootfs)
    clock.lap("written")
    run_job(rootfs, order, record.config)
    return {}


def probe(order: Order) -> None:
    """What is found out once per boot and kept is not part of a start: a working container runtime."""
    state = Path(order.work, "state")
    known = Path(order.work).parent / "probes"
    known.mkdir(exist_ok=True)
    image.runtime.find(known)
    state.mkdir()
    for record in known.glob("*.json"):
        shutil.copy(record, state)


def main() -> int:
    order = msgspec.json.decode(sys.argv[1], type=Order)
    record = msgspec.json.decode(Path(order.record).read_bytes(), type=ImageRecord)
    ways: dict[str, Callable[[Order, ImageRecord, Clock], dict[str, Any]]] = {
        "local": local, "lazy": lazy, "written": written, "containerd": containerd, "nydus": nydus,
        "peer": peer,
    }  # fmt: skip
    probe(order)
    background.lend()
    try:
        with Clock(order.link) as clock:
            details = ways[order.how](order, record, clock)
        print(msgspec.json.encode(clock.outcome(details)).decode(), flush=True)
    except BootseerError as exc:
        print(f"{type(exc).__name__}: {exc}", file=sys.stderr)
        return 1
    return 0


def containerd(order: Order, record: ImageRecord, clock: Clock) -> dict[str, Any]:
    """containerd pulls, unpacks and runs, with its own shim."""
    work = Path(order.work)
    with peers.containerd(work / "containerd") as ctr:
        clock.start()
        run([*ctr, "images", "pull", "--plain-http", order.ref])
        clock.lap("pulled")
        words = [*ctr, "run", "--rm", "--net-host", order.ref, "bench", *order.command]
        if code := subprocess.run(words, stdin=subprocess.DEVNULL, timeout=_JOB_SECONDS, check=False).returncode:
            raise BootseerError(f"the job ended with code {code}")
    return {}


def nydus(order: Order, record: ImageRecord, clock: Clock) -> dict[str, Any]:
    """nydusd serves the image by FUSE; overlay and runtime are those of our own variants."""
    work = Path(order.work)
    with contextlib.ExitStack() as undo:
        clock.start()
        lower = undo.enter_context(peers.nydus(work, **order.options))
        rootfs = undo.enter_context(overlay(lower, work))
        clock.lap("mounted")
        run_job(rootfs, order, record.config)
    return {}


def peer(order: Order, record: ImageRecord | None, clock: Clock) -> dict[str, Any]:
    """``PROGRAM REF FOLDER COMMAND...``, which somebody brings, starts the job of the image and passes on what it says.
    FOLDER is empty, and deleted at the end; what still runs in its session is killed."""
    folder = Path(order.work, "peer")
    folder.mkdir()
    words = [order.options["program"], order.ref, str(folder), *order.command]
    clock.start()
    process = subprocess.Popen(words, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        code = process.wait(_JOB_SECONDS)
    except subprocess.TimeoutExpired:
        raise BootseerError(f"{words[0]} has not ended after {_JOB_SECONDS:g} s") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if code:
        raise BootseerError(f"{words[0]} ended with code {code}")
    return {}


if __name__ == "__main__":
    sys.exit(main())
