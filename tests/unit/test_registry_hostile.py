"""The registry client against servers that break HTTP, or do with it what nobody expects: raw bytes on a socket."""

# ruff: noqa: SIM117 - what is in which block says what is closed when

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from bootseer import oci
from bootseer.errors import BootseerError, DataError, PrivilegeError, UnavailableError, UnsupportedError
from bootseer.objects import artifact
from bootseer.oci import endpoint, spec
from bootseer.oci.registry import Registry
from bootseer.oci.transport import Transport, TransportError
from support import lazy
from support.waits import together

BLOB = bytes(range(256)) * 40
ITEM = artifact.Item("x", spec.digest_of(BLOB), len(BLOB))
SECRET = "X-Amz-Signature=SECRETSIG"


class Server:
    """Answers each request with what ``answer(line, headers, number)`` returns: bytes, or pieces 50 ms apart.

    The connection is closed after an answer that ends with None.
    """

    def __init__(
        self,
        answer: Callable[
            [str, dict[str, str], int], bytes | list[bytes | None] | Iterator[bytes] | Iterator[bytes | None]
        ],
    ) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.answer = answer
        self.seen: list[tuple[str, dict[str, str]]] = []
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._open.append(connection)
            self._threads.append(threading.Thread(target=self._serve, args=(connection,)))
            self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as file:
            try:
                while line := file.readline().decode().strip():
                    headers = {}
                    while text := file.readline().decode("latin-1").strip():
                        name, _, value = text.partition(":")
                        headers[name.lower()] = value.strip()
                    file.read(int(headers.get("content-length", 0)))
                    self.seen.append((line, headers))
                    said = self.answer(line, headers, len(self.seen))
                    for count, piece in enumerate([said] if isinstance(said, bytes) else said):
                        if piece is None:
                            return
                        if count and isinstance(said, list):
                            time.sleep(0.05)
                        connection.sendall(piece)
            except OSError:
                pass

    def __enter__(self) -> Server:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._open:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(20)

    def client(self, *mirrors: str) -> Registry:
        return Registry(oci.Reference.parse(f"{self.address}/a/b:x"), mirrors=mirrors)


def reply(status: int | str, body: bytes = b"", **headers: str) -> bytes:
    fields = {"Content-Length": str(len(body)), **{name.replace("_", "-"): value for name, value in headers.items()}}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"HTTP/1.1 {status} x\r\n{head}\r\n".encode("latin-1") + body


def ranges(data: bytes) -> Callable[[str, dict[str, str], int], bytes]:
    def answer(line: str, headers: dict[str, str], number: int) -> bytes:
        first, last = map(int, headers["range"].removeprefix("bytes=").split("-"))
        return reply(206, data[first : last + 1], Content_Range=f"bytes {first}-{last}/{len(data)}")

    return answer


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "backoff", lambda failures, exc: 0.0)


@pytest.mark.parametrize("interim", [103, 102, 199, 100])
def test_interim_answers_are_not_the_answer(interim: int) -> None:
    def answer(line: str, headers: dict[str, str], number: int) -> list[bytes | None]:
        name = line.split()[1].rsplit("/", 1)[1]
        final = reply(404) if line.startswith("HEAD") else reply(200, f'{{"i":"{name}"}}'.encode())
        return [f"HTTP/1.1 {interim} Early\r\nLink: </x>\r\n\r\n".encode(), final]

    with Server(answer) as server, server.client() as client:
        for name in ("one", "two", "three"):
            assert client.manifest(name)[0] == f'{{"i":"{name}"}}'.encode()
        assert not client.has_blob("sha256:" + "0" * 64)


@pytest.mark.parametrize("status", [101, 304])
def test_other_statuses_are_no_success(status: int) -> None:
    with Server(lambda *_: reply(status)) as server, server.client() as client, pytest.raises(BootseerError):
        client.manifest("x")


