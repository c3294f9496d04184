"""One node's start: image stage, environment stage, initialisation, then the training command until it ends.

Whatever a stage mounts is unmounted at the end, also after an error or Ctrl-C, in reverse order by one `ExitStack`.
Concurrency: the stages run one after the other in the caller's thread; beside them run the process that forks their
servers (`kernel.background`), the checkpoint's prefetch (in its own process) and a thread that waits for its turn, a
snapshot's publication and one `ReadyWatch` thread."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from bootseer import env, fsmount, image, oci
from bootseer.blocks import tree
from bootseer.config import Config
from bootseer.env import cachekey, cachekinds
from bootseer.env.generation import Cache
from bootseer.errors import ConfigError, NotFoundError, UnsupportedError, doing, logged
from bootseer.folders import clear, owned_folder, private_folder
from bootseer.image import cdi
from bootseer.image.container import Bind
from bootseer.image.mount import STARTS
from bootseer.kernel import background, copies, pressure
from bootseer.launch.attempt import begin_events
from bootseer.launch.caches import PLACE, Caches, Report, may_begin_again
from bootseer.launch.checkpoint import CheckpointStage
from bootseer.launch.container import Container
from bootseer.launch.identity import Identity
from bootseer.launch.job import CachesTable, EnvTable, Job
from bootseer.launch.leftovers import CHECKPOINT, EVENTS, ROOTFS, sweep
from bootseer.launch.ready import ReadyWatch
from bootseer.launch.turn import until_hot
from bootseer.node.client import in_daemon_cgroup
from bootseer.objects import lease
from bootseer.profile import emit
from bootseer.units import parse_age

if TYPE_CHECKING:
    from bootseer.env.packagecache import PackageCaches
    from bootseer.node.userimage import UserImage

log = logging.getLogger(__name__)

_PUBLICATION_DEADLINE = 120.0
"""Seconds a node is held after its training command has ended, for a snapshot that is not published yet."""

_CANCEL_SECONDS = 20.0
"""Seconds for a cancelled publication to stop reading what is then deleted."""


class Start(msgspec.Struct, kw_only=True):
    """What one start did. Seconds from the call of `start`; ``ready_seconds`` is None when no first step was seen."""

    job: str
    attempt: str
    cycle: int
    node: str
    events: str
    exit_code: int = 0
    ready_seconds: float | None = None
    stages: dict[str, float] = {}
    image: dict[str, object] = {}
    env: dict[str, object] = {}
    checkpoint: dict[str, object] = {}
    caches: dict[str, object] = {}


def start(
    job: Job, *, config: Config, identity: Identity, events_dir: Path, on_ready: Callable[[Start], None] | None = None
) -> Start:
    """Start ``job`` on this node and wait for its training command. ``on_ready`` is called once, from another thread,
    when the first step has ended. Returns the record of the start; its ``exit_code`` is the training command's, or the
    set-up command's when that failed. Raises `BootseerError` when the job could not be started at all."""
    given = job.job.gpus
    if os.geteuid() and (job.job.devices or not isinstance(given, int)):
        raise UnsupportedError(
            "choosing GPUs and devices needs root",
            hint="an ordinary user's job sees all that its scheduler lets it use: give gpus a number",
        )
    devices = cdi.select(None if isinstance(given, int) else given, job.job.devices)
    gpus = given if isinstance(given, int) else (devices and devices.gpus) or 0
    with contextlib.ExitStack() as stack, contextlib.ExitStack() as starting:
        # Before anything is opened: this may be forked from here.
        starting.enter_context(background.preloaded(*_servers(job)))
        starts = private_folder(Path(config.cache_dir), sub=STARTS)
        folder = stack.enter_context(owned_folder(starts, f"{identity.job}-"))
        stack.callback(clear, folder)
        # One file per node, so that a network folder can hold them all.
        identity, events, descriptor = begin_events(events_dir, identity, folder)
        written = stack.enter_context(open(descriptor, "ab", buffering=0))
        os.environ.update(identity.environ(gpus))
        os.environ["BOOTSEER_EVENTS"] = str(events)
        config = in_daemon_cgroup(config)
        emit.hold(descriptor)
        stack.callback(emit.hold, -1)
        sweep(config)
        node = _Node(job, config, identity, events, written, folder, stack, devices, gpus)
        if code := node.prepare():
            log.error("the set-up command failed with exit code %d; the job was not started", code)
        else:
            starting.close()
            node.train(on_ready)
        return node.record


