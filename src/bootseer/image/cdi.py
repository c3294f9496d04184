"""Devices by the Container Device Interface (CDI, up to 1.0): what a vendor's device needs in a container.

Vendors describe their devices in files of ``/etc/cdi`` and ``/var/run/cdi``, as ``nvidia-ctk cdi generate`` does for
GPUs and the libraries of their driver. A device is named ``vendor.com/class=name``; its edits and those of its file are
merged into the OCI runtime configuration. Files are JSON, or YAML where PyYAML is installed."""

from __future__ import annotations

import logging
import os
import re
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from bootseer.errors import BootseerError, ConfigError, NotFoundError, PrivilegeError, doing
from bootseer.wiretypes import document_and_owner, json_as, yaml_as

log = logging.getLogger(__name__)

FOLDERS = (Path("/etc/cdi"), Path("/var/run/cdi"))
"""What a later one says of a device goes before what an earlier one says."""
_VISIBLE = "CUDA_VISIBLE_DEVICES"


class _Record(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """What is not known is not left out: the device would not work, or not as it should."""


class DeviceNode(_Record, frozen=True, kw_only=True):
    """A device node at ``path`` in the container, made like ``host_path`` (default: ``path``) of this host."""

    path: str
    host_path: str = ""
    type: Literal["", "b", "c", "u"] = ""
    major: int = 0
    minor: int = 0
    file_mode: int | None = None
    permissions: str = ""
    uid: int | None = None
    gid: int | None = None


class Mount(_Record, frozen=True, kw_only=True):
    """A file or folder of this host in the container."""

    host_path: str
    container_path: str
    type: Literal["", "bind"] = ""
    options: list[str] = []


class Hook(_Record, frozen=True, kw_only=True):
    """A program of this host that the runtime calls."""

    hook_name: Literal["prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop"]
    path: str
    args: list[str] = []
    env: list[str] = []
    timeout: int | None = None


class Edits(_Record, frozen=True, kw_only=True):
    """``containerEdits``. Nothing is made of ``intelRdt`` and ``netDevices``: a device that has them is refused."""

    env: list[str] = []
    device_nodes: list[DeviceNode] = []
    mounts: list[Mount] = []
    hooks: list[Hook] = []
    additional_gids: list[int] = []


class Device(_Record, frozen=True, kw_only=True):
    """One device of a file."""

    name: str
    container_edits: Edits
    annotations: dict[str, str] = {}


class Spec(_Record, frozen=True, kw_only=True):
    """A file."""

    cdi_version: str
    kind: str
    devices: list[Device]
    container_edits: Edits = Edits()
    annotations: dict[str, str] = {}


class Selection(msgspec.Struct, frozen=True):
    """What chosen devices need in a container."""

    edits: list[Edits]
    gpus: int | None
    """How many GPUs were chosen; None: nothing was said of GPUs."""

    def apply(self, document: dict[str, Any]) -> None:
        """Merge it into ``document``, the content of a ``config.json``. Raises `NotFoundError`."""
        process, linux, mounts = document["process"], document["linux"], document["mounts"]
        environ = dict(item.partition("=")[::2] for item in process["env"])
        nodes: dict[str, dict[str, Any]] = {}
        more: dict[str, dict[str, Any]] = {}
        for edit in self.edits:
            environ.update(item.partition("=")[::2] for item in edit.env)
            for node in edit.device_nodes:
                nodes[node.path], rule = _node(node)
                linux["resources"]["devices"].append(rule)
            for mount in edit.mounts:
                more[mount.container_path] = {
                    "destination": mount.container_path,
                    "type": "bind",
                    "source": mount.host_path,
                    "options": mount.options if {"bind", "rbind"} & {*mount.options} else ["bind", *mount.options],
                }
            for hook in edit.hooks:
                entry = {"path": hook.path, "args": hook.args, "env": hook.env, "timeout": hook.timeout}
                hooks = document.setdefault("hooks", {}).setdefault(hook.hook_name, [])
                hooks.append({key: value for key, value in entry.items() if value})
            if edit.additional_gids:
                user = process["user"]
                user["additionalGids"] = sorted({*user.get("additionalGids", ()), *edit.additional_gids})
        process["env"] = [f"{key}={value}" for key, value in environ.items()]
        linux["devices"] = list(nodes.values())
        mounts[:] = [mount for mount in mounts if mount["destination"] not in more]
        mounts += sorted(more.values(), key=lambda mount: mount["destination"].count("/"))


def select(
    gpus: Literal["all"] | Sequence[str] | None,
    devices: Sequence[str] = (),
    *,
    environ: Mapping[str, str] | None = None,
    folders: Sequence[Path] = FOLDERS,
) -> Selection | None:
    """What ``devices`` (``vendor.com/class=name``) and ``gpus`` need; None where none are wanted.

    ``gpus``: names of the class ``gpu``, with or without the vendor, or ``all`` that the cgroup of this process and
    ``CUDA_VISIBLE_DEVICES`` in ``environ`` allow. The numbers in that variable count what the cgroup allows, and in the
    container what is in it. Raises `NotFoundError` for a device that nobody describes, `PrivilegeError` for one that
    may not be used, `ConfigError` for a name that several vendors have."""
    if gpus is None and not devices:
        return None
    known = _Known(folders)
    chosen, edits, count = list(devices), [], None
    if gpus is not None:
        visible = (os.environ if environ is None else environ).get(_VISIBLE)
        found, visible = known.all_gpus(visible) if gpus == "all" else known.named_gpus(gpus, visible)
        chosen += found
        count = len(set(found))
        edits = [Edits(env=[f"{_VISIBLE}={visible}"])] if visible is not None else []
    for name in dict.fromkeys(chosen):
        spec, device = known.find(name)
        for edit in (spec.container_edits, device.container_edits):
            if edit not in edits:
                edits.append(edit)
        for node in (*spec.container_edits.device_nodes, *device.container_edits.device_nodes):
            if not _usable(node):
                raise PrivilegeError(
                    f"cannot use device {name}: {node.host_path or node.path} is missing, or this job may not use it",
                    hint="ask the scheduler for it",
                )
    for problem in known.problems:
        log.warning("%s; it is passed over", problem)
    return Selection(edits, count)


class _Known:
    """The devices that are described in ``folders``."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._where = " or ".join(map(str, folders))
        self.problems: list[str] = []
        """Of files that were passed over."""
        self._devices: dict[str, tuple[Spec, Device]] = {}
        for folder in folders:
            for path in sorted(path for path in folder.glob("*") if path.suffix in (".json", ".yaml", ".yml")):
                try:
                    spec = _read(path)
                except BootseerError as exc:
                    self.problems.append(str(exc))
                else:
                    self._devices.update({f"{spec.kind}={device.name}": (spec, device) for device in spec.devices})

    def find(self, name: str) -> tuple[Spec, Device]:
        if name not in self._devices:
            raise self._unknown(f"no device {name}")
        return self._devices[name]

    def _unknown(self, what: str) -> NotFoundError:
        seen = "; ".join(self.problems) or f"there are {', '.join(sorted(self._devices)[:8]) or 'none'}"
        hint = "for NVIDIA: nvidia-ctk cdi generate --format=json --output=/etc/cdi/nvidia.json"
        return NotFoundError(f"{what} is described in {self._where} ({seen})", hint=hint)

    def _gpus(self) -> list[str]:
        every = [name for name in self._devices if name.partition("=")[0].endswith("/gpu")]
        single = [name for name in every if not name.endswith("=all")]
        return sorted(single or every, key=self._order)

    def _order(self, name: str) -> tuple[bool, list[int | str]]:
        """As the driver counts GPUs: by the numbers that name them, else, as with UUIDs, by those of their nodes."""
        numbered = name.partition("=")[2][:1].isdecimal()
        nodes = ",".join(node.path for node in self._devices[name][1].container_edits.device_nodes)
        parts = re.split(r"(\d+)", name if numbered else f"{nodes},{name}")
        return not numbered, [int(part) if part.isdecimal() else part for part in parts]

    def named_gpus(self, names: Sequence[str], visible: str | None) -> tuple[list[str], str | None]:
        """Their CDI names, and `_VISIBLE` in the container."""
        found = []
        for name in names:
            meant = [gpu for gpu in self._gpus() if name in (gpu, gpu.partition("=")[2])]
            if not meant:
                raise self._unknown(f"no GPU {name}")
            if len(meant) > 1:
                raise ConfigError(f"GPU {name} may be {' or '.join(meant)}", hint="name it with its vendor")
            found += meant
        return found, self._counted(found) if visible is not None else None

    def all_gpus(self, visible: str | None) -> tuple[list[str], str | None]:
        """The CDI names of those that this process may use, and `_VISIBLE` in the container."""
        there = self._gpus()
        if not there:
            raise self._unknown("no GPU")
        allowed: dict[tuple[str, ...], str] = {}  # a GPU may have several names
        for name in there:
            nodes = self._devices[name][1].container_edits.device_nodes
            if all(map(_usable, nodes)):
                allowed.setdefault(tuple(node.path for node in nodes), name)
        usable = list(allowed.values())
        if not usable:
            raise PrivilegeError(
                f"this job may use none of the GPUs {', '.join(there)}", hint="ask the scheduler for them"
            )
        if visible is None:
            return usable, None
        chosen = []
        for text in visible.replace(" ", "").split(",") if visible else ():
            if not text.lstrip("-").isdecimal():
                log.info("%s=%s names no numbers: all GPUs that may be used are in the container", _VISIBLE, visible)
                return usable, visible
            if not 0 <= int(text) < len(usable):
                break  # as CUDA does
            chosen.append(usable[int(text)])
        return chosen, self._counted(chosen)

    def _counted(self, chosen: Sequence[str]) -> str:
        """`_VISIBLE` that shows ``chosen`` in their order in a container that has only these."""
        inside = [name for name in self._gpus() if name in chosen]
        return ",".join(str(inside.index(name)) for name in chosen)


def _read(path: Path) -> Spec:
    """Raises `ConfigError`: hooks in it run as root, so that it has to be root's; `NotFoundError`."""
    with doing(f"read {path}"):
        text, found = document_and_owner(path)
    if found.st_uid != 0 or found.st_mode & 0o022:
        raise ConfigError(f"{path} can be changed by others than root", hint="chown root, chmod go-w")
    try:
        return json_as(text, Spec) if path.suffix == ".json" else yaml_as(text, Spec)
    except ImportError:
        raise ConfigError(f"{path} is YAML, for which PyYAML is missing", hint="pip install pyyaml") from None
    except ValueError as exc:
        raise ConfigError(f"{path} is no description of devices that is understood: {exc}") from None


def _usable(node: DeviceNode) -> bool:
    """access(2) asks the cgroup, too, and does not wake the device up as open(2) would."""
    return os.access(node.host_path or node.path, os.R_OK | os.W_OK)


def device_number(found: os.stat_result) -> dict[str, Any]:
    """Type and number of a device, as a runtime configuration has them; empty for other files."""
    if not (stat.S_ISCHR(found.st_mode) or stat.S_ISBLK(found.st_mode)):
        return {}
    kind = "c" if stat.S_ISCHR(found.st_mode) else "b"
    return {"type": kind, "major": os.major(found.st_rdev), "minor": os.minor(found.st_rdev)}


def _node(node: DeviceNode) -> tuple[dict[str, Any], dict[str, Any]]:
    """The device of the runtime configuration, and the rule that allows its use. Nobody may make nodes of it."""
    source = node.host_path or node.path
    with doing(f"use device {source}"):
        found = os.stat(source)
    if not (number := device_number(found)):
        raise ConfigError(f"{source} is no device")
    attributes = {"fileMode": node.file_mode, "uid": node.uid, "gid": node.gid}
    given = {key: value for key, value in attributes.items() if value is not None}
    shown = {"path": node.path, **number, "fileMode": stat.S_IMODE(found.st_mode), "uid": found.st_uid,
             "gid": found.st_gid, **given}  # fmt: skip
    access = "".join(letter for letter in node.permissions or "rw" if letter in "rw")
    return shown, {"allow": True, **number, "access": access}
