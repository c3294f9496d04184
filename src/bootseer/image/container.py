"""The OCI runtime configuration (runtime-spec 1.0) of a container made from an image's configuration."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import posixpath
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bootseer import oci
from bootseer.closing import descriptor
from bootseer.errors import ConfigError, NotFoundError, UnsupportedError
from bootseer.image import seccomp
from bootseer.image.cdi import Selection, device_number
from bootseer.kernel import beneath, libc, procfs

log = logging.getLogger(__name__)

MAX_USERS = 1 << 20
"""Bytes of a file of users or groups in an image."""

CGROUPS = "/sys/fs/cgroup"
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# Root in the container may install packages, change owners, and pin memory for RDMA; it may not mount, load modules, or
# make device nodes: which devices there are is decided outside. But it is root (there is no user namespace): what is
# mounted writable it changes as root, and it is in the network of the host.
# Numbers: linux/capability.h
_CAPABILITIES = {
    "CAP_CHOWN": 0, "CAP_DAC_OVERRIDE": 1, "CAP_FOWNER": 3, "CAP_FSETID": 4, "CAP_KILL": 5, "CAP_SETGID": 6,
    "CAP_SETUID": 7, "CAP_SETPCAP": 8, "CAP_NET_BIND_SERVICE": 10, "CAP_NET_RAW": 13, "CAP_IPC_LOCK": 14,
    "CAP_SYS_CHROOT": 18, "CAP_SYS_PTRACE": 19, "CAP_SYS_NICE": 23, "CAP_AUDIT_WRITE": 29,
    "CAP_SETFCAP": 31,
}  # fmt: skip


_MASKED = ["/proc/acpi", "/proc/asound", "/proc/interrupts", "/proc/kcore", "/proc/keys", "/proc/latency_stats",
           "/proc/sched_debug", "/proc/scsi", "/proc/timer_list", "/proc/timer_stats", "/sys/devices/virtual/powercap",
           "/sys/firmware"]  # fmt: skip
"""What tells of the host, its other users' keys and its power meter; as other runtimes have it."""
_READONLY = ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"]


class Bind(NamedTuple):
    """A folder or file of this host, ``source``, shown at ``target`` in the container."""

    source: str
    target: str
    readonly: bool = False


def command_of(config: oci.ImageConfig, argv: Sequence[str]) -> list[str]:
    """Entry point and arguments: ``argv`` replaces the image's command, as usual; `ConfigError` when both are empty."""
    inner = config.config or oci.ContainerConfig()
    entry = _words(inner.entrypoint)
    args = [*(() if entry == ("",) else entry), *(argv or _words(inner.cmd))]  # [""] is how one is taken away
    if not args or not args[0]:
        raise ConfigError("the image names no command", hint="give one after the image")
    return args


def _words(said: tuple[str, ...] | str | None) -> tuple[str, ...]:
    """A command as an image says it: old ones have a program alone as a string."""
    return (said,) if isinstance(said, str) else said or ()


def folder_of(inner: oci.ContainerConfig, cwd: str) -> str:
    """Where the command begins: in ``cwd``, or in the image's folder, both as seen from the root."""
    return posixpath.join("/", cwd or inner.working_dir)


def spec(
    rootfs: Path,
    config: oci.ImageConfig,
    args: Sequence[str],
    *,
    env: Mapping[str, str],
    mounts: Sequence[Bind],
    cwd: str,
    network: str,
    chosen: Selection | None = None,
    dev: Path = Path("/dev"),
    readonly: bool = False,
    terminal: bool = False,
) -> dict[str, Any]:
    """The content of ``config.json``. ``network``: ``host`` (the caller's namespace) or ``none``. ``readonly``: only
    mounts are written.

    The GPU and RDMA devices in ``dev`` that this process may use are shown in the container; libraries of their drivers
    are not. Where GPUs are ``chosen`` these are shown instead, with what their vendor says that they need. The
    container may use these, device nodes among ``mounts``, and what runtimes allow every container.

    No limits are set: no cgroup limits, no rlimits, no OOM score, so that no further capability is needed."""
    if network not in ("host", "none"):
        raise ConfigError(f"unknown container network {network!r}", hint="host or none")
    for folder in ("dev", "proc", "sys"):
        if (rootfs / folder).is_symlink():  # runc puts links below /dev, and takes its ptmx away, by their names
            raise UnsupportedError(f"cannot run the image: its /{folder} is a link", hint="make it a folder there")
    inner = config.config or oci.ContainerConfig()
    environ = {"PATH": DEFAULT_PATH, **inner.variables, **env}
    namespaces = [{"type": "pid"}, {"type": "mount"}, *([{"type": "network"}] if network == "none" else [])]
    files = [path for path in ("/etc/resolv.conf", "/etc/hosts") if os.path.isfile(path)]
    names = [Bind(os.path.realpath(path), path, readonly=True) for path in files]
    shown = [*devices(dev, gpus=chosen is None or chosen.gpus is None), *mounts]
    (bounding,) = procfs.masks("self", "CapBnd:")
    held = [name for name, bit in _CAPABILITIES.items() if bounding >> bit & 1]
    document: dict[str, Any] = {
        "ociVersion": "1.0.2",
        "process": {
            "terminal": terminal,
            "user": user_of(rootfs, inner.user),
            "args": list(args),
            "env": [f"{key}={value}" for key, value in environ.items()],
            "cwd": folder_of(inner, cwd),
            "capabilities": {kind: held for kind in ("bounding", "effective", "permitted")},
            "noNewPrivileges": False,  # sudo of an image goes on working; what it gives is bounded by the capabilities
        },
        "root": {"path": str(rootfs), "readonly": readonly},
        "mounts": [*_system_mounts(), *map(_bind, [*names, *shown])],
        "linux": {
            "namespaces": namespaces,
            "resources": {"devices": [{"allow": False, "access": "rwm"}, *_device_rules(shown)]},
            "maskedPaths": _MASKED,
            "readonlyPaths": _READONLY,
            "seccomp": seccomp.profile(),
        },
    }
    if terminal:  # the runtime tells the size of ours only after the command has started
        columns, lines = os.get_terminal_size(0)
        document["process"] |= {"consoleSize": {"width": columns, "height": lines}}
    if chosen is not None:
        chosen.apply(document)
    return document


