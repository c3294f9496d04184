"""What the configuration of containerd has to say, and what a given one lacks."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bootseer.errors import ConfigError
from bootseer.wiretypes import loaded

_CRI = "io.containerd.grpc.v1.cri"
_IMAGES = "io.containerd.cri.v1.images"
_TRANSFER = "io.containerd.transfer.v1.local"

_FORM_2 = """\
# For containerd 1.6 and 1.7: add this to /etc/containerd/config.toml, then restart containerd.
version = 2

[proxy_plugins.bootseer]
  type = "snapshot"
  address = "{socket}"

[plugins."io.containerd.grpc.v1.cri".containerd]
  snapshotter = "bootseer"
  disable_snapshot_annotations = false   # else pulls do not say of which image a layer is, and nothing is lazy
"""
_FORM_3 = """\
# For containerd 2: add this to /etc/containerd/config.toml, then restart containerd.
version = 3

[proxy_plugins.bootseer]
  type = "snapshot"
  address = "{socket}"
  capabilities = ["only-remap-ids"]   # pods with user namespaces are refused, instead of copied file by file
  [proxy_plugins.bootseer.exports]
    root = "{root}"
    enable_remote_snapshot_annotations = "true"   # else pulls do not say of which image a layer is

[plugins.'io.containerd.cri.v1.images']
  snapshotter = "bootseer"
  disable_snapshot_annotations = false

# This replaces containerd's own list, which has overlayfs alone.
[[plugins.'io.containerd.transfer.v1.local'.unpack_config]]
  platform = "{platform}"
  snapshotter = "bootseer"
[[plugins.'io.containerd.transfer.v1.local'.unpack_config]]
  platform = "{platform}"
  snapshotter = "overlayfs"
"""


def text(containerd: str, root: Path, socket: Path, platform: str) -> str:
    """The part of a configuration of ``containerd`` (a version such as ``1.6``) for a snapshotter with its state in
    ``root`` that listens at ``socket``. Raises `ConfigError` for a version that is not known."""
    major, _, minor = containerd.partition(".")
    if major == "1" and minor.partition(".")[0] in ("6", "7"):
        return _FORM_2.format(socket=socket)
    if major == "2":
        return _FORM_3.format(socket=socket, root=root, platform=platform)
    raise ConfigError(f"containerd {containerd!r} is not known", hint="it is 1.6, 1.7 or 2")


def missing(content: str, root: Path, socket: Path, platform: str, name: str) -> list[str]:
    """What the configuration ``content`` (of the file ``name``) lacks of what `text` says for the same snapshotter, a
    line each. Raises `ConfigError` when it is no TOML."""
    try:
        document = loaded(tomllib.loads, content)
    except ValueError as exc:
        raise ConfigError(f"{name} is no TOML: {exc}") from None
    version = document.get("version", 1)
    if version not in (2, 3):
        return [f"version is {version!r}: set version = 2 (containerd 1.6, 1.7) or 3 (containerd 2)"]
    images = _images_2(document) if version == 2 else _images_3(document, str(root), platform)
    return [*_missing(document, str(socket)), *images]


def _missing(document: Mapping[str, Any], socket: str) -> Iterator[str]:
    if "cri" in document.get("disabled_plugins", ()) or _CRI in document.get("disabled_plugins", ()):
        yield 'disabled_plugins has "cri", without which no pod runs: take it out of the list'
    plugin = _at(document, "proxy_plugins", "bootseer")
    if plugin is None:
        yield f'[proxy_plugins.bootseer] is missing: add it, with type = "snapshot" and address = "{socket}"'
    else:
        yield from _differs(plugin, "proxy_plugins.bootseer", "type", "snapshot")
        yield from _differs(plugin, "proxy_plugins.bootseer", "address", socket)


def _images_2(document: Mapping[str, Any]) -> Iterator[str]:
    where, section = f'plugins."{_CRI}".containerd', _at(document, "plugins", _CRI, "containerd") or {}
    yield from _differs(section, where, "snapshotter", "bootseer")
    yield from _differs(section, where, "disable_snapshot_annotations", False)


def _images_3(document: Mapping[str, Any], root: str, platform: str) -> Iterator[str]:
    plugin = _at(document, "proxy_plugins", "bootseer")
    if plugin is not None and "only-remap-ids" not in (plugin.get("capabilities") or ()):
        yield '[proxy_plugins.bootseer] has no capability "only-remap-ids": add capabilities = ["only-remap-ids"]'
    exports = _at(document, "proxy_plugins", "bootseer", "exports") or {}
    yield from _differs(exports, "proxy_plugins.bootseer.exports", "root", root)
    yield from _differs(exports, "proxy_plugins.bootseer.exports", "enable_remote_snapshot_annotations", "true")
    where, section = f"plugins.'{_IMAGES}'", _at(document, "plugins", _IMAGES) or {}
    yield from _differs(section, where, "snapshotter", "bootseer")
    yield from _differs(section, where, "disable_snapshot_annotations", False)
    unpack = (_at(document, "plugins", _TRANSFER) or {}).get("unpack_config", [])
    ours = [item for item in unpack if isinstance(item, Mapping) and item.get("snapshotter") == "bootseer"]
    if not any(item.get("platform") == platform for item in ours):
        yield (
            f"[[plugins.'{_TRANSFER}'.unpack_config]] has none with snapshotter = \"bootseer\" and"
            f' platform = "{platform}": add it'
        )


def _differs(section: Mapping[str, Any], where: str, key: str, wanted: str | bool) -> Iterator[str]:
    shown = str(wanted).lower() if isinstance(wanted, bool) else f'"{wanted}"'
    if key not in section:
        yield f"[{where}] has no {key}: add {key} = {shown}"
    elif section[key] != wanted:
        yield f"[{where}] has {key} = {section[key]!r}: set {key} = {shown}"


def _at(document: Mapping[str, Any], *names: str) -> Mapping[str, Any] | None:
    found: Any = document
    for name in names:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else None
