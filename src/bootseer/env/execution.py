"""The set-up command's run on this node: with its result captured and published, or plainly.

The command is the job's, the snapshot is advice: nothing that goes wrong with the capture changes what the command did,
and nothing that can be done beside the job is waited for.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from bootseer.config import Config
from bootseer.env import capture, names, overlay, place, scan
from bootseer.env.inputs import Observed, Opened
from bootseer.env.lookup import Lookup
from bootseer.env.publication import Begin, End, Publication
from bootseer.env.result import EnvResult, Timer
from bootseer.env.spec import EnvSpec, MissError, Outcome
from bootseer.errors import BootseerError, DataError, NotFoundError
from bootseer.objects import lease

if TYPE_CHECKING:
    from bootseer.env.observer import Observer
    from bootseer.env.packagecache import PackageCaches

log = logging.getLogger(__name__)

_TIMED_OUT = 124
"""Exit code of ``timeout``."""
_UNTRIED = {126, 127, *(128 + number for number in (signal.SIGINT, signal.SIGKILL, signal.SIGTERM))}
"""Exit codes of a check that could not be run, or was ended by others: they say nothing of a snapshot."""


class CheckError(DataError):
    """The check failed."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.known = code not in _UNTRIED


class Execution:
    """``run`` it with a capture, in the lead or without, or ``run_plain``."""

    def __init__(
        self,
        spec: EnvSpec,
        command: Callable[[], int],
        check: Callable[[], int] | None,
        store_url: str,
        config: Config,
        timed: Timer,
        caches: PackageCaches | None = None,
    ) -> None:
        self._check, self._caches, self._command = check, caches, command
        self.spec, self.store_url, self.config, self.timed = spec, store_url, config, timed
        self.held = place.Held()

    def command(self) -> int:
        """Run it; its exit code."""
        return self._caches.run(self._command) if self._caches else self._command()

    @contextlib.contextmanager
    def _helped(self) -> Iterator[None]:
        """Package caches are there; afterwards what the command has added to them is captured."""
        if not self._caches or self._caches.folder:
            yield
            return
        with self.timed("caches"):
            self._caches.begin()
        try:
            yield
        finally:
            self._caches.end(beside=self.spec.background)

    def checked(self) -> None:
        """The check of what the targets show now. Raises `CheckError`, and what running it raises."""
        if self._check:
            with self.timed("check"):
                code = self._check()
            if code:
                raise CheckError(f"its check ended with exit code {code}", code)

    def run_plain(self, reason: str, key: str) -> EnvResult:
        """Without a snapshot, for ``reason``."""
        self._refuse(reason)
        with self._helped(), self.timed("command"):
            code = self.command()
        return EnvResult(outcome=Outcome.RAN, reason=reason, exit_code=code, key=key)

    def run(self, look: Lookup, turn: lease.Turn) -> EnvResult:
        """Run the command after the miss ``look`` and publish what it made; the lead is given up when that is done.
        After a publication that was killed this one is waited for: perhaps each start ends at once."""
        with contextlib.ExitStack() as led:  # an interrupt ends the lead, wherever it comes
            if turn.lead:
                led.enter_context(turn.lead)
            self._refuse(look.reason)
            with self._helped(), led.pop_all() as led:
                return self._run(look, turn, led)

    def _run(self, look: Lookup, turn: lease.Turn, led: contextlib.ExitStack) -> EnvResult:
        if look.store is None:
            return self.run_plain(look.reason, look.key)
        attempt = _Attempt(self, look, turn.lead, beside=self.spec.background and not turn.follows_dead)
        try:
            with self.timed("prepare"):
                attempt.prepare()
        except (BootseerError, OSError) as exc:
            log.warning("cannot capture what the command does: %s; it runs without a snapshot", exc)
            led.close()  # so that another node captures it
            return self.run_plain(f"{look.reason}; nothing captured: {exc}", look.key)
        return attempt.run()

    def _refuse(self, reason: str) -> None:
        if self.spec.only_restore:
            raise MissError(reason)
        if self.spec.frozen:
            hint = "run it without --frozen first (in a job file: without `frozen`)"
            raise NotFoundError(f"no environment to restore, and the command is not to be run: {reason}", hint=hint)


