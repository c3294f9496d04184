"""Stat-scans of a directory: the fingerprint of its content, and the difference between before and after. A scan never
crosses a mount point (GPU driver libraries are bind mounts) and never follows a link."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from bootseer.kernel import beneath
from bootseer.kernel import mount as mounts


class Mark(NamedTuple):
    """What must be equal for an entry to count as untouched. mtime alone misses what uv hard-links; ctime does not."""

    dev: int
    ino: int
    mode: int
    size: int
    mtime_ns: int
    ctime_ns: int
    owner: tuple[int, int]


class Changes(NamedTuple):
    """What a scan found in a target: the marks of what is new or changed, and of the folders above; what is deleted."""

    marks: dict[str, Mark]
    changed: list[str]
    deleted: list[str]


def mount_points_below(root: Path) -> set[str]:
    """Absolute paths of the mounts strictly below ``root``."""
    return {entry.target for entry in mounts.below(root)}


_STILL = 2.0
"""Seconds after which a file in such a folder is believed to stay: its writer may pause, as for a download."""
Settled = dict[str, tuple[int, list[tuple[str, os.stat_result]]]]
"""Folders in which nothing has changed for a while: when they last did (ns), and what is in them."""
UNREADABLE = (errno.ENAMETOOLONG, errno.EACCES)
"""Of a folder deeper than any path may be long, or closed to us."""


def walk(
    root: Path, *, skip: Collection[int] = (), settled: Settled | None = None, before: float = 0.0
) -> Iterator[tuple[str, os.stat_result]]:
    """(path relative to ``root``, lstat) of each entry below it, directories before their content; not ``root`` itself,
    nor mount points below it with all they hold. Raises `OSError` for what cannot be read, but for the errors to
    ``skip``; entries that vanish meanwhile are skipped.
    A folder in which all last changed `_STILL` seconds ``before`` is noted in ``settled``, and not listed again until
    its own change time is another one: a file that is written in place meanwhile is told as it was."""
    try:
        base = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return
    try:
        real = os.path.realpath(root)
        fence = mount_points_below(root)
        stack = [""]
        while stack:
            folder = stack.pop()
            below: list[str] = []
            for name, found in _listing(base, folder, skip, settled, before):
                path = f"{folder}/{name}" if folder else name
                if fence and f"{real}/{path}" in fence:
                    continue
                yield path, found
                if stat.S_ISDIR(found.st_mode):
                    below.append(path)
            stack.extend(reversed(below))
    finally:
        os.close(base)


def _listing(
    root: int, folder: str, skip: Collection[int], settled: Settled | None, before: float
) -> list[tuple[str, os.stat_result]]:
    """(name, lstat) of what is in ``folder`` now, by name; nothing when that is no folder any more."""
    try:
        with beneath.folder(folder, root=root) as fd:
            own = os.fstat(fd)
            changed, known = (settled or {}).get(folder, (0, []))
            if changed == own.st_ctime_ns:
                return known
            rows = []
            with os.scandir(fd) as items:
                for item in items:
                    with contextlib.suppress(FileNotFoundError):
                        rows.append((item.name, item.stat(follow_symlinks=False)))
    except OSError as exc:
        if exc.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, *skip):
            return []
        raise
    rows.sort()
    if settled is not None and all(found.st_ctime < before - _STILL for found in (own, *(found for _, found in rows))):
        settled[folder] = own.st_ctime_ns, rows
    return rows


def rows(root: Path) -> dict[str, str]:
    """Path -> kind, mode, size and link target of what lies below ``root``. ``__pycache__`` is left out, because any
    import changes it; times are, because they differ from node to node, and set-id bits, which are not unpacked."""
    out: dict[str, str] = {}
    for path, found in walk(root):
        if counts(path):
            size = found.st_size if stat.S_ISREG(found.st_mode) else 0
            text = os.readlink(root / path) if stat.S_ISLNK(found.st_mode) else ""  # of whichever link is there by now
            out[path] = row(found.st_mode, size, text)
    return out


def counts(path: str) -> bool:
    """Whether ``path`` is among the `rows`."""
    return "__pycache__" not in path or "__pycache__" not in path.split("/")


def row(mode: int, size: int, text: str) -> str:
    return f"{mode & ~0o6000:o} {size} {text}"


def fingerprint(found: Mapping[str, str]) -> str:
    """SHA-256 (hex) of the `rows` of a folder; empty for none."""
    lines = sorted(os.fsencode(f"{path}\0{text}") for path, text in found.items())
    return hashlib.sha256(b"\n".join(lines)).hexdigest() if lines else ""


def is_empty(root: Path) -> bool:
    """Whether ``root`` is missing or an empty directory."""
    try:
        with os.scandir(root) as items:
            return next(items, None) is None
    except (FileNotFoundError, NotADirectoryError):
        return not os.path.lexists(root)


def snapshot_marks(root: Path) -> dict[str, Mark]:
    """The mark of every entry below ``root``; 30,000 entries take about 0.2 s."""
    return {path: mark_of(found) for path, found in walk(root)}


def mark_of(found: os.stat_result) -> Mark:
    ino, size, ctime = found.st_ino, found.st_size, found.st_ctime_ns
    if stat.S_ISDIR(found.st_mode):  # its size and ctime follow from its content, which has marks of its own
        ino = size = ctime = 0
    return Mark(found.st_dev, ino, found.st_mode, size, found.st_mtime_ns, ctime, (found.st_uid, found.st_gid))


def difference(before: dict[str, Mark], after: dict[str, Mark]) -> tuple[list[str], list[str]]:
    """(changed or new paths, deleted paths). Of a deleted directory only the directory itself is listed."""
    changed = [path for path, mark in after.items() if before.get(path) != mark]
    # What was in a directory that is gone, or became something else, is gone with it.
    folders = {"", *(path for path, mark in after.items() if stat.S_ISDIR(mark.mode))}
    deleted = [path for path in before if path not in after and path.rpartition("/")[0] in folders]
    return changed, sorted(deleted)


def above(path: str) -> Iterator[str]:
    """The folders that ``path`` lies in, `""` last."""
    while path:
        path = path.rpartition("/")[0]
        yield path
