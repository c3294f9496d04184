"""Unpack restore: a snapshot written into the targets where mounting is not allowed.

Everything is extracted beside the target, checked against the inventory (hash of each file), given its owner, mode,
times and hard links, and only then moved in by rename: new inodes always, so nothing is ever written through a hard
link of a package cache, and nothing of a damaged snapshot gets in.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path

from blake3 import blake3

from bootseer import faults
from bootseer.blocks import tree
from bootseer.env import scan
from bootseer.env.inventory import Entry
from bootseer.env.manifest import SnapshotManifest
from bootseer.env.spec import Target
from bootseer.errors import DataError, UnsupportedError
from bootseer.store import Store

log = logging.getLogger(__name__)


def unpack(
    store: Store, found: SnapshotManifest, entries: list[Entry], targets: tuple[Target, ...], work: Path
) -> None:
    """Make ``targets`` what they were after the command, given that they are what they were before it.

    ``work`` is an empty folder, best on the file system of the targets. Raises `DataError`, `UnsupportedError` for a
    mount in the way (the targets are untouched then), `UnavailableError`, `FullError`, `OSError`: what was moved in by
    then is taken back, as far as what it replaced could be kept in ``work``.
    """
    stage = work / "tree"
    tree.extract(store, found.tree, stage)
    verify_stage(stage, entries)
    faults.point("env.unpack.before-place")
    own = [[entry for entry in entries if entry.target == number] for number in range(len(targets))]
    for mine, target in zip(own, targets, strict=True):
        check_mounts(mine, target.host)
    undo = _Undo(work / "undo")
    try:
        for mine, target in zip(own, targets, strict=True):
            target.host.mkdir(parents=True, exist_ok=True)
            _place(stage, mine, target.host, undo)
    except BaseException:
        undo.roll_back()
        raise


def check_mounts(entries: Sequence[Entry], host: Path) -> None:
    """Raise `UnsupportedError` when placing ``entries`` would replace or hide something mounted below ``host``."""
    host = Path(os.path.realpath(host))
    fence = scan.mount_points_below(host)
    if not fence:
        return
    for entry in entries:
        dest = host / entry.inner if entry.inner else host
        if str(dest) in fence or (entry.inner and entry.kind not in ("d", "o") and _holds_mount(dest, fence)):
            raise UnsupportedError(f"cannot restore {dest}: something is mounted there")


class _Undo:
    """What was placed, and beside it, in ``folder``, what was there before."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._done: list[tuple[Path, Path | None]] = []

    def replace(self, dest: Path) -> None:
        """Take away what is at ``dest``; a file that another one is renamed over stays until then."""
        self._keep(dest, move=True)
        _remove(dest)

    def overwrite(self, dest: Path) -> None:
        """Get ready for a rename over ``dest``, which is no directory."""
        self._keep(dest, move=False)

    def _keep(self, dest: Path, *, move: bool) -> None:
        if not os.path.lexists(dest):
            self._done.append((dest, None))
            return
        kept = self._folder / str(len(self._done))
        try:
            self._folder.mkdir(exist_ok=True)
            if move:
                os.rename(dest, kept)
            else:
                os.link(dest, kept, follow_symlinks=False)
        except OSError as exc:
            log.info("%s could not be taken back: %s", dest, exc.strerror)
            return
        self._done.append((dest, kept))

    def roll_back(self) -> None:
        for dest, kept in reversed(self._done):
            try:
                if kept is None or _is_real_dir(dest):
                    _remove(dest)
                if kept is not None:
                    os.rename(kept, dest)
            except OSError as exc:
                log.warning("%s stays as the snapshot has it: %s", dest, exc.strerror)


def verify_stage(stage: Path, entries: Sequence[Entry]) -> None:
    """Check the extracted tree entry by entry, and finish what the extraction cannot do: owners, modes, hard links,
    extended attributes, times to the nanosecond; whiteouts are taken away. Raises `DataError` for any difference."""
    children: dict[str, set[str]] = {"": set()}
    for entry in entries:
        parent, _, name = entry.path.rpartition("/")
        children.setdefault(parent, set()).add(name)
        if entry.kind in ("d", "o"):
            children.setdefault(entry.path, set())
    for folder, names in children.items():
        if set(os.listdir(stage / folder)) != names:
            raise DataError(f"snapshot differs from its inventory in {folder or 'its root'}")
    for entry in entries:
        _check(stage / entry.path, entry, stage)
    for entry in reversed(entries):
        path = stage / entry.path
        if entry.kind == "w":
            path.unlink()
        elif entry.kind != "h":
            _dress(path, entry)


