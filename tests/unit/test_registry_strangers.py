"""What a registry is asked for a stranger, as for a pod: nothing at addresses that are the machine's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer import oci
from bootseer.errors import BootseerError, PrivilegeError
from bootseer.oci.credentials import Logins
from bootseer.oci.reference import is_own
from support.web import Answer, Request, WebServer

SECRET = "token=abcdef internal state of the node"


class Service(WebServer):
    """An HTTP service of this machine. It answers with ``status`` and ``headers``, and tells what it was asked."""

    def __init__(self) -> None:
        super().__init__(self._answer)
        self.asked: list[str] = []
        self.status, self.headers = 400, dict[str, str]()

    def _answer(self, request: Request) -> Answer:
        self.asked.append(request.path)
        return Answer(self.status, SECRET.encode(), {"Content-Type": "text/plain", **self.headers})


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BOOTSEER_CONFIG", "/dev/null")
    monkeypatch.delenv("BOOTSEER_PLAIN_HTTP", raising=False)


@pytest.fixture
def service() -> Iterator[Service]:
    with Service() as made:
        yield made


registry = service


def ask(host: str, port: int, logins: Logins | None) -> str:
    return oci.digest_for(oci.Reference.parse(f"{host}:{port}/a/b:c"), logins)


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "127.1", "0x7f.0.0.1", "0.0.0.0", "[::1]", "[::ffff:127.0.0.1]"]
)
def test_a_port_of_this_machine_is_not_asked_for_a_stranger(service: Service, host: str) -> None:
    said = set()
    for port in (service.port, 1):  # nor is it told which ones are open
        with pytest.raises(PrivilegeError, match="loopback or link-local") as caught:
            ask(host, port, Logins())
        said.add(caught.value.message.replace(f":{port} ", ": "))
    assert service.asked == []
    assert len(said) == 1
    if host == "127.0.0.1":
        with pytest.raises(BootseerError, match="internal state"):
            ask(host, service.port, None)  # a user of this machine can ask by other means


def test_a_name_that_leads_there_is_not_asked(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    real = socket.getaddrinfo

    def resolve(host: str, *args: object, **more: object) -> object:
        return real("127.0.0.1" if host == "evil.example" else host, *args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setenv("BOOTSEER_PLAIN_HTTP", f"127.0.0.1:{service.port}")  # another name
    with pytest.raises(PrivilegeError, match=r"evil\.example:\d+ is a loopback or link-local"):
        ask("evil.example", service.port, Logins())
    assert service.asked == []


def test_one_that_the_settings_name_is_asked_and_its_words_are_not_passed_on(
    registry: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BOOTSEER_PLAIN_HTTP", f"127.0.0.1:{registry.port}")
    for status in (400, 403, 418, 500):
        registry.status = status
        monkeypatch.setattr("bootseer.oci.endpoint.RETRIES", 0)
        with pytest.raises(BootseerError) as caught:
            ask("127.0.0.1", registry.port, Logins())
        assert "internal" not in f"{caught.value.message} {caught.value.hint}"
    assert registry.asked[0] == "/v2/a/b/manifests/c"


@pytest.mark.parametrize("how", ["redirect", "token"])
def test_a_registry_leads_nobody_there(
    registry: Service, service: Service, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setenv("BOOTSEER_PLAIN_HTTP", f"127.0.0.1:{registry.port}")
    there = f"http://{service.address}"
    if how == "redirect":
        registry.status, registry.headers = 307, {"Location": f"{there}/secret"}
    else:
        registry.status, registry.headers = 401, {"WWW-Authenticate": f'Bearer realm="{there}/token",service="x"'}
    with pytest.raises(PrivilegeError, match="loopback or link-local"):
        ask("127.0.0.1", registry.port, Logins())
    assert registry.asked
    assert service.asked == []


@pytest.mark.parametrize(
    ("address", "own"),
    [
        ("127.0.0.53", True),
        ("::1", True),
        ("169.254.169.254", True),
        ("fe80::1%eth0", True),
        ("::ffff:169.254.1.1", True),
        ("0.0.0.0", True),
        ("::", True),
        ("10.1.2.3", False),
        ("192.168.0.1", False),
        ("2001:db8::1", False),
        ("registry.example", False),
    ],
)
def test_addresses_of_the_machine_itself(address: str, own: bool) -> None:
    assert is_own(address) is own
