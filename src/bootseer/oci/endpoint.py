"""One repository at one registry (or mirror): requests with login, redirects and retries, and what failures mean.

Retries: a transfer without an answer, and 429, 500, 502, 503 and 504, are tried again ``RETRIES`` times with growing
pauses, or after what ``Retry-After`` says. A longer one than `MAX_RETRY_AFTER`, and everything else, is final. The
``Authorization`` header goes to this registry's own scheme, host and port only."""

from __future__ import annotations

import json
import logging
import random
import time
from collections.abc import Mapping, Sequence
from urllib.parse import quote

from bootseer.errors import BootseerError, NotFoundError, NotWritableError, PrivilegeError, UnavailableError
from bootseer.oci.auth import Auth
from bootseer.oci.credentials import Logins
from bootseer.oci.hosts import Host
from bootseer.oci.transport import Answer, Transport
from bootseer.oci.wire import FilePart, Origin, TlsError, TransportError, onward
from bootseer.wiretypes import loaded

log = logging.getLogger(__name__)

RETRIES = 4
MAX_RETRY_AFTER = 60.0
"""The longest ``Retry-After``, in seconds, that is waited for; a longer one makes the answer final."""
_REDIRECTS = 5
_LOGINS = 2
_MAX_DETAIL = 64 << 10
_AGAIN = (429, 500, 502, 503, 504)


class Again(Exception):
    """A reason to repeat a request; ``after`` seconds if the server said so."""

    def __init__(self, why: str, *, after: float | None = None) -> None:
        super().__init__(why)
        self.after = after


def backoff(failures: int, exc: Exception) -> float:
    """Seconds to wait after the ``failures``-th failure in a row."""
    if isinstance(exc, Again) and exc.after is not None:
        # Spread, or all nodes that were told the same come back in the same second.
        return exc.after * random.uniform(1.0, 1.25)
    return float(min(8.0, 0.25 * 2**failures) * random.uniform(0.5, 1.0))