class _Attempt:
    """One captured run: `prepare`, then `run`."""

    def __init__(self, execution: Execution, look: Lookup, lead: lease.Lead | None, *, beside: bool) -> None:
        self._beside = beside
        self._execution, self._spec, self._timed = execution, execution.spec, execution.timed
        self._config, self._look, self._lead = execution.config, look, lead
        self._group: overlay.Group | None = None
        self._publication: Publication | None = None

    def prepare(self) -> None:
        """Raises `BootseerError`, `OSError`; nothing is mounted then."""
        base = [
            place.rows(target) if self._spec.in_image(target) else self._execution.held.of(target)
            for target in self._spec.targets
        ]
        if not self._spec.shared and self._places_targets(self._look.document.texts, failed=False):
            self._spec = msgspec.structs.replace(self._spec, restore="unpack")
        self._catch = capture.begin(self._spec, self._look.key, self._config)
        if isinstance(self._catch, overlay.Group):
            self._group = self._catch
        self._begin = Begin(
            spec=msgspec.structs.replace(self._spec, environ=dict(self._spec.env)),
            document=self._look.document,
            replaces=self._look.seen if self._look.replace else None,
            base=base,
            area=str(self._group.area) if self._group else "",
            store_url=self._execution.store_url,
            config=self._config,
        )
        if self._beside:
            try:
                self._publication = Publication(self._begin, Path(self._config.state_dir))
            except (BootseerError, OSError) as exc:
                log.warning("%s; publishing before the job goes on", exc)

    def run(self) -> EnvResult:
        """The command, and what follows; when it cannot even be run, or is interrupted, the overlays are taken down."""
        from bootseer.env.observer import Observer  # no start that restores needs it

        observer, done = Observer(self._spec, self._config), False
        try:
            with self._timed("command"), observer:
                code = self._execution.command()
            done = True
        except BootseerError as exc:
            if self._lead:
                self._lead.failed(f"the command could not be run: {exc.message}")
            raise
        finally:
            if not done:
                self._stop()
                if self._group:
                    self._group.take_down()
        result = EnvResult(
            outcome=Outcome.RAN,
            reason=self._look.reason,
            exit_code=code,
            key=self._look.key,
            mounts=[self._group] if self._group else [],
        )
        if code:
            self._stop()
            is_overlay = observer.moves() or self._places_targets(observer.scripts(), failed=True)
            if self._group and 0 < code < 128 and code != _TIMED_OUT and is_overlay:
                return self._again(code, f"failed with exit code {code}, which the overlay may be the cause of")
            failure = f"the command failed with exit code {code}"
            if self._lead:
                self._lead.failed(failure)
            result.reason += f"; {failure}, nothing is published"
            return result
        if self._group and self._group.record.made and self._is_empty(self._group):
            self._stop()
            return self._again(0, "left nothing in its targets, perhaps because they were there already")
        if self._group:
            self._group.unfold()
        end, why = self._end(observer)
        if self._group:
            try:
                self._show(self._group, end)
            except BootseerError as exc:
                self._stop()
                log.warning("%s; running the command again, without a snapshot", exc)
                return self._execution.run_plain(f"{self._look.reason}; the result was lost: {exc}", self._look.key)
        if end:
            try:
                self._execution.checked()
            except (BootseerError, OSError) as exc:
                end, why = None, f"not published: {exc}"
                log.warning("the snapshot was not published: %s", exc)
                if self._group:
                    with contextlib.suppress(BootseerError):
                        self._group.complete(known=False)
        if end:
            result.reason = hit(self._look.reason, end.inputs.known)
            if self._is_empty(self._group or end.changes):
                log.warning("the set-up command left no file in its targets: its snapshot is empty")
                result.reason += "; it left no file in its targets"
            if self._publication:
                why = self._publication.go_on(end._replace(lead=self._lead.hand_on() if self._lead else None))
                if not why:
                    result.outcome, result.publication = Outcome.RAN_AND_PUBLISHING, self._publication
                    result.reason += f"; it is published in the background, {self._publication.log} says how"
                    return result
                if self._lead:
                    self._lead.unshared(why)
            else:
                why = self._publish(end)
        elif self._lead:
            self._lead.unshared(why)
        self._stop()
        result.outcome = Outcome.RAN if why else Outcome.RAN_AND_PUBLISHED
        if why:
            result.reason += f"; {why}"
        return result

    def _places_targets(self, texts: Iterable[str], *, failed: bool) -> bool:
        targets = [target.path for target in self._spec.targets]
        return names.placed(texts, self._spec.env, self._look.document.cwd, targets, failed=failed)

    def _again(self, code: int, why: str) -> EnvResult:
        """Run it once more, without overlays: into them nothing can be renamed or linked from outside, and they are
        there before the command is."""
        assert self._group
        log.warning("the command %s; running it without overlays", why)
        self._group.record.leaves = False
        self._group.take_down()
        again = _Attempt(self._execution, self._look, self._lead, beside=self._beside)
        again._spec = msgspec.structs.replace(self._spec, restore="unpack")
        try:
            again.prepare()
        except (BootseerError, OSError) as exc:
            return self._execution.run_plain(f"{self._look.reason}; nothing captured: {exc}", self._look.key)
        result = again.run()
        if result.exit_code and code:
            log.warning("it failed again, with exit code %d", result.exit_code)
            result.exit_code = code
        return result

    def _is_empty(self, caught: overlay.Group | Iterable[scan.Changes]) -> bool:
        """Whether the command left nothing but folders."""
        if isinstance(caught, overlay.Group):
            try:
                return all(stat.S_ISDIR(status.st_mode) for _, status in scan.walk(caught.upper))
            except OSError:  # such as deeper than any path may be long
                return False
        return not any(
            change.deleted or any(not stat.S_ISDIR(change.marks[path].mode) for path in change.changed)
            for change in caught
        )

    def _stop(self) -> None:
        """There will be nothing to publish."""
        if self._publication:
            self._publication.give_up()
            self._publication = None

    def _end(self, observer: Observer) -> tuple[End | None, str]:
        """What must be known before the job may write; or why there can be no snapshot."""
        try:
            with self._timed("finish"):
                return End(
                    inputs=observer.result(),
                    began=observer.began,
                    seconds=self._timed.seconds["command"],
                    changes=self._catch.changes() if isinstance(self._catch, capture.ScanCapture) else [],
                    lead=None,
                    alone=bool(self._spec.caller),
                ), ""
        except Exception as exc:  # the command has succeeded, and others wrote what is looked at
            log.warning("the snapshot was not published: %s", exc)
            return None, f"not published: {exc}"

    def _show(self, group: overlay.Group, end: End | None) -> None:
        """Let the targets show the result, frozen, so that it can be published while the job goes on; where that cannot
        be, before. Raises `BootseerError` when the result is lost."""
        if self._publication and not (end and group.freeze()):
            self._stop()
        group.record.inputs = end.inputs if end else Opened(Observed(unobserved="nothing is published"))
        group.record.publisher = self._publication.named if self._publication else ""
        try:
            group.complete(known=end is not None)
        except BootseerError as exc:
            log.warning("%s; the next start on this node will not find its result in place", exc)

    def _publish(self, end: End) -> str:
        """Why it was not published. The command has succeeded; nothing in here may change that."""
        # No start that restores needs it.
        from bootseer.env.publisher import Work

        with self._timed("publish"):
            try:
                with Work(self._begin) as work:
                    done, why = work.publish(end)
            except (BootseerError, OSError) as exc:
                log.warning("the snapshot was not published: %s", exc)
                done, why = False, f"not published: {exc}"
        if self._lead and not done:
            self._lead.unshared(why)
        return why


def hit(reason: str, found: Observed) -> str:
    """``reason``, and how much of the inputs is known of the snapshot."""
    return f"{reason}; only its stated inputs count: {found.unobserved}" if found.unobserved else reason