@pytest.mark.parametrize(
    "answer",
    [
        reply(503, Retry_After="\xb2"),
        reply(503, Retry_After="9" * 5000),
        reply(503, Retry_After="Mon, 01 Jan 2026 00:00:00 +99999999999999999999"),
        reply(200, b"ab", Content_Length="\xb2"),
        reply(200, b"ab", Content_Length="1_0"),
        reply(200, b"ab", Content_Length="-5"),
        reply(200, b"ab", Content_Length="1" * 5000),
        reply(400, b"[" * 60_000),
        reply(307, Location="http://[::1/x?" + SECRET),
        reply(307, Location="gopher://x/y?" + SECRET),
        reply(307, Location="http://127.0.0.1:1/st\xe4rage?" + SECRET),
        reply(307, Location="http://127.0.0.1:1/a b\x7f?" + SECRET),
        reply(206, b"a" * 10, Content_Range=f"bytes {'1' * 5000}-9/10"),
        reply(206, b"a" * 10, Content_Range="bytes \xb2-9/10"),
        reply("2x0"),
        b"\0" * 1000,
    ],
)
def test_broken_answers_are_errors_of_ours(answer: bytes, caplog: pytest.LogCaptureFixture) -> None:
    calls: list[Callable[[Registry], object]] = [
        lambda client: client.manifest("x"),
        lambda client: client.head_manifest("x"),
        lambda client: client.read_range(ITEM, 0, 10),
        lambda client: b"".join(client.blob(ITEM)),
        lambda client: list(client.tags()),
        lambda client: client.referrers(ITEM.digest),
        lambda client: client.put_blob(ITEM, BLOB),
        lambda client: client.put_manifest(b"{}", spec.MANIFEST, "x"),
    ]
    said: list[str] = []
    with Server(lambda *_: [answer, None]) as server, server.client() as client:
        for call in calls:
            try:
                call(client)
            except BootseerError as exc:
                said.append(str(exc))
    present = answer.startswith(b"HTTP/1.1 206")  # to HEAD, with the name of a blob: nothing is left to upload
    assert len(said) == len(calls) - present
    assert "SECRETSIG" not in caplog.text + "".join(said)


@pytest.mark.parametrize(
    "there",
    ["file:///etc/passwd", "ftp://x/y", "data:,x", "http://[::1/x", "https:///x", "http://x:99999/y", "mailto:x"],
)
def test_a_redirect_to_no_web_address_is_refused_at_once(there: str) -> None:
    """Red before: tried again four times, as an outage, for 8.8 s."""
    for ask in (lambda client: client.manifest("x"), lambda client: b"".join(client.blob(ITEM))):
        with Server(lambda *_: reply(307, Location=there)) as server, server.client() as client:
            with pytest.raises(UnavailableError, match="not understood; that is refused"):
                ask(client)
            assert len(server.seen) == 1


def test_a_location_in_utf_8_is_followed() -> None:
    def answer(line: str, headers: dict[str, str], number: int) -> bytes:
        if "/v2/" in line:
            return reply(307, Location="/st\xc3\xa4rage?sig=%41")
        return reply(200, b"{}") if line.split()[1] == "/st%C3%A4rage?sig=%41" else reply(404)

    with Server(answer) as server, server.client() as client:
        assert client.manifest("x")[0] == b"{}"


@pytest.mark.parametrize("document", [b"[" * 100_000, b'{"a":' * 100_000])
def test_deep_documents(document: bytes) -> None:
    with Server(lambda *_: reply(200, document)) as server, server.client() as client:
        with pytest.raises(DataError):
            list(client.tags())
        with pytest.raises(DataError):
            client.referrers(ITEM.digest)


