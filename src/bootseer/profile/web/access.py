"""Who may read the pages and send events: everybody at loopback without a token, else who knows the token.

A token comes as ``Authorization: Bearer TOKEN``, or once through the form, which leaves a cookie that is good until the
server ends. It is never part of an address. A cookie is good for reading alone: browsers send it along with what pages
of other ports of the same host ask for."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable
from ipaddress import ip_address
from urllib.parse import parse_qs, urlsplit

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_COOKIE = "bootseer-session"
_TLS_COOKIE = f"__Host-{_COOKIE}"
"""Under TLS: browsers take it from no other host and no page without TLS."""
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'self'; connect-src 'self'; img-src 'self';"
    " form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
_FORM = 4096
"""Most bytes of a form."""


def loopback(host: str) -> bool:
    """Whether only processes of this machine reach ``host``."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Access:
    """``token``: "" when everybody may read who reaches the server, which is then to listen at loopback alone."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._session = secrets.token_urlsafe(32)

    def guard(self, app: ASGIApp, page: Callable[[Request, str], Response]) -> ASGIApp:
        """``app``, for those who may read; ``page`` asks others for the token."""

        async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return

            async def say(message: Message) -> None:
                if message["type"] == "http.response.start":
                    headers = MutableHeaders(scope=message)
                    headers["Content-Security-Policy"] = _POLICY
                    headers["X-Content-Type-Options"] = "nosniff"
                    headers["Cross-Origin-Resource-Policy"] = "same-origin"
                    headers["Referrer-Policy"] = "same-origin"  # without any, the form's Origin would be null
                    headers.setdefault("Cache-Control", "no-store")
                await send(message)

            request = Request(scope, receive)
            answer: ASGIApp = app
            if (why := self._refusal(request)) is not None:
                answer = page(request, why) if "text/html" in request.headers.get("accept", "") else _plain(why)
            await answer(scope, receive, say)

        return guarded

    def _refusal(self, request: Request) -> str | None:
        if not _own(request):
            return "this is not asked by a page of this server"
        if not self._token:
            # a page of another site may have its name resolved to loopback
            host = _split(f"//{request.headers.get('host', '')}")[1]
            return None if loopback(host) else "this address is not one of this server"
        path = request.scope["path"]  # not `request.url`: its path is made of the header Host, too, in some versions
        if path == "/login" or path.startswith("/static/"):
            return None
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and _equal(given.strip(), self._token):
            return None
        if request.method in _READING and any(
            _equal(request.cookies.get(name, ""), self._session) for name in (_TLS_COOKIE, _COOKIE)
        ):
            return None
        return "the token is wrong" if given else ""

    async def login(self, request: Request) -> Response:
        """Take the token of the form; back to the page that was asked for."""
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > _FORM:
                return _plain("the form is too large", 413)
        fields = parse_qs(body.decode("utf-8", "replace"))
        if not self._token or not _equal(fields.get("token", [""])[0].strip(), self._token):
            return _plain("the token is wrong: go back and try again")
        then = fields.get("then", ["/"])[0]
        if not then.startswith("/") or then.startswith(("//", "/\\")):
            then = "/"
        answer = RedirectResponse(then, 303)
        tls = request.scope["scheme"] == "https" or _split(request.headers.get("origin", ""))[0] == "https"
        answer.set_cookie(
            _TLS_COOKIE if tls else _COOKIE, self._session, httponly=True, samesite="lax", secure=tls, path="/"
        )
        return answer


def _equal(given: str, right: str) -> bool:
    return hmac.compare_digest(given.encode(errors="replace"), right.encode())


_READING = ("GET", "HEAD")


def _own(request: Request) -> bool:
    """Whether a program asks, or one of our pages, or for reading somebody who follows a link: no other site. Browsers
    say ``Origin`` for all that is not reading, ``Sec-Fetch-Site`` under TLS and at loopback alone."""
    reading, site = request.method in _READING, request.headers.get("sec-fetch-site", "none")
    if site not in ("none", "same-origin") and not (reading and request.headers.get("sec-fetch-mode") == "navigate"):
        return False
    if reading or (origin := request.headers.get("origin")) is None:
        return True
    scheme, _, place = _split(origin)
    # a proxy may take TLS away, and not say so: a page that came by TLS is no worse than one that did not
    return scheme in (request.scope["scheme"], "https") and place == request.headers.get("host", "").lower() != ""


def _split(url: str) -> tuple[str, str, str]:
    """Scheme, host and host with port."""
    try:
        parts = urlsplit(url)
        return parts.scheme, parts.hostname or "", parts.netloc.lower()
    except ValueError:
        return "", "", ""


def _plain(why: str, status: int = 401) -> Response:
    return PlainTextResponse(f"{why or 'a token is needed'}\n", status, {"WWW-Authenticate": "Bearer"})