def _servers(job: Job) -> Iterator[Sequence[str]]:
    """The programs that this start is about to need."""
    if not os.geteuid() and (job.image.enabled or (job.env and job.env.enabled)):
        yield tree.SERVER
    if job.checkpoint and job.checkpoint.enabled:
        yield fsmount.SERVER


class _Node:
    def __init__(
        self,
        job: Job,
        config: Config,
        identity: Identity,
        events: Path,
        written: io.FileIO,
        folder: Path,
        stack: contextlib.ExitStack,
        devices: cdi.Selection | None,
        gpus: int,
    ) -> None:
        self.job, self.config, self.identity = job, config, identity
        self.folder, self.stack, self.devices, self.gpus = folder, stack, devices, gpus
        self.began = time.monotonic()
        self.events, self._written = _jobs_events(folder / EVENTS, events.name), written
        self._seen = 0
        """Bytes of what the job wrote that were handed on."""
        self.mounted: image.ImageMount | UserImage | None = None
        self.image_digest = ""
        self.image_span = ""
        self.checkpoint: CheckpointStage | None = None
        self.caches: Caches | None = None
        self.caches_span = ""
        if job.checkpoint:
            self.checkpoint = CheckpointStage(job.checkpoint, folder / CHECKPOINT, config, identity, job.job.name)
        self.record = Start(
            job=identity.job, attempt=identity.attempt, cycle=identity.cycle, node=identity.node, events=str(events)
        )

    def prepare(self) -> int:
        """Image, checkpoint and environment. The exit code of the set-up command, if that ran."""
        with self._stage("image") as self.image_span:
            self.container = self._image(self.image_span)
        if self.checkpoint:
            self.stack.callback(self.checkpoint.close, self.events)
            self.checkpoint.begin()
        self.stack.enter_context(until_hot(self.mounted, self.checkpoint, self.image_span, self._is_ready))
        if self.job.env:
            with self._stage("env") as span:
                if code := self._env(self.container, self.job.env, span):
                    emit.annotate(span, exit_code=code)
                self.record.exit_code = code
        if self.job.caches and self.job.caches.enabled and not self.record.exit_code:
            with self._stage("caches") as self.caches_span:
                self._caches(self.container, self.job.caches)
        return self.record.exit_code

    def _is_ready(self) -> bool:
        return self.record.ready_seconds is not None

    @contextlib.contextmanager
    def _stage(self, name: str) -> Iterator[str]:
        began, pressed = time.monotonic(), pressure.totals()
        expected: dict[str, str | int] = {"nodes": self.identity.nodes, "nodelist": self.identity.nodelist}
        with emit.span(name, **{key: value for key, value in expected.items() if value}) as span:
            yield span
            emit.annotate(span, **pressure.since(pressed))
        self.record.stages[name] = round(time.monotonic() - began, 3)

    def _image(self, span: str) -> Container:
        table = self.job.image
        rootfs = self.folder / ROOTFS
        if table.enabled:
            config = self.config.trusting(table.verify_key, table.require_signature)
            if table.convert:
                _convert(table.ref, config)
            how = "lazy"
            if os.geteuid():
                from bootseer.node.userimage import UserImage  # root has no need of it

                self.mounted = UserImage(table.ref, rootfs, config, job=self.job.job.name, own=config != self.config)
                how = "lazy" if self.mounted.lazy else "extracted"
            else:
                self.mounted = image.mount(
                    table.ref,
                    rootfs,
                    store_url=self.config.store_url,
                    config=config,
                    job=self.job.job.name,
                    privileged=True,
                )
                emit.annotate(span, lookup_seconds=self.mounted.lookup_seconds)
            self.stack.callback(self.mounted.unmount)
            self.stack.callback(copies.withdraw, self.mounted.points)
            rootfs, runs = self.mounted.rootfs, self.mounted.config
            self.image_digest = self.mounted.digest
        else:
            pulled = self.stack.enter_context(unpacked(table.ref, rootfs))
            runs, how = pulled.config, "unpacked"
            self.image_digest = pulled.digest
        emit.annotate(span, how=how)
        self.record.image["how"] = how
        return Container(self.job, rootfs, runs, self.events, self.identity.environ(self.gpus), self.devices)

    def _env(self, container: Container, table: EnvTable, span: str) -> int:
        if os.geteuid():
            container.keep(table.targets, self.folder / "env")
        spec = env.EnvSpec(
            targets=tuple(container.target(path) for path in table.targets),
            command=tuple(table.command),
            key_files=tuple(str(container.placed(path)[0]) for path in table.key_files),
            key_env=tuple(table.key_env),
            cwd=self.job.job.cwd,
            mounts=container.shown,
            rootfs=str(container.rootfs),
            environ=self.job.job.env,
            salt=table.salt,
            max_age=parse_age(table.max_age) if table.max_age else None,
            image_digest=self.image_digest,
            frozen=table.frozen,
            snapshot=table.enabled,
            wait=table.wait,
            nodes=self.identity.nodes,
            rank=self.identity.rank,
            job=self.job.job.name,
        )

        caches = self._package_caches(container, spec)

        def command() -> int:
            folders = [Bind(str(caches.folder), caches.place)] if caches and caches.folder else []
            return container.run(table.command, span=span, more=caches.variables if caches else {}, folders=folders)

        with self._watched():
            result = env.run(
                spec,
                command,
                store_url=self.config.store_url,
                config=self.config,
                check=(lambda: container.run(table.check, span=span)) if table.check else None,
                caches=caches,
            )
        for mount in result.mounts:
            self.stack.callback(mount.unmount, copies=True)
        if result.publication:
            self.stack.enter_context(seen_out(result.publication, self.record))
        how, reason = result.outcome.value, result.reason
        emit.annotate(span, how=how, reason=reason)
        if caches and caches.said:
            self.stack.enter_context(caches.seen_out())
            emit.annotate(span, caches=caches.said)
        said = {"caches": caches.said} if caches else {}
        self.record.env = {"how": how, "reason": reason, "key": result.key, "seconds": result.timings, **said}
        return result.exit_code

    def _package_caches(self, container: Container, spec: env.EnvSpec) -> PackageCaches | None:
        table = self.job.caches
        names = cachekinds.chosen(table.kinds, "packages") if table and table.enabled else []
        if not table or not names:
            return None
        from bootseer.env.packagecache import PackageCaches  # few jobs have them

        spec = msgspec.structs.replace(spec, salt=f"{spec.salt}{table.salt}")
        return PackageCaches(names, spec, container.owner, self.config.store_url, self.config)

    def _caches(self, container: Container, table: CachesTable) -> None:
        kinds = cachekinds.chosen(table.kinds, "compile")
        if not self.job.env and table.kinds != "auto" and (idle := cachekinds.chosen(table.kinds, "packages")):
            log.warning("caches of a set-up command are not used, the job has none: %s", ", ".join(idle))
        if not kinds:
            return
        for mount in self.job.mounts:
            if Path(mount.target).is_relative_to(PLACE):
                log.warning("the caches hide what the job mounts on %s", mount.target)
        given = container.variables
        folders = [(container.placed(path)[0], path) for path in (self.job.env.targets if self.job.env else [])]
        folders += [(Path(mount.source), mount.target) for mount in self.job.mounts]
        cache = Cache(
            group="compile",
            path=PLACE,
            owner=container.owner,
            tenant=self.config.tenant,
            facts=cachekey.facts(container.noted, cachekey.installed(folders)),
            image=self.image_digest,
            salt=table.salt,
            most_bytes=table.most_bytes,
            most_files=table.most_files,
            generations=table.generations,
        )
        self.caches = Caches(
            cache,
            kinds,
            self.config.store_url,
            self.config,
            job=self.job.job.name,
            auto=table.kinds == "auto",
        )
        said = self.caches.begin()
        self.stack.enter_context(self.caches.seen_out())
        if self.caches.folder:
            container.add_mount(self.caches.folder, PLACE, readonly=False)
            container.tell(self.caches.variables(given, PLACE))
        self._tell_caches(Report(said))

    def _tell_caches(self, report: Report) -> None:
        self.record.caches = report._asdict()
        emit.annotate(self.caches_span, **report._asdict())

    def train(self, on_ready: Callable[[Start], None] | None) -> None:
        """Initialisation, then the training command until it ends."""
        container, began, pressed = self.container, time.monotonic(), pressure.totals()
        init = emit.begin("init")

        def ready() -> None:
            emit.end(init, **pressure.since(pressed))
            now = time.monotonic()
            self.record.ready_seconds = round(now - self.began, 3)
            self.record.stages["init"] = round(now - began, 3)
            if self.caches:
                self._tell_caches(self.caches.stepped(now - began))
            self._collect()
            if self.mounted:
                with logged(log.warning, "cannot tell the block server that the job is ready"):
                    self.mounted.ready()
            if on_ready:
                on_ready(self.record)
            self._keep_access()

        def otherwise() -> None:
            emit.end(init, error="no first_step was seen")
            if self.caches:
                self._tell_caches(self.caches.stepped())
            self._collect()
            self._keep_access()

        with self._watched(ready, otherwise):
            if self.checkpoint and self.job.checkpoint:
                container.add_mount(self.checkpoint.provide(init), self.job.checkpoint.path)
                container.tell(self.checkpoint.variables)
            command, auto = self.job.job.command, self.job.job.auto
            started = time.monotonic()
            code = self.record.exit_code = container.run(command, span=init, auto=auto)
            if may_begin_again(code, time.monotonic() - started) and not self._is_ready() and self._renewed():
                code = self.record.exit_code = container.run(command, span=init, auto=auto)
        emit.annotate(init, exit_code=code, run_seconds=round(time.monotonic() - began, 3))

    def _renewed(self) -> bool:
        """Whether what was restored of the caches is damaged, and they are empty now."""
        with logged(log.warning, "cannot start the training command once more, with empty caches"):
            if self.caches and self.caches.damaged:
                said = self.caches.renew()
                log.warning("what was restored of the caches is damaged; the training command starts once more, cold")
                self._tell_caches(Report(said))
                return True
        return False

    @contextlib.contextmanager
    def _watched(
        self, ready: Callable[[], None] = lambda: None, otherwise: Callable[[], None] = lambda: None
    ) -> Iterator[None]:
        """What the job writes meanwhile goes to the node's file. At the end comes ``otherwise`` if ``ready`` did
        not."""
        watch = ReadyWatch(self.events, ready, self._hand_on)
        watch.start(self._seen)
        try:
            yield
        finally:
            watch.stop()
            self._seen = watch.offset
            if not watch.ready.is_set():
                otherwise()

    def _hand_on(self, lines: bytes) -> None:
        try:
            self._written.write(lines)
        except (OSError, ValueError) as exc:  # ValueError: it is closed, the start is over
            log.warning("events of the job are lost: %s", exc)

    def _keep_access(self) -> None:
        if self.checkpoint:
            with logged(log.warning, "cannot keep what was read of the checkpoint"):
                self.checkpoint.ready(self.events)

    def _collect(self) -> None:
        """Note what the techniques moved, while their servers still run."""
        if self.mounted:
            with logged(log.warning, "cannot ask the block server what it moved"):
                status = self.mounted.status()
                self.record.image.update(msgspec.to_builtins(status) or {})
                if status and status.uptime <= time.monotonic() - self.began:  # else it has served others before
                    tree.tell_failed_reads(status)
                    emit.annotate(
                        self.image_span,
                        bytes_demand=status.bytes_demand,
                        bytes_hot=status.bytes_hot,
                        waited_seconds=round(status.waited_seconds, 3),
                        link_rate=status.link_rate,
                    )
        if self.checkpoint:
            self.record.checkpoint = self.checkpoint.status()


