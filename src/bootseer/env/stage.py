"""The environment stage: restore the snapshot of a set-up command, or run the command and publish what it made.

Advisory throughout: whatever goes wrong with a snapshot is a log line and a reason, and the command runs. Concurrency:
one thread, and with ``EnvSpec.background`` one more that publishes (`publication`); ranks of one node that ask for the
same targets wait for each other (`lock`), nodes for the one that runs the command (`bootseer.objects.lease`).
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from bootseer.config import Config
from bootseer.env import capture, inputs, key, lookup, overlay, pyc, quarantine, scan, snapshots
from bootseer.env import lock as locks
from bootseer.env.capture import Capture
from bootseer.env.inputs import Observed
from bootseer.env.key import KeyDocument
from bootseer.env.layer import read_layer
from bootseer.env.lookup import Lookup
from bootseer.env.manifest import SnapshotManifest
from bootseer.env.publication import Publication
from bootseer.env.spec import EnvSpec, Outcome
from bootseer.env.unpack import recover, unpack
from bootseer.errors import BootseerError, DataError, NotFoundError
from bootseer.objects import Store, lease

log = logging.getLogger(__name__)


class EnvResult(msgspec.Struct, kw_only=True):
    """``exit_code`` is the command's, 0 when its result was restored. ``timings`` in seconds, by step."""

    outcome: Outcome
    reason: str
    exit_code: int
    key: str
    seconds: float = 0.0
    mounts: list[overlay.Group] = []
    publication: Publication | None = None
    """Still going on, with ``EnvSpec.background``: wait for it, or cancel it, before the mounts are unmounted."""
    timings: dict[str, float] = {}


def run(spec: EnvSpec, runner: Callable[[], int], *, store_url: str, config: Config) -> EnvResult:
    """Bring the targets of ``spec`` to what its command makes of them; ``runner`` runs the command, at most once.
    (Once more, without a snapshot, in the rare case that the overlay with its result cannot be mounted again.)

    With mounts, the targets' overlays are there before ``runner`` is called and stay after it, until the result's
    ``mounts`` are unmounted or ``bootseer env unmount`` is called. Raises `ConfigError` for a wrong ``spec``,
    `NotWritableError` when other processes use another environment on the targets, and what ``runner`` raises (nothing
    stays mounted then); snapshot trouble is only logged.
    """
    spec.check()
    began = time.monotonic()
    stage = _Stage(spec, runner, store_url, config)
    result = stage.run()
    result.seconds = time.monotonic() - began
    result.timings = {name: round(seconds, 6) for name, seconds in stage.timings.items()}
    return result


class _Made(NamedTuple):
    """What a command read, and the fingerprint of each target after it; None when there can be no snapshot, for the
    reason why the inputs are ``unobserved``."""

    inputs: Observed
    result: list[str] | None


def _hit(reason: str, found: Observed) -> str:
    return f"{reason}; only its stated inputs count: {found.unobserved}" if found.unobserved else reason


