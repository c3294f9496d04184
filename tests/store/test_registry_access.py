"""The registry client against a real registry with logins, tokens, mirrors, redirects, outages and slow servers."""

from __future__ import annotations

import base64
import contextlib
import datetime
import email.utils
import hashlib
import json
import logging
import os
import socket
import ssl
import stat
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bootseer import oci
from bootseer.errors import (
    BootseerError,
    ConfigError,
    DataError,
    NotFoundError,
    PrivilegeError,
    UnavailableError,
    UnsupportedError,
)
from bootseer.oci import auth, blobs, connect, credentials, endpoint, hosts, providers, spec
from bootseer.oci.registry import Registry
from support.registry import PASSWORD, USER, DockerRegistry
from support.registrycache import RegistryCache
from support.registryproxy import Fault, RegistryProxy
from support.tokens import TokenServer
from support.waits import together

pytestmark = pytest.mark.registry

DATA = hashlib.shake_256(b"layer").digest(3_000_000)
ITEM = spec.Descriptor(spec.LAYER, spec.digest_of(DATA), len(DATA))
FOREVER = float("inf")


@pytest.fixture(scope="module")
def plain() -> Iterator[DockerRegistry]:
    with DockerRegistry() as running:
        fill(running.address, "x")
        yield running


@pytest.fixture(scope="module")
def locked() -> Iterator[DockerRegistry]:
    with DockerRegistry(login=True) as running:
        yield running


@pytest.fixture
def proxy(plain: DockerRegistry, monkeypatch: pytest.MonkeyPatch) -> Iterator[RegistryProxy]:
    monkeypatch.setattr(endpoint, "backoff", lambda failures, exc: getattr(exc, "after", None) or 0.01)
    with RegistryProxy(plain.address) as running:
        yield running


