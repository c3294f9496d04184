"""``hosts.toml`` of containerd: by which hosts a registry is asked, and how. Read are ``server``, and of it and of each
``[host."URL"]`` ``capabilities`` (``resolve``, ``pull``), ``ca``, ``client``, ``skip_verify``, ``override_path``,
``header`` and ``dial_timeout``. Anything else (``proxy``) is not: the log names it."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import msgspec

from bootseer.errors import ConfigError
from bootseer.oci.reference import is_host
from bootseer.wiretypes import document, known, loaded

log = logging.getLogger(__name__)

FOLDERS = (Path("/etc/containerd/certs.d"), Path("/etc/docker/certs.d"))
"""As containerd 2 has it when its settings do not say."""
T = TypeVar("T")
_USUAL = {"docker.io": "registry-1.docker.io"}
_MOST = 1 << 20
_TOP = ("server", "host")
_TLS = ("ca", "client", "skip_verify")
_ABLE = ("resolve", "pull", "push")
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(\d{1,9}(?:\.\d{0,9})?)(ns|us|µs|ms|s|m|h)", re.ASCII)
_LONGEST_DIAL = 180.0
_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_OF_REQUESTS = ("host", "content-length", "transfer-encoding", "trailer")
"""Headers that requests have of their own, whatever is said."""


class Host(msgspec.Struct, frozen=True):
    """Where a registry is asked. ``path`` is what repositories are below."""

    plain: bool | None
    """Without TLS; None: as it is asked where nothing is said."""
    name: str
    """``host`` or ``host:port``."""
    path: str = "/v2"
    resolves: bool = True
    """It may be asked for tags,"""
    pulls: bool = True
    """and for digests."""
    ca: tuple[str, ...] = ()
    skip_verify: bool = False
    client: tuple[tuple[str, str], ...] = ()
    """Files of certificates that show who we are, each with that of its key (empty: it holds both)."""
    header: tuple[tuple[str, str], ...] = ()
    """What requests to it have beside their own; may be secret."""
    dial_timeout: float = 0.0
    """Seconds to connect; 0: as usual."""

    def __repr__(self) -> str:
        return f"<Host {self.name}{self.path}>"


class Hosts(NamedTuple):
    """The mirrors of a registry in their order, and where it is itself (None: where its name says)."""

    mirrors: tuple[Host, ...] = ()
    server: Host | None = None


class _Entry(msgspec.Struct, frozen=True):
    capabilities: list[str] = []
    ca: str | list[str] = []
    client: str | list[str | list[str]] = []
    skip_verify: bool = False
    override_path: bool = False
    header: dict[str, str | list[str]] = {}
    dial_timeout: str = ""


def usual(registry: str) -> str:
    """The host at which ``registry`` answers, where nothing else is said."""
    return _USUAL.get(registry, registry)


def folders(base: Path, registry: str) -> list[Path]:
    """Where below ``base`` something may be said of ``registry``: first the name of containerd."""
    host, colon, port = registry.rpartition(":")
    return [base / name for name in (*([f"{host}_{port}_"] if colon else []), registry)]


def find(registry: str) -> Hosts:
    """What this machine says of ``registry``, else of ``_default``: the first folder that is there counts, also when it
    has certificates alone (`connect.context_for`). Raises `ConfigError` for what is no such file."""
    for base in FOLDERS:
        for folder in (*folders(base, registry), base / "_default"):
            path = folder / "hosts.toml"
            try:
                text = document(path)
            except (FileNotFoundError, NotADirectoryError):
                if folder.is_dir():
                    return Hosts()
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
        server = None
        if (url := found.get("server", "")) or rest:
            server = _host(url or registry, rest, path)
        if server and not url and rest.keys().isdisjoint(_TLS):
            server = msgspec.structs.replace(server, plain=None)
    except ValueError as exc:
        why = " ".join(str(exc).split())
        raise ConfigError(f"{path} is not understood: {why}", hint="containerd's hosts.md says what is in it") from None
    place = (server.name, server.path) if server else (usual(registry), "/v2")
    own = next((one for one in hosts if (one.name, one.path) == place), server)  # it is asked before
    if own and server and (own.plain, server.plain) == (True, False):
        log.warning("%s: %s is asked without TLS, as its host says, and not as its server", path, own.name)
    server = own
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
    able = [one.lower() for one in said.capabilities] or _ABLE
    if unknown := set(able) - set(_ABLE):
        raise ValueError(f"{min(unknown)!r} is no capability")
    pairs = [[one, ""] if isinstance(one, str) else one for one in _several(said.client)]
    if any(len(pair) != 2 for pair in pairs):
        raise ValueError("client has what is no pair of a certificate and its key")
    return Host(
        plain=parts.scheme == "http",
        name=usual(parts.netloc),
        path=below,
        resolves="resolve" in able,
        pulls="pull" in able,
        ca=tuple(str(path.parent / one) for one in _several(said.ca)),
        skip_verify=said.skip_verify,
        client=tuple((str(path.parent / cert), str(path.parent / key) if key else "") for cert, key in pairs),
        header=_header(said.header),
        dial_timeout=_seconds(said.dial_timeout),
    )


def _several(said: str | list[T]) -> list[str | T]:
    return [said] if isinstance(said, str) else [*said]


def _header(said: Mapping[str, str | list[str]]) -> tuple[tuple[str, str], ...]:
    for name, value in said.items():
        if not _NAME.fullmatch(name) or not all(one.isprintable() and one.isascii() for one in _several(value)):
            raise ValueError(f"header {name!r} is none of HTTP")
    kept = (name for name in said if name.lower() not in _OF_REQUESTS)
    return tuple((name, ", ".join(_several(said[name]))) for name in kept)


def _seconds(text: str) -> float:
    """Of ``1m30s``, as Go writes a time."""
    parts = _DURATION.findall(text)
    if "".join(map("".join, parts)) != text != "0":
        raise ValueError(f"{text!r} is no time, such as 1s or 500ms")
    return min(sum(float(number) * _UNITS[unit] for number, unit in parts), _LONGEST_DIAL)
