"""The single checks: each tries one thing, leaves nothing behind, and returns what it found; and the report of them.

What does not work is raised as a `BootseerError`, whose hint says how to get it; what works only in part is a `Found`.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from bootseer.config import Config
from bootseer.doctor import canary
from bootseer.errors import BootseerError, NotWritableError, PrivilegeError, UnavailableError, UnsupportedError, doing
from bootseer.folders import trusted
from bootseer.kernel import fuse as kernel_fuse
from bootseer.kernel import loop, mount, procfs

if TYPE_CHECKING:
    from bootseer import oci

Status = Literal["ok", "limited", "missing"]
_CAP_SYS_ADMIN = 21
_ROOMY = 10 << 30
_RECORDS, _REGISTRIES, _IMAGES = 256, 4, 4
"""Records that are looked at, registries that are asked, and images of each."""
_READ = ("images", "trees", "env/snapshots")
"""Folders of a store whose files each user must be able to read."""
_GROUP_SHARED = stat.S_ISGID | stat.S_IWGRP
_AS_ROOT = "run as root, or with CAP_SYS_ADMIN"
TAKEOVER_COST = "readers of what is served through FUSE get errors when its server is killed"
EROFS_FIX = "modprobe erofs; on Ubuntu the package linux-modules-extra-$(uname -r) has it"


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was tried."""

    name: str
    status: Status
    detail: str
    """What was found."""
    cost: str = ""
    """What goes without it."""
    fix: str = ""
    """How to get it."""
    essential: bool = False
    """The fast way needs it."""
    privilege: bool = False
    """Missing only because this process lacks a privilege."""


class DoctorReport(msgspec.Struct, frozen=True, kw_only=True):
    """All that was found, in the order it was tried."""

    version: str
    checks: tuple[Check, ...]
    settings: dict[str, str | int | float | bool]

    @property
    def lacking(self) -> tuple[Check, ...]:
        """The essential things that are missing."""
        return tuple(check for check in self.checks if check.essential and check.status == "missing")

    @property
    def exit_code(self) -> int:
        """0: the fast way works; 77: only privileges are missing for it; 71: something else is."""
        if not self.lacking:
            return 0
        if all(check.privilege for check in self.lacking):
            return PrivilegeError.exit_code
        return UnsupportedError.exit_code

    def as_json(self) -> dict[str, object]:
        """The report as plain values, with what follows from it."""
        found = {"ok": not self.lacking, "exit_code": self.exit_code}
        return {"version": self.version, **found, "checks": msgspec.to_builtins(self.checks), "settings": self.settings}


class Found(NamedTuple):
    """A finding of its own kind: what works in part, or works but costs something."""

    status: Status
    detail: str
    cost: str = ""
    fix: str = ""


def may_mount() -> bool:
    """Whether this process holds CAP_SYS_ADMIN."""
    return any(mask >> _CAP_SYS_ADMIN & 1 for mask in procfs.masks("self", "CapEff:"))


def kernel() -> str:
    name = os.uname()
    major, minor = (int("".join(filter(str.isdigit, part)) or 0) for part in name.release.split(".")[:2])
    detail = f"{name.sysname} {name.release} {name.machine}"
    if (major, minor) < (5, 16):
        raise UnsupportedError(detail, hint="Linux 5.16 or later")
    return detail


def privileges() -> str:
    user = f"user {os.geteuid()}"
    if may_mount():
        return f"{user} with CAP_SYS_ADMIN"
    hint = "run as root (sudo bootseer doctor); in a container give --privileged, or --cap-add SYS_ADMIN"
    raise PrivilegeError(f"{user} without CAP_SYS_ADMIN", hint=hint)


def fuse() -> str:
    tool = shutil.which("fusermount3")
    by_hand = f", fusermount3 at {tool}" if tool else ""
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC))
    except PermissionError:
        hint = "run as root, or chmod 666 /dev/fuse"
        raise PrivilegeError("/dev/fuse is not open to this user", hint=hint) from None
    except OSError as exc:
        hint = "modprobe fuse; in a container give --device /dev/fuse"
        raise UnsupportedError(f"cannot open /dev/fuse: {exc.strerror}", hint=hint) from None
    if may_mount():
        return f"/dev/fuse opens{by_hand}"
    if tool:
        return f"/dev/fuse opens{by_hand} (mounts without root)"
    raise UnsupportedError("/dev/fuse opens, but mounting it needs fusermount3 here", hint="apt install fuse3")