def _check(path: Path, entry: Entry, stage: Path) -> None:
    info = os.lstat(path)
    mode, kind = info.st_mode, entry.kind
    if kind in ("d", "o"):
        good = stat.S_ISDIR(mode)
    elif kind == "l":
        good = stat.S_ISLNK(mode) and os.readlink(path) == entry.data
    elif kind == "w":
        good = stat.S_ISCHR(mode) and info.st_rdev == 0
    elif kind == "f":
        good = stat.S_ISREG(mode) and info.st_size == entry.size and _digest(path) == entry.data
    else:
        good = stat.S_ISREG(mode)
        if good:
            path.unlink()
            os.link(stage / entry.data, path, follow_symlinks=False)
    if not good:
        raise DataError(f"snapshot differs from its inventory at {entry.path}")


def _digest(path: Path) -> str:
    hasher = blake3()
    with open(path, "rb") as file:
        while data := file.read(4 << 20):
            hasher.update(data)
    return hasher.hexdigest()


def _dress(path: Path, entry: Entry) -> None:
    if os.geteuid() == 0:
        os.chown(path, entry.uid, entry.gid, follow_symlinks=False)
    if entry.kind != "l":
        os.chmod(path, entry.mode)
    for name, value in entry.xattrs.items():
        try:
            os.setxattr(path, name, value, follow_symlinks=False)
        except OSError as exc:
            if exc.errno not in (errno.ENOTSUP, errno.EPERM):
                raise
            log.warning("cannot keep %s of %s: %s", name, path, exc.strerror)
    os.utime(path, ns=(entry.mtime_ns, entry.mtime_ns), follow_symlinks=False)


def _place(stage: Path, entries: Sequence[Entry], host: Path, undo: _Undo) -> None:
    """Move the entries of one target in, as an overlay would show them; directories get their times last.

    Nothing of `check_mounts` may be in the way.
    """
    host = Path(os.path.realpath(host))
    fence = scan.mount_points_below(host)
    moved = ""
    merged: list[tuple[Path, Entry]] = []
    for entry in entries:
        if moved and entry.path.startswith(moved):
            continue
        dest = host / entry.inner if entry.inner else host
        source = stage / entry.path
        if entry.kind == "w":
            undo.replace(dest)
        elif entry.kind not in ("d", "o"):
            if _is_real_dir(dest):
                undo.replace(dest)
            else:
                undo.overwrite(dest)
            _move(source, dest)
        elif entry.inner and not _holds_mount(dest, fence) and (entry.kind == "o" or not _is_real_dir(dest)):
            undo.replace(dest)
            _move(source, dest)
            moved = entry.path + "/"
        else:
            if entry.kind == "o":
                _empty(dest, fence, undo)
            merged.append((dest, entry))
    for dest, entry in reversed(merged):
        _dress(dest, entry)


def _is_real_dir(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _holds_mount(path: Path, fence: set[str]) -> bool:
    return any(point == str(path) or point.startswith(f"{path}/") for point in fence)


def _remove(path: Path) -> None:
    if _is_real_dir(path):
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _empty(folder: Path, fence: set[str], undo: _Undo) -> None:
    for item in sorted(folder.iterdir()):
        if not _holds_mount(item, fence):
            undo.replace(item)


def _move(source: Path, dest: Path) -> None:
    try:
        os.rename(source, dest)
    except OSError as exc:
        if exc.errno != errno.EXDEV:
            raise
        # Another file system: copy beside the destination first, so that the rename stays the only visible step.
        near = dest.with_name(f".bootseer-{os.getpid()}-{dest.name}"[:255])
        try:
            _copy(source, near)
            os.rename(near, dest)
        except BaseException:
            _remove(near)
            raise


def _copy(source: Path, dest: Path) -> None:
    from bootseer.env.layer import copy_attributes

    links: dict[int, Path] = {}
    todo = [(source, dest)]
    folders: list[tuple[Path, Path]] = []
    while todo:
        old, new = todo.pop()
        info = os.lstat(old)
        if stat.S_ISDIR(info.st_mode):
            new.mkdir()
            folders.append((old, new))
            todo.extend((old / name, new / name) for name in os.listdir(old))
            continue
        if info.st_nlink > 1 and (earlier := links.setdefault(info.st_ino, new)) != new:
            os.link(earlier, new, follow_symlinks=False)
            continue
        if stat.S_ISLNK(info.st_mode):
            os.symlink(os.readlink(old), new)
        else:
            shutil.copyfile(old, new, follow_symlinks=False)
        copy_attributes(old, new)
    for old, new in reversed(folders):
        copy_attributes(old, new)
