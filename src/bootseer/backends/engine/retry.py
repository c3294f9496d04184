"""What is to be done about a run that did not work: another DataNode, fresh locations, or an error for the request.
Pure, like the scheduler, which holds the lock."""

from __future__ import annotations

import logging
from collections.abc import Callable

from bootseer.backends.engine.assignment import Assignment
from bootseer.backends.engine.model import Attempt, BlockRange, Outcome, Place, ReadRequest, Relocate, Run, Tuning
from bootseer.errors import BootseerError, DataError, UnavailableError

_log = logging.getLogger(__name__)

_WRONG = {Outcome.DAMAGED, Outcome.CORRUPT}


class RetryPolicy:
    """``requests``: the scheduler's, all that are not finished; ``fail`` gives one of them up."""

    def __init__(
        self,
        requests: list[ReadRequest],
        chooser: Assignment,
        tuning: Tuning,
        fail: Callable[[ReadRequest, BaseException], None],
    ) -> None:
        self._requests, self._assignment, self._tuning, self._fail = requests, chooser, tuning, fail
        self._questions: list[Relocate] = []
        self._asking: set[int] = set()

    def failed(self, run: Run, attempt: Attempt, outcome: Outcome, error: BootseerError | None) -> None:
        key = attempt.node.key
        if outcome is Outcome.UNCHECKED:
            if attempt.place.without_checksums:
                run.failures.clear()
            elif run.span.verify:
                run.failures[key] = self._tuning.tries
        else:
            run.failures[key] = run.failures.get(key, 0) + 1
        if outcome is not Outcome.CANCELLED:
            run.outcomes.add(outcome)
        elif error is None:  # it was stopped because nothing came
            error = UnavailableError(
                f"cannot read {run.span.request.name or 'a file'}: no answer from DataNode {attempt.node.address}",
                hint="check that it runs and is reachable from here",
            )
        if outcome in (Outcome.DAMAGED, Outcome.CORRUPT):
            run.verify = True
        # what is wrong with the bytes says more than who did not answer
        if error is not None and not (isinstance(run.error, DataError) and not isinstance(error, DataError)):
            run.error = error

    def requeue(self, run: Run, now: float) -> None:
        request = run.span.request
        run.span.again.append(run)
        request.pending += run.size
        self._check_stuck(run, now)

    def _check_stuck(self, run: Run, ask_at: float) -> None:
        """Ask for fresh locations at that time, or give up, when there is nobody left to ask for ``run``."""
        request = run.span.request
        if request.over or self._assignment.able(run.span, run):
            return
        reasons = run.outcomes | set(run.span.place.bad.values())
        damaged = bool(reasons) and reasons <= _WRONG
        if run.rounds >= (1 if damaged else self._tuning.rounds):
            self._fail(request, run.error or self._nobody(run))
            return
        self._relocate(run.span.place.file, ask_at)

    def _nobody(self, run: Run) -> BootseerError:
        what = f"no DataNode has bytes {run.offset} to {run.offset + run.size} of a block"
        return UnavailableError(f"{what} of {run.span.request.name or 'a file'}", hint="run hdfs fsck on it")

    def _relocate(self, file: object, at: float) -> None:
        if id(file) not in self._asking:
            self._asking.add(id(file))
            self._questions.append(Relocate(file, at))
        for question in self._questions:
            if question.file is file:
                question.not_before = min(question.not_before, at)

    def question(self, now: float) -> Relocate | None:
        """A file whose blocks the NameNode must be asked for now; `relocated` follows."""
        for index, question in enumerate(self._questions):
            if question.not_before <= now:
                return self._questions.pop(index)
        return None

    def cut_rest(self, span: BlockRange, now: float) -> None:
        """``span`` has nobody to ask at all: its rest becomes runs, which keep count of the rounds."""
        self._cut(span)
        if span.again:
            self._relocate(span.place.file, now)

    def _cut(self, span: BlockRange) -> None:
        while span.fresh:
            span.again.append(span.cut(self._tuning.max_run))

    def _wait(self, rounds: int) -> float:
        """Seconds to wait after so many rounds, before the next step."""
        return self._tuning.round_wait * 3 ** (rounds - 1) if rounds else 0.0

    def _relocated_span(self, span: BlockRange, error: BootseerError | None, now: float) -> None:
        if span.fresh and not span.place.usable:
            self._cut(span)
        for run in list(span.again):
            if self._assignment.able(span, run):
                continue
            if isinstance(error, DataError):  # it is another file now
                self._fail(span.request, error)
                return
            run.rounds += 1
            if not run.outcomes or not run.outcomes <= _WRONG:
                run.failures = {}
                run.not_before = now + self._wait(run.rounds - 1)
            if error is not None and run.error is None:
                run.error = error
            if not self._assignment.able(span, run):  # the NameNode names nobody: no use to ask it again at once
                self._check_stuck(run, now + self._wait(run.rounds))
                if span.request.over:
                    return

    def lost(self, place: Place, now: float) -> None:
        """One replica fewer: perhaps that was the last for somebody who waits."""
        for request in list(self._requests):
            for span in request.spans:
                if span.place is place and not request.over:
                    if not place.usable:
                        self.cut_rest(span, now)
                    for run in list(span.again):
                        self._check_stuck(run, now)

    def without_checksums(self, place: Place) -> None:
        """No replica of it has checksums: whoever was refused for that may ask again, without."""
        _log.warning(
            "%s: a block has no checksums in HDFS, and is read without them", getattr(place.file, "path", "a file")
        )
        for request in self._requests:
            for span in request.spans:
                for run in span.again if span.place is place else ():
                    run.failures.clear()

    def relocated(self, file: object, error: BootseerError | None, now: float) -> None:
        """The places of ``file`` have fresh locations, or that failed."""
        self._asking.discard(id(file))
        for request in list(self._requests):
            if not any(span.place.file is file for span in request.spans):
                continue
            self._assignment.route(request, now)
            for span in request.spans:
                if span.place.file is file:
                    self._relocated_span(span, error, now)
                    if request.over:
                        break
