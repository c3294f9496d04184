"""Which of a registry's mirrors is asked for what: one that fails rests, one that lacks a blob is asked for it once.
Used by any number of threads; no request is made under the lock."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from bootseer.errors import BootseerError, DataError, NotFoundError, UnavailableError, UnsupportedError
from bootseer.oci.endpoint import Endpoint

log = logging.getLogger(__name__)

REST = 60.0
"""Seconds a mirror is left alone that did not answer, or gave damaged bytes."""
_LONGEST_REST = 600.0
_LACKS = 300.0
"""Seconds after which a mirror is asked again for a blob that it lacked or cannot give: it may have it then."""
_REMEMBERED = 4096
T = TypeVar("T")


class Mirrors:
    """``all``: the mirrors in their order, then the registry itself."""

    def __init__(self, mirrors: Sequence[Endpoint], origin: Endpoint) -> None:
        self.all = (*mirrors, origin)
        self._origin = origin
        self._lock = threading.Lock()
        self._until: dict[tuple[Endpoint, str], float] = {}
        """When to ask a mirror again: for one name, or, with an empty one, for anything."""
        self._served: dict[str, Endpoint] = {}

    def candidates(self, name: str) -> Iterator[Endpoint]:
        """Whom to ask for the blob or manifest ``name``, the registry itself last."""
        for endpoint in self.all[:-1]:
            if not (endpoint.pulls if ":" in name else endpoint.resolves):  # a tag has no colon
                continue
            with self._lock:
                until = max(self._until.get((endpoint, key), 0.0) for key in ("", name))
            if time.monotonic() >= until:
                yield endpoint
        yield self._origin

    def read(self, ask: Callable[[Endpoint], T], name: str, what: str) -> T:
        """The first answer. Raises what the registry itself raises."""
        for endpoint in self.candidates(name):
            try:
                return ask(endpoint)
            except BootseerError as exc:
                self.failed(endpoint, exc, name, what)
        raise AssertionError("the registry itself is always asked")

    def served(self, endpoint: Endpoint, name: str) -> None:
        """Take note of who gave ``name``, in case it is `damaged`."""
        if len(self.all) > 1:
            with self._lock:
                if len(self._served) >= _REMEMBERED:
                    self._served.clear()
                self._served[name] = endpoint

    def failed(self, endpoint: Endpoint, exc: BootseerError, name: str, what: str) -> None:
        """Take note that ``endpoint`` does not give ``name``; raises ``exc`` when it is the registry itself."""
        if endpoint is self._origin:
            raise exc
        log.warning("mirror %s does not give %s: %s; asking the next", endpoint.root, what, exc.message)
        if isinstance(exc, UnavailableError):
            self._leave(endpoint, "", min(max(REST, exc.retry_after or 0.0), _LONGEST_REST))
        elif isinstance(exc, NotFoundError | UnsupportedError | DataError):
            self._leave(endpoint, name, _LACKS)

    def damaged(self, name: str) -> None:
        """What was last read of ``name`` is damaged: the mirror that gave it rests."""
        with self._lock:
            endpoint = self._served.pop(name, None)
        if endpoint is not None and endpoint is not self._origin:
            log.warning("mirror %s gives damaged bytes of %s: leaving it for %.0f s", endpoint.root, name[:19], REST)
            self._leave(endpoint, "", REST)

    def _leave(self, endpoint: Endpoint, name: str, seconds: float) -> None:
        with self._lock:
            if len(self._until) >= _REMEMBERED:
                self._until.clear()
            self._until[endpoint, name] = time.monotonic() + seconds
