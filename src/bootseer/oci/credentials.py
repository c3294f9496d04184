"""Logins that docker, podman and their credential helpers keep on this machine.

Files, first hit wins: ``$REGISTRY_AUTH_FILE``; ``$DOCKER_CONFIG/config.json``; ``~/.docker/config.json``;
``containers/auth.json`` in ``$XDG_RUNTIME_DIR`` (without one ``/run/containers/UID/auth.json``) and in
``$XDG_CONFIG_HOME`` (docker's config.json, containers-auth.json(5)). Inside a file a helper named for the registry
(``credHelpers``) goes before ``auths``, and ``credsStore`` is asked last; after all files the kubelet's `providers`.
Nothing is kept in memory longer than a request for a token needs it, and nothing of it is ever logged."""

from __future__ import annotations

import base64
import binascii
import contextlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from bootseer import config as settings
from bootseer.errors import BootseerError, ConfigError, UnavailableError, UnsupportedError
from bootseer.oci import programs, providers
from bootseer.oci.providers import is_in
from bootseer.wiretypes import document, json_as, loaded

log = logging.getLogger(__name__)

HELPER_DEADLINE = 30.0
_DOCKER_HUB = ("docker.io", "index.docker.io", "registry-1.docker.io")
_TOKEN_USER = "<token>"
_MISSING = "credentials not found"


class Credential(msgspec.Struct, frozen=True, kw_only=True):
    """A login: a name and password, or an identity token to trade for access tokens. Its repr shows neither."""

    username: str = ""
    password: str = ""
    identity_token: str = ""
    place: str = ""
    """Where it was found, for messages."""

    @property
    def basic(self) -> str:
        """The value of a Basic ``Authorization`` header."""
        return "Basic " + base64.b64encode(f"{self.username}:{self.password}".encode()).decode()

    def __repr__(self) -> str:
        return f"<Credential of {self.place}>"

    __str__ = __repr__


class Login(msgspec.Struct, frozen=True):
    auth: str = ""
    username: str = ""
    password: str = ""
    identitytoken: str = ""

    def __repr__(self) -> str:
        return "<login>"


class Logins(msgspec.Struct, frozen=True):
    """What a file of logins says. Its repr shows none."""

    auths: dict[str, Login] = {}
    cred_helpers: dict[str, str] = msgspec.field(name="credHelpers", default_factory=dict)
    creds_store: str = msgspec.field(name="credsStore", default="")

    def __repr__(self) -> str:
        return "<logins>"


def given(text: str) -> Logins:
    """The logins of a document like docker's config.json, which somebody else sent: without the programs that it names.
    Raises `ConfigError`."""
    try:
        return Logins(auths=json_as(text, Logins).auths)
    except ValueError:
        raise ConfigError("the logins are not JSON like docker's config.json") from None


def find(registry: str, name: str = "", logins: Logins | None = None) -> Credential | None:
    """The login for ``registry`` (``host[:port]``), most specific first when logins name parts of ``name`` too, in
    ``logins`` (None: those of this machine). None when there is none: the registry is then asked anonymously. A file
    that is not understood is passed over with a warning. Raises `UnsupportedError`, `UnavailableError` or `ConfigError`
    when a helper or provider is missing, fails or is set up wrongly, and nothing else has a login."""
    failed: BootseerError | None = None
    for place, found in _of_this_machine(registry, name) if logins is None else [("the given logins", logins)]:
        try:
            if credential := _in(found, place, registry, name):
                return credential
        except BootseerError as exc:
            failed = failed or _passed_over(exc)
    if failed is not None:
        raise failed
    return None


def _in(found: Logins, place: str, registry: str, name: str) -> Credential | None:
    helpers = [found.cred_helpers[key] for key in _fitting(found.cred_helpers, registry, name)]
    if helpers and helpers[0]:  # an empty one: what the file has itself, and not the store
        return _ask(helpers[0], _server(registry))
    for key in _fitting(found.auths, registry, name):
        if credential := _decode(found.auths[key], place):
            return credential
    return _ask(found.creds_store, _server(registry)) if found.creds_store and not helpers else None


def _passed_over(exc: BootseerError) -> BootseerError:
    log.warning("%s; looking for another login", exc.message)
    return exc


def _of_this_machine(registry: str, name: str) -> Iterator[tuple[str, Logins]]:
    for path in _files():
        if (found := read(path)) is not None:
            yield str(path), found
    yield from _of_providers(registry, name)


