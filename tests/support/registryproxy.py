"""A proxy before a real registry that does wrong on purpose: statuses, cut and dripping bodies, redirects, outages."""

from __future__ import annotations

import http.client
import http.server
import re
import secrets
import socket
import ssl
import threading
import time
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec

_HOP = ("connection", "keep-alive", "transfer-encoding", "content-length")


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """What to do instead of answering rightly; ``match`` (a regular expression on ``METHOD PATH``) chooses requests."""

    match: str = ""
    times: float = 1
    """How often; ``inf`` for ever."""
    after: int = 0
    """Matching requests that are answered rightly first."""
    status: int = 0
    headers: dict[str, str] = {}
    body: bytes = b""
    no_ranges: bool = False
    """Answer 200 with the whole blob to a request for a range."""
    content_range: str = ""
    """Answer a range with this header."""
    cut: int = -1
    """Close after this many bytes of the body."""
    drip: float = 0.0
    """After the first 1000 bytes send one byte each ``drip`` seconds."""
    drip_head: bool = False
    """Drip the head of the answer as well."""
    drop: bool = False
    """Close without an answer, after reading the request's head and up to 100 kB of its body."""


class Seen(msgspec.Struct, frozen=True):
    """One request: where it came in (``registry`` or ``storage``), and its headers in small letters."""

    where: str
    line: str
    headers: dict[str, str]
    port: int
    """The client's port: the same for requests on one connection."""


class RegistryProxy:
    """Serves on ``address`` while it is entered, forwarding to the registry at ``target`` (``host:port``).

    ``faults`` may be added at any time. ``down``: connections are closed at once. ``storage``: blobs are redirected to
    a second server, another host to any client, with a signed link that ends after ``link_uses`` uses. ``tls``:
    speak it.
    """

    def __init__(
        self, target: str, *, storage: bool = False, link_uses: float = float("inf"), tls: ssl.SSLContext | None = None
    ) -> None:
        self.target = target
        self.faults: list[Fault] = []
        self.down = False
        self.seen: list[Seen] = []
        self.link_uses = link_uses
        self.signatures: dict[str, float] = {}
        self._logins: dict[str, str] = {}
        self._used: dict[int, int] = {}
        self._lock = threading.Lock()
        self._servers = [_Server(_handler(self, "registry"), tls)]
        if storage:
            self._servers.append(_Server(_handler(self, "storage")))
        self._threads = [threading.Thread(target=s.serve_forever, args=(0.02,)) for s in self._servers]

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._servers[0].server_address[1]}"

    @property
    def storage(self) -> str:
        """``host:port`` of the second server; empty without one."""
        return f"127.0.0.1:{self._servers[1].server_address[1]}" if len(self._servers) > 1 else ""

    def __enter__(self) -> RegistryProxy:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        for server, thread in zip(self._servers, self._threads, strict=True):
            server.shutdown()
            thread.join()
            server.close()

    def add(self, fault: Fault) -> None:
        with self._lock:
            self.faults.append(fault)

    def clear(self) -> None:
        with self._lock:
            self.faults.clear()
            self._used.clear()

    def requests(self, pattern: str, where: str = "registry") -> list[Seen]:
        """The requests so far whose ``METHOD PATH`` matches."""
        return [seen for seen in list(self.seen) if seen.where == where and re.search(pattern, seen.line)]

    def fault_for(self, line: str) -> Fault | None:
        with self._lock:
            for fault in self.faults:
                if re.search(fault.match, line):
                    used = self._used.get(id(fault), 0)
                    self._used[id(fault)] = used + 1
                    if fault.after <= used < fault.after + fault.times:
                        return fault
        return None

    def link(self, path: str, authorization: str) -> str:
        """A signed link to ``path`` on the storage server, for who showed ``authorization``."""
        signature = secrets.token_hex(16)
        with self._lock:
            self.signatures[signature] = self.link_uses
            self._logins[signature] = authorization
        return f"http://{self.storage}{path}?signature={signature}"

    def use(self, path: str) -> str | None:
        """The login behind a link that may be used once more, else None."""
        signature = parse_qs(urlsplit(path).query).get("signature", [""])[0]
        with self._lock:
            left = self.signatures.get(signature, 0)
            self.signatures[signature] = left - 1
            return self._logins.get(signature, "") if left > 0 else None


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, handler: type[http.server.BaseHTTPRequestHandler], tls: ssl.SSLContext | None = None) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self._tls = tls
        self.connections: set[socket.socket] = set()

    def finish_request(self, request: Any, client_address: Any) -> None:
        if self._tls:
            request.settimeout(5.0)
            try:
                request = self._tls.wrap_socket(request, server_side=True)
            except OSError:
                return  # the client does not trust us
        try:
            super().finish_request(request, client_address)
        finally:
            if self._tls:
                request.close()

    def close(self) -> None:
        for connection in list(self.connections):
            _shutdown(connection)
        self.server_close()


