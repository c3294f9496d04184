"""The single checks: each tries one thing and gives a `Check`; none leaves anything behind."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from bootseer.config import Config
from bootseer.doctor.report import Check, Status
from bootseer.errors import BootseerError, PrivilegeError
from bootseer.kernel import loop, mount

_CAP_SYS_ADMIN = 21
_ROOMY = 10 << 30
_MODULES = "on Ubuntu the package linux-modules-extra-$(uname -r) has it"
AS_ROOT = "run as root, or with CAP_SYS_ADMIN"
NO_LAZY = "images are unpacked in full before a job starts, and environments are unpacked instead of mounted"


def may_mount() -> bool:
    """Whether this process holds CAP_SYS_ADMIN."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> _CAP_SYS_ADMIN & 1)
    return False


def kernel() -> Check:
    name = os.uname()
    major, minor = (int("".join(filter(str.isdigit, part)) or 0) for part in name.release.split(".")[:2])
    detail = f"{name.sysname} {name.release} {name.machine}"
    if (major, minor) >= (5, 16):
        return Check(name="kernel", status="ok", detail=detail)
    cost = "no EROFS image in two parts: " + NO_LAZY
    return Check(name="kernel", status="missing", detail=detail, cost=cost, fix="Linux 5.16 or later", essential=True)


def privileges() -> Check:
    user = f"user {os.geteuid()}"
    if may_mount():
        return Check(name="privileges", status="ok", detail=f"{user} with CAP_SYS_ADMIN", essential=True)
    return Check(
        name="privileges",
        status="missing",
        detail=f"{user} without CAP_SYS_ADMIN",
        cost="no EROFS or overlay mounts: " + NO_LAZY,
        fix="run as root (sudo bootseer doctor); in a container give --privileged, or --cap-add SYS_ADMIN",
        essential=True,
        privilege=True,
    )


def fuse() -> Check:
    tool = shutil.which("fusermount3")
    by_hand = f", fusermount3 at {tool}" if tool else ""
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC))
    except PermissionError:
        detail, fix, privilege = "/dev/fuse is not open to this user", "run as root, or chmod 666 /dev/fuse", True
    except OSError as exc:
        detail = f"cannot open /dev/fuse: {exc.strerror}"
        fix, privilege = "modprobe fuse; in a container give --device /dev/fuse", False
    else:
        if may_mount():
            return Check(name="fuse", status="ok", detail=f"/dev/fuse opens{by_hand}", essential=True)
        if tool:
            return Check(
                name="fuse", status="ok", detail=f"/dev/fuse opens{by_hand} (mounts without root)", essential=True
            )
        detail, fix, privilege = "/dev/fuse opens, but mounting it needs fusermount3 here", "apt install fuse3", False
    cost = f"no lazy images and no mounted striped store: {NO_LAZY}"
    return Check(name="fuse", status="missing", detail=detail, cost=cost, fix=fix, essential=True, privilege=privilege)


def erofs(folder: Path, image: tuple[Path, Path] | None) -> Check:
    """Mounts the canary image from local files."""
    cost = "no lazy images: " + NO_LAZY
    if image is None or not may_mount():
        known = "erofs" in Path("/proc/filesystems").read_text().split()
        reason = "mounting was not tried: " + ("no privileges" if image else "no canary image")
        if known:
            detail = f"the kernel has it; {reason}"
            return Check(name="erofs", status="limited", detail=detail)
        detail = f"the kernel has not loaded it; {reason}"
        fix = f"modprobe erofs; {_MODULES}"
        return Check(name="erofs", status="limited", detail=detail, cost=cost, fix=fix)
    target = folder / "erofs"
    target.mkdir()
    try:
        way = mount.mount_erofs(*image, target)
        mount.unmount(target)
    except BootseerError as exc:
        return failed("erofs", exc, cost, f"modprobe erofs; {_MODULES}")
    if way == "file":
        return Check(name="erofs", status="ok", detail="mounts image files itself", essential=True)
    return Check(
        name="erofs",
        status="ok",
        detail="mounts image files through loop devices",
        cost="one loop device for each part of a mounted image",
        fix="Linux 6.12 with CONFIG_EROFS_FS_BACKED_BY_FILE",
        essential=True,
    )


def loop_device(image: tuple[Path, Path] | None) -> Check:
    cost = "none where EROFS mounts files itself"
    if image is None or not may_mount():
        there = os.path.exists("/dev/loop-control")
        status: Status = "limited" if there else "missing"
        detail = "/dev/loop-control is there, not tried" if there else "no /dev/loop-control"
        return Check(name="loop device", status=status, detail=detail, cost=cost, fix="" if there else "modprobe loop")
    try:
        with loop.attached(image[0]) as name:
            return Check(name="loop device", status="ok", detail=f"{name} could be set up")
    except BootseerError as exc:
        return Check(name="loop device", status="missing", detail=exc.message, cost=cost, fix=exc.hint)


