"""The small parts of the registry client and store that need no server."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from bootseer import oci
from bootseer.config import load
from bootseer.errors import ConfigError
from bootseer.objects import artifact
from bootseer.oci import connect, credentials, hosts, spec, wire
from bootseer.oci.auth import challenges
from bootseer.oci.credentials import Credential
from bootseer.oci.hosts import Host, Hosts
from bootseer.oci.registry import Registry
from bootseer.oci.transport import Transport

PARTS = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=80)
KEYS = st.lists(PARTS.filter(lambda part: part not in (".", "..")), min_size=1, max_size=12).map("/".join)


@given(KEYS, KEYS)
def test_every_key_has_a_tag_of_its_own_below_its_folders(key: str, other: str) -> None:
    tag = artifact.tag_of(key)
    assert re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", tag)
    assert (tag == artifact.tag_of(other)) == (key == other)
    parts = key.split("/")
    for depth in range(len(parts)):
        assert tag.startswith(artifact.tag_prefix("/".join(parts[:depth])))


@given(st.dictionaries(KEYS, st.binary(max_size=50), max_size=8), st.randoms())
def test_artifacts_say_the_same_in_any_order(objects: dict[str, bytes], random: object) -> None:
    import msgspec

    items = {key: artifact.Item("x", spec.digest_of(data), len(data)) for key, data in objects.items()}
    subject = spec.Descriptor(spec.MANIFEST, spec.digest_of(b"image"), 5, annotations={"left": "out"})
    body = artifact.build(items, subject)
    assert body == artifact.build(dict(reversed(items.items())), subject)
    found = msgspec.json.decode(body, type=artifact.Found)
    assert {key: item.digest for key, item in found.objects.items()} == {key: i.digest for key, i in items.items()}
    assert found.layers  # OCI wants one at least


def test_manifests_of_others_have_no_objects() -> None:
    import msgspec

    body = artifact.build({"k": artifact.Item("x", spec.digest_of(b""), 0)}, None)
    other = body.replace(artifact.ARTIFACT.encode(), b"application/x")
    assert msgspec.json.decode(body, type=artifact.Found).objects
    assert not msgspec.json.decode(other, type=artifact.Found).objects


@given(st.lists(st.text(max_size=200), max_size=3))
def test_any_challenge_is_read(headers: list[str]) -> None:
    challenges(headers)


@pytest.mark.parametrize(
    "headers",
    [
        ['Bearer realm="https://a/t?x=1,2",service="s",scope="repository:x:pull,push"', 'Basic realm="r"'],
        ['Basic realm="r", bearer realm="https://a/t?x=1,2", service=s , scope="repository:x:pull,push"'],
    ],
)
@pytest.mark.parametrize(
    "before", ["", "Negotiate", "Bearer", 'Bearer error="invalid_token"', 'Digest qop="auth, Basic x"']
)
def test_challenges(headers: list[str], before: str) -> None:
    headers = [before, *headers] if before else headers
    found = challenges(headers)
    assert found["basic"] == {"realm": "r"}
    assert found["bearer"] == {"realm": "https://a/t?x=1,2", "service": "s", "scope": "repository:x:pull,push"}


@given(st.binary(max_size=300))
def test_any_file_of_logins_is_read(data: bytes) -> None:
    import tempfile

    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(data)
        credentials.read(Path(file.name))


@pytest.mark.parametrize(
    ("said", "registry", "user"),
    [
        ({"auths": {"https://r.site/v2/": {"auth": "dTpw"}}}, "r.site", "u"),
        ({"auths": {"r.site": {"auth": "dXNlcjpw"}}}, "r.site", "user"),
        ({"auths": {"r.site": {"auth": "dXNlc\njpw\n"}}}, "r.site", "user"),
        ({"auths": {"r.site": {"auth": "dXNlcjpwYQ"}}}, "r.site", "user"),
        ({"auths": {"r.site": {"auth": "dXNlcjpwYQ=="}}}, "r.site", "user"),
        ({"auths": {"*.site": {"auth": "dTpw"}}}, "r.site", "u"),
        ({"auths": {"*.site": {"auth": "dTpw"}}}, "a.r.site", None),
        ({"auths": {"r*.site:5000/a": {"auth": "dTpw"}}}, "r1.site:5000", "u"),
        ({"auths": {"r*.site:5000/a": {"auth": "dTpw"}}}, "r1.site", None),
        ({"auths": {"r.site/b": {"auth": "dTpw"}, "r.site/ab": {"auth": "dTpw"}}}, "r.site", None),
        ({"auths": {"*.site": {"auth": "bm86cA=="}, "r.site": {"auth": "dTpw"}}}, "r.site", "u"),
        ({"auths": {"r.site": {"auth": "bm86cA=="}, "*.site/a": {"auth": "dTpw"}}}, "r.site", "u"),
        ({"auths": {"[::1]:5000": {"auth": "dTpw"}}}, "[::1]:5000", "u"),
        ({"auths": {"r.site": {}}, "credsStore": "own"}, "r.site", "helped"),
        ({"auths": {"r.site": {"auth": "dTpw"}}, "credHelpers": {"r.site": ""}, "credsStore": "own"}, "r.site", "u"),
        ({"credHelpers": {"r.site": ""}, "credsStore": "own"}, "r.site", None),
        ({"credHelpers": {"https://index.docker.io/v1/": "own"}}, "docker.io", "helped"),
        ({"credHelpers": {"r.site": "none"}}, "r.site", None),
    ],
)
def test_forms_of_logins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: dict[str, Any], registry: str, user: str | None
) -> None:
    for name, answer in (("own", "helped"), ("none", "")):
        (program := tmp_path / f"docker-credential-{name}").write_text(
            f'#!/bin/sh\necho \'{{"Username": "{answer}", "Secret": "{answer}"}}\'\n'
        )
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("HOME", str(tmp_path))
    for variable in ("REGISTRY_AUTH_FILE", "DOCKER_CONFIG", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(variable, raising=False)
    for place in (".docker/config.json", ".config/containers/auth.json"):
        (tmp_path / place).parent.mkdir(parents=True)
        (tmp_path / place).write_text(json.dumps(said))
        found = credentials.find(registry, "a/b")
        assert (found.username if found else None) == user
        (tmp_path / place).unlink()


def test_logins_do_not_show() -> None:
    login = Credential(username="u", password="hidden", identity_token="hidden", place="file")
    assert "hidden" not in f"{login} {login!r} {[login]}"


def test_mirrors_in_settings(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('[registry_mirrors]\n"docker.io" = ["m:5000", "https://n/p"]\n')
    assert load({"BOOTSEER_CONFIG": str(file)}).registry_mirrors == {"docker.io": ("m:5000", "https://n/p")}
    env = {"BOOTSEER_CONFIG": str(file), "BOOTSEER_REGISTRY_MIRRORS": "quay.io=m,n docker.io=m"}
    assert load(env).registry_mirrors == {"quay.io": ("m", "n"), "docker.io": ("m",)}
    for bad in ("ftp://m", "", "a b", "https://"):
        with pytest.raises(ConfigError, match="bad mirror"):
            Registry(oci.Reference.parse("h.x/n:v1"), mirrors=[bad])


def test_registries_without_tls_in_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "c.toml"
    file.write_text('plain_http = ["10.1.2.3:5000"]\n')
    monkeypatch.setenv("BOOTSEER_CONFIG", str(file))
    assert load().plain_http == ("10.1.2.3:5000",)
    monkeypatch.setenv("BOOTSEER_PLAIN_HTTP", "10.1.2.4:5000,m.site")
    assert load().plain_http == ("10.1.2.4:5000", "m.site")
    mirrors = ("m.site", "10.1.2.4", "http://10.1.2.4", "127.0.0.1:1")
    for text, roots in {
        "10.1.2.3:5000/x": ["http://m.site", "https://10.1.2.4", "http://10.1.2.4", "http://127.0.0.1:1",
                            "https://10.1.2.3:5000"],
        "10.1.2.4:5000/x": ["http://m.site", "https://10.1.2.4", "http://10.1.2.4", "http://127.0.0.1:1",
                            "http://10.1.2.4:5000"],
    }.items():  # fmt: skip
        with Registry(oci.Reference.parse(text), mirrors=mirrors) as registry:
            assert [endpoint.root for endpoint in registry._mirrors.all] == roots
    for bad in ("http://m.site", "m.site/x", "a b"):
        with pytest.raises(ConfigError, match="plain_http"):
            load({"BOOTSEER_PLAIN_HTTP": bad})
    assert load({"BOOTSEER_PLAIN_HTTP": ""}).plain_http == ()


def test_a_fork_does_not_share_connections() -> None:
    """Parent and child on one connection would read each other's answers."""
    ports: list[int] = []

    def serve(listener: socket.socket) -> None:
        for _ in range(2):
            connection, address = listener.accept()
            threads.append(threading.Thread(target=answer, args=(connection, address[1])))
            threads[-1].start()

    def answer(connection: socket.socket, port: int) -> None:
        with connection:
            while connection.recv(4096):
                ports.append(port)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    threads: list[threading.Thread] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        transport = Transport()

        def ask() -> None:
            with transport.request("GET", url, headers={}) as got:
                assert got.document(10) == b"ok"

        server = threading.Thread(target=serve, args=(listener,))
        server.start()
        ask()
        ask()
        assert transport.idle == 1
        transport._pid = os.getpid() + 1  # as after a fork, which a process with threads should not do
        ask()
        transport.close()
        server.join(20)
        for thread in threads:
            thread.join(20)
    assert ports[0] == ports[1] != ports[2]


