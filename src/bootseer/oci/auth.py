"""Logging in to one registry: Basic, or bearer tokens with their refresh (distribution spec, token authentication).
Concurrency: any thread asks for `Auth.header`. A token is renewed before it ends by one thread, while others go on with
the old one; when it has ended they wait for the one that renews (its requests have deadlines)."""

from __future__ import annotations

import json
import logging
import math
import random
import re
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from urllib.parse import urlencode, urlsplit

from bootseer.errors import BootseerError, PrivilegeError, UnavailableError, logged
from bootseer.oci import credentials
from bootseer.oci.credentials import Credential, Logins
from bootseer.oci.reference import is_loopback
from bootseer.oci.transport import Answer, Transport
from bootseer.oci.wire import TransportError, onward
from bootseer.wiretypes import loaded

log = logging.getLogger(__name__)

_CHALLENGE = re.compile(r'([A-Za-z0-9_-]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s,"]+))|([A-Za-z][A-Za-z0-9_-]*)')
"""A parameter, or the name of a scheme."""
_LEAST_LIFETIME = 60.0
"""Seconds a token lasts when its server does not say, and no server should say less (token specification). One that
does, or a negative number, gets no request for each of ours: a token that has really ended is refused, and then a new
one is fetched."""
_EARLY = 0.25
_EARLY_MOST = 60.0
_MAX_TOKEN = 1 << 20
_REMEMBERED = 16
"""Secrets looked for in what servers say: those in use and the last few tokens."""
TRIES = 3
_PAUSE = 0.5
_MAX_PAUSE = 1.0
"""The longest pause that a token server may ask for within one of our requests."""
_MAX_BACK_OFF = 10.0
_MAX_BACK_OFF_TOLD = 60.0
"""The most seconds without another request after all tries failed: where the server does not say when, and where its
``Retry-After`` does."""