@pytest.mark.parametrize("size", [b"-1", b"+5", b"0x5", b"1_0", b"", b"f" * 20])
def test_chunks_of_no_size(size: bytes) -> None:
    def answer(line: str, headers: dict[str, str], number: int) -> Iterator[bytes]:
        yield b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + size + b"\r\n"
        for _ in range(64):
            yield b"a" * (1 << 20)

    transport = Transport()
    with Server(answer) as server, transport.request("GET", f"http://{server.address}/", headers={}) as said:
        with pytest.raises(TransportError):
            said.document(64 << 10)


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n", b""])
def test_answers_without_end_are_left(head: bytes) -> None:
    """Endless trailers, and endless interim answers, at full speed: no stall ends them."""

    def answer(line: str, headers: dict[str, str], number: int) -> Iterator[bytes]:
        yield head
        while True:
            yield b"X: y\r\n" * 1000 if head else b"HTTP/1.1 100 Continue\r\n\r\n" * 1000

    transport = Transport()
    with Server(answer) as server, pytest.raises(TransportError):
        with transport.request("GET", f"http://{server.address}/", headers={}, patience=30) as said:
            said.document(100)


@pytest.mark.parametrize("endless", [False, True], ids=["that lead to themselves", "without end"])
def test_pages(monkeypatch: pytest.MonkeyPatch, endless: bool) -> None:
    monkeypatch.setattr("bootseer.oci.registry._MAX_PAGES", 20)

    def answer(line: str, headers: dict[str, str], number: int) -> bytes:
        body = {"tags": ["a"]} if "/tags/" in line else {"schemaVersion": 2, "manifests": []}
        there = f"{re.split('[ ?]', line)[1]}?{number if endless else 'again'}"
        return reply(200, json.dumps(body).encode(), Link=f'<{there}>; rel="next"')

    with Server(answer) as server, server.client() as client:
        if endless:
            with pytest.raises(DataError, match="without end"):
                client.referrers(ITEM.digest)
            with pytest.raises(DataError, match="without end"):
                list(client.tags())
            assert len(server.seen) <= 42
        else:
            assert client.referrers(ITEM.digest) == ()
            assert len(server.seen) <= 3
            assert len(list(client.tags())) <= 3


@pytest.mark.parametrize(
    "link",
    [
        '<{next}>; rel="next"',
        '<http://internal.invalid:5000{next}>; rel="next"',
        "<https://{here}{next}>;rel=next",
        '</v2/x/tags/list?last=0>; rel="prev", <{next}>; rel="next"',
        '<{next}> ; title="a, b" ; REL="last next"',
        '<?last=a>; rel="next"',
    ],
)
@pytest.mark.parametrize("first", [["a"], [], None], ids=str)
def test_the_next_page_is_found_however_it_is_named(link: str, first: list[str] | None) -> None:
    def answer(line: str, headers: dict[str, str], number: int) -> bytes:
        if "last=a" in line:
            return reply(200, b'{"tags":["b"]}')
        place = line.split()[1].partition("?")[0] + "?n=1&last=a"
        return reply(200, json.dumps({"tags": first}).encode(), Link=link.format(next=place, here=headers["host"]))

    with Server(answer) as server, server.client() as client:
        assert list(client.tags()) == [*(first or []), "b"]


@pytest.mark.parametrize("kind", ["application/json", "text/plain; charset=utf-8", "", spec.MANIFEST.upper()])
def test_a_manifest_says_what_it_is_where_its_server_does_not(kind: str) -> None:
    body = json.dumps({"schemaVersion": 2, "mediaType": spec.MANIFEST}).encode()
    with Server(lambda *_: reply(200, body, Content_Type=kind)) as server, server.client() as client:
        assert client.manifest("x")[1].media_type == spec.MANIFEST


def test_a_range_does_not_sleep_for_a_busy_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with Server(lambda *_: reply(429, Retry_After="6")) as server, server.client() as client:
        with pytest.raises(UnavailableError, match="429") as caught:
            client.read_range(ITEM, 0, 10)
        assert caught.value.retry_after == 6
        assert len(server.seen) == 1


def test_pauses_that_a_server_asks_for_are_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    pauses = [endpoint.backoff(1, endpoint.Again("busy", after=10.0)) for _ in range(20)]
    assert min(pauses) >= 10
    assert max(pauses) < 15
    assert len(set(pauses)) > 10
    assert endpoint.backoff(1, endpoint.Again("a new link", after=0.0)) == 0