@pytest.fixture(autouse=True)
def no_logins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A docker configuration of this test's own, and no secret of anybody in any log or message."""
    folder = tmp_path / "docker"
    folder.mkdir()
    monkeypatch.setenv("DOCKER_CONFIG", str(folder))
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder))
    for name in ("REGISTRY_AUTH_FILE", "XDG_RUNTIME_DIR", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    return folder


def client(address: str, name: str = "x", mirrors: tuple[str, ...] = ()) -> Registry:
    return Registry(oci.Reference.parse(f"{address}/{name}:v1"), mirrors=mirrors)


def fill(address: str, name: str) -> str:
    """Push an image of one layer, `DATA`; returns its digest."""
    with client(address, name) as registry:
        config = json.dumps(
            {"os": "linux", "architecture": "amd64", "rootfs": {"type": "layers", "diff_ids": ["sha256:" + "0" * 64]}}
        ).encode()
        described = spec.Descriptor(spec.CONFIG, spec.digest_of(config), len(config))
        registry.put_blob(described, config)
        registry.put_blob(ITEM, DATA)
        body = json.dumps(
            {"schemaVersion": 2, "mediaType": spec.MANIFEST,
             "config": {"mediaType": spec.CONFIG, "digest": described.digest, "size": described.size},
             "layers": [{"mediaType": ITEM.media_type, "digest": ITEM.digest, "size": ITEM.size}]}
        ).encode()  # fmt: skip
        return registry.put_manifest(body, spec.MANIFEST, "v1")


def log_in(folder: Path, address: str, user: str = USER, password: str = PASSWORD, **more: object) -> None:
    auth = base64.b64encode(f"{user}:{password}".encode()).decode()
    (folder / "config.json").write_text(json.dumps({"auths": {address: {"auth": auth}}, **more}))


def helper(folder: Path, name: str, script: str) -> None:
    path = folder / f"docker-credential-{name}"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


class TestLogins:
    def test_without_one(self, locked: DockerRegistry) -> None:
        with pytest.raises(PrivilegeError, match=rf"denies access to image .*docker login {locked.address}") as caught:
            oci.open_image(f"{locked.address}/x:v1")
        assert caught.value.exit_code == 77

    def test_with_a_wrong_one(self, locked: DockerRegistry, no_logins: Path) -> None:
        log_in(no_logins, locked.address, password="wrong-horse")
        with pytest.raises(PrivilegeError, match=r"config\.json is not accepted") as caught:
            fill(locked.address, "x")
        assert "wrong-horse" not in str(caught.value)

    def test_in_docker_config(self, locked: DockerRegistry, no_logins: Path) -> None:
        log_in(no_logins, locked.address)
        digest = fill(locked.address, "x")
        with client(locked.address) as registry:
            assert b"".join(registry.blob(ITEM)) == DATA
            assert registry.head_manifest("v1", retries=0).digest == digest
        oci.preflight(f"{locked.address}/x:v1")

    def test_in_a_helper(self, locked: DockerRegistry, no_logins: Path) -> None:
        answer = json.dumps({"ServerURL": locked.address, "Username": USER, "Secret": PASSWORD})
        helper(no_logins, "right", f"read server; test \"$1 $server\" = 'get {locked.address}' && echo '{answer}'")
        log_in(no_logins, locked.address, password="old", credHelpers={locked.address: "right"})
        fill(locked.address, "h")
        (no_logins / "config.json").write_text(json.dumps({"credsStore": "right"}))
        fill(locked.address, "h")

    @pytest.mark.parametrize("kind", ["json", "yaml"])
    def test_in_a_credential_provider_of_the_kubelet(
        self, locked: DockerRegistry, no_logins: Path, monkeypatch: pytest.MonkeyPatch, kind: str
    ) -> None:
        version = "credentialprovider.kubelet.k8s.io/v1"
        request = json.dumps(
            {"kind": "CredentialProviderRequest", "apiVersion": version, "image": f"{locked.address}/h"}
        )
        auth = {f"127.0.*.{locked.address[8:]}": {"username": USER, "password": PASSWORD}}
        answer = {"kind": "CredentialProviderResponse", "apiVersion": version, "cacheKeyType": "Registry", "auth": auth}
        script = f"#!/bin/sh\ntest \"$1 $WHO $(cat)\" = 'get me {request}' && echo '{json.dumps(answer)}'\n"
        for name in ("own", "other"):
            (no_logins / name).write_text(script if name == "own" else "#!/bin/sh\nexit 1\n")
            (no_logins / name).chmod(0o755)
        each = {
            "apiVersion": version,
            "defaultCacheDuration": "0s",
            "args": ["get"],
            "env": [{"name": "WHO", "value": "me"}],
        }
        providers = [
            {**each, "name": "other", "matchImages": ["*.*.0.1", "127.0.0.1:1", f"{locked.address}/other"]},
            {**each, "name": "other", "matchImages": ["*.*.*.*"], "tokenAttributes": {"requireServiceAccount": True}},
            {**each, "name": "own", "matchImages": ["registry.site", f"*.0.0.{locked.address[8:]}/h"]},
        ]
        document = {
            "apiVersion": "kubelet.config.k8s.io/v1",
            "kind": "CredentialProviderConfig",
            "providers": providers,
        }
        path = no_logins / f"kubelet.{kind}"
        path.write_text(json.dumps(document))  # which is YAML, too
        with pytest.raises(PrivilegeError, match="denies access"):
            fill(locked.address, "h")
        monkeypatch.setenv("BOOTSEER_CREDENTIAL_PROVIDERS", f"{path}:{no_logins}")
        fill(locked.address, "h")
        ref = oci.Reference.parse(f"{locked.address}/h:v1")
        monkeypatch.setenv("BOOTSEER_PLAIN_HTTP", locked.address)
        for logins in (credentials.given('{"auths": {}}'), credentials.Logins()):  # pods have none of this node's
            with pytest.raises(PrivilegeError, match="denies access"):
                oci.digest_for(ref, logins)
        assert oci.digest_for(ref, credentials.with_providers(credentials.Logins(), ref.registry, ref.name))

    @pytest.mark.parametrize(
        ("provider", "kind", "said"),
        [
            ("exit 1", UnavailableError, "credential provider own failed for .*/x: exit code 1"),
            (f"echo {PASSWORD}", UnavailableError, "answered something else"),
            ("exec sleep 20", UnavailableError, "did not answer within 0"),
            (None, UnavailableError, "cannot run: No such file"),
            ("echo '{}'", UnavailableError, "answered something else"),
            ("sed 's/Request/Response/'", PrivilegeError, "denies access"),
            ('sed \'s/Request/Response/; s/"image": /"auth": /\'', UnavailableError, "answered something else"),
            ("sleep 20 & sed 's/Request/Response/'", PrivilegeError, "denies access"),
            ("yes", UnavailableError, "own answered more than 1 MiB"),
            ("yes >&2", UnavailableError, "own answered more than 1 MiB"),
        ],
    )
    def test_providers_that_do_not_help(
        self, locked: DockerRegistry, no_logins: Path, monkeypatch: pytest.MonkeyPatch,
        provider: str | None, kind: type[BootseerError], said: str,
    ) -> None:  # fmt: skip
        if provider:
            monkeypatch.setattr(providers, "DEADLINE", 0.3 if "exec" in provider else 15.0)
            (no_logins / "own").write_text(f"#!/bin/sh\n{provider}\n")
            (no_logins / "own").chmod(0o755)
        each = {"name": "own", "apiVersion": "credentialprovider.kubelet.k8s.io/v1", "matchImages": [locked.address]}
        (no_logins / "kubelet.json").write_text(json.dumps({"providers": [each]}))
        monkeypatch.setenv("BOOTSEER_CREDENTIAL_PROVIDERS", f"{no_logins}:{no_logins}")
        with pytest.raises(kind, match=said) as caught:
            oci.open_image(f"{locked.address}/x:v1")
        assert PASSWORD not in str(caught.value)

    @pytest.mark.parametrize(
        ("text", "setting", "said"),
        [
            (None, "{0}/none.json:{0}", "No such file"),
            ("[]", "{0}/k.json:{0}", "not understood: Expected `object`"),
            ("{", "{0}/k.json:{0}", "not understood: "),
            (
                '{"providers": [{"name": "../x", "apiVersion": "v", "matchImages": ["ADDRESS"]}]}',
                "{0}/k.json:{0}",
                "no name",
            ),
            ("{}", "{0}/k.json", "names no whole folder"),
        ],
    )
    def test_providers_that_are_none(
        self, locked: DockerRegistry, no_logins: Path, monkeypatch: pytest.MonkeyPatch,
        text: str | None, setting: str, said: str,
    ) -> None:  # fmt: skip
        if text is not None:
            (no_logins / "k.json").write_text(text.replace("ADDRESS", locked.address))
        monkeypatch.setenv("BOOTSEER_CREDENTIAL_PROVIDERS", setting.format(no_logins))
        with pytest.raises(ConfigError, match=said):
            oci.open_image(f"{locked.address}/x:v1")

    def test_a_registry_that_says_403_of_a_login_that_has_ended(self, proxy: RegistryProxy, no_logins: Path) -> None:
        """As ECR does after 12 hours, without a challenge; who may not read it is told so all the same."""
        proxy.add(Fault(match="manifests", status=401, headers={"WWW-Authenticate": 'Basic realm="r"'}))
        proxy.add(Fault(match="blobs", status=403, times=2))
        log_in(no_logins, proxy.address, password="old")
        with client(proxy.address) as registry:
            assert registry.manifest("v1")[0]
            with pytest.raises(PrivilegeError, match="denies access"):
                registry.read_range(ITEM, 7, 10)
            log_in(no_logins, proxy.address, password="new")
            assert registry.read_range(ITEM, 7, 10) == DATA[7:17]
        sent = [base64.b64decode(one.headers.get("authorization", "")[6:]).decode() for one in proxy.requests("blobs")]
        assert sent == [f"{USER}:old", f"{USER}:old", f"{USER}:new"]

    @pytest.mark.parametrize(
        ("script", "kind", "said"),
        [
            ("echo 'credentials not found in native keychain'; exit 1", PrivilegeError, "denies access"),
            (f"echo {PASSWORD}; exit 3", UnavailableError, "exit code 3"),
            (f"echo {PASSWORD}", UnavailableError, "something else than a login"),
            ("sleep 20", UnavailableError, "did not answer within 0"),
            (None, UnsupportedError, "docker-credential-odd is not installed"),
        ],
    )
    def test_helpers_that_do_not_help(
        self, locked: DockerRegistry, no_logins: Path, monkeypatch: pytest.MonkeyPatch,
        script: str | None, kind: type[BootseerError], said: str,
    ) -> None:  # fmt: skip
        monkeypatch.setattr(credentials, "HELPER_DEADLINE", 0.3)
        if script:
            helper(no_logins, "odd", script if script != "sleep 20" else "exec sleep 20")
        (no_logins / "config.json").write_text(json.dumps({"credHelpers": {locked.address: "odd"}}))
        with pytest.raises(kind, match=said) as caught:
            oci.open_image(f"{locked.address}/x:v1")
        assert PASSWORD not in str(caught.value)

    @pytest.mark.parametrize(
        "failing",
        [
            "provider",
            "odd answer",
            "open program",
            "no name",
            "bad file",
            "open file",
            "helper",
            "no helper",
            "odd helper",
        ],
    )
    def test_one_that_fails_does_not_hide_another(
        self, locked: DockerRegistry, no_logins: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
        caplog: pytest.LogCaptureFixture, failing: str,
    ) -> None:  # fmt: skip
        log_in(no_logins, locked.address)
        fill(locked.address, "x")
        version, auth = "credentialprovider.kubelet.k8s.io/v1", {"username": USER, "password": PASSWORD}
        answer = {"kind": "CredentialProviderResponse", "apiVersion": version}
        good, odd = (json.dumps({**answer, "auth": found}) for found in ({locked.address: auth}, ["odd"]))
        if failing not in ("helper", "no helper", "odd helper"):
            (folder := tmp_path / "providers.d").mkdir()
            for name, script in (
                ("bad", f"echo '{odd}'" if "odd" in failing else "exit 1"),
                ("good", f"echo '{good}'"),
            ):
                (no_logins / name).write_text(f"#!/bin/sh\n{script}\n")
                (no_logins / name).chmod(0o777 if (name, failing) == ("bad", "open program") else 0o755)
                said = "../bad" if (name, failing) == ("bad", "no name") else name
                each = {"name": said, "apiVersion": version, "matchImages": [locked.address]}
                (folder / f"{name}.json").write_text(json.dumps({"providers": [each]}))
            if failing == "bad file":
                (folder / "bad.json").write_text("[")
            (folder / "bad.json").chmod(0o666 if failing == "open file" else 0o644)
            (no_logins / "config.json").unlink()
            monkeypatch.setenv("BOOTSEER_CREDENTIAL_PROVIDERS", f"{folder}:{no_logins}")
        else:
            if failing == "helper":
                helper(no_logins, "odd", "exit 3")
            named = "../odd" if failing == "odd helper" else "odd"
            (other := tmp_path / "auth.json").write_text(json.dumps({"credHelpers": {locked.address: named}}))
            monkeypatch.setenv("REGISTRY_AUTH_FILE", str(other))
        with client(locked.address) as registry:
            assert registry.manifest("v1")[0]
        assert "looking for another login" in caplog.text
        assert PASSWORD not in caplog.text

    def test_which_login_is_whose(self, no_logins: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        auths = {
            "https://index.docker.io/v1/": {"username": "hub", "password": "p"},
            "quay.site/team": {"username": "team", "password": "p"},
            "quay.site": {"username": "all", "password": "p"},
            "acr.site": {"auth": "PDpwPg==", "identitytoken": "long"},
            "bad.site": {"auth": "%%%"},
        }
        (no_logins / "config.json").write_text(json.dumps({"auths": auths}))

        def user(registry: str, name: str = "a/b") -> str | None:
            found = credentials.find(registry, name)
            return found.username or found.identity_token if found else None

        assert user("docker.io") == "hub"
        assert user("quay.site", "team/x") == "team"
        assert user("quay.site", "teams/x") == "all"
        assert user("acr.site") == "long"
        assert user("bad.site") is None
        assert user("other.site") is None
        other = tmp_path / "auth.json"
        other.write_text(json.dumps({"auths": {"quay.site": {"username": "first", "password": "p"}}}))
        monkeypatch.setenv("REGISTRY_AUTH_FILE", str(other))
        assert user("quay.site", "team/x") == "first"
        assert user("docker.io") == "hub"


class TestTokens:
    @pytest.fixture
    def tokens(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TokenServer]:
        monkeypatch.setattr(auth, "_LEAST_LIFETIME", 0.0)  # tokens of seconds, to see many end
        with TokenServer(tmp_path / "tokens", users={USER: PASSWORD}, identity="identity-5up3r") as running:
            yield running

    @pytest.fixture
    def guarded(self, tokens: TokenServer, no_logins: Path) -> Iterator[DockerRegistry]:
        with DockerRegistry(tokens=tokens) as running:
            log_in(no_logins, running.address)
            yield running

    def test_one_token_serves_reads_and_writes(self, tokens: TokenServer, guarded: DockerRegistry) -> None:
        fill(guarded.address, "x")
        assert tokens.requests == 2  # to look whether a blob is there, then to push
        with client(guarded.address) as registry:
            for start in range(0, len(DATA) - 1000, 300_000):
                assert registry.read_range(ITEM, start, 1000) == DATA[start : start + 1000]
        assert tokens.requests == 3

    @pytest.mark.parametrize("honest", [True, False])
    def test_tokens_end_in_a_long_run_of_many_threads(
        self, tokens: TokenServer, guarded: DockerRegistry, honest: bool
    ) -> None:
        """Lifetime 2 s, read for 5: renewed before the end, or, where the server lies about it, after a 401."""
        fill(guarded.address, "x")
        tokens.lifetime, tokens.said, tokens.delay = 2.0, None if honest else 300.0, 0.1
        before, reads = tokens.requests, [0]
        until = time.monotonic() + 5.0
        with client(guarded.address) as registry:

            def read(seed: int) -> None:
                while time.monotonic() < until:
                    offset = (seed * 7919 + reads[0] * 104729) % (len(DATA) - 1000)
                    assert registry.read_range(ITEM, offset, 1000) == DATA[offset : offset + 1000]
                    reads[0] += 1
                    time.sleep(0.02)

            together(read, range(12))
        assert reads[0] > 100
        # Single flight: one for each lifetime (renewed at three quarters), not one for each thread.
        assert 2 <= tokens.requests - before <= 6

    @pytest.mark.serial  # tokens live for seconds here
    def test_the_old_token_serves_while_the_server_of_new_ones_is_down(
        self, tokens: TokenServer, guarded: DockerRegistry, caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:  # fmt: skip
        monkeypatch.setattr(auth, "_PAUSE", 0.01)
        fill(guarded.address, "x")
        tokens.lifetime = 5.0  # in truth up to one less: it ends at a whole second
        with client(guarded.address) as registry:
            registry.read_range(ITEM, 0, 10)
            before, tokens.status = tokens.requests, 503
            time.sleep(3.8)  # renewed at three quarters
            assert registry.read_range(ITEM, 0, 10) == DATA[:10]
            assert tokens.requests > before
            assert "is not renewed yet" in caplog.text
            time.sleep(1.3)  # the end of its lifetime
            with pytest.raises(UnavailableError, match="gives no token"):
                registry.read_range(ITEM, 0, 10)
            tokens.status = 0
            time.sleep(0.1)  # a failure is remembered for a while, of growing multiples of _PAUSE
            assert registry.read_range(ITEM, 0, 10) == DATA[:10]

    def test_a_wrong_login(self, tokens: TokenServer, guarded: DockerRegistry, no_logins: Path) -> None:
        log_in(no_logins, guarded.address, password="wrong-horse")
        with pytest.raises(PrivilegeError, match=r"refuses the login for registry .*config\.json"):
            fill(guarded.address, "x")
        (no_logins / "config.json").unlink()
        with pytest.raises(PrivilegeError, match=r"gives no anonymous token for x.*docker login"):
            oci.open_image(f"{guarded.address}/x:v1")

    def test_identity_tokens(self, tokens: TokenServer, guarded: DockerRegistry, no_logins: Path) -> None:
        (no_logins / "config.json").write_text(
            json.dumps({"auths": {guarded.address: {"identitytoken": "identity-5up3r"}}})
        )
        fill(guarded.address, "x")
        helper(no_logins, "id", 'echo \'{"Username": "<token>", "Secret": "identity-5up3r"}\'')
        (no_logins / "config.json").write_text(json.dumps({"credsStore": "id"}))
        with client(guarded.address) as registry:
            assert registry.read_range(ITEM, 5, 10) == DATA[5:15]

    def test_no_secret_is_ever_shown(
        self, tokens: TokenServer, guarded: DockerRegistry, no_logins: Path, caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:  # fmt: skip
        monkeypatch.setattr(endpoint, "backoff", lambda failures, exc: 0.01)
        caplog.set_level(logging.DEBUG)
        shown: list[str] = []
        fill(guarded.address, "x")
        with RegistryProxy(guarded.address, storage=True, link_uses=2) as proxy:
            log_in(no_logins, proxy.address)
            with client(proxy.address) as registry:
                for fault in (
                    Fault(match="^GET", status=503), Fault(match="^GET", cut=1000), Fault(match="^GET", drop=True)
                ):  # fmt: skip
                    proxy.clear()
                    proxy.add(fault)
                    assert b"".join(registry.blob(ITEM)) == DATA
                shown += [repr(registry), repr(registry._origin), repr(registry._origin.auth)]
                echo = {"errors": [{"code": "DENIED", "message": f"{tokens.issued[-1]} and {PASSWORD}"}]}
                for status in (400, 401, 403, 404, 418, 429, 500):
                    proxy.clear()
                    proxy.add(Fault(times=FOREVER, status=status, body=json.dumps(echo).encode()))
                    for ask in (lambda: registry.manifest("v1"), lambda: list(registry.blob(ITEM))):
                        with pytest.raises(BootseerError) as caught:
                            ask()
                        shown += [str(caught.value), repr(caught.value)]
            links = list(proxy.signatures)
        shown += [repr(credentials.find(proxy.address)), caplog.text]
        text = "\n".join(shown)
        assert links
        for secret in (PASSWORD, *tokens.issued, *links, "dHJhaW5lcj"):
            assert secret not in text
        assert "DENIED" in text
        assert "***" in text


class TestFaults:
    def test_statuses(self, proxy: RegistryProxy) -> None:
        table = {
            400: (BootseerError, 70, "refused"), 401: (PrivilegeError, 77, "docker login"),
            403: (PrivilegeError, 77, "right to pull from x"), 404: (NotFoundError, 66, "does not exist"),
            429: (UnavailableError, 69, "HTTP 429"), 500: (UnavailableError, 69, "HTTP 500"),
            502: (UnavailableError, 69, "HTTP 502"), 503: (UnavailableError, 69, "HTTP 503"),
        }  # fmt: skip
        with client(proxy.address) as registry:
            for status, (kind, code, said) in table.items():
                proxy.clear()
                proxy.add(Fault(times=FOREVER, status=status))
                for ask in (
                    lambda: registry.manifest("v1"), lambda: list(registry.blob(ITEM)),
                    lambda: registry.read_range(ITEM, 0, 5), lambda: registry.head_manifest("v1", retries=0),
                ):  # fmt: skip
                    with pytest.raises(kind, match=said) as caught:
                        ask()
                    assert caught.value.exit_code == code
                    assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("form", ["seconds", "date"])
    def test_retry_after(self, proxy: RegistryProxy, form: str) -> None:
        then = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=2)
        value = "1" if form == "seconds" else email.utils.format_datetime(then, usegmt=True)
        proxy.add(Fault(status=429, headers={"Retry-After": value}))
        began = time.monotonic()
        with client(proxy.address) as registry:
            registry.manifest("v1")
            assert 0.7 < time.monotonic() - began < 4
            proxy.add(Fault(status=429, headers={"Retry-After": "3600"}))
            with pytest.raises(UnavailableError, match=r"busy.*come back in 3600 s.*mirror"):
                registry.manifest("v1")

    def test_ranges_that_are_none(self, proxy: RegistryProxy, caplog: pytest.LogCaptureFixture) -> None:
        with client(proxy.address) as registry:
            proxy.add(Fault(match="blobs", no_ranges=True, times=2))
            assert registry.read_range(ITEM, 1_000_000, 500) == DATA[1_000_000:1_000_500]
            assert registry.read_range(ITEM, 2_000_000, 500) == DATA[2_000_000:2_000_500]
            assert caplog.text.count("does not serve ranges") == 1
            for wrong in ("bytes 0-499/3000000", "bytes 1000000-1000499/9", "nonsense"):
                proxy.clear()
                proxy.add(Fault(match="blobs", content_range=wrong))
                with pytest.raises(DataError, match=r"range|bytes 0-499|of 9"):
                    registry.read_range(ITEM, 1_000_000, 500)
            with pytest.raises(DataError, match="ends at 3000000"):
                registry.read_range(ITEM, 2_999_999, 2)
            short = spec.Descriptor(ITEM.media_type, ITEM.digest, ITEM.size + 10)
            with pytest.raises(DataError, match=r"shorter|of 3000000"):
                registry.read_range(short, ITEM.size + 1, 5)

    def test_short_bodies(self, proxy: RegistryProxy) -> None:
        with client(proxy.address) as registry:
            proxy.add(Fault(match="blobs", cut=100))
            assert registry.read_range(ITEM, 1_000, 5_000) == DATA[1_000:6_000]
            proxy.add(Fault(match="blobs", cut=300_000))
            proxy.add(Fault(match="blobs", drop=True, after=1))
            assert b"".join(registry.blob(ITEM)) == DATA
            proxy.add(Fault(match="manifests", cut=10))
            assert registry.manifest("v1")[0].endswith(b"}")

    @pytest.mark.parametrize("head", [False, True])
    def test_a_dripping_server_is_given_up(
        self, proxy: RegistryProxy, monkeypatch: pytest.MonkeyPatch, head: bool
    ) -> None:
        monkeypatch.setattr(blobs, "RANGE_STALL", 0.4)
        proxy.add(Fault(match="blobs", drip=0.05, drip_head=head))
        began = time.monotonic()
        with client(proxy.address) as registry:
            assert registry.read_range(ITEM, 0, 200_000) == DATA[:200_000]
        assert 0.3 < time.monotonic() - began < 3

    def test_connections_are_used_again(self, proxy: RegistryProxy) -> None:
        with client(proxy.address) as registry:
            for start in range(0, 30_000, 1_000):
                registry.read_range(ITEM, start, 1_000)
            registry.manifest("v1")
            assert registry._transport.idle == 1
        assert len({seen.port for seen in proxy.requests("")}) == 1

    def test_dead_kept_connections_are_replaced_unseen(
        self, plain: DockerRegistry, caplog: pytest.LogCaptureFixture
    ) -> None:
        with DockerRegistry() as mine:
            fill(mine.address, "x")
            with client(mine.address) as registry:
                registry.read_range(ITEM, 0, 10)
                with mine.outage():
                    pass
                assert registry.read_range(ITEM, 0, 10) == DATA[:10]
        assert caplog.text == ""


class TestRedirects:
    @pytest.fixture
    def away(self, locked: DockerRegistry, no_logins: Path) -> Iterator[RegistryProxy]:
        log_in(no_logins, locked.address)
        fill(locked.address, "x")
        with RegistryProxy(locked.address, storage=True) as running:
            log_in(no_logins, running.address)
            yield running

    def test_the_login_stays_with_the_registry(self, away: RegistryProxy) -> None:
        with client(away.address) as registry:
            assert b"".join(registry.blob(ITEM)) == DATA
            assert registry.has_blob(ITEM.digest)
        assert any("authorization" in seen.headers for seen in away.requests("blobs"))
        assert away.requests("blobs", "storage")
        assert not any("authorization" in seen.headers for seen in away.requests("", "storage"))

    def test_links_are_remembered_and_renewed(self, away: RegistryProxy) -> None:
        away.link_uses = 3
        with client(away.address) as registry:
            for number in range(10):
                assert registry.read_range(ITEM, number * 1000, 1000) == DATA[number * 1000 : number * 1000 + 1000]
        asked = len([seen for seen in away.requests("^GET /v2/x/blobs") if "authorization" in seen.headers])
        assert 4 <= asked <= 5

    def test_links_that_never_work(self, away: RegistryProxy, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(endpoint, "backoff", lambda failures, exc: 0.01)
        away.link_uses = 0
        with (
            client(away.address) as registry,
            pytest.raises(UnavailableError, match=r"link .* not accepted \(HTTP 403\)"),
        ):
            registry.read_range(ITEM, 0, 10)

    def test_in_circles_and_to_nowhere(self, proxy: RegistryProxy) -> None:
        with client(proxy.address) as registry:
            proxy.add(Fault(times=FOREVER, status=302, headers={"Location": "/v2/again?secret=1"}))
            with pytest.raises(UnavailableError, match="on and on") as caught:
                registry.manifest("v1")
            assert "secret" not in str(caught.value)
            proxy.clear()
            proxy.add(Fault(times=FOREVER, status=302, headers={"Location": "ftp://elsewhere/"}))
            with pytest.raises(UnavailableError, match="not understood"):
                registry.manifest("v1")


class TestMirrors:
    def test_mirrors_come_first_and_failing_ones_rest(
        self, plain: DockerRegistry, caplog: pytest.LogCaptureFixture
    ) -> None:
        with RegistryProxy(plain.address) as mirror, RegistryProxy(plain.address) as origin:
            broken = "127.0.0.1:9"
            with client(origin.address, mirrors=(broken, f"http://{mirror.address}")) as registry:
                registry.manifest("v1")
                assert registry.read_range(ITEM, 7, 10) == DATA[7:17]
                assert b"".join(registry.blob(ITEM)) == DATA
                assert caplog.text.count("mirror http://127.0.0.1:9 does not give") == 1
                assert origin.requests("") == []
                mirror.add(Fault(match="manifests", status=404))
                registry.manifest("v1")
                assert len(origin.requests("manifests")) == 1
                assert registry.head_manifest("v1", retries=0)
                assert len(origin.requests("^HEAD")) == 1  # the registry itself says who may read
                mirror.down = True
                assert registry.read_range(ITEM, 7, 10) == DATA[7:17]
                assert b"".join(registry.blob(ITEM)) == DATA

    def test_a_cache_of_ranges_asks_the_registry_once_for_each_piece(self, plain: DockerRegistry) -> None:
        """nginx as we recommend it: for nodes that ask for the same at the same time, and without the rest."""
        with RegistryProxy(plain.address) as origin, RegistryCache(origin.address) as cache:

            def node(number: int) -> None:
                with client(origin.address, mirrors=(f"http://{cache.address}",)) as registry:
                    registry.manifest("v1")
                    assert registry.read_range(ITEM, 100, 1_000_000) == DATA[100:1_000_100]
                    assert registry.read_range(ITEM, 700_000 + number, 10) == DATA[700_000 + number :][:10]

            with ThreadPoolExecutor(8) as pool:
                list(pool.map(node, range(8)))
            blobs = [one for one in origin.seen if "/blobs/" in one.line]
            assert [one.headers["range"] for one in blobs] == ["bytes=0-1048575"]
            assert {one.headers["host"] for one in origin.seen} == {origin.address}
            mine = {"Authorization": "Bearer mine", "Range": "bytes=2000000-2000009"}
            url = f"http://{cache.address}{blobs[0].line.split()[1]}"
            urllib.request.urlopen(urllib.request.Request(url, headers=mine), timeout=60).close()
            assert "bytes=1048576-2097151" in [one.headers.get("range") for one in origin.seen]
            assert not any("authorization" in one.headers for one in origin.seen), "what a login gets is everybody's"
            assert len(origin.requests("manifests")) == 8  # tags may move
            with client(origin.address, mirrors=(f"http://{cache.address}",)) as registry:
                assert b"".join(registry.blob(ITEM)) == DATA
                origin.down = True
                assert b"".join(registry.blob(ITEM)) == DATA
            blobs = [one for one in origin.seen if "/blobs/" in one.line]
            assert len(blobs) == 3
            # each process of nginx keeps its own, and which one answers is chance
            assert len({one.port for one in origin.seen}) < len(origin.seen), "connections are kept"
        new = spec.Descriptor(spec.LAYER, spec.digest_of(b"new"), 3)
        with RegistryCache(plain.address) as cache, client(cache.address) as registry, pytest.raises(PrivilegeError):
            registry.put_blob(new, b"new")

    def test_settings_name_them(self, plain: DockerRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
        fill(plain.address, "pre/fix/y")
        with RegistryProxy(plain.address) as mirror:
            monkeypatch.setenv("BOOTSEER_REGISTRY_MIRRORS", f"127.0.0.1:9=http://{mirror.address}/pre/fix")
            with Registry(oci.Reference.parse("127.0.0.1:9/y:v1")) as registry:
                assert registry.manifest("v1")[0]
            assert mirror.requests("GET /v2/pre/fix/y/manifests/v1")


def certificate(folder: Path, name: str = "IP:127.0.0.1") -> ssl.SSLContext:
    """Of a server with this name; its CA is ``ca.crt`` in ``folder``."""
    argv = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={name[4:]}"]
    argv += ["-addext", f"subjectAltName={name}", "-keyout", "key.pem", "-out", "ca.crt"]
    subprocess.run(argv, check=True, capture_output=True, cwd=folder)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "ca.crt", folder / "key.pem")
    return context


class TestHostsOfContainerd:
    @pytest.fixture
    def said(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setattr(hosts, "FOLDERS", (tmp_path / "none", tmp_path / "certs.d"))
        (folder := tmp_path / "certs.d" / "r.example.org_5000_").mkdir(parents=True)
        return folder / "hosts.toml"

    def test_mirrors_where_it_is_and_whom_to_trust(
        self, plain: DockerRegistry, tmp_path: Path, said: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        context = certificate(tmp_path)
        (tmp_path / "ca.crt").rename(said.parent / "own.pem")
        fill(plain.address, "below/x")
        ref = oci.Reference.parse("r.example.org:5000/x:v1")
        with (
            RegistryProxy(plain.address, tls=context) as secure,
            RegistryProxy(plain.address, tls=context) as unchecked,
            RegistryProxy(plain.address) as origin,
        ):
            said.write_text(f"""
                server = "http://{origin.address}"
                [host."https://{secure.address}"]
                capabilities = ["pull"]
                ca = "own.pem"
                [host."https://{unchecked.address}/v2/below"]
                capabilities = ["pull", "resolve"]
                skip_verify = true
                override_path = true
                """)
            with Registry(ref) as registry:
                assert registry.manifest("v1")[0]
                assert [one.line for one in unchecked.seen] == ["GET /v2/below/x/manifests/v1?ns=r.example.org:5000"]
                assert b"".join(registry.blob(ITEM)) == DATA
                assert len(secure.seen) == 1
                secure.down = unchecked.down = True
                assert registry.read_range(ITEM, 7, 10) == DATA[7:17]
                assert origin.requests(r"^GET /v2/x/blobs/sha256:[0-9a-f]{64}\?ns=r\.example\.org:5000$")
            origin.seen.clear()
            with Registry(ref, mirrors=()) as registry:  # as the node daemon asks for a user
                assert registry.head_manifest("v1", retries=0)
            assert len(origin.seen) == 1
            monkeypatch.setenv("BOOTSEER_REGISTRY_MIRRORS", f"r.example.org:5000=http://{plain.address}")
            with Registry(ref) as registry:  # our own settings come first
                assert b"".join(registry.blob(ITEM)) == DATA
            assert len(origin.seen) == 1

    @pytest.mark.parametrize("pair", ['"both.pem"', '["both.pem"]', '[["ca.crt", "key.pem"]]', '[["both.pem", ""]]'])
    def test_certificates_of_our_own_and_headers(
        self, plain: DockerRegistry, said: Path, monkeypatch: pytest.MonkeyPatch, pair: str
    ) -> None:
        context = certificate(said.parent)
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(said.parent / "ca.crt")
        texts = [(said.parent / name).read_text() for name in ("key.pem", "ca.crt")]
        (said.parent / "both.pem").write_text("".join(texts))
        with RegistryProxy(plain.address, tls=context) as secure, RegistryProxy(plain.address) as origin:
            rest = f'ca = "ca.crt"\nclient = {pair}\n[host."https://{secure.address}".header]\nX-Own = ["a", "b"]\n'
            said.write_text(f'server = "http://{origin.address}"\n[host."https://{secure.address}"]\n{rest}')
            with Registry(oci.Reference.parse("r.example.org:5000/x:v1")) as registry:
                assert b"".join(registry.blob(ITEM)) == DATA
            assert [one.headers["x-own"] for one in secure.seen] == ["a, b"]
            assert not origin.seen

    def test_a_stranger_has_no_rights_of_this_machine(
        self, proxy: RegistryProxy, said: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        said.write_text(f'server = "http://{proxy.address}"\nclient = "none"\n[header]\nAuthorization = "Basic b3du"\n')
        monkeypatch.setenv("BOOTSEER_PLAIN_HTTP", proxy.address)
        ref = oci.Reference.parse("r.example.org:5000/x:v1")
        for logins in (None, credentials.Logins()):
            assert oci.digest_for(ref, logins)
        assert [one.headers.get("authorization") for one in proxy.seen] == ["Basic b3du", None]

    def test_certificates_alone(self, plain: DockerRegistry, said: Path) -> None:
        """A folder without a hosts.toml, as docker has them."""
        context = certificate(said.parent)
        with RegistryProxy(plain.address, tls=context) as origin:
            (other := said.parent.parent / "_default").mkdir()
            (other / "hosts.toml").write_text('server = "http://127.0.0.1:9"')
            said.parent.rename(said.parent.parent / f"{origin.address.replace(':', '_')}_")
            with Registry(oci.Reference.parse(f"{origin.address}/x:v1"), plain_http=False) as registry:
                assert registry.manifest("v1")[0]

    def test_a_registry_named_as_its_own_host(self, plain: DockerRegistry, tmp_path: Path, said: Path) -> None:
        context = certificate(tmp_path)
        with RegistryProxy(plain.address, tls=context) as origin:
            folder = said.parent.parent / origin.address
            folder.mkdir()
            (folder / "hosts.toml").write_text(f'[host."https://{origin.address}"]\nskip_verify = true\n')
            with Registry(oci.Reference.parse(f"{origin.address}/x:v1")) as registry:
                assert not registry.mirrored
                assert registry.manifest("v1")[0]


class TestTls:
    def test_untrusted_plain_and_trusted(
        self, plain: DockerRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        context = certificate(tmp_path)
        with RegistryProxy(plain.address, tls=context) as proxy:
            ref = oci.Reference.parse(f"{proxy.address}/x:v1")
            with (
                Registry(ref, plain_http=False) as registry,
                pytest.raises(
                    UnavailableError, match=r"certificate is not trusted \(self-signed certificate\).*certs\.d"
                ),
            ):
                registry.manifest("v1")
            folder = tmp_path / "certs" / proxy.address
            folder.mkdir(parents=True)
            (tmp_path / "ca.crt").rename(folder / "ca.crt")
            monkeypatch.setattr(connect, "CERTS", (tmp_path / "certs",))
            with Registry(ref, plain_http=False) as registry:
                assert registry.manifest("v1")[0]
                assert b"".join(registry.blob(ITEM)) == DATA
                assert registry._transport.idle == 1
        with client(plain.address) as registry:
            assert registry.manifest("v1")
        with (
            Registry(oci.Reference.parse(f"{plain.address}/x:v1"), plain_http=False) as registry,
            pytest.raises(UnavailableError, match=r"no TLS .*--plain-http"),
        ):
            registry.manifest("v1")


def test_preflight(proxy: RegistryProxy, caplog: pytest.LogCaptureFixture) -> None:
    ref = f"{proxy.address}/x:v1"
    oci.preflight(ref)
    proxy.add(Fault(status=403))
    with pytest.raises(PrivilegeError):
        oci.preflight(ref)
    with pytest.raises(NotFoundError):
        oci.preflight(f"{proxy.address}/x:other")
    proxy.down = True
    oci.preflight(ref)
    assert "is not checked" in caplog.text


def test_a_tag_that_the_registry_itself_has_resolved_is_not_asked_for_again(
    proxy: RegistryProxy, plain: DockerRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    tag = f"{proxy.address}/x:v1"
    digest = oci.resolve_digest(tag)
    assert len(proxy.requests("/manifests/")) == 1
    for mirrored, ref, asked in ((False, tag, 0), (False, f"{proxy.address}/x@{digest}", 1), (True, tag, 1)):
        monkeypatch.setenv("BOOTSEER_REGISTRY_MIRRORS", f"{proxy.address}=http://{plain.address}" if mirrored else "")
        before = len(proxy.requests("^HEAD .*/manifests/"))
        oci.preflight(ref, resolved=True)
        assert len(proxy.requests("^HEAD .*/manifests/")) - before == asked, (mirrored, ref)
        proxy.add(Fault(status=403))
        with pytest.raises(PrivilegeError) if asked else contextlib.nullcontext():
            oci.preflight(ref, resolved=True)
        proxy.clear()


def test_faults_are_seen_by_these_tests(proxy: RegistryProxy) -> None:
    """The control: without the client's care each of these faults would change what is read."""
    import http.client

    def get(path: str, headers: dict[str, str]) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(proxy.address, timeout=5)
        try:
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            try:
                return answer.status, answer.read()
            except http.client.IncompleteRead as exc:
                return answer.status, exc.partial
        finally:
            connection.close()

    path, some = f"/v2/x/blobs/{ITEM.digest}", {"Range": "bytes=100-199"}
    assert get(path, some) == (206, DATA[100:200])
    proxy.add(Fault(no_ranges=True))
    assert get(path, some) == (200, DATA)
    proxy.add(Fault(cut=50))
    assert get(path, some) == (206, DATA[100:150])


class TestProxies:
    def test_plain(self, proxy: RegistryProxy, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HTTP_PROXY", f"http://me:s%40fe@{proxy.address}")
        monkeypatch.setenv("NO_PROXY", "direct.invalid")
        ref = oci.Reference.parse("registry.invalid/x:v1")
        with Registry(ref, plain_http=True, mirrors=()) as registry:
            assert registry.read_range(ITEM, 3, 10) == DATA[3:13]
        (seen,) = proxy.requests("blobs")
        assert seen.line.startswith("GET http://registry.invalid/v2/x/blobs/")
        assert seen.headers["proxy-authorization"] == "Basic bWU6c0BmZQ=="
        with client(proxy.address) as registry:  # this address is local: no proxy
            assert registry.manifest("v1")
        assert proxy.requests("GET /v2/x/manifests/v1")
        with (
            Registry(oci.Reference.parse("direct.invalid/x:v1"), plain_http=True, mirrors=()) as registry,
            pytest.raises(UnavailableError, match="does not answer") as caught,
        ):
            registry.manifest("v1")
        assert "fe@" not in str(caught.value)

    def test_tunnels(self, plain: DockerRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        context = certificate(tmp_path, "DNS:registry.invalid")
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.crt"))
        lines: list[bytes] = []

        def tunnel(listener: socket.socket, target: str) -> None:
            inner, _ = listener.accept()
            head = b""
            while b"\r\n\r\n" not in head:
                head += inner.recv(4096)
            lines.extend(head.split(b"\r\n"))
            inner.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            host, _, port = target.partition(":")
            with inner, socket.create_connection((host, int(port)), timeout=20) as outer:
                ends = [threading.Thread(target=pipe, args=pair) for pair in ((inner, outer), (outer, inner))]
                for end in ends:
                    end.start()
                for end in ends:
                    end.join()

        def pipe(source: socket.socket, sink: socket.socket) -> None:
            try:
                while data := source.recv(65536):
                    sink.sendall(data)
                sink.shutdown(socket.SHUT_WR)
            except OSError:
                return

        with RegistryProxy(plain.address, tls=context) as server, socket.create_server(("127.0.0.1", 0)) as listener:
            thread = threading.Thread(target=tunnel, args=(listener, server.address))
            thread.start()
            monkeypatch.setenv("HTTPS_PROXY", f"http://me:pw@127.0.0.1:{listener.getsockname()[1]}")
            with Registry(oci.Reference.parse("registry.invalid/x:v1"), mirrors=()) as registry:
                assert registry.manifest("v1")
                assert b"".join(registry.blob(ITEM)) == DATA
                assert registry._transport.idle == 1
            thread.join(10)
        assert lines[0].startswith(b"CONNECT registry.invalid:443")
        assert b"Proxy-Authorization: Basic bWU6cHc=" in lines
        assert "proxy-authorization" not in server.seen[0].headers
