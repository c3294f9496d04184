"""Unpack restore: a snapshot written into the targets where mounting is not allowed.

Everything is extracted beside the target, block by verified block, compared with the inventory, and only then moved in
by rename: new inodes always, so nothing is ever written through a hard link of a package cache, and nothing of a
damaged snapshot gets in. `bootseer.blocks.extract.attributes` decides on modes, `give_owners` on owners. The target
itself stays whose it is.

What is replaced is kept in a folder ``.bootseer-restore-*`` beside the target (in it, when it is a mount of its own)
until all is in place, with a journal that is written before each step. A restore that was killed is taken back by
`recover`. A power failure may lose the end of the journal."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import stat
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from bootseer import faults, folders
from bootseer.blocks import tree
from bootseer.closing import descriptor
from bootseer.env import place, scan
from bootseer.env.inventory import Entry
from bootseer.env.layer import first_difference, xattrs
from bootseer.env.manifest import SnapshotManifest
from bootseer.env.spec import Target
from bootseer.errors import BootseerError, DataError, UnsupportedError
from bootseer.kernel import beneath
from bootseer.kernel.removal import remove_tree
from bootseer.objects import Store
from bootseer.wiretypes import loaded

log = logging.getLogger(__name__)

_PREFIX = ".bootseer-restore-"
_JOURNAL = "journal"


def unpack(
    store: Store,
    found: SnapshotManifest,
    entries: list[Entry],
    targets: tuple[Target, ...],
    check: Callable[[], None] = lambda: None,
) -> None:
    """Make ``targets`` what they were after the command, given that they are what they were before it. ``check`` may
    raise when all is in place. Raises what that does, `DataError`, `UnsupportedError` for a mount in the way (the
    targets are untouched then), `UnavailableError`, `FullError`, `OSError`: what was moved in by then is taken back, as
    far as what it replaced could be kept."""
    with contextlib.ExitStack() as stack:
        undo = [stack.enter_context(undoing(target)) for target in targets]
        stage = undo[0].folder / "tree"
        tree.extract(store, found.tree, stage, seen=False)
        verify_stage(stage, entries, "shape")  # each of its blocks was verified on the way
        faults.point("env.unpack.before-place")
        own = [[entry for entry in entries if entry.target == number] for number in range(len(targets))]
        for mine, target in zip(own, targets, strict=True):
            check_mounts(mine, target.host)
        hosts = [stack.enter_context(place.opened(target, make=True)) for target in targets]
        for mine, target, host in zip(own, targets, hosts, strict=True):
            give_owners(stage, mine, host, contained=bool(target.within))
        try:
            for mine, host, steps in zip(own, hosts, undo, strict=True):
                place_entries(stage, mine, host, steps)
            faults.point("env.unpack.placed")
            check()
        except BaseException:
            for host, steps in reversed(list(zip(hosts, undo, strict=True))):
                steps.roll_back(host)
            raise
        for steps in undo:
            steps.forget()


def recover(target: Target) -> None:
    """Take back what a restore into ``target`` did that was killed, and delete what it left. To be called while no
    other one begins. Raises `BootseerError` when what lies there cannot be believed, `OSError`."""
    place.check([target])
    base, prefix = beside(target)
    for folder in [path for path in base.iterdir() if path.name.startswith(prefix)] if base.is_dir() else []:
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise BootseerError(f"{folder} is of another user's restore", hint=f"look at {target.host}, then remove it")
        with folders.adopted(folder) as ours:
            if ours:
                log.warning("a restore into %s was killed; taking back what it did", target.host)
                steps = Undo(folder)
                with place.opened(target, make=True) as host:
                    steps.roll_back(host)
                steps.clear()
                folders.remove(folder)


def beside(target: Target) -> tuple[Path, str]:
    """The folder on the file system of ``target`` that folders for its restore are made in, and how their names begin.
    Raises `ConfigError` when root is to use one in which somebody else can change names."""
    real = Path(os.path.realpath(target.host))
    base = real.parent
    if real.is_dir() and (real.stat().st_dev != base.stat().st_dev or not os.access(base, os.W_OK)):
        base = real
    name = f"{_PREFIX}{hashlib.sha256(os.fsencode(real)).hexdigest()[:16]}-"
    if os.geteuid() == 0 and not target.within:
        folders.settled(base / name)
    return base, name


@contextlib.contextmanager
def undoing(target: Target) -> Iterator[Undo]:
    base, prefix = beside(target)
    base.mkdir(parents=True, exist_ok=True)
    with folders.owned_folder(base, prefix) as folder:
        steps = Undo(folder)
        try:
            yield steps
        finally:
            steps.clear()


def check_mounts(entries: Sequence[Entry], host: Path) -> None:
    """Raise `UnsupportedError` when placing ``entries`` would replace or hide something mounted below ``host``."""
    host = Path(os.path.realpath(host))
    fence = scan.mount_points_below(host)
    if not fence:
        return
    for entry in entries:
        dest = host / entry.inner
        if str(dest) in fence or (entry.inner and entry.kind not in ("d", "o") and _holds_mount(dest, fence)):
            raise UnsupportedError(f"cannot restore {dest}: something is mounted there")


class Undo:
    """What was placed in one target, and in ``folder`` what was there before: ``N`` is what line N of the journal tells
    of, missing when it could not be kept. The journal names entries by their way from the target, and nothing else is
    touched, whatever is in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._journal = folder / _JOURNAL
        self._lines = 0

    def replace(self, inner: str, dest: Path) -> None:
        """Take away what is at ``dest``, which is ``inner`` in the target; a file that another one is renamed over
        stays until then."""
        self._keep(inner, dest, move=True)
        _remove(dest)

    def overwrite(self, inner: str, dest: Path) -> None:
        """Get ready for a rename over ``dest``, which is no directory."""
        self._keep(inner, dest, move=False)

    def dress(self, inner: str, dest: str) -> None:
        """Get ready for new attributes of the directory ``dest``, and for changes in it."""
        found = os.lstat(dest)
        times = [found.st_atime_ns, found.st_mtime_ns]
        self._note(inner, [stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid, times])

    def _keep(self, inner: str, dest: Path, *, move: bool) -> None:
        kept = self.folder / str(self._lines)
        there = os.path.lexists(dest)
        self._note(inner, there)
        if not there:
            return
        try:
            if move:
                os.rename(dest, kept)
            else:
                os.link(dest, kept, follow_symlinks=False)
        except OSError as exc:
            log.info("%s could not be taken back: %s", inner, exc.strerror)

    def _note(self, inner: str, before: object) -> None:
        with open(self._journal, "ab", buffering=0, opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            file.write(json.dumps([inner, before]).encode() + b"\n")
        self._lines += 1
        faults.point("env.unpack.noted")

    def forget(self) -> None:
        """All is in place."""
        self._journal.unlink(missing_ok=True)

    def clear(self) -> None:
        """Empty the folder, unless something of it could not be taken back: the next start tries again."""
        if not self._journal.exists():
            folders.clear(self.folder)

    def roll_back(self, host: Path) -> None:
        """Take back what was noted of the target, which ``host`` leads to. What cannot be taken back stays noted, with
        a line in the log."""
        try:
            fd = os.open(self._journal, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        with open(fd, "rb") as file:
            found = os.fstat(fd)
            if found.st_uid != os.geteuid() or found.st_mode & 0o077:
                raise BootseerError(f"{self._journal} is not of a restore by this user", hint="remove its folder")
            lines = file.read().split(b"\n")[:-1]  # what has no end was not begun
        whole = True
        with beneath.folder(host) as root:
            for number, line in reversed(list(enumerate(lines))):
                inner, before = loaded(json.loads, line)
                try:
                    self._take_back(root, inner, self.folder / str(number), before)
                except OSError as exc:
                    whole = False
                    log.warning("%s stays as the snapshot has it, %s as it was: %s", inner, self.folder, exc.strerror)
        if whole:
            self.forget()

    def _take_back(self, root: int, inner: str, kept: Path, before: object) -> None:
        if isinstance(before, list):
            mode, uid, gid, times = before
            with contextlib.suppress(FileNotFoundError, NotADirectoryError), beneath.folder(inner, root=root) as fd:
                if inner:
                    if os.geteuid() == 0:
                        os.chown(fd, uid, gid)
                    os.chmod(fd, mode)
                os.utime(fd, ns=(times[0], times[1]))
            return
        with beneath.parent(root, inner) as (folder, name):
            dest = Path(beneath.shown(folder), name)
            _remove(_near(dest))
            if os.path.lexists(kept):
                if _is_real_dir(dest) or _is_real_dir(kept):
                    _remove(dest)
                os.rename(kept, dest)
            elif not before:
                _remove(dest)


def verify_stage(stage: Path, entries: Sequence[Entry], what: Literal["shape", "content"] = "content") -> None:
    """Check the extracted tree entry by entry, and take the whiteouts away. Raises `DataError` for any difference in
    what is compared, see `first_difference`."""
    if path := first_difference(stage, entries, what):
        raise DataError(f"snapshot differs from its inventory at {path}")
    for entry in reversed(entries):
        if entry.kind == "w":
            (stage / entry.path).unlink()
        elif entry.kind in ("d", "o"):  # without its whiteouts it has another time
            os.utime(stage / entry.path, ns=(entry.mtime_ns, entry.mtime_ns))


def give_owners(stage: Path, entries: Sequence[Entry], host: Path, *, contained: bool) -> None:
    """As root, give what is in the private folder ``stage``, all root's own, to its owners: in a container's root file
    system to any user, for they are the image's; else only to the one that the target belongs to, who rules over what
    is in it anyway. What another one owned stays root's."""
    if os.geteuid() != 0:
        return
    found = os.stat(host)
    foreign = 0
    for entry in entries:
        if entry.kind in ("w", "h") or (entry.uid, entry.gid) == (0, 0):
            continue
        uid = entry.uid if contained or entry.uid == found.st_uid else 0
        gid = entry.gid if contained or entry.gid == found.st_gid else 0
        foreign += (uid, gid) != (entry.uid, entry.gid)
        if entry.inner:
            os.chown(stage / entry.path, uid, gid, follow_symlinks=False)
    if foreign:
        log.warning("%d files of the snapshot belonged to other users, and are root's here", foreign)


def _dress(path: str, source: Path, entry: Entry) -> None:
    """Give a directory that was there before, and is not the target itself, what ``source`` has of the snapshot."""
    if entry.inner:
        found = os.stat(source)
        if os.geteuid() == 0:
            os.chown(path, found.st_uid, found.st_gid)
        os.chmod(path, stat.S_IMODE(found.st_mode))
        for name, value in ((n, v) for n, v in xattrs(source).items() if n.startswith("user.")):
            try:
                os.setxattr(path, name, value)
            except OSError as exc:
                if exc.errno not in (errno.ENOTSUP, errno.EPERM):
                    raise
                log.warning("cannot keep %s of %s: %s", name, entry.inner, exc.strerror)
    os.utime(path, ns=(entry.mtime_ns, entry.mtime_ns))


def place_entries(stage: Path, entries: Sequence[Entry], host: Path, undo: Undo) -> None:
    """Move the entries of one target in, as an overlay would show them; directories get their times last. Nothing of
    `check_mounts` may be in the way."""
    fence = scan.mount_points_below(host)
    real = Path(os.path.realpath(host))
    moved = ""
    merged: list[Entry] = []
    with beneath.folder(host) as root:
        for entry in entries:
            inner = entry.inner
            if moved and entry.path.startswith(moved):
                continue
            if not inner:
                _merge(root, entry, real, fence, undo)
                merged.append(entry)
                continue
            source = stage / entry.path
            with beneath.parent(root, inner) as (folder, name):
                dest = Path(beneath.shown(folder), name)
                if entry.kind == "w":
                    undo.replace(inner, dest)
                elif entry.kind not in ("d", "o"):
                    if _is_real_dir(dest):
                        undo.replace(inner, dest)
                    else:
                        undo.overwrite(inner, dest)
                    move_in(source, dest)
                elif not _holds_mount(real / inner, fence) and (entry.kind == "o" or not _is_real_dir(dest)):
                    undo.replace(inner, dest)
                    move_in(source, dest)
                    moved = entry.path + "/"
                else:
                    _merge(root, entry, real, fence, undo)
                    merged.append(entry)
        for entry in reversed(merged):
            with beneath.folder(entry.inner, root=root) as fd:
                _dress(f"{beneath.shown(fd)}/.", stage / entry.path, entry)


def _merge(root: int, entry: Entry, real: Path, fence: set[str], undo: Undo) -> None:
    """Get a directory ready that stays: an opaque one loses what is in it."""
    inner = entry.inner
    with beneath.folder(inner, root=root) as fd:
        undo.dress(inner, f"{beneath.shown(fd)}/.")
        for name in sorted(os.listdir(fd)) if entry.kind == "o" else ():
            if real / inner / name != undo.folder and not _holds_mount(real / inner / name, fence):
                undo.replace(f"{inner}/{name}".lstrip("/"), Path(beneath.shown(fd), name))


def _is_real_dir(path: Path) -> bool:
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except FileNotFoundError:
        return False


def _holds_mount(path: Path, fence: set[str]) -> bool:
    return any(point == str(path) or point.startswith(f"{path}/") for point in fence)


def _remove(path: Path) -> None:
    if _is_real_dir(path):
        remove_tree(path)
    else:
        path.unlink(missing_ok=True)


def move_in(source: Path, dest: Path) -> None:
    try:
        os.rename(source, dest)
    except OSError as exc:
        if exc.errno != errno.EXDEV:
            raise
        # Another file system: copy beside the destination first, so that the rename stays the only visible step. The
        # copy lies in a folder of ours, which cp is given by descriptor.
        near = _near(dest)
        try:
            _remove(near)
            near.mkdir(0o700)
            with descriptor(os.open(near, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)) as fd:
                _copy(source, Path(f"/proc/{os.getpid()}/fd/{fd}/copy"))
                os.rename("copy", dest, src_dir_fd=fd)
        finally:
            _remove(near)


def _near(dest: Path) -> Path:
    return dest.with_name(f".bootseer-{dest.name}"[:255])


def _copy(source: Path, dest: Path) -> None:
    """Copy a file or folder to the new path ``dest``, with its hard links and all attributes."""
    done = subprocess.run(["cp", "-aT", "--", source, dest], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(errno.EIO, done.stderr.strip() or "cp failed", str(source))