@pytest.mark.parametrize("said", ["0", "Mon, 01 Jan 2018 00:00:00 GMT"])
def test_a_busy_registry_that_says_now_is_not_asked_at_once(monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    """Red before: five requests within milliseconds, and given up."""
    monkeypatch.undo()
    pauses: list[float] = []
    monkeypatch.setattr("bootseer.oci.endpoint.time.sleep", pauses.append)
    with Server(lambda *_: reply(429, Retry_After=said)) as server, server.client() as client:
        for ask in (lambda: client.manifest("x"), lambda: b"".join(client.blob(ITEM))):
            with pytest.raises(UnavailableError, match="429"):
                ask()
    assert len(pauses) == 2 * endpoint.RETRIES
    assert all(pause > 0.2 for pause in pauses)


def test_a_damaged_mirror_rests_once_the_registry_was_asked_instead() -> None:
    with Server(ranges(BLOB)) as server, Server(ranges(bytes(len(BLOB)))) as mirror:
        with server.client(f"http://{mirror.address}") as client:
            assert client.read_range(ITEM, 0, 16) == bytes(16)
            assert client.read_range(ITEM, 0, 16, fresh=True) == BLOB[:16]
            assert client.read_range(ITEM, 16, 16) == BLOB[16:32]
            assert len(mirror.seen) == 1


def test_a_mirror_that_lacks_a_blob_is_asked_once(caplog: pytest.LogCaptureFixture) -> None:
    with Server(ranges(BLOB)) as server, Server(lambda *_: reply(404)) as mirror:
        with server.client(f"http://{mirror.address}") as client:
            for offset in range(20):
                assert client.read_range(ITEM, offset, 16) == BLOB[offset : offset + 16]
            assert len(mirror.seen) == 1
            assert len(caplog.records) == 1
            other = spec.Descriptor("x", spec.digest_of(b"other"), len(BLOB))
            client.read_range(other, 0, 1)
            assert len(mirror.seen) == 2


def cut(first: int) -> Callable[[str, dict[str, str], int], Iterator[bytes | None]]:
    """Answers the first ``first`` requests up to byte 600 of the blob, the others whole."""

    def answer(line: str, headers: dict[str, str], number: int) -> Iterator[bytes | None]:
        whole = ranges(BLOB)(line, headers, number)
        start = int(headers["range"].removeprefix("bytes=").split("-")[0])
        if number > first:
            yield whole
        else:
            yield whole[: whole.index(b"\r\n\r\n") + 4 + max(0, 600 - start)]
            yield None

    return answer


def test_pieces_come_as_they_arrive() -> None:
    go = threading.Event()

    def answer(line: str, headers: dict[str, str], number: int) -> Iterator[bytes]:
        whole = ranges(BLOB)(line, headers, number)
        middle = whole.index(b"\r\n\r\n") + 4 + 150
        yield whole[:middle]
        assert go.wait(10)
        yield whole[middle:]

    with Server(answer) as server, server.client() as client:
        pieces = client.read_pieces(ITEM, 50, [100, 7, 43, 1000])
        assert next(pieces) == BLOB[50:150]
        go.set()
        assert list(pieces) == [BLOB[150:157], BLOB[157:200], BLOB[200:1200]]
        assert list(client.read_pieces(ITEM, 0, [1])) == [BLOB[:1]]
        assert [headers["range"] for _, headers in server.seen] == ["bytes=50-1199", "bytes=0-0"]
        with pytest.raises(DataError):
            next(client.read_pieces(ITEM, len(BLOB) - 10, [5, 6]))
        assert list(client.read_pieces(ITEM, 0, [])) == []


def test_what_came_before_a_cut_is_not_asked_for_again() -> None:
    with Server(cut(1)) as server, server.client() as client:
        pieces = client.read_pieces(ITEM, 100, [300, 300, 300])
        assert next(pieces) == BLOB[100:400]
        with pytest.raises(UnavailableError):
            next(pieces)
        assert len(server.seen) == 1, "its callers try again themselves, and have other sources"
        assert list(client.read_pieces(ITEM, 400, [300, 300])) == [BLOB[400:700], BLOB[700:1000]]


def test_without_a_piece_there_is_another_try() -> None:
    with Server(cut(1)) as server, server.client() as client:
        assert list(client.read_pieces(ITEM, 100, [600, 300])) == [BLOB[100:700], BLOB[700:1000]]
        assert len(server.seen) == 2


def test_another_goes_on_where_a_mirror_breaks_off() -> None:
    with Server(ranges(BLOB)) as server, Server(cut(9)) as mirror, server.client(f"http://{mirror.address}") as client:
        assert b"".join(client.read_pieces(ITEM, 100, [300, 300, 300])) == BLOB[100:1000]
        assert [headers["range"] for _, headers in server.seen] == ["bytes=400-999"]


def test_a_server_without_ranges_is_not_read_from_its_beginning_for_each_block() -> None:
    data = b"x" * (64 << 20)
    item = spec.Descriptor("x", "sha256:" + "0" * 64, len(data))
    sent = [0]

    def answer(line: str, headers: dict[str, str], number: int) -> Iterator[bytes]:
        yield reply(200, Content_Length=str(len(data)))
        for at in range(0, len(data), 1 << 18):
            yield data[at : at + (1 << 18)]
            sent[0] += 1 << 18

    with Server(answer) as server, server.client() as client:
        assert client.read_range(item, 1 << 20, 4096) == b"x" * 4096
        sent[0] = 0
        with pytest.raises(UnsupportedError, match="ranges"):
            client.read_range(item, len(data) - 4096, 4096)
        assert sent[0] <= 16 << 20


def test_a_connection_that_ends_in_the_tls_handshake_is_tried_again() -> None:
    came = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            for _ in range(2):
                with listener.accept()[0] as connection:
                    came.append(connection.recv(10))

        thread = threading.Thread(target=accept)
        thread.start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with Registry(oci.Reference.parse(f"{address}/a/b:x"), plain_http=False, mirrors=()) as client:
            with pytest.raises(UnavailableError):
                client.head_manifest("x", retries=1)
        thread.join(20)
    assert len(came) == 2


def test_a_name_server_that_is_busy_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def busy(*args: object, **more: object) -> object:
        asked.append(args)
        raise socket.gaierror(socket.EAI_AGAIN if len(asked) < 3 else socket.EAI_NONAME, "Temporary failure")

    monkeypatch.setattr(socket, "getaddrinfo", busy)
    with Registry(oci.Reference.parse("registry.example.org/a/b:x"), mirrors=()) as client:
        with pytest.raises(UnavailableError):
            client.manifest("x")
    assert len(asked) == 3


def test_storage_on_a_private_address_is_not_asked_through_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with Server(lambda *_: reply(502)) as proxy, Server(lambda *_: reply(200, b"{}")) as storage:
        monkeypatch.setenv("http_proxy", f"http://{proxy.address}")
        with Server(lambda *_: reply(307, Location=f"http://{storage.address}/b?{SECRET}")) as server:
            with server.client() as client:
                assert client.manifest("x")[0] == b"{}"
        assert not proxy.seen
        assert len(storage.seen) == 1


class Tokens:
    """A registry that wants tokens, and the server that gives them: ``reply`` is what that says."""

    def __init__(self, said: bytes) -> None:
        self.said = said
        self.asked = 0
        self.server: Server | None = None

    def __call__(self, line: str, headers: dict[str, str], number: int) -> bytes:
        if line.startswith("GET /token"):
            self.asked += 1
            return self.said
        if "authorization" in headers:
            return reply(200, b"{}")
        assert self.server
        return reply(401, WWW_Authenticate=f'Bearer realm="http://{self.server.address}/token",service="s"')


@pytest.mark.parametrize("lifetime", [b"-5", b"1", b"NaN", b"-Infinity", b"1e400", b'"60"'])
def test_tokens_of_no_lifetime_are_used_all_the_same(lifetime: bytes) -> None:
    tokens = Tokens(reply(200, b'{"token":"abc","expires_in":%s}' % lifetime))
    with Server(tokens) as tokens.server, tokens.server.client() as client:
        for _ in range(20):
            client.manifest("x")
    assert tokens.asked == 1


@pytest.mark.parametrize(
    "said", [b"[" * 60_000, b'{"token":"abc","expires_in":1%s}' % (b"0" * 400), b"[1]", b"null", b"<html>log in</html>"]
)
def test_tokens_that_are_none(said: bytes) -> None:
    tokens = Tokens(reply(200, said))
    with Server(tokens) as tokens.server, tokens.server.client() as client:
        with pytest.raises(UnavailableError, match="request for a token"):
            client.manifest("x")


@pytest.mark.parametrize("realm", ["http://token.invalid/t", "http://127.0.0.1@10.99.99.99:1/t", "http://[::2]:1/t"])
def test_a_login_goes_without_tls_to_nobody_who_is_not_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, realm: str
) -> None:
    asked: list[str] = []
    plain = Transport.request

    def request(self: Transport, method: str, url: str, **more: Any) -> Any:
        asked.append(url)
        return plain(self, method, url, **more)

    monkeypatch.setattr(Transport, "request", request)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    wanted = f'Bearer realm="{realm}",service="s",scope="repository:a/b:pull"'
    with Server(lambda *_: reply(401, WWW_Authenticate=wanted)) as server:
        (tmp_path / "config.json").write_text(json.dumps({"auths": {server.address: {"auth": "dTpw"}}}))
        with server.client() as client, pytest.raises(PrivilegeError, match=r"without TLS.*unless plain_http"):
            client.manifest("x")
    assert asked == [f"http://{server.address}/v2/a/b/manifests/x"]


