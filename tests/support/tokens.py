"""A token server for a real registry with ``auth: token``: Bearer tokens signed RS256, of any lifetime."""

from __future__ import annotations

import base64
import json
import secrets
import shutil
import subprocess
import threading
import time
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from bootseer.errors import UnsupportedError
from support.web import Answer, Request, WebServer

SERVICE, ISSUER = "bootseer-tests", "bootseer-token-server"
_LEEWAY = 60.0
"""docker-registry takes a token this long after its end; we sign for that much less, so that lifetimes are real."""


class TokenServer(WebServer):
    """Serves while it is entered. ``lifetime`` seconds a token is good for; ``said`` what the answer claims (None: the
    same); ``users`` may have a token (none: anybody); ``identity`` tokens may be traded for one (OAuth2). ``status``
    not 0 is answered to every request. ``requests`` counts, ``issued`` has every token.
    """

    def __init__(
        self, folder: Path, *, lifetime: float = 300.0, users: dict[str, str] | None = None, identity: str = ""
    ) -> None:
        if not shutil.which("openssl"):
            raise UnsupportedError("no openssl here", hint="apt-get install openssl")
        self.lifetime, self.users, self.identity = lifetime, users or {}, identity
        self.said: float | None = None
        self.status = 0
        self.delay = 0.0
        self.requests = 0
        self.issued: list[str] = []
        self.certificate = folder / "token.crt"
        self._key = folder / "token.key"
        folder.mkdir(parents=True, exist_ok=True)
        argv = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={ISSUER}"]
        argv += ["-keyout", str(self._key), "-out", str(self.certificate)]
        subprocess.run(argv, check=True, capture_output=True, timeout=60)
        der = subprocess.run(
            ["openssl", "x509", "-in", str(self.certificate), "-outform", "DER"], check=True, capture_output=True
        ).stdout
        self._chain = [base64.b64encode(der).decode()]
        self._lock = threading.Lock()
        super().__init__(self._answer)

    @property
    def realm(self) -> str:
        return f"http://{self.address}/token"

    def token(self, scopes: list[str]) -> str:
        """A token for ``repository:NAME:pull,push`` scopes."""
        now = time.time()
        access = []
        for scope in scopes:
            resource, _, actions = scope.rpartition(":")
            kind, _, name = resource.partition(":")
            access.append({"type": kind, "name": name, "actions": actions.split(",")})
        claims = {
            "iss": ISSUER, "sub": "", "aud": SERVICE, "access": access, "jti": secrets.token_hex(8),
            "iat": int(now), "nbf": int(now - 2 * _LEEWAY), "exp": int(now + self.lifetime - _LEEWAY),
        }  # fmt: skip
        head = {"typ": "JWT", "alg": "RS256", "x5c": self._chain}
        signed = ".".join(_base64(json.dumps(part).encode()) for part in (head, claims))
        argv = ["openssl", "dgst", "-sha256", "-sign", str(self._key)]
        signature = subprocess.run(argv, input=signed.encode(), check=True, capture_output=True).stdout
        token = f"{signed}.{_base64(signature)}"
        with self._lock:
            self.issued.append(token)
        return token

    def allows(self, authorization: str, form: dict[str, list[str]]) -> bool:
        if "refresh_token" in form:
            return bool(self.identity) and form["refresh_token"] == [self.identity]
        if not self.users:
            return True
        scheme, _, pair = authorization.partition(" ")
        user, _, password = base64.b64decode(pair).decode().partition(":") if scheme == "Basic" else ("", "", "")
        return user in self.users and self.users[user] == password

    def _answer(self, request: Request) -> Answer:
        form = parse_qs(request.body.decode() if request.command == "POST" else urlsplit(request.path).query)
        with self._lock:
            self.requests += 1
        time.sleep(self.delay)
        status = self.status or (200 if self.allows(request.headers.get("Authorization", ""), form) else 401)
        body: dict[str, object] = {"errors": [{"code": "UNAUTHORIZED", "message": str(form)}]}
        if status == 200:
            scopes = " ".join(form.get("scope", [])).split()
            said = self.lifetime if self.said is None else self.said
            body = {"token": self.token(scopes), "expires_in": said}
        return Answer(status, json.dumps(body).encode(), {"Content-Type": "application/json"})


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")
