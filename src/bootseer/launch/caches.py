"""The compile caches of a start: restored before the programs begin, captured beside them once the first step is over.
Advice throughout: without them the programs compile. Concurrency: one thread looks whether what was added has settled
and starts the process that captures it (`env.generation.Held.capture`)."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from bootseer.config import Config
from bootseer.env import cachekey, cachekinds, generation
from bootseer.env.cacheuse import Use
from bootseer.env.generation import Cache, Held
from bootseer.env.publication import Publication
from bootseer.errors import BootseerError, logged

log = logging.getLogger(__name__)

PLACE = "/run/bootseer/caches"
"""Where a container sees them."""
_LOOK = 10.0
"""Seconds between two looks at what was added; what two of them find alike is captured."""
_PAUSE = 60.0
"""Seconds from one capture to the next: each reads all that there is."""
_BEGIN_SECONDS = 600.0
"""A command that ends by itself so soon may have ended for what it read of the caches."""
_LAST_SECONDS = 120.0
"""For all captures at the end of the start."""
_CANCEL_SECONDS = 20.0
"""For a cancelled capture to end."""


class Report(NamedTuple):
    """``how``: in words. ``used`` is -1 where nobody can tell."""

    how: str
    restored: int = 0
    used: int = -1
    compiled: int = 0


class Caches:
    """``begin``, then `variables` and `folder` for the programs, ``stepped`` when the first step has ended, and
    `seen_out` around all that."""

    def __init__(
        self,
        cache: Cache,
        kinds: Sequence[str],
        store_url: str,
        config: Config,
        *,
        job: str = "",
        auto: bool = False,
    ) -> None:
        """``auto``: nobody expects that the programs use all of ``kinds``."""
        self._kinds, self._auto = list(kinds), auto
        self._cache, self._store, self._config, self._job = cache, store_url, config, job
        self._held: Held | None = None
        self._use: Use | None = None
        self._used = set[str]()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="caches", daemon=True)
        self._running: Publication | None = None
        self._seconds = 0.0
        self.report = Report("no cache")
        """What the first step has come to."""

    def begin(self) -> str:
        """How it begins, in words. There may be no cache at all afterwards."""
        try:
            self._held = generation.restore(self._cache, self._store, self._config, job=self._job)
        except (BootseerError, OSError) as exc:
            log.warning("%s; the programs use no cache of ours", exc)
            return f"no cache: {exc}"
        if not self._cache.image:  # in a container they lie at one place on all nodes
            with logged(log.warning, "cannot lead the caches here"):
                self._held.lead_here()
        self._use = Use(self._held)
        self._thread.start()
        return self._held.said

    @property
    def folder(self) -> Path | None:
        """Of this host."""
        return self._held.folder if self._held else None

    def variables(self, given: Collection[str], folder: str) -> dict[str, str]:
        """For the programs, which see the caches in ``folder`` and have the variables ``given``."""
        if not self._held:
            return {}
        found, own = cachekinds.exported(self._kinds, folder, given)
        for name in own:
            log.warning("the job says itself where the cache %s is: it is left alone", name)
        self._kinds = [name for name in self._kinds if name not in own]
        return found

    def stepped(self, seconds: float = 0.0) -> Report:
        """The first step has ended, ``seconds`` after the programs began. Was the cache used?"""
        held, use, self._use = self._held, self._use, None
        if held and use:
            with logged(log.warning, "cannot see what of the caches was used"):
                self.report = self._ended(held, use, seconds)
        return self.report

    def _ended(self, held: Held, use: Use, seconds: float) -> Report:
        restored, used = use.ended()
        kept = {path.partition("/")[0] for path in held.entries()}
        idle = [name for name in self._kinds if name not in kept]
        if idle and (not self._auto or not kept):
            log.warning("no program has compiled into these caches, nor what it uses: %s", ", ".join(idle))
        compiled = len(held.compiled())
        self._seconds = 0.0 if held.restored else seconds
        if not restored:
            return Report(f"{held.said}, compiled {compiled}", compiled=compiled)
        said = f"restored {restored}, used {'?' if used is None else len(used)}, compiled {compiled} anew"
        if used is not None:
            self._used = used
            if not used:
                log.warning("the cache was restored and not used: %s", said)
        if held.restored and held.restored.seconds and seconds:
            saved = held.restored.seconds - seconds
            said += f", {saved:.0f} s saved" if saved >= 1 else ", none saved"
        return Report(said, restored, -1 if used is None else len(used), compiled)

    @property
    def damaged(self) -> bool:
        """Whether a read of what was restored has failed."""
        return self._held is not None and self._held.damaged

    def renew(self) -> str:
        """Begin again, with nothing in it; how, in words. Raises `BootseerError` and `OSError` when that cannot be;
        there is no cache then."""
        held, self._held = self._held, None
        assert held
        held.close()
        self._held = generation.restore(self._cache, self._store, self._config, use=False)
        return "cold: what was restored is damaged"

    @contextlib.contextmanager
    def seen_out(self) -> Iterator[None]:
        """At the end of a start wait until what was added is captured, unless the start is being broken off."""
        try:
            yield
            with logged(log.warning, "cannot capture the caches"):
                self._capture_all(time.monotonic() + _LAST_SECONDS)
        finally:
            self.close()

    def close(self) -> Report:
        """The programs have ended: a capture that runs is cancelled, and the folder goes with its last user. Safe to
        call twice."""
        until = time.monotonic() + _CANCEL_SECONDS
        self._end(until)
        held, self._held = self._held, None
        if held:
            with logged(log.warning, "cannot give up the caches"):
                if self._running:
                    self._running.cancel()
                    self._see_out(until)
                held.close()
        return self.report

    def _end(self, until: float) -> None:
        """The thread captures nothing more, and all is seen of what the programs used."""
        self._over.set()
        if self._thread.ident:
            self._thread.join(max(until - time.monotonic(), 0))
        if self._use:
            self.stepped()

    def _capture_all(self, until: float) -> None:
        """What the programs added and nobody else on this node captures."""
        self._end(until)
        self._see_out(until)
        held = self._held
        if held and not self._running and not (held.joined and held.group and held.group.in_use):
            self._capture(last=True)
            self._see_out(until)

    def _see_out(self, until: float) -> None:
        if self._running and self._running.ended(max(until - time.monotonic(), 0)):
            published, why = self._running.wait(0)
            if self._held and not published and why != generation.NOTHING:
                self._held.retract()
            log.info("the caches were captured" if published else f"the caches were not captured: {why}")
            self._running = None

    def _capture(self, *, last: bool = False) -> None:
        assert self._held
        with logged(log.warning, "cannot capture the caches"):
            self._running = self._held.capture(self._used, seconds=self._seconds, last=last)

    def _watch(self) -> None:
        before, tried, last = dict[str, tuple[int, int]](), dict[str, tuple[int, int]](), -_PAUSE
        while not self._over.wait(_LOOK):
            held, added = self._held, dict[str, tuple[int, int]]()
            if held is None or held.joined:
                continue
            with logged(log.warning, "cannot look at the caches"):
                added = held.added()
            if added and added == before != tried and time.monotonic() - last >= _PAUSE:
                tried, last = added, time.monotonic()
                self._capture()
                while self._running and not self._over.is_set():
                    self._see_out(time.monotonic() + 1)
            before = added


def may_begin_again(code: int, seconds: float) -> bool:
    """Whether a command that ended with ``code``, so long after its begin, may have failed for a cache that could not
    be read. One that a signal ended did not; and nobody wants hours of work again."""
    return 0 < code < 128 and seconds < _BEGIN_SECONDS


def of_host(names: Sequence[str] | Literal["auto"], command: Sequence[str], config: Config) -> Caches:
    """Those of the kinds ``names`` for a command on this host, without a container. Raises `ConfigError`."""
    kinds = cachekinds.chosen(names, "compile")
    environ = dict(os.environ)
    facts = cachekey.facts(environ, cachekey.imported(command, environ, config))
    owner = os.geteuid(), os.getegid()
    cache = Cache(group="compile", path=PLACE, owner=owner, tenant=config.tenant, facts=facts)
    return Caches(cache, kinds, config.store_url, config, auto=names == "auto")