def check_command(document: dict[str, Any]) -> None:
    """Say that the command of a `spec` is missing before a runtime does in its own words. `NotFoundError`. What may be
    mounted, or come from a mounted folder, is not checked."""
    process, root = document["process"], document["root"]["path"]
    name, cwd = process["args"][0], process["cwd"]
    paths = dict(item.partition("=")[::2] for item in process["env"])["PATH"].split(":")
    places = [posixpath.join(cwd, name)] if "/" in name else [posixpath.join(cwd, path, name) for path in paths]
    targets = [mount["destination"].rstrip("/") + "/" for mount in document["mounts"]]

    def mounted(path: str) -> bool:
        return any(f"{path}/".startswith(target) for target in targets)

    try:
        if not mounted(cwd):
            os.close(_open_inside(Path(root), os.fsencode(cwd), os.O_PATH | os.O_DIRECTORY))
    except NotADirectoryError:
        raise ConfigError(f"cannot start in {cwd} in the container: it is no folder") from None
    except OSError:
        pass  # the runtime makes it
    if any(map(mounted, places)):
        return
    for place in places:
        try:
            os.close(_open_inside(Path(root), os.fsencode(place), os.O_PATH))
            return
        except OSError:
            continue
    hint = "options of bootseer go before the image" if name.startswith("-") else "check the command"
    raise NotFoundError(f"cannot run {name} in the container: the image has no such file", hint=hint)