def test_a_login_goes_without_tls_to_a_token_server_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.setenv("BOOTSEER_PLAIN_HTTP", "token.invalid:1")
    wanted = 'Bearer realm="http://token.invalid:1/t",service="s",scope="repository:a/b:pull"'
    with Server(lambda *_: reply(401, WWW_Authenticate=wanted)) as server:
        (tmp_path / "config.json").write_text(json.dumps({"auths": {server.address: {"auth": "dTpw"}}}))
        with server.client() as client, pytest.raises(UnavailableError, match=r"token.invalid:1 gives no token"):
            client.manifest("x")


def test_a_token_server_that_is_busy_is_left_alone() -> None:
    tokens = Tokens(reply(429, Retry_After="30"))
    with Server(tokens) as tokens.server, tokens.server.client() as client:

        def read(_: int) -> float | None:
            with pytest.raises(UnavailableError) as caught:
                client.read_range(ITEM, 0, 10)
            return caught.value.retry_after

        began = time.monotonic()
        errors = together(read, range(6))
        assert time.monotonic() - began < 1
        assert tokens.asked == 1
        assert all(after and after > 25 for after in errors)


def test_a_token_server_that_fails_is_asked_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    from bootseer.oci import auth

    monkeypatch.setattr(auth, "_PAUSE", 0.1)
    tokens = Tokens(reply(503))
    with Server(tokens) as tokens.server, tokens.server.client() as client:
        for _ in range(5):
            with pytest.raises(UnavailableError, match="503"):
                client.manifest("x")
        assert tokens.asked == auth.TRIES
        tokens.said = reply(200, b'{"token":"abc"}')
        time.sleep(0.3)
        assert client.manifest("x")[0] == b"{}"