@pytest.mark.parametrize(
    ("url", "there", "followed"),
    [
        ("https://r.example.org/v2/", "http://r.example.org/v2/u?_state=x", "https://r.example.org/v2/u?_state=x"),
        ("https://r.example.org:5000/v2/", "http://r.example.org:5000/u", "https://r.example.org:5000/u"),
        ("https://r.example.org:5000/v2/", "http://r.example.org/u", "https://r.example.org:5000/u"),
        ("https://r.example.org/v2/", "http://r.example.org:8080/u", ""),
        ("https://r.example.org/v2/", "http://other.example.org/u", ""),
        ("https://r.example.org/v2/", "https://other.example.org/u", "https://other.example.org/u"),
        ("http://r.example.org/v2/", "http://other.example.org/u", "http://other.example.org/u"),
    ],
)
def test_uploads_do_not_lose_tls(url: str, there: str, followed: str) -> None:
    assert wire.secured(url, there) == followed


@given(st.text(max_size=30))
def test_numbers_of_servers(text: str) -> None:
    number = wire.number(text)
    assert (number is not None) == bool(re.fullmatch(r"[ \t]*[0-9]{1,18}[ \t]*", text))


@given(st.text(st.characters(max_codepoint=255), max_size=60))
def test_places_that_servers_name(location: str) -> None:
    try:
        there = wire.onward("https://r.example.org/v2/x", location)
    except wire.TransportError:
        return
    assert there.isascii()
    assert there.isprintable()
    assert " " not in there


