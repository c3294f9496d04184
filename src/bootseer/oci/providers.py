"""The kubelet's image credential providers: programs that have logins of registries, good for some hours (kubelet
configuration v1, credential provider API v1). Here they are asked whenever a login is wanted, and nothing is kept: who
asks uses the answer for as long as the registry takes it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from bootseer.errors import ConfigError, UnavailableError
from bootseer.folders import trusted_file
from bootseer.oci import programs
from bootseer.wiretypes import document_and_owner, json_as, yaml_as

log = logging.getLogger(__name__)

DEADLINE = 60.0
"""Seconds for an answer, as the kubelet has it."""
_SUFFIXES = (".json", ".yaml", ".yml")


class _Variable(msgspec.Struct, frozen=True):
    name: str
    value: str = ""


class _Provider(msgspec.Struct, frozen=True, rename="camel"):
    name: str
    match_images: list[str]
    api_version: str
    args: list[str] | None = None
    env: list[_Variable] | None = None
    token_attributes: Any = None


class _Providers(msgspec.Struct, frozen=True):
    """A ``CredentialProviderConfig``."""

    providers: list[_Provider]


class _Answer(msgspec.Struct, frozen=True, rename="camel"):
    kind: str
    api_version: str
    auth: msgspec.Raw = msgspec.Raw(b"null")


def is_in(pattern: str, registry: str, name: str) -> bool:
    """Whether the repository ``name`` at ``registry`` is in ``HOST[:PORT][/PATH]``, of whose host ``*`` stands for
    anything in a part: so the kubelet, its providers and secrets of pods name registries."""
    host, _, path = pattern.partition("/")
    if host.rpartition(":")[2].isdecimal() != registry.rpartition(":")[2].isdecimal():
        return False  # `*` stands for no port
    above = path.split("/") if path else []
    if name.split("/")[: len(above)] != above:
        return False
    wanted, has = host.split("."), registry.split(".")
    return host == registry or (len(has) == len(wanted) and all(map(_fits, wanted, has)))


def _fits(pattern: str, part: str) -> bool:
    """A pod may send any number of any patterns: none is compiled, as `fnmatch` does."""
    first, *rest = pattern.split("*")
    if not rest or not part.startswith(first):
        return part == pattern
    at = len(first)
    for piece in rest[:-1]:
        if (found := part.find(piece, at)) < 0:
            return False
        at = found + len(piece)
    return len(part) - at >= len(rest[-1]) and part.endswith(rest[-1])


def fitting(setting: str, registry: str, name: str) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """Of each provider that `Config.credential_providers` names and that is for this repository, what to call it and
    who asks it for its logins: a JSON object like ``auths`` of docker's config.json, empty for none. Raises
    `ConfigError`; who asks, `UnavailableError` for a provider that fails, `ConfigError` for one, or a file of them,
    that is set up wrongly."""
    if not setting:
        return
    file, colon, folder = setting.partition(":")
    if not colon or not os.path.isabs(folder):
        raise ConfigError(f"credential_providers = {setting!r} names no whole folder", hint="write /FILE:/FOLDER")
    for path in _files(Path(file)):
        try:
            found = _read(path)
        except ConfigError as exc:  # the other files may have a login
            yield str(path), partial(_refuse, exc)
            continue
        for one in found:
            if not any(is_in(pattern, registry, name) for pattern in one.match_images):
                continue
            if one.token_attributes is not None:
                log.warning("credential provider %s wants the token of a pod, and is not asked", one.name)
            else:
                yield f"credential provider {one.name}", partial(_ask, Path(folder), one, f"{registry}/{name}")


def _refuse(exc: ConfigError) -> bytes:
    raise exc


def _files(path: Path) -> list[Path]:
    found: list[Path] = []
    with _understood(path):
        found = sorted(one for one in path.iterdir() if one.suffix in _SUFFIXES) if path.is_dir() else [path]
    return found


def _read(path: Path) -> list[_Provider]:
    """Programs run as the file says, so that nobody else may change it."""
    found: list[_Provider] = []
    with _understood(path):
        text, owner = document_and_owner(path)
        if owner.st_uid not in (0, os.geteuid()) or owner.st_mode & 0o022:
            raise ConfigError(f"{path} can be changed by others than root", hint="chown root, chmod go-w")
        found = (json_as(text, _Providers) if path.suffix == ".json" else yaml_as(text, _Providers)).providers
    return found


@contextlib.contextmanager
def _understood(path: Path) -> Iterator[None]:
    try:
        yield
    except ImportError:
        raise ConfigError(f"{path} is YAML, for which PyYAML is missing", hint="pip install pyyaml") from None
    except PermissionError:  # for root and the kubelet alone
        log.warning("the kubelet's credential providers in %s are not asked: this user cannot read them", path)
    except (OSError, ValueError) as exc:
        why = exc.strerror if isinstance(exc, OSError) else " ".join(str(exc).split())
        raise ConfigError(
            f"the kubelet's credential providers in {path} are not understood: {why}",
            hint="credential_providers in the settings names them",
        ) from None


def _ask(folder: Path, one: _Provider, image: str) -> bytes:
    what = f"credential provider {one.name}"
    if "/" in one.name or one.name in ("", ".", ".."):
        raise ConfigError(f"{what!r} is no name of a program")
    request = {"kind": "CredentialProviderRequest", "apiVersion": one.api_version, "image": image}
    environ = os.environ | {item.name: item.value for item in one.env or ()}
    program = folder / one.name
    if os.path.exists(program):
        trusted_file(program)
    argv = [str(program), *(one.args or ())]
    code, answer, _ = programs.ask(what, argv, json.dumps(request).encode(), DEADLINE, environ)
    if code != 0:
        raise UnavailableError(f"{what} failed for {image}: exit code {code}")
    try:
        found = json_as(answer, _Answer)
        if (found.kind, found.api_version) != ("CredentialProviderResponse", one.api_version):
            raise ValueError
    except ValueError:
        raise UnavailableError(f"{what} answered something else than logins") from None
    auth = bytes(found.auth)
    return b"" if auth == b"null" else auth