def test_a_few_traces_of_many_cost_a_few_requests_and_once(caplog: pytest.LogCaptureFixture) -> None:
    from bootseer.objects import open_store

    keys = {artifact.tag_of(key): key for key in (f"profiles/{'a' * 64}/j/{n}.trace" for n in range(300))}
    bad = next(iter(keys))

    def answer(line: str, headers: dict[str, str], number: int) -> bytes:
        path = line.split()[1]
        if "/tags/" in path:
            return reply(200, json.dumps({"tags": list(keys)}).encode())
        tag = path.rpartition("/")[2]
        return reply(200, b"[" * 9 if tag == bad else artifact.build({keys[tag]: ITEM}, None))

    with Server(answer) as server:
        store = open_store(f"registry+http://{server.address}/a/b")
        listing = store.some(f"profiles/{'a' * 64}/j")
        for _ in range(8):
            next(listing)
        listing.close()  # type: ignore[attr-defined]
        assert len(server.seen) <= 1 + 2 * 8
        found = list(store.list(f"profiles/{'a' * 64}/j"))
        assert len(found) == 299  # all but the one that is not understood
        assert [info.key for info in found] == sorted(info.key for info in found)
        assert bad in caplog.text
        before = len(server.seen)
        assert list(store.list(f"profiles/{'a' * 64}")) == found
        assert store.stat(found[5].key) == found[5]
        assert len(server.seen) == before + 1  # the bad one: the tags were listed just now
        store.close()  # type: ignore[attr-defined]


