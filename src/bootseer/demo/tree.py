"""Compares two file trees entry by entry, by everything a container can see."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from blake3 import blake3

_CHUNK = 4 << 20


def _walk(root: bytes) -> Iterator[bytes]:
    """Every path below ``root`` (relative, sorted within each folder); mount points are not entered."""
    device = os.lstat(root).st_dev
    pending = [b""]
    while pending:
        folder = pending.pop()
        with os.scandir(os.path.join(root, folder)) as entries:
            for entry in sorted(entries, key=lambda e: e.name):
                path = os.path.join(folder, entry.name)
                yield path
                if entry.is_dir(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_dev == device:
                    pending.append(path)


def _content(path: bytes) -> str:
    digest = blake3()
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(_CHUNK):
            digest.update(piece)
    return digest.hexdigest()


def describe(root: Path, path: bytes) -> tuple[object, ...]:
    """All a container sees of one entry: kind, mode, owner, size, mtime (ns), device, link target, xattrs, content.

    Left out: inode numbers and link counts of folders (a file system's own affair), and a folder's size.
    """
    full = os.path.join(os.fsencode(root), path)
    info = os.lstat(full)
    kind = stat.S_IFMT(info.st_mode)
    common = (kind, stat.S_IMODE(info.st_mode), info.st_uid, info.st_gid, info.st_mtime_ns)
    attrs = tuple(
        (name, os.getxattr(full, name, follow_symlinks=False))
        for name in sorted(os.listxattr(full, follow_symlinks=False))
        if not name.startswith("trusted.overlay.")
    )
    if kind == stat.S_IFREG:
        return (*common, info.st_size, info.st_nlink, attrs, _content(full))
    if kind == stat.S_IFLNK:
        return (*common, attrs, os.readlink(full))
    return (*common, info.st_rdev if kind in (stat.S_IFCHR, stat.S_IFBLK) else 0, attrs)


def differences(left: Path, right: Path, *, workers: int = 4, limit: int = 20) -> tuple[int, list[str]]:
    """Compare two trees. Returns (entries compared, up to ``limit`` differences in words); no difference: ``[]``."""
    found: list[str] = []
    paths = sorted(_walk(os.fsencode(left)))
    others = set(_walk(os.fsencode(right)))
    for path in [p for p in paths if p not in others][:limit]:
        found.append(f"only in {left}: {os.fsdecode(path)}")
    for path in sorted(others.difference(paths))[:limit]:
        found.append(f"only in {right}: {os.fsdecode(path)}")
    shared = [p for p in paths if p in others]
    with ThreadPoolExecutor(workers) as pool:
        pairs = zip(
            shared, pool.map(lambda p: (describe(left, p), describe(right, p)), shared, chunksize=1), strict=True
        )
        for path, (mine, theirs) in pairs:
            if mine != theirs and len(found) < limit:
                found.append(f"{os.fsdecode(path)}: {mine} != {theirs}")
    return len(shared), found[:limit]
