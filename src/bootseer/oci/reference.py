"""Names of images: ``HOST[:PORT]/NAME[:TAG][@DIGEST]``, ``oci:DIR[:NAME]``, ``docker-archive:FILE[:NAME]`` and
``oci-archive:FILE[:NAME]``."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Container
from pathlib import Path

import msgspec

from bootseer.errors import ConfigError
from bootseer.profile.emit import redact

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}\Z")
_ALGORITHM = re.compile(r"(?:sha[0-9]+|blake3):")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}\Z")
_NAME = re.compile(r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*)*\Z")
_SAVED = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:/-]*\Z")
_HOST = re.compile(r"(?:[A-Za-z0-9.-]+|\[[0-9a-fA-F:.]+\])(?::[0-9]{1,5})?\Z")
_HUB = "docker.io"
_FILES = ("oci:", "docker-archive:", "oci-archive:")
_SCHEME = re.compile(r"\w+://|(?:docker-daemon|containers-storage):|dir:/", re.ASCII)
"""What other tools put before the name of an image; without this it would be a name at docker.io."""
_TAR = re.compile(r"\.(?:tar(?:\.(?:gz|zst|xz|bz2))?|tgz)\Z")
_FORM = (
    "write HOST[:PORT]/NAME[:TAG|@sha256:...], oci:DIR[:NAME], docker-archive:FILE[:NAME] or oci-archive:FILE[:NAME];"
    " DIR and FILE have no colon"
)


class Reference(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed name. Exactly one of ``layout``, ``archive`` and ``registry`` + ``name`` is set."""

    registry: str = ""
    """``host`` or ``host:port``."""
    name: str = ""
    layout: str = ""
    """Absolute path of an OCI layout folder."""
    archive: str = ""
    """Absolute path of a file that ``docker save`` or ``podman save`` wrote, or of a layout in a tar file."""
    is_oci_archive: bool = False
    """Whether its layout counts where ``archive`` is both."""
    tag: str = ""
    """In a layout or archive also a whole name, such as ``team/torch:2.6``."""
    digest: str = ""
    """``sha256:...`` or empty; wins over the tag."""

    @classmethod
    def parse(cls, text: str) -> Reference:
        """Parse ``text``, without a look at any file; `ConfigError` when it is no reference. A registry reference
        without tag means ``latest``, and one without a registry ``docker.io``, with ``library/`` before a single name:
        as everywhere else."""
        body, digest, text = text, "", redact("", text)  # which is told, perhaps in the log of a node
        if "@" in body:
            body, _, digest = body.rpartition("@")
            if ("/" in digest or "@" in body) and not body.startswith(_FILES):
                raise ConfigError("an image reference has no login in it", hint="write HOST/NAME, and docker login")
            if not _DIGEST.match(digest):
                raise ConfigError(f"bad digest in image reference {text!r}", hint="it is sha256: and 64 hex digits")
        if (kind := next(filter(body.startswith, _FILES), "")) != "":
            path, colon, tag = body.removeprefix(kind).partition(":")  # whatever files there are
            if not path or (colon and not _SAVED.match(tag)):
                raise ConfigError(f"bad image reference {text!r}", hint=_FORM)
            path = str(Path(path).absolute())
            if kind == "oci:":
                return cls(layout=path, tag=tag, digest=digest)
            return cls(archive=path, is_oci_archive=kind == "oci-archive:", tag=tag, digest=digest)
        body = body.removeprefix("docker://")
        if _ALGORITHM.match(body):  # at docker.io it would be a name with a tag
            hint = "write NAME@sha256:... with all 64 digits; for what is converted, 6 digits do to look at it"
            raise ConfigError(f"{text!r} is a digest, and no image's name", hint=hint)
        if (scheme := _SCHEME.match(body)) is not None:
            raise ConfigError(f"bad image reference {text!r}: {scheme[0]} is not known", hint=_FORM)
        if body.startswith(("/", "./", "../")) or (_TAR.search(body) and "/" not in body):
            raise ConfigError(
                f"{text!r} is a path, not an image's name",
                hint=f"docker-archive:{body} for what docker save wrote, oci-archive:{body}, oci:{body} for a folder",
            )
        host, sep, rest = body.partition("/")
        if host == "index.docker.io":  # an older name of the same
            host = _HUB
        if not sep or not _HOST.match(host) or not ("." in host or ":" in host or host == "localhost"):
            host, rest = _HUB, body
        if host == _HUB and "/" not in rest:
            rest = f"library/{rest}"
        name, colon, tag = rest.partition(":")
        if not _NAME.match(name) or (colon and not _TAG.match(tag)):
            raise ConfigError(f"bad image reference {text!r}", hint=_FORM)
        return cls(registry=host, name=name, tag=tag or ("" if digest else "latest"), digest=digest)

    @property
    def host(self) -> str:
        """The registry's host without its port and brackets."""
        if self.registry.startswith("["):
            return self.registry[1:].partition("]")[0]
        return self.registry.partition(":")[0]

    def plain_http(self, named: Container[str]) -> bool:
        """Whether its registry is asked without TLS: at loopback, and when it is one of those ``named`` (settings)."""
        return is_loopback(self.host) or self.registry in named

    @property
    def selector(self) -> str:
        """What to ask a registry for: the digest, else the tag."""
        return self.digest or self.tag

    def __str__(self) -> str:
        base = f"{self.registry}/{self.name}"
        if self.layout or self.archive:
            scheme = "oci" if self.layout else "oci-archive" if self.is_oci_archive else "docker-archive"
            base = f"{scheme}:{self.layout or self.archive}"
        base += f":{self.tag}" if self.tag else ""
        return base + (f"@{self.digest}" if self.digest else "")


def in_files(text: str) -> bool:
    """Whether ``text`` names an image in a layout or archive."""
    return text.startswith(_FILES)


def is_host(text: str) -> bool:
    """Whether ``text`` is ``host`` or ``host:port``."""
    return bool(_HOST.match(text))


def is_loopback(host: str) -> bool:
    """Whether ``host`` is ``localhost`` or a loopback address (never a name to look up)."""
    return host == "localhost" or ((address := _address(host)) is not None and address.is_loopback)


def is_local(host: str) -> bool:
    """Whether ``host`` is ``localhost`` or a loopback, private or link-local address (never a name to look up)."""
    address = _address(host)
    return is_loopback(host) or (address is not None and (address.is_private or address.is_link_local))


def is_own(host: str) -> bool:
    """Whether ``host`` is an address by which a machine reaches itself or its neighbours on the link alone: loopback,
    link-local, or none at all (never a name to look up)."""
    address = _address(host.partition("%")[0])
    address = getattr(address, "ipv4_mapped", None) or address
    return address is not None and (address.is_loopback or address.is_link_local or address.is_unspecified)


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
