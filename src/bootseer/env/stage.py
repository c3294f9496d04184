"""The environment stage: restore the snapshot of a set-up command, or run the command and publish what it made.

Advisory throughout: whatever goes wrong with a snapshot is a log line and a reason, and the command runs. Concurrency:
one thread, and with ``EnvSpec.background`` one more that publishes (`publication`); ranks of one node that ask for the
same targets wait for each other (`lock`), nodes do not.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from bootseer.config import Config
from bootseer.env import capture, inputs, key, lease, lookup, overlay, pyc, python, quarantine, scan, snapshots
from bootseer.env import lock as locks
from bootseer.env.capture import Capture
from bootseer.env.inputs import Observed
from bootseer.env.layer import read_layer
from bootseer.env.lookup import Lookup
from bootseer.env.manifest import SnapshotManifest
from bootseer.env.publication import Publication
from bootseer.env.publish import publish
from bootseer.env.spec import EnvResult, EnvSpec, Outcome
from bootseer.env.unpack import unpack
from bootseer.errors import BootseerError, DataError
from bootseer.store import Store

log = logging.getLogger(__name__)


def run(spec: EnvSpec, runner: Callable[[], int], *, store_url: str, config: Config) -> EnvResult:
    """Bring the targets of ``spec`` to what its command makes of them; ``runner`` runs the command, at most once.
    (Once more, without a snapshot, in the rare case that the overlay with its result cannot be mounted again.)

    With mounts, the targets' overlays are there before ``runner`` is called and stay after it, until the result's
    ``mounts`` are unmounted or ``bootseer env release`` is called. Raises `ConfigError` for a wrong ``spec`` and what
    ``runner`` raises (nothing stays mounted then); snapshot trouble is only logged.
    """
    spec.check()
    began = time.monotonic()
    stage = _Stage(spec, runner, store_url, config)
    result = stage.run()
    result.seconds = time.monotonic() - began
    result.timings = {name: round(seconds, 6) for name, seconds in stage.timings.items()}
    return result


class Made(NamedTuple):
    """What a command read, and the fingerprint of each target after it."""

    inputs: Observed
    result: list[str]


def _hit(reason: str, found: Observed) -> str:
    return f"{reason}; only its stated inputs count: {found.unobserved}" if found.unobserved else reason


class _Stage:
    def __init__(self, spec: EnvSpec, runner: Callable[[], int], store_url: str, config: Config) -> None:
        self.spec, self.runner, self.store_url, self.config = spec, runner, store_url, config
        self.timings: dict[str, float] = {}
        self.key = ""
        self.failure = ""

    def run(self) -> EnvResult:
        spec = self.spec
        if not spec.snapshot:
            return self._plain("snapshots are off")
        if spec.contained and not spec.image_digest:
            log.warning("the container's image is not known by a digest: no snapshot is used or made")
            return self._plain("the container's image is not known by a digest")
        with self._timed("key"):
            document = key.build(spec)
            self.key = document.key
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(locks.locked(spec.targets, Path(self.config.state_dir)))
                overlay.sweep(self.config)
                if group := self._standing():
                    reason = _hit("already in place on this node", group.record.inputs)
                    return self._result(Outcome.RESTORED_MOUNT, reason, mounts=[group])
            except (BootseerError, OSError) as exc:
                log.warning("%s; running the command without a snapshot", exc)
                return self._plain(str(exc))
            unpacking = spec.restore == "unpack" or not capture.may_mount(spec)
            with self._timed("lookup"):
                look = lookup.look(spec, document, self.store_url, self.config, unpacking=unpacking)
            if look.found is None and look.store is not None and not look.replace and spec.wait > 0:
                with self._timed("wait"):
                    look = lease.wait_for(look, lambda: self._look(look, unpacking), spec.wait)
            if look.found is not None and look.store is not None:
                if result := self._restore(look.store, look.found, unpacking):
                    return result
                look.reason = self.failure
            return self._run_and_publish(look)

    def _look(self, old: Lookup, unpacking: bool) -> Lookup:
        return lookup.look(self.spec, old.document, self.store_url, self.config, unpacking=unpacking)

    # -- before -----------------------------------------------------------------------------------------------------

    def _standing(self) -> overlay.Group | None:
        """The group that already shows this key's result; whatever else covers the targets is released."""
        for group in overlay.groups_on(self.spec.targets, Path(self.config.state_dir)):
            record = group.record
            if record.key == self.key and group.intact and group.untouched:
                if not (reason := inputs.Digests(self.spec, self.config).difference(record.inputs)):
                    return group
                log.info("%s", reason)
            log.info("releasing the overlay of snapshot %s", record.key[:12])
            group.unmount()
        return None

    # -- restore ----------------------------------------------------------------------------------------------------

    def _restore(self, store: Store, found: SnapshotManifest, unpacking: bool) -> EnvResult | None:
        """Restore ``found``; None, with the reason in ``failure``, when the command has to run instead."""
        try:
            if not unpacking:
                try:
                    with self._timed("restore"):
                        return self._mount(found)
                except DataError:
                    raise
                except BootseerError as exc:
                    if self.spec.restore == "mount":
                        raise
                    log.warning("%s; unpacking the snapshot instead of mounting it", exc)
            with self._timed("restore"):
                return self._unpack(store, found)
        except DataError as exc:
            quarantine.put(Path(self.config.cache_dir), quarantine.mark_of(found), exc.message)
            log.warning("%s; snapshot %s is quarantined on this node, running the command", exc, self.key[:12])
            self.failure = f"the snapshot is damaged and quarantined on this node: {exc.message}"
        except (BootseerError, OSError) as exc:
            log.warning("cannot restore snapshot %s: %s; running the command", self.key[:12], exc)
            self.failure = f"the snapshot could not be restored: {exc}"
        return None

    def _mount(self, found: SnapshotManifest) -> EnvResult:
        group = overlay.new_group(self.key, self.spec.targets, self.config, found)
        try:
            group.mount_tree(self.store_url, self.config, self.spec.job)
            group.mount_targets()
            group.complete()
        except BaseException:
            group.unmount()
            raise
        return self._result(Outcome.RESTORED_MOUNT, _hit("hit", found.inputs), mounts=[group])

    def _unpack(self, store: Store, found: SnapshotManifest) -> EnvResult:
        entries = snapshots.entries(store, found)
        work = capture.work_folder(self.spec.targets[0].host, Path(self.config.cache_dir))
        try:
            unpack(store, found, entries, self.spec.targets, work)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        return self._result(Outcome.RESTORED_UNPACK, _hit("hit", found.inputs))

    # -- run and publish --------------------------------------------------------------------------------------------

    def _plain(self, reason: str) -> EnvResult:
        with self._timed("command"):
            code = self.runner()
        return self._result(Outcome.RAN, reason, code=code)

    def _run_and_publish(self, look: Lookup) -> EnvResult:
        if look.store is None:
            return self._plain(look.reason)
        try:
            with self._timed("prepare"):
                base = [scan.fingerprint(target.host) for target in self.spec.targets]
                catch = capture.begin(self.spec, self.key, self.config)
        except (BootseerError, OSError) as exc:
            log.warning("cannot capture what the command does: %s; it runs without a snapshot", exc)
            return self._plain(f"{look.reason}; nothing captured: {exc}")
        mounts = [catch.group] if catch.group else []
        observer = inputs.Observer(self.spec, self.config)
        with contextlib.ExitStack() as held:
            held.callback(catch.close)
            held.enter_context(lease.held(look.store, self.key, _node()))
            if code := self._guarded_command(catch, observer):
                reason = f"{look.reason}; the command failed with exit code {code}, nothing is published"
                return self._result(Outcome.RAN, reason, code=code, mounts=mounts)
            made = self._finish(look, catch, observer)
            if isinstance(made, Made):
                look.reason = _hit(look.reason, made.inputs)
            if catch.group:
                try:
                    frozen = self.spec.background and isinstance(made, Made) and catch.group.freeze()
                except BootseerError as exc:
                    log.warning("%s; running the command again, without a snapshot", exc)
                    return self._plain(f"{look.reason}; the result was lost: {exc}")
                if isinstance(made, Made):
                    catch.group.record.inputs = made.inputs
                    self._completed(catch.group)
                if frozen:
                    later = held.pop_all()
                    store = look.store

                    def publish_later(cancelled: Callable[[], bool]) -> tuple[bool, str]:
                        with later:
                            return self._publish(look, store, catch, base, made, cancelled)

                    result = self._result(Outcome.RAN, look.reason, mounts=mounts)
                    result.publication = catch.group.publication = Publication(publish_later)
                    return result
            published, why = self._publish(look, look.store, catch, base, made)
        if published:
            return self._result(Outcome.RAN_AND_PUBLISHED, look.reason, mounts=mounts)
        return self._result(Outcome.RAN, f"{look.reason}; {why}", mounts=mounts)

    def _guarded_command(self, catch: Capture, observer: inputs.Observer) -> int:
        """Run the command; when it cannot even be run, or is interrupted, take the overlays down."""
        try:
            with self._timed("command"), observer:
                return self.runner()
        except BaseException:
            if catch.group:
                catch.group.unmount()
            raise

    def _completed(self, group: overlay.Group) -> None:
        try:
            group.complete()
        except BootseerError as exc:
            log.warning("%s; the next start on this node will not find its result in place", exc)

    def _finish(self, look: Lookup, catch: Capture, observer: inputs.Observer) -> Made | str:
        """What must be done before the job may write: inputs, byte code, and a fingerprint of each target (else why
        there can be no snapshot)."""
        try:
            with self._timed("finish"):
                observed = observer.result()
                self._compile(look, catch)
                return Made(observed, [scan.fingerprint(target.host) for target in self.spec.targets])
        except (BootseerError, OSError) as exc:
            log.warning("the snapshot was not published: %s", exc)
            return f"not published: {exc}"

    def _publish(
        self,
        look: Lookup,
        store: Store,
        catch: Capture,
        base: list[str],
        made: Made | str,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> tuple[bool, str]:
        """(published, why not). The command has succeeded; nothing in here may change that."""
        if isinstance(made, str):
            return False, made
        try:
            with self._timed("capture"):
                layers = catch.layers()
                content = read_layer(layers, len(self.spec.targets))
            if content.secrets:
                path, what = content.secrets[0]
                log.warning("not published: %s in %s (%d in all)", what, path, len(content.secrets))
                return False, f"not published: {what} in {path}"
            with self._timed("publish"):
                done = publish(
                    store,
                    look.document,
                    made.inputs,
                    layers,
                    content.entries,
                    work=catch.work,
                    base=base,
                    result=made.result,
                    node=_node(),
                    seconds=self.timings["command"],
                    overwrite=look.replace,
                    cancelled=cancelled,
                )
        except (BootseerError, OSError) as exc:
            log.warning("the snapshot was not published: %s", exc)
            return False, f"not published: {exc}"
        return done, "" if done else "not published: there is a snapshot of this key already"

    def _compile(self, look: Lookup, catch: Capture) -> None:
        spec = self.spec
        interpreter = spec.python if spec.contained else python.find_python(spec.python, spec.env)
        if not interpreter or not look.document.python.version:
            return
        for number, target in enumerate(spec.targets):
            source = catch.group.upper / str(number) if catch.group else target.host
            pyc.compile_missing(interpreter, look.document.python.version, source, target.host, target.path)

    # -- results ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.timings[name] = self.timings.get(name, 0.0) + time.monotonic() - began

    def _result(
        self, outcome: Outcome, reason: str, *, code: int = 0, mounts: list[overlay.Group] | None = None
    ) -> EnvResult:
        return EnvResult(
            outcome=outcome, reason=reason, exit_code=code, seconds=0.0, key=self.key, mounts=[*(mounts or [])]
        )


def _node() -> str:
    return os.environ.get("BOOTSEER_NODE") or socket.gethostname()