class Auth:
    """What to send as ``Authorization`` to ``registry``, for repository ``name``. ``plain``: token servers that may get
    the login without TLS, beside those at loopback; empty for a registry with TLS, where none may. ``logins``: see
    `credentials.find`."""

    def __init__(
        self, registry: str, name: str, transport: Transport, *, plain: Sequence[str], logins: Logins | None = None
    ) -> None:
        self._registry, self._name, self._logins = registry, name, logins
        self._plain = plain
        self._transport = transport
        self._lock = threading.Lock()
        self._basic = ""
        self._challenge: dict[str, str] = {}
        self._realm = ""
        self._scopes: dict[str, set[str]] = {}
        self._token = ""
        self._renew_at = self._ends_at = 0.0
        self._failed: UnavailableError | None = None
        self._failed_until = 0.0
        self._failures = 0
        self._secrets: deque[str] = deque(maxlen=_REMEMBERED)
        self.place = ""
        """Where the login in use was found; empty: anonymous."""

    def __repr__(self) -> str:
        return f"<Auth of {self._registry}>"

    def header(self) -> str:
        """The value to send now; empty before the first challenge. Raises as `challenged`."""
        if not self._realm:
            return self._basic
        now = time.monotonic()
        if now >= self._renew_at:
            self._renew(now)
        token = self._token
        return f"Bearer {token}" if token else ""

    def challenged(self, answer: Answer, used: str) -> bool:
        """Follow the challenge of a 401 to a request that sent ``used``; whether to ask again. Raises `PrivilegeError`
        (the login is refused), `UnavailableError` (no token to be had)."""
        found = challenges(answer.headers.get_all("www-authenticate") or [])
        with self._lock:
            current = f"Bearer {self._token}" if self._token else self._basic
            if used != current:
                return True  # another thread has logged in meanwhile
            if "realm" in found.get("bearer", {}):
                fields = found["bearer"]
                self._challenge, self._realm = fields, onward(answer.url, fields["realm"])
                for scope in fields.get("scope", "").split():
                    resource, _, actions = scope.rpartition(":")
                    self._scopes.setdefault(resource, set()).update(actions.split(","))
                self._fetch()
                return bool(self._token)
            if "basic" in found and (login := self._login()) and login.basic != used:
                self._basic = login.basic
                return True
        return False

    def renewed(self, used: str) -> bool:
        """After a 403 to a request that sent ``used``: whether there is another login by now. Some registries answer so
        when a password of hours has ended, and challenge nobody."""
        with self._lock:
            if used and used == self._basic:
                with logged(log.warning, "no other login for %s", self._registry, kinds=BootseerError):  # 403 it is
                    self._basic = login.basic if (login := self._login()) else used
            return not self._realm and self._basic != used

    def redact(self, text: str) -> str:
        """``text`` of a server without anything secret that we have sent or received."""
        for secret in list(self._secrets):
            text = text.replace(secret, "***")
        return text

    def _renew(self, now: float) -> None:
        ended = now >= self._ends_at
        if not self._lock.acquire(blocking=ended):
            return  # somebody renews it, and the old one still works
        try:
            if time.monotonic() < self._renew_at:
                return
            try:
                self._fetch()
            except BootseerError as exc:
                if time.monotonic() >= self._ends_at:
                    raise
                log.warning("the token for %s is not renewed yet: %s", self._registry, exc.message)
                self._renew_at = min(time.monotonic() + 2 * _PAUSE, self._ends_at)
        finally:
            self._lock.release()

    def _login(self) -> Credential | None:
        login = credentials.find(self._registry, self._name, self._logins)
        self.place = login.place if login else ""
        if login:
            secrets = (login.password, login.identity_token, login.basic.partition(" ")[2])
            self._secrets.extend(secret for secret in secrets if secret and secret not in self._secrets)
        return login

    def _fetch(self) -> None:
        login = self._login()
        host = urlsplit(self._realm).netloc.rpartition("@")[2]
        scopes = [f"{name}:{','.join(sorted(actions))}" for name, actions in sorted(self._scopes.items())]
        fields = [("service", self._challenge["service"])] if "service" in self._challenge else []
        fields += [("scope", " ".join(scopes))] if login and login.identity_token else [("scope", s) for s in scopes]
        began = time.monotonic()
        if self._failed and began < self._failed_until:  # all that wait for a token get that error
            again = self._failed_until - began
            raise UnavailableError(self._failed.message, hint=self._failed.hint, retry_after=again)
        try:
            answer = self._ask(host, fields, login)
        except UnavailableError as exc:
            self._failures += 1
            pause = min(_MAX_BACK_OFF, _PAUSE * 2.0 ** min(self._failures, 8))
            if exc.retry_after is not None:
                pause = min(exc.retry_after, _MAX_BACK_OFF_TOLD)
            self._failed, self._failed_until = exc, time.monotonic() + pause * random.uniform(1.0, 1.25)
            raise
        self._failures = 0
        try:
            reply = loaded(json.loads, answer)
            token = reply.get("token") or reply.get("access_token") or ""
            lifetime = float(reply.get("expires_in") or 0.0)
            lifetime = max(lifetime, _LEAST_LIFETIME) if math.isfinite(lifetime) else _LEAST_LIFETIME
            if not isinstance(token, str) or not re.fullmatch(r"[\x21-\x7e]*", token):
                raise ValueError
        except (ValueError, AttributeError, TypeError, OverflowError):
            raise UnavailableError(
                f"registry {self._registry}: {host} answers a request for a token with something else",
                hint="a proxy or login page may be in between",
            ) from None
        # Counted from before the request by our own clock: issued_at is another machine's.
        self._ends_at = began + lifetime
        self._renew_at = self._ends_at - min(_EARLY * lifetime, _EARLY_MOST)
        self._token = token
        if token:
            self._secrets.append(token)

    def _ask(self, host: str, fields: list[tuple[str, str]], login: Credential | None) -> bytes:
        url, method, body = self._realm, "GET", None
        where = urlsplit(url)
        trusted = self._plain and (host in self._plain or is_loopback(where.hostname or ""))
        if where.scheme != "https" and not trusted:  # also without a login: it might be any server of this network
            raise PrivilegeError(
                f"registry {self._registry} wants a token fetched from {host} without TLS",
                hint="that is refused" + (", unless plain_http in the settings names it" if self._plain else ""),
            )
        headers: dict[str, str] = {"Accept": "application/json"}
        if login and login.identity_token:
            method = "POST"
            form = [*fields, ("grant_type", "refresh_token"), ("client_id", "bootseer")]
            body = urlencode([*form, ("refresh_token", login.identity_token)]).encode()
            headers["Content-Type"] = "application/x-www-form-urlencoded"
        else:
            account = [("account", login.username)] if login and login.username else []
            url += ("&" if urlsplit(url).query else "?") + urlencode([*fields, *account]) if fields else ""
            if login:
                headers["Authorization"] = login.basic
        after: float | None = None
        for attempt in range(1, TRIES + 1):
            try:
                with self._transport.request(method, url, headers=headers, body=body) as answer:
                    text = answer.document(_MAX_TOKEN)
                    status, after = answer.status, answer.retry_after
            except TransportError as exc:
                status, why, after = 0, str(exc), None
            else:
                why = f"HTTP {status}"
            if status == 200:
                return text
            if status in (400, 401, 403):
                if login:
                    raise PrivilegeError(
                        f"{host} refuses the login for registry {self._registry} in {login.place}",
                        hint="log in again, e.g. with docker login",
                    )
                raise PrivilegeError(
                    f"{host} gives no anonymous token for {self._name} in registry {self._registry}",
                    hint=f"log in, e.g. with docker login {self._registry}",
                )
            if status not in (0, 429, 500, 502, 503, 504) or (after or 0.0) > _MAX_PAUSE:
                break
            if attempt < TRIES:
                log.warning("token for %s from %s: %s; trying again", self._registry, host, why)
                time.sleep((_PAUSE * attempt if after is None else after) * random.uniform(1.0, 1.25))
        raise UnavailableError(
            f"registry {self._registry}: {host} gives no token: {why}",
            hint="check that it is reachable from here",
            retry_after=after,
        )


def challenges(headers: list[str]) -> Mapping[str, dict[str, str]]:
    """Scheme in small letters -> parameters, of all ``WWW-Authenticate`` headers."""
    found: dict[str, dict[str, str]] = {}
    for header in headers:
        fields: dict[str, str] = {}
        for name, quoted, plain, scheme in _CHALLENGE.findall(header):
            if name:
                fields[name.lower()] = quoted or plain
            elif "realm" not in found.get(scheme.lower(), {}):  # one that does not say where is of no use
                fields = found[scheme.lower()] = {}
            else:
                fields = {}
    return found