def _shutdown(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # closed already


def _handler(proxy: RegistryProxy, where: str) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(_Handler):
        pass

    Handler.proxy, Handler.where = proxy, where
    return Handler


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # head and body are written apart: each answer would wait 40 ms
    proxy: RegistryProxy
    where: str
    server: _Server

    def log_message(self, *args: object) -> None:
        """Quiet."""

    def setup(self) -> None:
        super().setup()
        self.server.connections.add(self.connection)

    def finish(self) -> None:
        self.server.connections.discard(self.connection)
        try:
            super().finish()
        except OSError:
            return  # cut on purpose

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except OSError:
            self.close_connection = True

    def _serve(self) -> None:
        proxy, line = self.proxy, f"{self.command} {self.path}"
        headers = {key.lower(): value for key, value in self.headers.items()}
        proxy.seen.append(Seen(self.where, line, dict(headers), self.client_address[1]))
        fault = proxy.fault_for(line) or Fault()
        if proxy.down or fault.drop:
            self.rfile.read(min(100_000, int(headers.get("content-length", 0))))
            self._hang_up()
            return
        body = self.rfile.read(int(headers.get("content-length", 0)))
        if fault.status:
            self._reply(fault.status, fault.headers, fault.body, fault)
            return
        if self.where == "registry" and proxy.storage and re.search(r"^(GET|HEAD) /v2/.*/blobs/sha256:", line):
            status, found, _ = self._forward("HEAD", self.path, headers, b"")  # may this client read it?
            if status in (200, 206):
                self._reply(307, {"Location": proxy.link(self.path, headers.get("authorization", ""))}, b"", fault)
                return
            found.pop("Content-Length", None)
            self._reply(status, found, b"", fault)
            return
        path = self.path
        if self.where == "storage":
            login = proxy.use(self.path)
            if login is None:
                self._reply(403, {"Content-Type": "application/xml"}, b"<Error>Request has expired</Error>", fault)
                return
            path = urlsplit(self.path).path
            headers |= {"authorization": login} if login else {}
        if fault.no_ranges:
            headers.pop("range", None)
        status, found, data = self._forward(self.command, path, headers, body)
        if fault.content_range:
            found["Content-Range"] = fault.content_range
        self._reply(status, found, data, fault)

    do_GET = do_HEAD = do_PUT = do_POST = do_PATCH = do_DELETE = _serve

    def _forward(
        self, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(self.proxy.target, timeout=30)
        try:
            connection.request(method, path, body or None, {k: v for k, v in headers.items() if k not in _HOP})
            answer = connection.getresponse()
            found = {key: value for key, value in answer.getheaders() if key.lower() not in _HOP}
            if method == "HEAD" and answer.getheader("content-length"):
                found["Content-Length"] = str(answer.getheader("content-length"))
            try:
                return answer.status, found, answer.read()
            except http.client.IncompleteRead as exc:  # docker-registry 2.8 gives a 416 the blob's length
                return answer.status, found, exc.partial
        except OSError:
            return 502, {}, b""
        finally:
            connection.close()

    def _reply(self, status: int, headers: dict[str, str], body: bytes, fault: Fault) -> None:
        head = [f"HTTP/1.1 {status} x", *(f"{key}: {value}" for key, value in headers.items())]
        if "Content-Length" not in headers:
            head.append(f"Content-Length: {len(body)}")
        raw = "\r\n".join([*head, "", ""]).encode()
        if self.command == "HEAD":
            body = b""
        if fault.drip_head:
            self._drip(raw + body, fault.drip)
            return
        self.wfile.write(raw)
        if fault.cut >= 0:
            self.wfile.write(body[: fault.cut])
            self._hang_up()
        elif fault.drip:
            self.wfile.write(body[:1000])
            self._drip(body[1000:], fault.drip)
        else:
            self.wfile.write(body)

    def _drip(self, data: bytes, seconds: float) -> None:
        for byte in data:
            self.wfile.write(bytes((byte,)))
            time.sleep(seconds)

    def _hang_up(self) -> None:
        self.wfile.flush()
        self.close_connection = True
        _shutdown(self.connection)
