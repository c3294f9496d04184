"""The environment stage: restore the snapshot of a set-up command, or run the command and publish what it made.

Advisory throughout: whatever goes wrong with a snapshot is a log line and a reason, and the command runs. Concurrency:
one thread, and with ``EnvSpec.background`` one more that publishes (`publication`); ranks of one node that ask for the
same targets wait for each other (`lock`), nodes for the one that runs the command (`bootseer.objects.lease`)."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bootseer.config import Config
from bootseer.env import (
    capture,
    inputs,
    key,
    leads,
    lookup,
    names,
    overlay,
    place,
    quarantine,
    remembered,
    snapshots,
    wager,
)
from bootseer.env import lock as locks
from bootseer.env.execution import CheckError, Execution, hit
from bootseer.env.key import KeyDocument
from bootseer.env.lookup import Lookup
from bootseer.env.manifest import SnapshotManifest
from bootseer.env.result import EnvResult, Timer
from bootseer.env.spec import EnvSpec, MissError, Outcome
from bootseer.env.unpack import recover, unpack
from bootseer.errors import BootseerError, DataError, NotFoundError, UnsupportedError
from bootseer.objects import Store, lease

if TYPE_CHECKING:
    from bootseer.env.packagecache import PackageCaches

log = logging.getLogger(__name__)

_LEAST_PATIENCE, _TIMES = 300.0, 4
_LENT_SECONDS = 2.0
"""For another stage on the target, when somebody else waits for it better (`EnvSpec.only_restore`)."""


def run(
    spec: EnvSpec,
    runner: Callable[[], int],
    *,
    store_url: str,
    config: Config,
    check: Callable[[], int] | None = None,
    caches: PackageCaches | None = None,
) -> EnvResult:
    """Bring the targets of ``spec`` to what its command makes of them; ``runner`` runs the command, at most once. (Once
    more, without overlays, where these may be why it failed or left nothing, or cannot be mounted again.)

    ``check`` tries what the targets show, after a restore and before a publication, and returns 0 when that is good: a
    snapshot with another one is restored on no node, or not published. ``caches`` are restored if ``runner`` is called,
    which uses them as they say. With mounts, the targets' overlays are there before ``runner`` is called and stay after
    it, until the result's ``mounts`` are unmounted or ``bootseer unmount`` is called. Raises `ConfigError` for a wrong
    ``spec``, `NotWritableError` when other processes use another environment on the targets, `NotFoundError` when
    ``spec`` is frozen and no snapshot fits, and what ``runner`` raises (nothing stays mounted then); snapshot trouble
    is only logged."""
    spec.check()
    began = time.monotonic()
    stage = _Stage(spec, Execution(spec, runner, check, store_url, config, Timer(), caches))
    result = stage.run()
    result.seconds = time.monotonic() - began
    result.timings = {name: round(seconds, 6) for name, seconds in stage.timed.seconds.items()}
    return result


class _Stage:
    def __init__(self, spec: EnvSpec, execution: Execution) -> None:
        self.spec, self.store_url, self.config = spec, execution.store_url, execution.config
        self.timed, self.execution = execution.timed, execution
        self.key = ""

    def run(self) -> EnvResult:
        spec = self.spec
        if not spec.snapshot:
            return self.execution.run_plain("snapshots are off", self.key)
        if spec.contained and not spec.image_digest:
            log.warning("the container's image is not known by a digest: no snapshot is used or made")
            return self.execution.run_plain("the container's image is not known by a digest", self.key)
        with self.timed("key"), remembered.at_hand(self.config):
            document = key.build(spec, self.config)
            self.key = document.key
        with contextlib.ExitStack() as stack:
            try:
                wait = _LENT_SECONDS if spec.only_restore else locks.WAIT_SECONDS
                stack.enter_context(locks.locked(spec.targets, Path(self.config.state_dir), wait=wait))
                place.check(spec.targets, dict(spec.mounts))
                overlay.sweep(self.config, spec.targets)
                for target in spec.targets:
                    recover(target)
                with locks.groups_locked(Path(self.config.state_dir)), remembered.at_hand(self.config):
                    group = self._standing()
                if group:
                    reason = hit("already in place on this node", group.inputs.known)
                    return self._result(Outcome.RESTORED_MOUNT, reason, mounts=[group])
                unpacking = not capture.may_mount(spec)
            except overlay.InUseError:
                raise
            except (BootseerError, OSError) as exc:
                if spec.only_restore:
                    raise MissError(str(exc)) from None
                log.warning("%s; running the command without a snapshot", exc)
                return self.execution.run_plain(str(exc), self.key)
            with self.timed("lookup"):
                look = self._look(document, unpacking)
            if result := self._restored(look, unpacking):
                return result
            if spec.only_restore:
                raise MissError(look.reason)
            turn = lease.Turn()
            if look.store is not None and (look.absent or look.replace) and not spec.frozen:

                def settled() -> bool:
                    nonlocal look
                    nearest, look = look.nearest, self._look(document, unpacking)
                    if look.found is None and look.nearest != nearest:
                        log.info("another node published what does not fit here; waiting for no other")
                        return True
                    return look.found is not None or look.store is None

                with self.timed("wait"):
                    name, work = f"env/{self.key}", "runs the set-up command"
                    wait = min(spec.wait, self._patience(look))
                    turn = lease.take_turn(
                        look.store,
                        name,
                        work=work,
                        seconds=wait,
                        settled=settled,
                        waits=lambda told: wager.waits(told, spec.nodes, spec.rank),
                    )
                if result := self._restored(look, unpacking):
                    return result
            return self.execution.run(look, turn)

    def _look(self, document: KeyDocument, unpacking: bool) -> Lookup:
        return lookup.look(self.spec, document, self.store_url, self.config, self.execution.held, unpacking=unpacking)

    def _patience(self, look: Lookup) -> float:
        """Seconds after which a node that says it runs the command is not believed: a few times what that took before,
        where a snapshot of this key tells."""
        return max(_LEAST_PATIENCE, _TIMES * look.nearest.seconds) if look.nearest else self.spec.wait

    def _standing(self) -> overlay.Group | None:
        """The group that already shows this key's result; another one that covers the targets is taken down. Raises
        `InUseError` when other processes use that one."""
        spec = self.spec
        hosts = [target.host for target in spec.targets]
        for group in overlay.groups_on(hosts, Path(self.config.state_dir), spec.caller):
            record, who, untouched = group.record, group.in_use, group.untouched
            same = record.key == self.key and record.targets == list(spec.targets)
            same = same and (group.made or 0.0) >= spec.since
            if same:
                read = group.inputs
                known = inputs.Digests(spec, self.config)
                if reason := read.changed(spec) or leads.difference(spec, known, read.known):
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
            if who and (who := group.freed()):
                raise overlay.InUseError(
                    f"cannot set up {group.mounted[0]}: {who} uses the environment {record.key[:12]} there",
                    hint="end that, use another target, or run `bootseer unmount --force DIR` first",
                )
            level = logging.INFO if untouched else logging.WARNING
            log.log(level, "removing the overlay of snapshot %s, with what was written to it", record.key[:12])
            group.take_down()
        return None

    def _restored(self, look: Lookup, unpacking: bool) -> EnvResult | None:
        """Restore what was found; None, with the reason in ``look``, when the command has to run instead."""
        store, found = look.store, look.found
        if store is None or found is None:
            return None
        try:
            if not unpacking:
                try:
                    with self.timed("restore"):
                        return self._mount(found, look.document)
                except DataError:
                    raise
                except BootseerError as exc:
                    if self.spec.restore == "mount":
                        raise
                    log.warning("%s; unpacking the snapshot instead of mounting it", exc)
            with self.timed("restore"):
                return self._unpack(store, found)
        except DataError as exc:
            quarantine.put(Path(self.config.cache_dir), quarantine.mark_of(found), exc.message)
            if isinstance(exc, CheckError) and exc.known:
                quarantine.tell(store, found, exc.message, self.config)
            log.warning("%s; snapshot %s is quarantined on this node, running the command", exc, self.key[:12])
            look.reason, look.replace = f"the snapshot is damaged and quarantined on this node: {exc.message}", True
            look.found, look.nearest = None, found
        except (BootseerError, OSError) as exc:
            log.warning("cannot restore snapshot %s: %s; running the command", self.key[:12], exc)
            look.reason = f"the snapshot could not be restored: {exc}"
        except Exception as exc:  # others wrote what is in it
            log.warning("cannot restore snapshot %s: %r; running the command", self.key[:12], exc)
            quarantine.put(Path(self.config.cache_dir), quarantine.mark_of(found), repr(exc))
            look.reason, look.replace = f"the snapshot could not be restored: {type(exc).__name__}", True
            look.found, look.nearest = None, found
        return None

    def _mount(self, found: SnapshotManifest, mine: KeyDocument) -> EnvResult:
        group = overlay.new_group(self.key, self.spec.targets, self.config, found, self.spec.caller)
        places = [target.path for target in self.spec.targets]
        # our own texts: a snapshot's key says nothing of its
        group.record.leaves = not names.placed(mine.texts, self.spec.env, mine.cwd, places, failed=True)
        try:
            with _whole():
                group.mount_tree(self.store_url, self.config, self.spec.job)
            group.mount_targets()
            group.complete()
            self.execution.checked()
        except BaseException:
            group.take_down()
            raise
        return self._result(Outcome.RESTORED_MOUNT, hit("hit", found.inputs), mounts=[group])

    def _unpack(self, store: Store, found: SnapshotManifest) -> EnvResult:
        if os.geteuid() == 0 and self.spec.shared:
            raise UnsupportedError(f"other containers may change {self.spec.shared} while root unpacks there")
        with _whole():
            unpack(store, found, snapshots.entries(store, found), self.spec.targets, self.execution.checked)
        return self._result(Outcome.RESTORED_UNPACK, hit("hit", found.inputs))

    def _result(self, outcome: Outcome, reason: str, *, mounts: Sequence[overlay.Group] = ()) -> EnvResult:
        return EnvResult(outcome=outcome, reason=reason, exit_code=0, key=self.key, mounts=[*mounts])


@contextlib.contextmanager
def _whole() -> Iterator[None]:
    """What the store lacks of a snapshot is damage, too."""
    try:
        yield
    except NotFoundError as exc:
        raise DataError(f"a part of the snapshot is missing: {exc.message}") from exc