def fuse_takeover(folder: Path) -> str | Found:
    """Whether the kernel repeats requests to the successor of a killed FUSE server."""
    place = folder / "takeover"
    place.mkdir()
    operations = kernel_fuse.SingleFile("data", 4096, lambda offset, size, ctx: b"x" * size)
    options = kernel_fuse.Options(name="bootseer-doctor")
    with kernel_fuse.Server(operations, place, workers=2, options=options) as server:
        right = (place / "data").read_bytes() == b"x" * 4096
        got = server.negotiated
    if not right or got is None:
        raise UnsupportedError("a small FUSE file gave wrong bytes", hint="another kernel")
    protocol = f"protocol 7.{got.kernel_minor}"
    if "has_resend" not in got.flags:
        return Found("limited", f"requests of a killed server are lost; {protocol}", TAKEOVER_COST, "Linux 6.9")
    return f"requests of a killed server are sent again; {protocol}"


def erofs(folder: Path, image: tuple[Path, Path] | None) -> str | Found:
    """Mounts the canary image from local files."""
    if image is None or not may_mount():
        known = "erofs" in Path("/proc/filesystems").read_text().split()
        reason = "mounting was not tried: " + ("no privileges" if image else "no canary image")
        if known:
            return Found("limited", f"the kernel has it; {reason}")
        return Found("limited", f"the kernel has not loaded it; {reason}", "perhaps no lazy images", EROFS_FIX)
    target = folder / "erofs"
    target.mkdir()
    way = mount.mount_erofs(*image, target)
    mount.unmount(target)
    if way == "file":
        return "mounts image files itself"
    cost, fix = "one loop device for each part of a mounted image", "Linux 6.12 with CONFIG_EROFS_FS_BACKED_BY_FILE"
    return Found("ok", "mounts image files through loop devices", cost, fix)


def loop_device(image: tuple[Path, Path] | None) -> str | Found:
    if image is not None and may_mount():
        with loop.attached(image[0]) as name:
            return f"{name} could be set up"
    if os.path.exists("/dev/loop-control"):
        return Found("limited", "/dev/loop-control is there, not tried")
    raise UnsupportedError("no /dev/loop-control", hint="modprobe loop")


def overlay(folder: Path) -> str:
    """A writable overlay whose upper folder lies on the cache's file system."""
    if not may_mount():
        raise PrivilegeError("not tried: no privileges", hint=_AS_ROOT)
    lower, upper, work, target = (folder / f"overlay-{part}" for part in ("lower", "upper", "work", "target"))
    for path in (lower, upper, work, target):
        path.mkdir()
    (lower / "file").write_text("below")
    mount.mount_overlay([lower], target, upper=upper, work=work)
    try:
        (target / "file").write_text("above")
        right = (lower / "file").read_text() == "below" and (upper / "file").read_text() == "above"
    finally:
        mount.unmount(target)
    if not right:
        raise UnsupportedError("a write went to the wrong layer", hint="another kernel")
    return "a writable overlay on the cache's file system"


def fuse_canary(folder: Path, image: tuple[Path, Path] | None) -> str:
    if image is None:
        raise UnsupportedError("its image could not be written", hint="see the cache's line")
    place = folder / "canary"
    place.mkdir()
    if may_mount():
        return canary.whole(place, *image)
    try:
        detail = canary.fuse_only(place, image[1]) + "; EROFS needs privileges"
    except (BootseerError, OSError, subprocess.SubprocessError) as exc:
        detail = str(exc)
    raise PrivilegeError(detail, hint=_AS_ROOT)