def _open_inside(rootfs: Path, path: bytes, flags: int) -> int:
    with descriptor(os.open(rootfs, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as root:
        return libc.open_in_root(root, path, flags | os.O_CLOEXEC)


def _system_mounts() -> list[dict[str, Any]]:
    return [
        _mount("/proc", "proc", "nosuid", "noexec", "nodev"),
        _mount("/dev", "tmpfs", "nosuid", "strictatime", "mode=755", "size=65536k"),
        _mount("/dev/pts", "devpts", "nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"),
        # no size: data loaders need more than the usual 64 MiB; the kernel's own limit is half the memory
        _mount("/dev/shm", "tmpfs", "nosuid", "noexec", "nodev", "mode=1777"),
        _mount("/sys", "sysfs", "nosuid", "noexec", "nodev", "ro"),
        # its limits, where virtual machines and run times of languages look for them
        *(
            [_mount(CGROUPS, "cgroup", "nosuid", "noexec", "nodev", "relatime", "ro")]
            if os.path.ismount(CGROUPS)
            else ()
        ),
    ]


def _mount(target: str, kind: str, *options: str) -> dict[str, Any]:
    return {"destination": target, "type": kind, "source": kind, "options": list(options)}


def volumes(rootfs: Path, config: oci.ImageConfig) -> dict[str, bool]:
    """The ``VOLUME`` folders of the image, as paths below ``rootfs`` without links, and whether each is there. What
    cannot be made is left out, with a line in the log, and what the container has of the kernel."""
    inner, found = config.config or oci.ContainerConfig(), {}
    for name in sorted(inner.volumes or ()):
        try:
            if path := posixpath.normpath(f"/{name}").strip("/"):
                place, rest = _existing(rootfs, path)
                if posixpath.join(place, rest).partition("/")[0] in ("dev", "proc", "sys"):
                    continue
                found[posixpath.join(place, rest)] = not rest
        except (OSError, ValueError) as exc:
            log.warning("the volume %s of the image is not made: %s", name[:100], getattr(exc, "strerror", exc))
    return found


def _existing(rootfs: Path, path: str) -> tuple[str, str]:
    """How far the folder ``path`` is there, without links, and the rest of it."""
    rest = ""
    while True:
        try:
            fd = _open_inside(rootfs, os.fsencode(path or "."), os.O_PATH | os.O_DIRECTORY)
            break
        except FileNotFoundError:
            path, _, last = path.rpartition("/")
            rest = posixpath.join(last, rest) if rest else last
    place = os.path.relpath(os.readlink(beneath.shown(fd)), os.path.realpath(rootfs))
    os.close(fd)
    if rest and os.path.lexists(rootfs / place / rest.partition("/")[0]):
        raise FileExistsError(errno.EEXIST, "it is a link to nothing")
    return place, rest


def devices(dev: Path = Path("/dev"), *, gpus: bool = True) -> list[Bind]:
    """Binds for the device nodes of RDMA cards, and of ``gpus``, in ``dev`` that the cgroup of this process allows;
    none on a host without them. access(2) asks the cgroup, too, and does not wake the device up as open(2) would."""
    found = [path for pattern in ("nvidia*", "nvidia*/*") if gpus for path in dev.glob(pattern)]
    found += dev.glob("infiniband/*")
    nodes = sorted(path for path in found if not path.is_dir() and not path.is_symlink())
    nodes = [path for path in nodes if os.access(path, os.R_OK | os.W_OK)]
    return [Bind(str(path), f"/dev/{path.relative_to(dev)}") for path in nodes]


def _device_rules(binds: Sequence[Bind]) -> list[dict[str, Any]]:
    rules = []
    sources = [Path(bind.source) for bind in binds]
    folders = [path for path in sources if Path("/dev") in path.parents and path.is_dir()]
    for path in [*sources, *(path for folder in folders for path in folder.rglob("*"))]:
        with contextlib.suppress(OSError):
            if number := device_number(os.stat(path)):
                rules.append({"allow": True, **number, "access": "rw"})
    return rules


def _bind(mount: Bind) -> dict[str, Any]:
    target = mount.target
    if not target.startswith("/") or not posixpath.normpath(target).strip("/") or not os.path.exists(mount.source):
        raise ConfigError(
            f"cannot mount {mount.source} at {mount.target} in the container",
            hint="the source must exist and the target be an absolute path, and not /",
        )
    options = ["rbind", "rprivate", "ro" if mount.readonly else "rw"]
    source = os.path.abspath(mount.source)
    return {"destination": mount.target, "type": "bind", "source": source, "options": options}


def user_of(rootfs: Path, text: str) -> dict[str, Any]:
    """The ``user`` object for the image's ``USER`` (``name|uid[:group|gid]``), looked up in the image's own files."""
    name, _, group = text.partition(":")
    name = name or "0"
    uid, gid = (int(name), 0) if _is_number(name) else (-1, 0)
    for fields in _lines(rootfs, "etc/passwd", 4):
        if fields[0] == name or fields[2] == str(uid):
            name, uid, gid = fields[0], int(fields[2]), int(fields[3])
            break
    if uid < 0:
        raise ConfigError(f"user {name[:100]!r} of the image is not in its /etc/passwd")
    groups = _lines(rootfs, "etc/group", 3)
    if group:
        found = {fields[0]: int(fields[2]) for fields in reversed(groups)}  # the first of a name counts
        if not _is_number(group) and group not in found:
            raise ConfigError(f"group {group[:100]!r} of the image is not in its /etc/group")
        gid = int(group) if _is_number(group) else found[group]
    # With the first one, too, as a set-gid program leaves that: what its group may not do it could (CVE-2022-36109).
    extra = {gid, *(int(f[2]) for f in groups if len(f) > 3 and name in f[3].split(","))}
    return {"uid": uid, "gid": gid, "additionalGids": sorted(extra)}


def _is_number(text: str) -> bool:
    """Whether it may be one of a user or a group: Python refuses to read very long ones, runtimes take 31 bits."""
    return text.isascii() and text.isdecimal() and len(text) <= 10 and int(text) < 1 << 31


def _lines(rootfs: Path, path: str, numbers_from: int) -> list[list[str]]:
    """The colon-separated lines of a file inside the root, never outside, whatever links say."""
    try:
        text = beneath.read_inside(rootfs, path, MAX_USERS).decode(errors="replace")
    except OSError as exc:
        if exc.errno in (errno.EFBIG, errno.EINVAL):
            log.warning("/%s of the image is not used: %s", path, exc.strerror)
        return []
    lines = [line.split(":") for line in text.split("\n")]
    return [f for f in lines if len(f) >= numbers_from and all(_is_number(f[i]) for i in range(2, numbers_from))]
