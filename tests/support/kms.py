"""A key server (KMS) for one key, over HTTP: what a NameNode with an encryption zone and its clients ask of one.

What it says of keys is no secret: an "encrypted" key is the key with every bit changed.
"""

from __future__ import annotations

import base64
import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from urllib.parse import parse_qs, urlsplit

KEY = "k1"
_VERSION = f"{KEY}@0"


class Kms:
    """Context manager. ``url``: for ``hadoop.security.key.provider.path``; ``asked``: what was."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        asked = self.asked

        class Handler(BaseHTTPRequestHandler):
            def _answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                url = urlsplit(self.path)
                query = parse_qs(url.query)
                asked.append(query.get("eek_op", query.get("op", [url.path.rpartition("/")[2]]))[0])
                # Hadoop's clients log in with a question of another kind first
                said = json.dumps({} if self.command == "OPTIONS" else _said(url.path, query, body)).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(said)))
                self.end_headers()
                self.wfile.write(said)

            do_GET = do_POST = do_OPTIONS = _answer

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"kms://http@127.0.0.1:{self._server.server_address[1]}/kms"

    def __enter__(self) -> Kms:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()


def _said(path: str, query: dict[str, list[str]], body: bytes) -> object:
    if query.get("op") == ["GETDELEGATIONTOKEN"]:
        return {"Token": {"urlString": _text(b"token")}}
    if query.get("eek_op") == ["decrypt"]:
        return _version("EK", base64.urlsafe_b64decode(json.loads(body)["material"] + "=="))
    if query.get("eek_op") == ["generate"]:
        made = [os.urandom(16) for _ in range(int(query["num_keys"][0]))]
        return [
            {"versionName": _VERSION, "iv": _text(key), "encryptedKeyVersion": _version("EEK", key)} for key in made
        ]
    if path.endswith("/_metadata"):
        known = {"cipher": "AES/CTR/NoPadding", "length": 128, "description": "", "attributes": {}}
        return {"name": KEY, "created": 1 << 40, "versions": 1, **known}
    return _version(_VERSION, bytes(16))


def _version(name: str, key: bytes) -> dict[str, str]:
    return {"name": KEY, "versionName": name, "material": _text(bytes(byte ^ 255 for byte in key))}


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")
