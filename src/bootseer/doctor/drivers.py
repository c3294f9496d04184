"""The checks of the two ways in which missing blocks reach a mount, and which of them is taken here."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Literal

from bootseer.config import Config
from bootseer.doctor import canary
from bootseer.doctor.checks import AS_ROOT, NO_LAZY, failed, may_mount, nearest
from bootseer.doctor.report import Check
from bootseer.errors import BootseerError
from bootseer.kernel import canary as fanotify_canary
from bootseer.kernel import fuse as kernel_fuse

_SLOWER = "missing blocks come through FUSE, where the first read of a page costs about three times as much"


def fanotify(config: Config, folder: Path, *, beside: bool) -> Check:
    """A lazily filled file under EROFS, its keeper killed in the middle; on the cache's file system."""
    if not beside:
        return Check(name="fanotify", status="missing", detail="not tried: see the cache's line", cost=_SLOWER)
    # `folder` lies on the cache's file system, and is there even where the cache is still to be made
    verdict = fanotify_canary.fanotify_works(folder, Path(config.state_dir), fresh=True)
    if verdict.works:
        return Check(name="fanotify", status="ok", detail=verdict.reason)
    fix = "Linux 6.14, cache_dir on ext4, xfs or btrfs" if may_mount() else AS_ROOT
    return Check(
        name="fanotify", status="missing", detail=verdict.reason, cost=_SLOWER, fix=fix, privilege=not may_mount()
    )


def fuse_takeover(folder: Path) -> Check:
    """Whether the kernel repeats requests to the successor of a killed FUSE server; and clones of the device."""
    name = "fuse takeover"
    cost = "readers of what is served through FUSE get errors when its server is killed"
    place = folder / "takeover"
    place.mkdir()
    operations = kernel_fuse.SingleFile("data", 4096, lambda offset, size, ctx: b"x" * size)
    try:
        options = kernel_fuse.Options(name="bootseer-doctor", clone=True)
        with kernel_fuse.Server(operations, place, workers=2, options=options) as server:
            right = (place / "data").read_bytes() == b"x" * 4096
            clones, got = len(set(server.descriptors())) > 1, server.negotiated
    except BootseerError as exc:
        return Check(name=name, status="missing", detail=exc.message, cost=cost, fix=exc.hint or "see fuse")
    if not right or got is None:
        return failed(name, BootseerError("a small FUSE file gave wrong bytes"), cost, "another kernel")
    can = "can be cloned" if clones else "cannot be cloned"
    protocol = f"protocol 7.{got.kernel_minor}, device {can}"
    if "has_resend" in got.flags:
        return Check(name=name, status="ok", detail=f"requests of a killed server are sent again; {protocol}")
    detail = f"requests of a killed server are lost; {protocol}"
    return Check(name=name, status="limited", detail=detail, cost=cost, fix="Linux 6.9")


def whole_way(folder: Path, image: tuple[Path, Path] | None) -> Check:
    """The FUSE canary."""
    name = "fuse canary"
    cost = "no lazy images: " + NO_LAZY
    if image is None:
        detail, fix = "its image could not be written", "see the cache's line"
        return Check(name=name, status="missing", detail=detail, cost=cost, fix=fix, essential=True)
    place = folder / "canary"
    place.mkdir()
    try:
        if may_mount():
            return Check(name=name, status="ok", detail=canary.whole(place, *image), essential=True)
        detail = canary.fuse_only(place, image[1]) + "; EROFS needs privileges"
    except (BootseerError, OSError, subprocess.SubprocessError) as exc:
        return failed(name, exc, cost, "see the lines above", privilege=not may_mount())
    return Check(name=name, status="missing", detail=detail, cost=cost, fix=AS_ROOT, essential=True, privilege=True)


def chosen(config: Config, found: list[Check]) -> tuple[Check, Literal["fanotify", "fuse"]]:
    """Which driver images and environments get here, and why."""
    by_name = {check.name: check for check in found}
    fanotify, fuse = by_name["fanotify"], by_name["fuse canary"]
    what = "images and environments are served"
    path = nearest(Path(config.cache_dir).absolute())
    disk = os.statvfs(path)
    room = f"{disk.f_bavail * disk.f_frsize / 1e9:.1f} GB free for whole data files"
    if config.driver != "fuse" and fanotify.status == "ok":
        detail = f"{what} by fanotify, {room}"
        if config.driver == "auto":
            detail += "; those that do not fit through FUSE" if fuse.status == "ok" else "; those that do not fit fail"
        return Check(name="driver", status="ok", detail=detail, essential=True), "fanotify"
    if config.driver == "fanotify":
        detail = f"driver = fanotify is set, but {fanotify.detail}"
        cost, fix = "images and environments are not mounted at all", "set driver = auto"
        lacks = fanotify.privilege
        return (
            Check(name="driver", status="missing", detail=detail, cost=cost, fix=fix, essential=True, privilege=lacks),
            "fanotify",
        )
    why = "driver = fuse is set" if config.driver == "fuse" else f"fanotify: {fanotify.detail}"
    if fuse.status == "ok":
        return Check(name="driver", status="ok", detail=f"{what} through FUSE ({why})", essential=True), "fuse"
    return (
        Check(
            name="driver",
            status="missing",
            detail=f"neither fanotify nor FUSE ({why})",
            cost="no lazy images: " + NO_LAZY,
            fix="see their lines",
            essential=True,
            privilege=fuse.privilege,
        ),
        "fuse",
    )