_OWN = Host(plain=False, name="r.example.org")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", Hosts()),
        ('server = "r.example.org"', Hosts((), _OWN)),
        ('server = "http://r.example.org/v2/"', Hosts((), replace(_OWN, plain=True))),
        ('[host."https://r.example.org"]\nca = ["a", "/b"]', Hosts((), replace(_OWN, ca=("FOLDER/a", "/b")))),
        ('[host."http://m:1/x/"]\ncapabilities = ["push", "pull"]',
         Hosts((Host(plain=True, name="m:1", path="/x/v2", resolves=False),))),
        ('[host.m]\noverride_path = true\n[host.n]\ncapabilities = []\nproxy = "http://p"',
         Hosts((Host(plain=False, name="m", path=""), Host(plain=False, name="n")))),
        ('[host.m]\ncapabilities = ["Pull"]', Hosts((Host(plain=False, name="m", resolves=False),))),
        ('[host.m]\nclient = "a"\n[host.n]\nclient = ["/a", "b"]\n[host.o]\nclient = [["a", "b"], ["c", ""]]',
         Hosts((Host(plain=False, name="m", client=(("FOLDER/a", ""),)),
                Host(plain=False, name="n", client=(("/a", ""), ("FOLDER/b", ""))),
                Host(plain=False, name="o", client=(("FOLDER/a", "FOLDER/b"), ("FOLDER/c", "")))))),
        ('[host.m]\ndial_timeout = "1m1.5s"\n[host.m.header]\nX-A = "1"\nx-b = ["2", "3"]\nHost = "h"\n'
         '[host.n]\ndial_timeout = "500ms"',
         Hosts((Host(plain=False, name="m", dial_timeout=61.5, header=(("X-A", "1"), ("x-b", "2, 3"))),
                Host(plain=False, name="n", dial_timeout=0.5)))),
        ('server = "https://r.example.org"\n[host."https://m"]\n[host."https://r.example.org"]\nca = "a"',
         Hosts((Host(plain=False, name="m"),), replace(_OWN, ca=("FOLDER/a",)))),
        ('server = "https://r.example.org"\n[host."http://r.example.org"]', Hosts((), replace(_OWN, plain=True))),
        ('ca = "a"', Hosts((), replace(_OWN, ca=("FOLDER/a",)))),
        ('dial_timeout = "1s"', Hosts((), replace(_OWN, plain=None, dial_timeout=1.0))),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["r.example.org", "_default"])
