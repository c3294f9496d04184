"""Unpack restore: a snapshot written into the targets where mounting is not allowed.

Everything is extracted beside the target, checked against the inventory (hash of each file), and only then moved in by
rename: new inodes always, so nothing is ever written through a hard link of a package cache, and nothing of a damaged
snapshot gets in.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from bootseer import faults
from bootseer.blocks import tree
from bootseer.env import scan
from bootseer.env.inventory import Entry
from bootseer.env.layer import first_difference
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
    """Check the extracted tree entry by entry, and take the whiteouts away. Raises `DataError` for any difference."""
    if path := first_difference(stage, entries, content=True):
        raise DataError(f"snapshot differs from its inventory at {path}")
    for entry in reversed(entries):
        if entry.kind == "w":
            (stage / entry.path).unlink()
        elif entry.kind in ("d", "o"):  # without its whiteouts it has another time
            os.utime(stage / entry.path, ns=(entry.mtime_ns, entry.mtime_ns))


def _dress(path: Path, entry: Entry) -> None:
    """Give a directory that was there before the attributes it has in the snapshot."""
    if os.geteuid() == 0:
        os.chown(path, entry.uid, entry.gid)
    os.chmod(path, entry.mode)
    for name, value in entry.xattrs.items():
        try:
            os.setxattr(path, name, value)
        except OSError as exc:
            if exc.errno not in (errno.ENOTSUP, errno.EPERM):
                raise
            log.warning("cannot keep %s of %s: %s", name, path, exc.strerror)
    os.utime(path, ns=(entry.mtime_ns, entry.mtime_ns))


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
            _remove(near)
            _copy(source, near)
            os.rename(near, dest)
        except BaseException:
            _remove(near)
            raise


def _copy(source: Path, dest: Path) -> None:
    """Copy a file or folder to the new path ``dest``, with its hard links and all attributes."""
    done = subprocess.run(["cp", "-aT", "--", source, dest], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(errno.EIO, done.stderr.strip() or "cp failed", str(source))