def runtimes(folder: Path) -> str | Found:
    """Runs a container in each runtime."""
    from bootseer import rootless
    from bootseer.image import runtime
    from bootseer.kernel.enter import Shown

    if os.geteuid():
        place = folder / "rootless"
        place.mkdir()
        shown = [Shown(one, one, True) for one in ("/bin", "/lib", "/lib64", "/usr") if os.path.isdir(one)]
        env = {"PATH": "/usr/bin:/bin"}
        command = rootless.Command(root=str(place), argv=["true"], env=env, shown=shown, folders=["/"])
        if code := rootless.run(command, stdin=False):
            raise UnsupportedError(f"a command in a user namespace ended with {code}", hint="run as root")
        return "a command runs in a user namespace, as those of users do; runc and crun are for root"
    if not may_mount():
        found = ", ".join(name for name in runtime.RUNTIMES if shutil.which(name)) or "none"
        return Found("limited", f"{found} installed; running one was not tried: no privileges", fix=_AS_ROOT)
    works, reasons = [], []
    for name in runtime.RUNTIMES:
        try:
            probe = runtime.probe(name, folder / "runtime")
        except BootseerError as exc:
            reasons.append(f"{name}: {exc.message}")
            continue
        if probe.works:
            done = subprocess.run([probe.path, "--version"], capture_output=True, text=True, timeout=10, check=False)
            works.append(done.stdout.partition("\n")[0] or name)
        else:
            reasons.append(f"{name}: {probe.reason}")
    detail = "; ".join([f"{', '.join(works) or 'none'} runs a container", *reasons])
    if not works:
        raise UnsupportedError(detail, hint="apt install runc")
    return detail


def hdfs(config: Config) -> str | Found:
    try:
        import hdfs_native  # noqa: F401

        from bootseer.hdfs.namenode import NameNode
        from bootseer.hdfs.sasl import transfer

        version = importlib.metadata.version("hdfs-native")
    except Exception as exc:  # a binary wheel fails to load in many ways
        raise UnsupportedError(f"cannot be loaded: {exc}", hint="pip install 'bootseer[hdfs]'") from None
    if not in_hdfs(config):
        return f"hdfs-native {version}; the store is not in HDFS"
    namenode = NameNode.connect(config.store)
    namenode.info("/")
    detail = f"{config.store} answers: {namenode.way()}"
    if transfer.is_slow():
        cost = "DataNodes that encrypt by rc4 or 3des are slow"
        return Found("limited", detail, cost, f"at the DataNodes set {transfer.AES_SETTING}")
    return detail


def node_daemon(config: Config) -> str | Found:
    """Whether it mounts images for users without root."""
    from bootseer.node import client

    found = client.node(config=config)
    if found.draining:
        cost = "users extract whole images"
        return Found("limited", "it is drained and mounts nothing more", cost, "systemctl restart bootseer-node")
    return f"version {found.version} mounts images for users"


def registries(config: Config) -> str | Found:
    """Whether this user may have images of the store: of each registry one, asked for as a start asks. A login goes to
    the registry alone for which it is kept, whatever records name."""
    from bootseer import oci
    from bootseer.image import record
    from bootseer.objects import open_store

    asked = dict[str, dict[str, oci.Reference]]()
    for one in itertools.islice(record.listing(open_store(config.store_url)), _RECORDS):
        with contextlib.suppress(BootseerError):  # none that a start could ask for
            ref = msgspec.structs.replace(oci.Reference.parse(one.reference), digest=one.image)
            if ref.registry and (ref.registry in asked or len(asked) < _REGISTRIES):
                asked.setdefault(ref.registry, {}).setdefault(ref.name, ref)
    answers = [_gives(list(refs.values())[:_IMAGES]) for refs in asked.values()]
    failed = [answer for answer in answers if isinstance(answer, BootseerError)]
    detail = "; ".join(answer.message if isinstance(answer, BootseerError) else answer for answer in answers)
    if not failed:
        return detail or "no image of a registry is in the store"
    refused = [exc for exc in failed if not isinstance(exc, UnavailableError)]
    if not refused:
        return Found(
            "limited", detail, "nobody checks who may have its images, and tags are not looked up", failed[0].hint
        )
    status: Status = "limited" if len(failed) < len(answers) else "missing"
    return Found(status, detail, "such images do not start here, as this user", refused[0].hint)


def _gives(refs: Sequence[oci.Reference]) -> str | BootseerError:
    """Which of these images of one registry it gives; else why not the first: it may be gone, or another's."""
    from bootseer.oci.registry import Registry

    why: BootseerError | None = None
    for ref in refs:
        try:
            with Registry(ref, mirrors=()) as asking:
                asking.head_manifest(ref.selector, retries=0)
            return f"{ref.registry} gives {ref.name}"
        except BootseerError as exc:
            why = why or exc
            if isinstance(exc, UnavailableError):
                break
    assert why
    return why