def test_hosts_of_containerd(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    found: Hosts,
    name: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(hosts, "FOLDERS", (tmp_path,))
    (tmp_path / name).mkdir()
    (tmp_path / name / "hosts.toml").write_text(text)
    wanted = msgspec.json.encode(found).replace(b"FOLDER", os.fsencode(tmp_path / name))
    assert hosts.find("r.example.org") == msgspec.json.decode(wanted, type=Hosts)
    assert ("proxy of n is not used" in caplog.text) == ("proxy" in text)
    assert ("r.example.org is asked without TLS" in caplog.text) == ('[host."http://r.example.org"]' in text)
    assert hosts.find("other") == (Hosts() if name != "_default" else hosts.find("other"))


def test_docker_io_is_where_it_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example of containerd's own page."""
    monkeypatch.setattr(hosts, "FOLDERS", (tmp_path,))
    (tmp_path / "docker.io").mkdir()
    host = '[host."https://registry-1.docker.io"]\ncapabilities = ["pull", "resolve"]\n'
    for text in (host, f'server = "https://docker.io"\n{host}', 'server = "docker.io"'):
        (tmp_path / "docker.io/hosts.toml").write_text(text)
        assert hosts.find("docker.io") == Hosts((), Host(plain=False, name="registry-1.docker.io"))


def test_the_first_folder_of_a_registry_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "FOLDERS", (tmp_path / "1", tmp_path / "2"))
    for number, place in enumerate(("2/r", "2/_default", "2/r:1", "2/r_1_", "1/_default")):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "hosts.toml").write_text(f'server = "m{number}"')
        found = hosts.find("r:1").server
        assert found is None if number < 1 else found and found.name == f"m{number}"
    (tmp_path / "1/r:1").mkdir()
    assert hosts.find("r:1") == Hosts()


@pytest.mark.parametrize(
    "text",
    ["server = 1", "host = 1", "[host]\nx = 1", "x = ", 'server = "ftp://r"', '[host."http://a/ b"]\nca = 1',
     '[host."http:///"]', '[host."http://u:p@h"]', 'capabilities = ["read"]', 'client = [["a"]]', 'dial_timeout = "1"',
     'dial_timeout = "-1s"', '[header]\n"a b" = "1"', '[header]\na = "u:p\\r\\nb: 1"', "header = 1",
     "server = " + "[" * 5000, "\udcff", "#" * 2_000_000],
)  # fmt: skip
def test_hosts_of_containerd_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(hosts, "FOLDERS", (tmp_path,))
    (tmp_path / "r:1").mkdir()
    (tmp_path / "r:1" / "hosts.toml").write_text(text, errors="surrogateescape")
    with pytest.raises(ConfigError, match=r"r:1/hosts\.toml is not understood: [^\n]*\Z") as caught:
        hosts.find("r:1")
    assert "u:p" not in str(caught.value)


@pytest.mark.parametrize("what", ["junk", "pipe", "holes", "folder"])
@pytest.mark.parametrize("name", ["ca.crt", "client.cert"])
def test_certificates_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, what: str) -> None:
    """OpenSSL waited for somebody to write to a pipe, and read all holes."""
    folder = tmp_path / "r.example.org:443"
    folder.mkdir()
    if what == "folder":
        (folder / name).mkdir()
    elif what == "pipe":
        os.mkfifo(folder / name)
    else:
        (folder / name).write_text("junk")
        os.truncate(folder / name, 1 << 40 if what == "holes" else 4)
    monkeypatch.setattr(connect, "CERTS", (tmp_path,))
    asking = threading.Thread(target=_told, args=(said := [],), daemon=True)
    asking.start()
    asking.join(10)
    assert re.fullmatch(rf"certificate \S+{name} for registry \S+: it is no [^\n]+", "".join(said))


def _told(said: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        connect.context_for("r.example.org", 443)
    said.append(str(caught.value))


def test_nobody_has_logins_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for variable in ("REGISTRY_AUTH_FILE", "DOCKER_CONFIG", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(Path, "home", none)
    assert credentials.find("r.example.org") is None


def test_a_registry_store_loads_nothing_that_handles_layers() -> None:
    script = "import sys, bootseer.objects.registry; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert "bootseer.oci.blobs" in loaded
    assert not {"isal", "bootseer.erofs", "bootseer.oci.image", "bootseer.oci.folder"} & set(loaded)
