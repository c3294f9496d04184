"""Conversion of the bench's image: ours, and the tools that do as much (skopeo copy, umoci unpack, mkfs.erofs)."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from bench.common.report import Run
from bench.image.node import busy_seconds
from bootseer import image
from bootseer.demo.programs import run


def ours(ref: str, work: Path, number: int) -> Run:
    """Into an empty folder store, deleted again."""
    work.mkdir()
    try:
        began, busy = time.monotonic(), busy_seconds()
        record = image.ensure(ref, str(work / "store"), work_dir=work / "tmp").record
        seconds, busy = time.monotonic() - began, busy_seconds() - busy
    finally:
        shutil.rmtree(work, ignore_errors=True)
    sizes = {"layers": record.layer_bytes, "tree": record.tree_bytes, "stored": record.stored_bytes}
    details = {"cpu_seconds": round(busy, 2), **sizes}
    return Run(variant="convert", n=number, seconds=round(seconds, 3), stages=record.seconds, details=details)


def tools(ref: str, work: Path, number: int) -> Run:
    """Each step with a folder of its own; a copy is deleted as soon as the next step has what it needs."""
    work.mkdir()
    stages: dict[str, float] = {}

    def step(name: str, *argv: str) -> None:
        began = time.monotonic()
        run(argv)
        stages[name] = round(time.monotonic() - began, 3)

    busy = busy_seconds()
    layout, bundle, out = work / "layout", work / "bundle", work / "image.erofs"
    try:
        step("copy", "skopeo", "copy", "--quiet", "--src-tls-verify=false", f"docker://{ref}", f"oci:{layout}:1")
        step("unpack", "umoci", "unpack", "--image", f"{layout}:1", str(bundle))
        shutil.rmtree(layout)
        step("build", "mkfs.erofs", "--quiet", str(out), str(bundle / "rootfs"))
        size = out.stat().st_size
    finally:
        shutil.rmtree(work, ignore_errors=True)
    total = round(sum(stages.values()), 3)
    details = {"cpu_seconds": round(busy_seconds() - busy, 2), "image": size}
    return Run(variant="convert-tools", n=number, seconds=total, stages=stages, details=details)
