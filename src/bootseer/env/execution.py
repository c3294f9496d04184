"""The set-up command's run on this node: with its result captured and published, or plainly.

The command is the job's, the snapshot is advice: nothing that goes wrong with the capture changes what the command did.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path

from bootseer.config import Config
from bootseer.env import capture, inputs, key, leads, place, pyc
from bootseer.env.inputs import Observed
from bootseer.env.layer import read_layer
from bootseer.env.lookup import Lookup
from bootseer.env.publication import Publication
from bootseer.env.result import EnvResult, Timer
from bootseer.env.spec import EnvSpec, Outcome
from bootseer.errors import BootseerError
from bootseer.objects import lease

log = logging.getLogger(__name__)


class Execution:
    """``run`` it with a capture, in the lead or without, or ``run_plain``."""

    def __init__(self, spec: EnvSpec, command: Callable[[], int], config: Config, timed: Timer) -> None:
        self.spec, self.command, self.config, self.timed = spec, command, config, timed

    def run_plain(self, reason: str, key: str) -> EnvResult:
        """Without a snapshot, for ``reason``."""
        with self.timed("command"):
            code = self.command()
        return EnvResult(outcome=Outcome.RAN, reason=reason, exit_code=code, key=key)

    def run(self, look: Lookup, lead: lease.Lead | None) -> EnvResult:
        """Run the command after the miss ``look`` and publish what it made; ``lead`` is given up when that is done."""
        if look.store is None:
            return self.run_plain(look.reason, look.key)
        # No start that restores needs it; and now, as the command may change where it would be loaded from.
        from bootseer.env.publish import publish

        with contextlib.ExitStack() as held:
            if lead:
                held.enter_context(lead)
            try:
                with self.timed("prepare"):
                    base = [place.fingerprint(target) for target in self.spec.targets]
                    catch = capture.begin(self.spec, look.key, self.config)
            except (BootseerError, OSError) as exc:
                log.warning("cannot capture what the command does: %s; it runs without a snapshot", exc)
                held.close()  # so that another node captures it
                return self.run_plain(f"{look.reason}; nothing captured: {exc}", look.key)
            held.callback(catch.close)
            attempt = _Attempt(self, look, lead, catch, base, publish)
            if (code := attempt.run()) == 0:
                attempt.finish()
            result = EnvResult(
                outcome=Outcome.RAN,
                reason=look.reason,
                exit_code=code,
                key=look.key,
                mounts=[catch.group] if catch.group else [],
            )
            if code:
                result.reason += f"; {attempt.failed(code)}, nothing is published"
                return result
            frozen = False
            if catch.group:
                try:
                    frozen = attempt.freeze()
                except BootseerError as exc:
                    log.warning("%s; running the command again, without a snapshot", exc)
                    return self.run_plain(f"{look.reason}; the result was lost: {exc}", look.key)
                if frozen:
                    later = held.pop_all()

                    def publish_later(cancelled: Callable[[], bool]) -> tuple[bool, str]:
                        with later:
                            return attempt.publish(cancelled)

                    result.publication = catch.group.publication = Publication(publish_later)
                    return result
            published, why = attempt.publish(lambda: False)
        if published:
            result.outcome = Outcome.RAN_AND_PUBLISHED
        else:
            result.reason += f"; {why}"
        return result


class _Attempt:
    """One captured run: `run`, `finish` before the job may write, perhaps `freeze`, `publish`."""

    def __init__(
        self,
        execution: Execution,
        look: Lookup,
        lead: lease.Lead | None,
        catch: capture.Capture,
        base: list[str],
        publish: Callable[..., bool],
    ) -> None:
        self._spec, self._command, self._timed = execution.spec, execution.command, execution.timed
        self._config = execution.config
        self._look, self._lead, self._catch, self._base, self._put = look, lead, catch, base, publish
        self._observer = inputs.Observer(execution.spec, execution.config)
        self._inputs = Observed(unobserved="")
        self._began = 0
        self._result: list[str] | None = None
        """Fingerprint of each target after the command; None when there can be no snapshot."""

    def run(self) -> int:
        """The command's exit code; when it cannot even be run, or is interrupted, the overlays are taken down."""
        self._began = time.clock_gettime_ns(inputs.CLOCK_REALTIME_COARSE)
        try:
            with self._timed("command"), self._observer:
                return self._command()
        except BaseException as exc:
            if self._catch.group:
                self._catch.group.take_down()
            if self._lead and isinstance(exc, BootseerError):
                self._lead.failed(f"the command could not be run: {exc.message}")
            raise

    def failed(self, code: int) -> str:
        """Tell the others that the command failed; the reason in words."""
        failure = f"the command failed with exit code {code}"
        if self._lead:
            self._lead.failed(failure)
        return failure

    def finish(self) -> None:
        """What must be done before the job may write: inputs, byte code, and a fingerprint of each target."""
        try:
            with self._timed("finish"):
                self._inputs = self._observer.result()
                self._compile()
                self._result = [place.fingerprint(target) for target in self._spec.targets]
                self._look.reason = hit(self._look.reason, self._inputs)
        except (BootseerError, OSError) as exc:
            log.warning("the snapshot was not published: %s", exc)
            self._inputs = Observed(unobserved=f"not published: {exc}")

    def _compile(self) -> None:
        version = self._look.document.python.version
        interpreter = key.find_python(self._spec)
        if not interpreter or not version:
            return
        for number, target in enumerate(self._spec.targets):
            with contextlib.suppress(FileNotFoundError), place.opened(target) as host:
                source = self._catch.group.upper / str(number) if self._catch.group else host
                pyc.compile_missing(interpreter, version, source, host, target.path)

    def freeze(self) -> bool:
        """Let the targets show the result; whether what was captured is frozen, so that it can be published while the
        job goes on. Raises `BootseerError` when the result is lost."""
        group = self._catch.group
        assert group
        frozen = self._spec.background and self._result is not None and group.freeze()
        group.record.inputs = self._inputs
        try:
            group.complete(known=self._result is not None)
        except BootseerError as exc:
            log.warning("%s; the next start on this node will not find its result in place", exc)
        return frozen

    def publish(self, cancelled: Callable[[], bool]) -> tuple[bool, str]:
        """(published, why not). The command has succeeded; nothing in here may change that."""
        published, why = self._publish(cancelled)
        if self._lead and not published and not cancelled():
            self._lead.unshared(why)
        return published, why

    def _publish(self, cancelled: Callable[[], bool]) -> tuple[bool, str]:
        if self._result is None or self._look.store is None:
            return False, self._inputs.unobserved
        if (self._config.verify_key or self._config.require_signature) and not self._config.sign_key:
            return False, "not published: snapshots must be signed here, and no sign_key is set"
        try:
            with self._timed("capture"):
                layers = self._catch.layers()
                content = read_layer(layers, len(self._spec.targets))
            if content.secrets:
                path, what = content.secrets[0]
                log.warning("not published: %s in %s (%d in all)", what, path, len(content.secrets))
                return False, f"not published: {what} in {path}"
            found = leads.added(
                self._spec,
                self._config,
                self._inputs,
                content.entries,
                lambda name, most: _head(layers / name, most),
                self._began,
            )
            with self._timed("publish"):
                done = self._put(
                    self._look.store,
                    self._look,
                    found,
                    layers,
                    content.entries,
                    work=self._catch.work,
                    base=self._base,
                    result=self._result,
                    seconds=self._timed.seconds["command"],
                    sign_key=self._config.sign_key,
                    cancelled=cancelled,
                )
        except (BootseerError, OSError) as exc:
            log.warning("the snapshot was not published: %s", exc)
            return False, f"not published: {exc}"
        return done, "" if done else "not published: there is a snapshot of this key already"


def _head(path: Path, most: int) -> bytes:
    with path.open("rb") as file:
        return file.read(most)


def hit(reason: str, found: Observed) -> str:
    """``reason``, and how much of the inputs is known of the snapshot."""
    return f"{reason}; only its stated inputs count: {found.unobserved}" if found.unobserved else reason