def test_a_start_without_a_profile_lists_the_tags_once(tmp_path: Path) -> None:
    """Red before: eight times, as each folder of the store that it looked into was listed."""
    from bootseer.blocks.fetch import predict, prefetch
    from bootseer.blocks.profiles.library import ProfileKey, Target
    from bootseer.objects import open_store

    tree, others, tags = "a" * 64, ["b" * 64, "c" * 64], [artifact.tag_of("images/x.json"), "v1"]
    blocks = lazy.make(tmp_path, b"x" * 4096).map

    def answer(line: str, headers: dict[str, str], number: int) -> bytes:
        return reply(200, json.dumps({"tags": tags}).encode()) if "/tags/" in line else reply(404)

    with Server(answer) as server:
        store = open_store(f"registry+http://{server.address}/a/b")
        key, target = ProfileKey("x"), Target(tree, "d" * 64, blocks)
        assert prefetch.begin(None, store, key, target) == prefetch.Plan()  # type: ignore[arg-type]
        assert predict.predict_blocks(store, tree, others, key, cache_dir=Path("/nowhere")) == []
        assert [line.split()[1] for line, _ in server.seen] == ["/v2/a/b/tags/list?n=1000"]
        store.close()  # type: ignore[attr-defined]


def test_a_manifest_holds_no_more_of_an_object_than_it_says() -> None:
    """Red before: who may push to a store had any reader take 4 MiB for an object of any size."""
    from bootseer.objects import open_store

    one = artifact.Item(artifact.OBJECT, ITEM.digest, 1, data=BLOB)

    def answer(line: str, headers: dict[str, str], number: int) -> bytes:
        return reply(200, BLOB[:1] if "/blobs/" in line else artifact.build({"trees/a": one}, None))

    with Server(answer) as server:
        store = open_store(f"registry+http://{server.address}/a/b")
        with pytest.raises(DataError, match="does not match its digest"):
            store.get("trees/a", most=1)
        store.close()  # type: ignore[attr-defined]


def test_an_upload_without_tls_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry with TLS that names another host without: nothing is sent there."""
    from bootseer.oci import uploads

    monkeypatch.setattr(uploads, "secured", lambda url, there: "")
    with Server(lambda line, *_: reply(404) if line[0] == "H" else reply(202, Location="http://x.example.org/u")) as s:
        with s.client() as client, pytest.raises(UnavailableError, match=r"http://x\.example\.org:80 without TLS"):
            client.put_blob(ITEM, BLOB)
        assert [line.split()[0] for line, _ in s.seen] == ["HEAD", "POST"]
