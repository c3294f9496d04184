"""What a registry is asked for a stranger, as for a pod: nothing at addresses that are the machine's own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer import oci
from bootseer.errors import BootseerError, ConfigError, PrivilegeError, UnavailableError
from bootseer.oci import connect, credentials, hosts, providers
from bootseer.oci import registry as registry_module
from bootseer.oci.credentials import Logins
from bootseer.oci.reference import is_own
from support import neighbour
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


@pytest.mark.parametrize("folders", ["of docker", "of containerd"])
def test_a_stranger_is_not_shown_as_this_machine(folders: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """At a registry that knows machines by certificates, a pod had images of the node. The one here is none: who would
    show it is told."""
    monkeypatch.setattr(connect, "CERTS", (tmp_path,) if folders == "of docker" else ())
    monkeypatch.setattr(hosts, "FOLDERS", (tmp_path,) if folders == "of containerd" else ())
    (tmp_path / "reg.site").mkdir()
    (tmp_path / "reg.site/client.cert").write_text("no certificate")
    connect.context_for("reg.site", 443, stranger=True)
    with pytest.raises(ConfigError, match=r"client\.cert"):
        connect.context_for("reg.site", 443)


@pytest.mark.root
@pytest.mark.parametrize("closed", ["client.cert", "client.key", "ca.crt", ".", "client.pem"])
def test_certificates_for_root_alone_are_no_mistake_of_a_user(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, closed: str
) -> None:
    """A user, as whom the node daemon asks, was told of a mistake in the settings of the node."""
    with neighbour.place() as shared:
        (folder := shared / "reg.site").mkdir()
        for name in (closed, "client.cert", "client.key") if closed == "client.key" else (closed,):
            if name != ".":
                (folder / name).write_text("no certificate")
        (folder / closed).chmod(0)
        monkeypatch.setattr(connect, "CERTS", (shared,))
        pem = str(folder / closed)
        said = hosts.Host(False, "reg.site", client=((pem, ""),)) if closed == "client.pem" else None
        if closed != ".":
            with pytest.raises(ConfigError, match=r"reg\.site"):
                connect.context_for("reg.site", 443, said)
        os.seteuid(neighbour.NOBODY)
        try:
            connect.context_for("reg.site", 443, said)
        finally:
            os.seteuid(0)
    assert ("this user cannot read it" in caplog.text) is (closed != ".")


def test_a_denied_image_is_denied_also_where_no_other_login_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """A helper that failed after the 403 made it an outage, in which what lies on the node is used."""
    calls = list[str]()

    def find(*_: object) -> credentials.Credential:
        calls.append("")
        if len(calls) > 1:
            raise UnavailableError("credential helper x did not answer within 30 s")
        return credentials.Credential(username="u", password="p", place="x")

    monkeypatch.setattr(credentials, "find", find)
    answer = {True: Answer(403), False: Answer(401, b"", {"WWW-Authenticate": 'Basic realm="r"'})}
    served = WebServer(lambda request: answer["authorization" in request.headers])
    with served as server, pytest.raises(PrivilegeError):
        oci.preflight(f"{server.address}/a:b")
    assert len(calls) > 1


def test_what_is_said_of_a_mirror_is_not_said_of_its_registry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Both at one address: with ``skip_verify`` of the mirror, logins went to a registry that nobody verified."""
    monkeypatch.setattr(hosts, "FOLDERS", (tmp_path,))
    (tmp_path / "reg.site").mkdir()
    text = '[host."https://reg.site/v2/proxy"]\noverride_path = true\nskip_verify = true\n'
    (tmp_path / "reg.site/hosts.toml").write_text(text)
    contexts = list[object]()

    def context_for(_host: str, _port: int, said: object, _stranger: bool) -> object:
        contexts.append(said)
        return object()

    monkeypatch.setattr(connect, "context_for", context_for)
    with registry_module.Registry(oci.Reference.parse("reg.site/a:b")) as asked:
        asked._transport._context("reg.site", 443)
    assert [bool(said and getattr(said, "skip_verify", False)) for said in contexts] == [False]


@pytest.mark.parametrize(
    ("pattern", "registry", "expected"),
    [
        ("reg.site", "reg.site", True), ("*.site", "reg.site", True), ("*.site", "a.reg.site", False),
        ("r*g.s*e", "reg.site", True), ("r**.site", "reg.site", True), ("reg*reg.site", "reg.site", False),
        ("10.0.0.*", "10.0.0.7", True), ("10.0.0.*", "10.0.0.7:3000", False), ("10.*.0.*:3000", "10.0.0.7:3000", True),
        ("reg.site:443", "reg.site", False), ("[r]eg.site", "reg.site", False), ("?eg.site", "reg.site", False),
    ],
)  # fmt: skip
def test_hosts_of_a_pattern(pattern: str, registry: str, expected: bool) -> None:
    assert providers.is_in(pattern, registry, "x") is expected


@pytest.mark.root
def test_providers_that_another_user_says_are_not_run(tmp_path: Path) -> None:
    file = tmp_path / "providers.json"
    file.write_text('{"providers": [{"name": "p", "matchImages": ["reg.site"], "apiVersion": "v1"}]}')
    os.chown(file, 1001, 1001)
    ((_, ask),) = providers.fitting(f"{file}:{tmp_path}", "reg.site", "x")
    with pytest.raises(ConfigError, match="can be changed by others"):
        ask()
    with pytest.raises(ConfigError, match="names no whole folder"):
        list(providers.fitting(f"{file}:bin", "reg.site", "x"))
    os.chown(file, 0, 0)
    for mode, change in (("o+w p", "others can write to"), ("o+w .", "others can replace")):
        (program := tmp_path / "p").write_text("#!/bin/sh\n")
        program.chmod(0o755)
        subprocess.run(f"chmod {mode}", shell=True, cwd=tmp_path, check=True)
        ((_, ask),) = providers.fitting(f"{file}:{tmp_path}", "reg.site", "x")
        with pytest.raises(ConfigError, match=change):
            ask()
