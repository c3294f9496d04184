"""Lazy images: whether they can be served through FUSE here, and what readers get when the server is killed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from bootseer.config import Config
from bootseer.doctor import canary
from bootseer.doctor.checks import AS_ROOT, NO_LAZY, failed, may_mount, nearest
from bootseer.doctor.report import Check
from bootseer.errors import BootseerError
from bootseer.kernel import fuse as kernel_fuse


def fuse_takeover(folder: Path) -> Check:
    """Whether the kernel repeats requests to the successor of a killed FUSE server."""
    name = "fuse takeover"
    cost = "readers of what is served through FUSE get errors when its server is killed"
    place = folder / "takeover"
    place.mkdir()
    operations = kernel_fuse.SingleFile("data", 4096, lambda offset, size, ctx: b"x" * size)
    try:
        options = kernel_fuse.Options(name="bootseer-doctor")
        with kernel_fuse.Server(operations, place, workers=2, options=options) as server:
            right = (place / "data").read_bytes() == b"x" * 4096
            got = server.negotiated
    except BootseerError as exc:
        return Check(name=name, status="missing", detail=exc.message, cost=cost, fix=exc.hint or "see fuse")
    if not right or got is None:
        return failed(name, BootseerError("a small FUSE file gave wrong bytes"), cost, "another kernel")
    protocol = f"protocol 7.{got.kernel_minor}"
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


def lazy_images(config: Config, found: list[Check]) -> Check:
    """Whether images and environments are mounted while their bytes still arrive."""
    canary_found = next(check for check in found if check.name == "fuse canary")
    disk = os.statvfs(nearest(Path(config.cache_dir).absolute()))
    if canary_found.status == "ok":
        room = f"{disk.f_bavail * disk.f_frsize / 1e9:.1f} GB free for whole data files"
        detail = f"images and environments are served through FUSE; {room}, what does not fit is read without keeping"
        return Check(name="lazy images", status="ok", detail=detail, essential=True)
    return Check(
        name="lazy images",
        status="missing",
        detail=f"FUSE does not serve them: {canary_found.detail}",
        cost="no lazy images: " + NO_LAZY,
        fix="see the line of the fuse canary",
        essential=True,
        privilege=canary_found.privilege,
    )