def overlay(folder: Path) -> Check:
    """A writable overlay whose upper folder lies on the cache's file system."""
    cost = "containers get a copy of the image instead of an overlay, and environments are captured by a file scan"
    if not may_mount():
        detail = "not tried: no privileges"
        return Check(
            name="overlayfs", status="missing", detail=detail, cost=cost, fix=AS_ROOT, essential=True, privilege=True
        )
    lower, upper, work, target = (folder / f"overlay-{part}" for part in ("lower", "upper", "work", "target"))
    for path in (lower, upper, work, target):
        path.mkdir()
    (lower / "file").write_text("below")
    try:
        mount.mount_overlay([lower], target, upper=upper, work=work)
        try:
            (target / "file").write_text("above")
            right = (lower / "file").read_text() == "below" and (upper / "file").read_text() == "above"
        finally:
            mount.unmount(target)
    except (BootseerError, OSError) as exc:
        return failed("overlayfs", exc, cost, "modprobe overlay; put cache_dir on ext4, xfs or btrfs")
    if not right:
        return failed("overlayfs", BootseerError("a write went to the wrong layer"), cost, "another kernel")
    return Check(name="overlayfs", status="ok", detail="a writable overlay on the cache's file system", essential=True)


def hdfs(config: Config) -> Check:
    cost, fix = "no checkpoints, images or snapshots in HDFS", "pip install hdfs-native"
    try:
        import hdfs_native  # noqa: F401

        version = importlib.metadata.version("hdfs-native")
    except Exception as exc:  # a binary wheel fails to load in many ways
        return Check(name="hdfs client", status="missing", detail=f"cannot be loaded: {exc}", cost=cost, fix=fix)
    if not config.store.startswith(("hdfs://", "viewfs://")):
        return Check(name="hdfs client", status="ok", detail=f"hdfs-native {version}; the store is not in HDFS")
    from bootseer import hdfs as client

    try:
        client.connect(config.store).info("/")
    except BootseerError as exc:
        detail, cost = f"hdfs-native {version}, but {exc.message}", "the configured store cannot be reached"
        return Check(name="hdfs client", status="missing", detail=detail, cost=cost, fix=exc.hint, essential=True)
    return Check(name="hdfs client", status="ok", detail=f"hdfs-native {version}, {config.store} answers")


def runtimes(folder: Path) -> Check:
    """Runs a container in each runtime."""
    from bootseer.image import runtime

    cost = "image run and containers of bootseer run do not start; image mount works"
    if not may_mount():
        found = [name for name in runtime.RUNTIMES if shutil.which(name)]
        detail = f"{', '.join(found) or 'none'} installed; running one was not tried: no privileges"
        return Check(name="runtime", status="limited", detail=detail, cost=cost, fix=AS_ROOT)
    works, reasons = [], []
    for name in runtime.RUNTIMES:
        try:
            probe = runtime.probe(name, folder / "runtime")
        except BootseerError as exc:
            reasons.append(f"{name}: {exc.message}")
            continue
        if probe.works:
            works.append(_first_line([probe.path, "--version"]) or name)
        else:
            reasons.append(f"{name}: {probe.reason}")
    detail = "; ".join([f"{', '.join(works) or 'none'} runs a container", *reasons])
    if works:
        return Check(name="runtime", status="ok", detail=detail)
    return Check(name="runtime", status="missing", detail=detail, cost=cost, fix="apt install runc")


def cache(config: Config, folder: Path | None) -> Check:
    """Where blocks are kept: file system, free space, whether it can be written to."""
    path = Path(config.cache_dir).absolute()
    cost, fix = "no lazy images: there is nowhere to keep blocks", f"make {path} writable, or set cache_dir"
    there = nearest(path)
    if folder is None or not os.access(there, os.W_OK):
        detail = f"{there} cannot be written to"
        return Check(
            name="cache",
            status="missing",
            detail=detail,
            cost=cost,
            fix=fix,
            essential=True,
            privilege=os.geteuid() != 0,
        )
    stat = os.statvfs(there)
    free = stat.f_bavail * stat.f_frsize
    fstype = fstype_of(there)
    detail = f"{path}: {fstype}, {free / 1e9:.1f} GB free"
    if fstype in ("overlay", "tmpfs", "nfs", "nfs4"):
        cost = "overlays may fail, blocks may cost memory or network"
        return Check(name="cache", status="limited", detail=detail, cost=cost, fix="a folder on ext4, xfs or btrfs")
    if free < _ROOMY:
        cost = "large images may not fit; bootseer then reads without keeping"
        return Check(name="cache", status="limited", detail=detail, cost=cost, fix=f"have {_ROOMY >> 30} GiB free")
    return Check(name="cache", status="ok", detail=detail, essential=True)


def attempt(name: str, check: Callable[[], Check]) -> Check:
    """Run ``check``; a surprise in it becomes a finding."""
    try:
        return check()
    except Exception as exc:
        return failed(name, exc, "unknown", "run with BOOTSEER_TRACEBACK=1 and report it")


def nearest(path: Path) -> Path:
    """The nearest folder at or above ``path`` that exists."""
    return next(each for each in (path, *path.parents) if each.is_dir())


def failed(name: str, exc: Exception, cost: str, fix: str, *, privilege: bool = False) -> Check:
    hint = exc.hint if isinstance(exc, BootseerError) and exc.hint else fix
    message = exc.message if isinstance(exc, BootseerError) else f"{type(exc).__name__}: {exc}"
    return Check(
        name=name,
        status="missing",
        detail=message,
        cost=cost,
        fix=hint,
        essential=True,
        privilege=privilege or isinstance(exc, PrivilegeError),
    )


def _first_line(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return (done.stdout.strip() or done.stderr.strip()).split("\n")[0]


def fstype_of(path: Path) -> str:
    real = os.path.realpath(path)
    inside = [
        entry for entry in mount.entries() if real == entry.target or real.startswith(entry.target.rstrip("/") + "/")
    ]
    return max(inside, key=lambda entry: len(entry.target)).fstype if inside else "unknown"