def _of_providers(registry: str, name: str) -> Iterator[tuple[str, Logins]]:
    """Raises the first error, after the last of them, when some have failed."""
    failed: BootseerError | None = None
    for place, ask in providers.fitting(settings.load().credential_providers, registry, name):
        try:
            found = Logins(auths=json_as(ask() or b"{}", dict[str, Login]))
        except BootseerError as exc:
            failed = failed or _passed_over(exc)
        except ValueError:  # whose message may quote it
            failed = failed or _passed_over(UnavailableError(f"{place} answered something else than logins"))
        else:
            yield place, found
    if failed is not None:
        raise failed


def with_providers(logins: Logins, registry: str, name: str) -> Logins:
    """``logins``, or, where they have none for the repository, those that the kubelet's providers have for all pods of
    this node. Raises as `find`."""
    if find(registry, name, logins) is None:
        for _, found in _of_providers(registry, name):
            if find(registry, name, found):
                return found
    return logins


def _files() -> Iterator[Path]:
    env = os.environ
    if env.get("REGISTRY_AUTH_FILE"):
        yield Path(env["REGISTRY_AUTH_FILE"])
    if env.get("DOCKER_CONFIG"):
        yield Path(env["DOCKER_CONFIG"], "config.json")
    else:
        with contextlib.suppress(RuntimeError):  # no HOME, and a user id without a name: a container's, often
            yield Path.home() / ".docker" / "config.json"
    own = env.get("XDG_RUNTIME_DIR")
    yield Path(own, "containers/auth.json") if own else Path(f"/run/containers/{os.geteuid()}/auth.json")
    with contextlib.suppress(RuntimeError):
        yield Path(env.get("XDG_CONFIG_HOME") or Path.home() / ".config", "containers/auth.json")


def read(path: Path) -> Logins | None:
    try:
        return json_as(document(path), Logins)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as exc:
        # The reason only: a decoder's message may quote what it stumbled over.
        log.warning("ignoring logins in %s: %s", path, exc.strerror if isinstance(exc, OSError) else "no such JSON")
        return None


def _fitting(places: Iterable[str], registry: str, name: str) -> list[str]:
    """Those of ``places`` that the repository is in, the most specific first."""
    plain = {place: _plain(place) for place in places}
    found = [place for place, key in plain.items() if any(is_in(key, host, name) for host in _names(registry))]
    return sorted(found, key=lambda place: (-plain[place].count("/"), "*" in plain[place]))


def _names(registry: str) -> tuple[str, ...]:
    return _DOCKER_HUB if registry in _DOCKER_HUB else (registry,)


def _plain(place: str) -> str:
    """``https://index.docker.io/v1/`` as ``index.docker.io``: how old logins name a registry."""
    return re.sub(r"/v[12]$", "", re.sub(r"^https?://", "", place).rstrip("/"))


def _server(registry: str) -> str:
    return "https://index.docker.io/v1/" if registry in _DOCKER_HUB else registry


def _decode(login: Login, place: str) -> Credential | None:
    if login.identitytoken:
        return Credential(identity_token=login.identitytoken, place=place)
    user, password = login.username, login.password
    if login.auth:
        try:
            text = "".join(login.auth.split()).rstrip(
                "="
            )  # in lines, or without what fills the last one, as some write
            user, _, password = base64.b64decode(text + "=" * (-len(text) % 4), validate=True).decode().partition(":")
        except (binascii.Error, ValueError):
            log.warning("ignoring a login in %s: it is not base64", place)
            return None
    return Credential(username=user, password=password.rstrip("\0"), place=place) if user else None


def _ask(helper: str, server: str) -> Credential | None:
    """Run ``docker-credential-<helper> get`` (docker-credential-helpers' protocol: JSON on standard output)."""
    program = f"docker-credential-{helper}"
    if not re.fullmatch(r"[A-Za-z0-9._-]+", helper):
        raise ConfigError(f"bad name of a credential helper: {helper!r}")
    if not shutil.which(program):
        raise UnsupportedError(
            f"credential helper {program} is not installed", hint=f"install it, or log in to {server} without it"
        )
    what = f"credential helper {program}"
    code, answer, said = programs.ask(what, [program, "get"], server.encode(), HELPER_DEADLINE)
    if code != 0:
        if _MISSING in (answer + said).decode(errors="replace"):
            return None
        raise UnavailableError(f"credential helper {program} failed for {server}: exit code {code}")
    try:
        fields = loaded(json.loads, answer)
        user, secret = str(fields["Username"]), str(fields["Secret"])
    except (ValueError, KeyError, TypeError):
        raise UnavailableError(f"credential helper {program} answered something else than a login") from None
    if user == _TOKEN_USER:
        return Credential(identity_token=secret, place=program)
    return Credential(username=user, password=secret, place=program) if user or secret else None