def _group_name(gid: int) -> str:
    import grp

    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def store(config: Config) -> str | Found:
    """Whether the store answers, and whether what starts write can be written by this user."""
    from bootseer.objects import open_store
    from bootseer.objects.folder import FolderStore
    from bootseer.objects.registry import RegistryStore

    shared, user = open_store(config.store_url), f"user {os.geteuid()}"
    if not config.store:
        return Found("limited", f"{shared.shown} is of this node alone", "other nodes find nothing", "set store")
    if isinstance(shared, FolderStore) or in_hdfs(config):  # others are there with their first object
        shared.check_there()
    shared.exists("images/none")
    if isinstance(shared, FolderStore):
        for info in itertools.chain(*(itertools.islice(shared.list(one), _RECORDS) for one in _READ)):
            shared.open(info.key).close()
    if isinstance(shared, RegistryStore):
        return f"{shared.shown} answers; whether {user} may push there was not tried"
    cost = "environments are not published: each start runs its set-up command; nodes note no use of images"
    try:
        if isinstance(shared, FolderStore):
            shut = [one for one in sorted(shared.root.iterdir()) if one.is_dir() and not os.access(one, os.W_OK)]
            if shut:
                raise NotWritableError(f"{user} cannot write to {', '.join(map(str, shut[:3]))}")
        key = f"leases/doctor-{os.urandom(8).hex()}"
        shared.put(key, b"")
        shared.delete(key)
    except BootseerError as exc:
        fix = exc.hint
        if isinstance(shared, FolderStore):
            fix = "bootseer store init --shared GROUP, as its owner"
            if (top := shared.root.stat()).st_mode & _GROUP_SHARED == _GROUP_SHARED:
                fix = f"join group {_group_name(top.st_gid)}, which alone may write there"
        return Found("limited", f"{shared.shown} answers, but {exc.message}", cost, fix)
    found = shared.root.stat() if isinstance(shared, FolderStore) else None
    if found and os.geteuid() == 0 and found.st_mode & _GROUP_SHARED != _GROUP_SHARED:
        cost = "environments of other users are not published"
        return Found("limited", f"{shared.shown}: only root writes there", cost, "bootseer store init --shared GROUP")
    return f"{shared.shown} answers, {user} may write"


def in_hdfs(config: Config) -> bool:
    """Whether the configured store is in HDFS."""
    return config.store.startswith("hdfs://")


def cache(config: Config, folder: Path | None) -> str | Found:
    """Where blocks are kept: file system, free space, whether it can be written to."""
    path = Path(config.cache_dir).absolute()
    there = nearest(path)
    closed = not os.access(there, os.W_OK)
    for own in (path, Path(config.state_dir).absolute()) if not closed else ():  # as each start does first
        with doing(f"use the folder {own}"):
            if own.exists():
                trusted(own)
            else:
                with tempfile.TemporaryDirectory(prefix=".bootseer-doctor-", dir=nearest(own)) as made:
                    trusted(Path(made))
    if closed or folder is None:
        kind = PrivilegeError if os.geteuid() != 0 else NotWritableError
        raise kind(f"{there} cannot be written to", hint=f"make {path} writable, or set cache_dir")
    free = shutil.disk_usage(there).free
    fstype = mount.fstype(there) or "unknown"
    detail = f"{path}: {fstype}, {free / 1e9:.1f} GB free"
    if fstype in ("overlay", "tmpfs", "nfs", "nfs4"):
        cost = "overlays may fail, blocks may cost memory or network"
        return Found("limited", detail, cost, "a folder on ext4, xfs or btrfs")
    if free < _ROOMY:
        cost = "large images may not fit; bootseer then reads without keeping"
        return Found("limited", detail, cost, f"have {_ROOMY >> 30} GiB free")
    return detail


def lazy_images(config: Config, found: Check, daemon: Check) -> str:
    """Whether images and environments are mounted while their bytes still arrive: what the canary ``found``, or for
    users the node ``daemon``."""
    if os.geteuid() and daemon.status == "ok":
        return "the node daemon mounts images; environments are unpacked"
    if found.status != "ok":
        kind = PrivilegeError if found.privilege else UnsupportedError
        raise kind(f"FUSE does not serve them: {found.detail}", hint="see the line of the fuse canary")
    free = shutil.disk_usage(nearest(Path(config.cache_dir).absolute())).free
    room = f"{free / 1e9:.1f} GB free for whole data files"
    return f"images and environments are served through FUSE; {room}, what does not fit is read without keeping"


def nearest(path: Path) -> Path:
    """The nearest folder at or above ``path`` that exists."""
    return next(each for each in (path, *path.parents) if each.is_dir())
