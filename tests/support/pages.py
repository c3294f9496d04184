"""A real `bootseer profile serve`."""

from __future__ import annotations

import contextlib
import http.client
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from support import forked

TOKEN = "a-token-of-thirty-two-characters"


class Server:
    def __init__(self, *args: str | Path) -> None:
        command = [sys.executable, "-m", "bootseer.cli.main", "profile", "serve", "--port", "0", *map(str, args)]
        self.process = forked.Popen(command, stderr=-1, text=True)
        assert self.process.stderr is not None
        self.said = self.process.stderr.readline()
        self.port = int(self.said.rstrip("/\n").rpartition(":")[2])
        until = time.monotonic() + 60
        while self.ask("/jobs.json", Authorization=f"Bearer {TOKEN}")[0] == 503:
            assert time.monotonic() < until, "the events are not read"
            time.sleep(0.05)

    def ask(
        self, path: str, method: str = "GET", body: bytes | None = None, **headers: str
    ) -> tuple[int, http.client.HTTPMessage, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        with contextlib.closing(connection):
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body, named)
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read().decode()

    def page(self, path: str) -> str:
        status, headers, text = self.ask(path)
        assert status == 200, text
        assert "script-src 'self'" in headers["Content-Security-Policy"]
        return text


@contextlib.contextmanager
def serving(*args: str | Path) -> Iterator[Server]:
    server = Server(*args)
    try:
        yield server
    finally:
        server.process.send_signal(signal.SIGINT)
        with server.process:
            pass
