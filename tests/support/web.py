"""An HTTP server of a test, in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple, Self


class Request(NamedTuple):
    command: str
    path: str
    headers: Message
    body: bytes


class Answer(NamedTuple):
    """``body`` may come in pieces, with its length in ``headers``; at a None the connection ends."""

    status: int = 200
    body: bytes | Iterator[bytes | None] = b""
    headers: Mapping[str, str] = {}


class WebServer:
    """Answers with what ``answer`` returns, on ``address`` (``host:port``), while it is entered."""

    def __init__(self, answer: Callable[[Request], Answer], host: str = "127.0.0.1") -> None:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # head and body are written apart: each answer would wait 40 ms

            def _answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                status, said, headers = answer(Request(self.command, self.path, self.headers, body))
                length = {"Content-Length": str(len(said))} if isinstance(said, bytes) else {}
                self.send_response(status)
                for name, value in {**length, **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                for piece in () if self.command == "HEAD" else [said] if isinstance(said, bytes) else said:
                    if piece is None:
                        self.close_connection = True
                        return
                    self.wfile.write(piece)

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_OPTIONS = _answer

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer((host, 0), Handler)
        self.host, self.port = host, self._server.server_port
        self.address = f"{host}:{self.port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
