"""A token server for a real registry with ``auth: token``: Bearer tokens signed RS256, of any lifetime."""

from __future__ import annotations

import base64
import http.server
import json
import secrets
import shutil
import subprocess
import threading
import time
from pathlib import Path
from types import TracebackType
from urllib.parse import parse_qs, urlsplit

from bootseer.errors import UnsupportedError

SERVICE, ISSUER = "bootseer-tests", "bootseer-token-server"
_LEEWAY = 60.0
"""docker-registry takes a token this long after its end; we sign for that much less, so that lifetimes are real."""


class TokenServer:
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
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), name="token-server")

    @property
    def realm(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/token"

    def __enter__(self) -> TokenServer:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

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


def _handler(server: TokenServer) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # head and body are written apart: each answer would wait 40 ms

        def log_message(self, *args: object) -> None:
            """Quiet."""

        def do_GET(self) -> None:
            self.answer(parse_qs(urlsplit(self.path).query))

        def do_POST(self) -> None:
            self.answer(parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode()))

        def answer(self, form: dict[str, list[str]]) -> None:
            with server._lock:
                server.requests += 1
            time.sleep(server.delay)
            status = server.status or (200 if server.allows(self.headers.get("Authorization", ""), form) else 401)
            body: dict[str, object] = {"errors": [{"code": "UNAUTHORIZED", "message": str(form)}]}
            if status == 200:
                scopes = " ".join(form.get("scope", [])).split()
                said = server.lifetime if server.said is None else server.said
                body = {"token": server.token(scopes), "expires_in": said}
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    return Handler


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")
