"""Compares two file trees entry by entry, by everything a container can see."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from support import trees

_MOST = 20


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


def _seen(root: Path) -> trees.Found:
    """All a container sees below ``root``, which is left out; attributes of overlays are their own affair."""
    found = trees.scan(root)
    del found[b"."]
    for entry in found.values():
        xattrs = entry["xattrs"]
        assert isinstance(xattrs, dict)
        entry["xattrs"] = {key: value for key, value in xattrs.items() if not key.startswith(b"trusted.overlay.")}
    return found
