"""Comparing file trees: everything about every path that a copy, an image or a mount must keep."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

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