class _Stage:
    def __init__(self, spec: EnvSpec, runner: Callable[[], int], store_url: str, config: Config) -> None:
        self.spec, self.runner, self.store_url, self.config = spec, runner, store_url, config
        self.timings: dict[str, float] = {}
        self.key = ""

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
                for target in spec.targets:
                    recover(target.host)
                with locks.groups_locked(Path(self.config.state_dir)):
                    group = self._standing()
                if group:
                    reason = _hit("already in place on this node", group.record.inputs)
                    return self._result(Outcome.RESTORED_MOUNT, reason, mounts=[group])
            except overlay.InUseError:
                raise
            except (BootseerError, OSError) as exc:
                log.warning("%s; running the command without a snapshot", exc)
                return self._plain(str(exc))
            unpacking = not capture.may_mount(spec)
            with self._timed("lookup"):
                look = self._look(document, unpacking)
            if result := self._restored(look, unpacking):
                return result
            turn = lease.Turn()
            if look.store is not None and (look.absent or look.replace):

                def settled() -> bool:
                    nonlocal look
                    nearest, look = look.nearest, self._look(document, unpacking)
                    if look.found is None and look.nearest != nearest:
                        log.info("another node published what does not fit here; waiting for no other")
                        return True
                    return look.found is not None or look.store is None

                with self._timed("wait"):
                    name, work = f"env/{self.key}", "runs the set-up command"
                    turn = lease.take_turn(look.store, name, work=work, seconds=spec.wait, settled=settled)
                if turn.failure:
                    return self._failed(turn.failure)
                if result := self._restored(look, unpacking):
                    return result
            return self._run_and_publish(look, turn.lead)

    def _look(self, document: KeyDocument, unpacking: bool) -> Lookup:
        return lookup.look(self.spec, document, self.store_url, self.config, unpacking=unpacking)

    # -- before -----------------------------------------------------------------------------------------------------

    def _standing(self) -> overlay.Group | None:
        """The group that already shows this key's result; another one that covers the targets is taken down.

        Raises `InUseError` when other processes use that one.
        """
        spec = self.spec
        hosts = [target.host for target in spec.targets]
        for group in overlay.groups_on(hosts, Path(self.config.state_dir), spec.caller):
            record, who, untouched = group.record, group.in_use, group.untouched
            same = record.key == self.key and record.targets == list(spec.targets)
            if same and (reason := inputs.Digests(spec, self.config).difference(record.inputs)):
                log.info("%s", reason)
                same = False
            if same and group.intact and (untouched or (who and record.marks)):
                if not untouched:
                    log.warning("%s was changed since; it is shared as it is, %s uses it", group.mounted[0], who)
                try:
                    group.join()
                except BootseerError as exc:
                    log.warning("%s; when its other users end, it is taken down", exc)
                return group
            if who:
                raise overlay.InUseError(
                    f"cannot set up {group.mounted[0]}: {who} uses the environment {record.key[:12]} there",
                    hint="end that, use another target, or run `bootseer env unmount --force DIR` first",
                )
            level = logging.INFO if untouched else logging.WARNING
            log.log(level, "removing the overlay of snapshot %s, with what was written to it", record.key[:12])
            group.take_down()
        return None

    # -- restore ----------------------------------------------------------------------------------------------------

    def _restored(self, look: Lookup, unpacking: bool) -> EnvResult | None:
        """Restore what was found; None, with the reason in ``look``, when the command has to run instead."""
        store, found = look.store, look.found
        if store is None or found is None:
            return None
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
            look.reason, look.replace = f"the snapshot is damaged and quarantined on this node: {exc.message}", True
            look.found, look.nearest = None, found
        except (BootseerError, OSError) as exc:
            log.warning("cannot restore snapshot %s: %s; running the command", self.key[:12], exc)
            look.reason = f"the snapshot could not be restored: {exc}"
        return None

    def _mount(self, found: SnapshotManifest) -> EnvResult:
        group = overlay.new_group(self.key, self.spec.targets, self.config, found, self.spec.caller)
        try:
            with _whole():
                group.mount_tree(self.store_url, self.config, self.spec.job)
            group.mount_targets()
            group.complete()
        except BaseException:
            group.take_down()
            raise
        return self._result(Outcome.RESTORED_MOUNT, _hit("hit", found.inputs), mounts=[group])

    def _unpack(self, store: Store, found: SnapshotManifest) -> EnvResult:
        with _whole():
            unpack(store, found, snapshots.entries(store, found), self.spec.targets)
        return self._result(Outcome.RESTORED_UNPACK, _hit("hit", found.inputs))

    def _failed(self, failure: lease.Failure) -> EnvResult:
        reason = f"other nodes ran the command without success, {failure.node} the last: {failure.message}"
        log.error("%s", reason)
        return self._result(Outcome.FAILED, reason, code=failure.code)

    # -- run and publish --------------------------------------------------------------------------------------------

    def _plain(self, reason: str) -> EnvResult:
        with self._timed("command"):
            code = self.runner()
        return self._result(Outcome.RAN, reason, code=code)

    def _run_and_publish(self, look: Lookup, lead: lease.Lead | None) -> EnvResult:
        if look.store is None:
            return self._plain(look.reason)
        # No start that restores needs it; and now, as the command may change where it would be loaded from.
        from bootseer.env.publish import publish

        with contextlib.ExitStack() as held:
            if lead:
                held.enter_context(lead)
            try:
                with self._timed("prepare"):
                    base = [scan.fingerprint(target.host) for target in self.spec.targets]
                    catch = capture.begin(self.spec, self.key, self.config)
            except (BootseerError, OSError) as exc:
                log.warning("cannot capture what the command does: %s; it runs without a snapshot", exc)
                held.close()  # so that another node captures it
                return self._plain(f"{look.reason}; nothing captured: {exc}")
            held.callback(catch.close)
            mounts = [catch.group] if catch.group else []
            observer = inputs.Observer(self.spec, self.config)
            try:
                code = self._guarded_command(catch, observer)
            except BootseerError as exc:
                if lead:
                    lead.failed(f"the command could not be run: {exc.message}", exc.exit_code)
                raise
            if code:
                failure = f"the command failed with exit code {code}"
                if lead:
                    lead.failed(failure, code)
                reason = f"{look.reason}; {failure}, nothing is published"
                return self._result(Outcome.RAN, reason, code=code, mounts=mounts)
            made = self._finish(look, catch, observer)
            if made.result is not None:
                look.reason = _hit(look.reason, made.inputs)
            later = None
            if catch.group:
                try:
                    frozen = self.spec.background and made.result is not None and catch.group.freeze()
                except BootseerError as exc:
                    log.warning("%s; running the command again, without a snapshot", exc)
                    return self._plain(f"{look.reason}; the result was lost: {exc}")
                catch.group.record.inputs = made.inputs
                try:
                    catch.group.complete(known=made.result is not None)
                except BootseerError as exc:
                    log.warning("%s; the next start on this node will not find its result in place", exc)
                later = held.pop_all() if frozen else None

            def publish_it(cancelled: Callable[[], bool]) -> tuple[bool, str]:
                with later or contextlib.nullcontext():
                    published, why = self._publish(publish, look, catch, base, made, cancelled)
                    if lead and not published and not cancelled():
                        lead.unshared(why)
                    return published, why

            if later and catch.group:
                result = self._result(Outcome.RAN, look.reason, mounts=mounts)
                result.publication = catch.group.publication = Publication(publish_it)
                return result
            published, why = publish_it(lambda: False)
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
                catch.group.take_down()
            raise

    def _finish(self, look: Lookup, catch: Capture, observer: inputs.Observer) -> _Made:
        """What must be done before the job may write: inputs, byte code, and a fingerprint of each target."""
        try:
            with self._timed("finish"):
                observed = observer.result()
                self._compile(look, catch)
                return _Made(observed, [scan.fingerprint(target.host) for target in self.spec.targets])
        except (BootseerError, OSError) as exc:
            log.warning("the snapshot was not published: %s", exc)
            return _Made(Observed(unobserved=f"not published: {exc}"), None)

    def _publish(
        self,
        publish: Callable[..., bool],
        look: Lookup,
        catch: Capture,
        base: list[str],
        made: _Made,
        cancelled: Callable[[], bool],
    ) -> tuple[bool, str]:
        """(published, why not). The command has succeeded; nothing in here may change that."""
        if made.result is None or look.store is None:
            return False, made.inputs.unobserved
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
                    look.store,
                    look,
                    made.inputs,
                    layers,
                    content.entries,
                    work=catch.work,
                    base=base,
                    result=made.result,
                    seconds=self.timings["command"],
                    cancelled=cancelled,
                )
        except (BootseerError, OSError) as exc:
            log.warning("the snapshot was not published: %s", exc)
            return False, f"not published: {exc}"
        return done, "" if done else "not published: there is a snapshot of this key already"

    def _compile(self, look: Lookup, catch: Capture) -> None:
        spec = self.spec
        interpreter = key.find_python(spec)
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
        self, outcome: Outcome, reason: str, *, code: int = 0, mounts: Sequence[overlay.Group] = ()
    ) -> EnvResult:
        return EnvResult(outcome=outcome, reason=reason, exit_code=code, key=self.key, mounts=[*mounts])


@contextlib.contextmanager
def _whole() -> Iterator[None]:
    """What the store lacks of a snapshot is damage, too."""
    try:
        yield
    except NotFoundError as exc:
        raise DataError(f"a part of the snapshot is missing: {exc.message}") from exc
