"""Compares file trees: everything about every path that a copy, an image or a mount must keep."""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_MOST = 20
Found = dict[bytes, dict[str, object]]


def scan(root: Path, *, largest: int = 1 << 62) -> Found:
    """By path from ``root`` (which is ``b"."``): mode, owner, links, size, mtime, content, extended attributes.

    ``links`` lists the other names of what is no directory; ``content`` is a digest, a link's target or a device
    number. The content of files beyond ``largest`` bytes is not looked at.
    """
    found: Found = {}
    names: dict[tuple[int, int], list[bytes]] = {}
    top = os.fsencode(root)
    for folder, folders, files in os.walk(top):
        for name in (b".", *folders, *files):
            if name == b"." and folder != top:
                continue
            path = os.path.join(folder, name)
            status = os.lstat(path)
            kind = stat.S_IFMT(status.st_mode)
            content: object = status.st_rdev
            if kind == stat.S_IFREG and status.st_size <= largest:
                with open(path, "rb") as file:
                    content = hashlib.file_digest(file, "sha256").hexdigest()
            elif kind == stat.S_IFLNK:
                content = os.readlink(path)
            keys = sorted(os.fsencode(key) for key in os.listxattr(path, follow_symlinks=False))
            short = os.path.relpath(path, top)
            same = [] if kind == stat.S_IFDIR else names.setdefault((status.st_dev, status.st_ino), [])
            same.append(short)
            found[short] = {
                "mode": oct(status.st_mode),
                "owner": (status.st_uid, status.st_gid),
                "link count": status.st_nlink if kind != stat.S_IFDIR else 0,
                "links": same,
                "size": status.st_size if kind != stat.S_IFDIR else 0,
                "mtime": status.st_mtime_ns,
                "content": content,
                "xattrs": {key: os.getxattr(path, key, follow_symlinks=False) for key in keys},
            }
    for values in found.values():
        if isinstance(values["links"], list):
            values["links"].sort()
    return found


def differences(left: Path, right: Path) -> tuple[int, list[str]]:
    """Compare two trees. Returns (entries compared, the first differences in words); no difference: ``[]``."""
    with ThreadPoolExecutor(2) as pool:
        mine, theirs = pool.map(_seen, (left, right))
    found = [f"only in {left}: {os.fsdecode(path)}" for path in sorted(mine.keys() - theirs)]
    found += [f"only in {right}: {os.fsdecode(path)}" for path in sorted(theirs.keys() - mine)]
    shared = sorted(mine.keys() & theirs)
    for path in shared:
        if mine[path] != theirs[path]:
            found.append(f"{os.fsdecode(path)}: {mine[path]} != {theirs[path]}")
    return len(shared), found[:_MOST]


def _seen(root: Path) -> Found:
    """All a container sees below ``root``, which is left out; attributes of overlays are their own affair."""
    found = scan(root)
    del found[b"."]
    for entry in found.values():
        xattrs = entry["xattrs"]
        assert isinstance(xattrs, dict)
        entry["xattrs"] = {key: value for key, value in xattrs.items() if not key.startswith(b"trusted.overlay.")}
    return found


def is_spread(folder: Path) -> bool:
    """Whether `bootseer.folders.spread` was called for ``folder``, or its file system is none that heeds it."""
    kind = subprocess.run(["stat", "-f", "-c", "%T", folder], capture_output=True, text=True, check=True).stdout
    shown = subprocess.run(["lsattr", "-d", folder], capture_output=True, text=True, check=False).stdout
    return "T" in shown.split(" ")[0] or not kind.startswith("ext")