class Endpoint:
    """``registry`` is ``host[:port]`` as people write it, ``host`` where it answers; ``name`` the repository.

    ``plain``: without TLS; its login may go so to a token server there, at loopback, or one that is ``named``.
    ``said``: what `hosts` says of it, such as whether it may be asked for tags and digests (``resolves``, ``pulls``).
    ``mirrors``: the registry in whose place it is asked, as mirrors of several want to be told."""

    def __init__(
        self,
        registry: str,
        host: str,
        name: str,
        *,
        plain: bool,
        named: Sequence[str],
        transport: Transport,
        logins: Logins | None = None,
        said: Host | None = None,
        mirrors: str = "",
    ) -> None:
        self.registry, self.name = registry, name
        self.root = f"{'http' if plain else 'https'}://{host}"
        self.base = f"{self.root}{said.path if said else '/v2'}/{name}"
        self.resolves, self.pulls = (said.resolves, said.pulls) if said else (True, True)
        self._header = {name.title(): value for name, value in said.header} if said else {}
        self._query = f"ns={quote(mirrors, safe=':')}" if mirrors else ""
        self._transport = transport
        self._origin = Origin.of(self.root)
        self.auth = Auth(registry, name, transport, plain=(host, *named) if plain else (), logins=logins)

    def __repr__(self) -> str:
        return f"<Endpoint {self.base}>"

    def request(
        self,
        method: str,
        path: str,
        what: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: bytes | FilePart | None = None,
        retries: int | None = None,
        limit: int = 0,
    ) -> Answer:
        """The answer to a request for ``path`` (below the repository, or a whole URL), with any final status.
        ``limit``: read a good answer's body, up to that many bytes and one more, into ``Answer.body`` as well. A
        refused connection is final too: a registry that is not there is said at once. Raises `UnavailableError`."""
        left = RETRIES if retries is None else retries
        failures = 0
        while True:
            try:
                answer = self.once(method, path, headers=headers, body=body)
                if limit and 200 <= answer.status < 300:
                    with answer:
                        answer.document(limit)
                return answer
            except (TransportError, Again) as exc:
                failures += 1
                if failures > left or (isinstance(exc, TransportError) and exc.fresh):
                    raise self.unavailable(exc) from None
                self.pause(failures, exc, what)

    def once(
        self,
        method: str,
        path: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: bytes | FilePart | None = None,
        patience: float | None = None,
    ) -> Answer:
        """One try, logging in when asked to. Raises `Again` and `TransportError` for what is worth another one."""
        url = path if "://" in path else self.base + path
        if self._query and "://" not in path:
            url += ("&" if "?" in path else "?") + self._query
        for _ in range(_LOGINS + 1):
            used = self.auth.header()
            answer = self._follow(method, url, dict(headers or {}), used, body, patience)
            if answer.status not in (401, 403) or not self.own(answer.url):
                break
            try:
                if not (self.auth.challenged(answer, used) if answer.status == 401 else self.auth.renewed(used)):
                    break
            except BaseException:
                answer.close()
                raise
            _drain(answer)
        if answer.status in _AGAIN:
            after, why = answer.retry_after, f"HTTP {answer.status}{self.detail(answer)}"
            answer.close()
            if after is not None and after > MAX_RETRY_AFTER:
                raise UnavailableError(
                    f"registry {self.registry} is busy: {why}, it asks to come back in {after:.0f} s",
                    hint="it limits requests: log in, use a mirror, or wait",
                    retry_after=after,
                )
            raise Again(why, after=after)
        return answer

    def own(self, url: str) -> bool:
        """Whether ``url`` is of the registry itself: same scheme, host and port."""
        return Origin.of(url) == self._origin

    def _follow(
        self,
        method: str,
        url: str,
        headers: dict[str, str],
        secret: str,
        body: bytes | FilePart | None,
        patience: float | None,
    ) -> Answer:
        for _ in range(_REDIRECTS + 1):
            own = self.own(url)
            sent = {**self._header, **headers} if own else headers
            sent = {**sent, "Authorization": secret} if secret and own else sent
            answer = self._transport.request(method, url, headers=sent, body=body, patience=patience)
            if answer.status not in (301, 302, 303, 307, 308) or "location" not in answer.headers:
                return answer
            location = answer.headers["location"]
            _drain(answer)
            try:
                there = onward(url, location)
                scheme = Origin.of(there).scheme
            except TransportError:
                said = f"registry {self.registry} sends us on to an address that is not understood"
                raise UnavailableError(said, hint="that is refused") from None
            if Origin.of(url).scheme == "https" and scheme != "https":
                raise UnavailableError(
                    f"registry {self.registry} sends us on to {place(there)} without TLS", hint="that is refused"
                )
            if answer.status == 303:
                method, body = "GET", None
            url = there
        raise UnavailableError(f"registry {self.registry} sends us on and on, at last to {place(url)}")

    def pause(self, failures: int, exc: Exception, what: str) -> None:
        """Sleep before try number ``failures`` + 1."""
        seconds = backoff(failures, exc)
        log.warning("%s at registry %s: %s; trying again in %.1f s", what, self.registry, exc, seconds)
        time.sleep(seconds)

    def check(self, answer: Answer, what: str, *, writing: bool = False, detail: str = "") -> None:
        """Raise the error that a final status means, after closing ``answer``; return for 2xx. ``detail``: what
        `detail` has read from it already."""
        code = answer.status
        if 200 <= code < 300:
            return
        detail = detail or self.detail(answer)
        answer.close()
        where = f"registry {self.registry}"
        if not self.own(answer.url):
            raise UnavailableError(f"{place(answer.url)}, where {where} keeps {what}, refuses it: HTTP {code}")
        if code == 401:
            if self.auth.place:
                hint = f"the login in {self.auth.place} is not accepted: log in again"
            else:
                hint = f"log in, e.g. with docker login {self.registry}"
            raise PrivilegeError(f"{where} denies access to {what}", hint=hint)
        if code == 403:
            verb = "push to" if writing else "pull from"
            raise PrivilegeError(
                f"{where} denies access to {what}{detail}", hint=f"this login needs the right to {verb} {self.name}"
            )
        if code == 404:
            raise NotFoundError(f"{what} does not exist in {where}")
        if writing and code in (405, 413, 507):
            raise NotWritableError(f"{where} does not accept {what}: HTTP {code}{detail}")
        if code >= 500:
            raise UnavailableError(f"{where} failed on {what}: HTTP {code}{detail}", hint="look at the registry's log")
        hint = "it speaks TLS: use --https" if code == 400 and "HTTPS" in detail else ""
        raise BootseerError(f"{where} refused {what}: HTTP {code}{detail}", hint=hint)

    def unavailable(self, exc: Exception) -> UnavailableError:
        hint = exc.hint if isinstance(exc, TlsError) else "check that it runs and is reachable from here"
        after = exc.after if isinstance(exc, Again) else None
        text = f"registry {self.registry} does not answer at {self.root}: {exc}"
        return UnavailableError(text, hint=hint, retry_after=after)

    def detail(self, answer: Answer) -> str:
        """What the body says went wrong, in parentheses, or nothing; never to a stranger, who may not be meant to see
        what a service answers to this machine."""
        if self._transport.named is not None:
            return ""
        try:
            text = answer.document(_MAX_DETAIL).decode(errors="replace")
        except TransportError:
            return ""
        try:
            error = loaded(json.loads, text)["errors"][0]
            said = f"{error['code']}: {error.get('message', '')}".rstrip(": ")
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            said = text.strip() if answer.headers.get("content-type", "").startswith("text/plain") else ""
        line = " ".join(self.auth.redact(said).split())[:200]
        return f" ({line})" if line.isprintable() and line else ""


def place(url: str) -> str:
    """Scheme and host of a URL: its path and query may be signed, and belong in no message."""
    try:
        origin = Origin.of(url)
    except TransportError:
        return "an address that is not understood"
    return f"{origin.scheme}://{origin.host}:{origin.port}"


def _drain(answer: Answer) -> None:
    try:
        answer.document(_MAX_DETAIL)
    except TransportError:
        pass
    finally:
        answer.close()