def _jobs_events(folder: Path, name: str) -> Path:
    """The file that processes of the job, which may be any user, write their events to, in a folder for these alone."""
    file = folder / name
    with doing(f"make {file}"):
        folder.mkdir()
        folder.chmod(0o1777)
        file.touch()
        file.chmod(0o666)
    return file


@contextlib.contextmanager
def unpacked(ref: str, rootfs: Path) -> Iterator[oci.Image]:
    """The image ``ref``, pulled and unpacked into the folder ``rootfs``."""
    with oci.open_image(ref) as pulled:
        oci.unpack(pulled, rootfs)
    yield pulled


def _convert(ref: str, config: Config) -> None:
    """Have the image in the store, by this node's conversion or by another's that it waits for."""
    try:
        image.resolve(ref, config.store_url, config=config)
    except NotFoundError:
        if config.verify_key and not config.sign_key:
            raise ConfigError(
                f"cannot convert {ref} here: its conversion must be signed, and no sign_key is set",
                hint="convert it where the key is: bootseer image convert --sign-key",
            ) from None
        key = Path(config.sign_key) if config.sign_key else None
        image.ensure(ref, config.store_url, work_dir=Path(config.cache_dir, "work"), sign_key=key, wait=lease.WAIT)


@contextlib.contextmanager
def seen_out(publication: env.Publication, record: Start) -> Iterator[None]:
    """At the end of a start wait for the snapshot, unless the start is being broken off."""
    try:
        yield
        publication.wait(_PUBLICATION_DEADLINE)
    finally:
        publication.cancel()
        published, why = publication.wait(_CANCEL_SECONDS)
        record.env["how"] = (env.Outcome.RAN_AND_PUBLISHED if published else env.Outcome.RAN).value
        if not published:
            record.env["reason"] = f"{record.env['reason']}; {why}"
