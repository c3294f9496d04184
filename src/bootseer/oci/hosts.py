"""``hosts.toml`` of containerd: by which hosts a registry is asked, and how. Read are ``server``, and of it and of each
``[host."URL"]`` ``capabilities`` (``resolve``, ``pull``), ``ca``, ``skip_verify`` and ``override_path``. Anything else
(``client``, ``header``, timeouts) is not: the log names it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from bootseer.errors import ConfigError
from bootseer.oci.reference import is_host
from bootseer.wiretypes import known, loaded

log = logging.getLogger(__name__)

FOLDERS = (Path("/etc/containerd/certs.d"), Path("/etc/docker/certs.d"))
"""As containerd 2 has it when its settings do not say."""
_MOST = 1 << 20
_TOP = ("server", "host")


class Host(msgspec.Struct, frozen=True):
    """Where a registry is asked. ``path`` is what repositories are below."""

    plain: bool
    name: str
    """``host`` or ``host:port``."""
    path: str = "/v2"
    resolves: bool = True
    """It may be asked for tags,"""
    pulls: bool = True
    """and for digests."""
    ca: tuple[str, ...] = ()
    skip_verify: bool = False


class Hosts(NamedTuple):
    """The mirrors of a registry in their order, and where it is itself (None: where its name says)."""

    mirrors: tuple[Host, ...] = ()
    server: Host | None = None


class _Entry(msgspec.Struct, frozen=True):
    capabilities: list[str] | None = None
    ca: str | list[str] = msgspec.field(default_factory=list)
    skip_verify: bool = False
    override_path: bool = False


def find(registry: str) -> Hosts:
    """What this machine says of ``registry``, else of ``_default``. Raises `ConfigError` for what is no such file."""
    host, colon, port = registry.rpartition(":")
    names = [f"{host}_{port}_"] if colon else []
    for folder in FOLDERS:
        for name in (*names, registry, "_default"):
            path = folder / name / "hosts.toml"
            try:
                with open(path, "rb") as file:
                    text = file.read(_MOST + 1)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as exc:
                log.warning("%s is not used: %s", path, exc.strerror)
                continue
            return _read(text, path, registry)
    return Hosts()


def _read(text: bytes, path: Path, registry: str) -> Hosts:
    import tomllib  # most machines have no such file

    try:
        if len(text) > _MOST:
            raise ValueError(f"it has more than {_MOST} bytes")
        found = loaded(tomllib.loads, text.decode())
        rest = {key: value for key, value in found.items() if key not in _TOP}
        named = found.get("host", {})
        if not isinstance(named, dict) or not all(isinstance(one, dict) for one in named.values()):
            raise ValueError("host is no table of tables")
        hosts = [_host(url, entry, path) for url, entry in named.items()]
        server = _host(url, rest, path) if (url := found.get("server", "")) else None
    except ValueError as exc:
        why = " ".join(str(exc).split())
        raise ConfigError(f"{path} is not understood: {why}", hint="containerd's hosts.md says what is in it") from None
    if server is None:
        server = next((one for one in hosts if one.name == registry), None)
    mirrors = [one for one in hosts if server is None or (one.name, one.path) != (server.name, server.path)]
    return Hosts(tuple(mirrors), server)


def _host(url: object, entry: Mapping[str, Any], path: Path) -> Host:
    if not isinstance(url, str):
        raise ValueError("a server is no text")
    parts = urlsplit(url if "://" in url else f"https://{url}")
    if parts.scheme not in ("http", "https") or not is_host(parts.netloc):
        shown = "a URL with a login" if "@" in url else repr(url)
        raise ValueError(f"{shown} is no http[s]://HOST[:PORT][/PATH]")
    said = msgspec.convert(dict(entry), known(_Entry))
    if unused := entry.keys() - set(_Entry.__struct_fields__):
        log.warning("%s: %s of %s is not used", path, ", ".join(sorted(unused)), parts.netloc)
    if said.skip_verify:
        log.warning("%s: the certificate of %s is not verified", path, parts.netloc)
    below = parts.path.rstrip("/")
    if not said.override_path and not below.endswith("/v2"):
        below += "/v2"
    able = said.capabilities
    return Host(
        plain=parts.scheme == "http",
        name=parts.netloc,
        path=below,
        resolves=able is None or "resolve" in able,
        pulls=able is None or "pull" in able,
        ca=tuple(str(path.parent / one) for one in ([said.ca] if isinstance(said.ca, str) else said.ca)),
        skip_verify=said.skip_verify,
    )
