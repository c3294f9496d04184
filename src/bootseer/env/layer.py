"""Lists what a captured overlayfs layer holds; builds a layer from the files that a scan found changed."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from blake3 import blake3

from bootseer.env import scan
from bootseer.env.inventory import Entry, Kind, sort_key
from bootseer.errors import DataError, UnsupportedError
from bootseer.kernel import beneath

_OPAQUE = "trusted.overlay.opaque"
_REDIRECT = "trusted.overlay.redirect"
_FOREIGN = (_REDIRECT, "trusted.overlay.metacopy")
_NO_XATTRS = {errno.ENOTSUP, errno.EPERM, errno.EACCES}
_TYPES = {
    "d": stat.S_IFDIR,
    "o": stat.S_IFDIR,
    "f": stat.S_IFREG,
    "h": stat.S_IFREG,
    "l": stat.S_IFLNK,
    "w": stat.S_IFCHR,
}
Digest = Callable[[os.stat_result], str]
"""BLAKE3 (hex) of the regular file that has this status."""


class Item(NamedTuple):
    """An entry as it was listed: ``path`` lies below ``base``."""

    path: str
    base: Path
    status: os.stat_result
    xattrs: dict[str, bytes]

    @property
    def full(self) -> str:
        return f"{self.base}/{self.path}"


def list_layers(targets: int, *roots: Path, known: Iterable[Item] = ()) -> tuple[list[Item], list[Item]]:
    """What the layer directories ``0``, ``1``, ... of all ``roots`` hold, in inventory order; a name that several have
    is that of the first, but that a directory takes the place of a whiteout. Then the whiteouts that gave way.
    ``known``: what the first root holds, if that is listed already. Raises `OSError` when something cannot be read."""
    found = {item.path: item for item in known}
    gone: list[Item] = []
    for root in roots[bool(found) :]:
        there = [str(number) for number in range(targets) if (root / str(number)).is_dir() or root == roots[0]]
        for path, status, attributes in _walk(root, there):
            other = found.get(path)
            if other and stat.S_ISCHR(other.status.st_mode) and stat.S_ISDIR(status.st_mode):
                gone.append(found.pop(path))
            found.setdefault(path, Item(path, root, status, attributes))
    return sorted(found.values(), key=lambda item: sort_key(item.path)), gone


def firsts(items: Iterable[Item]) -> dict[tuple[int, int], Item]:
    """The regular files, each by the first of its names."""
    out: dict[tuple[int, int], Item] = {}
    for item in items:
        if stat.S_ISREG(item.status.st_mode):
            out.setdefault((item.status.st_dev, item.status.st_ino), item)
    return out


def entries_of(items: Iterable[Item], first: Mapping[tuple[int, int], Item], digest: Digest) -> list[Entry]:
    """The inventory of ``items``, of which ``first`` are the `firsts`. Raises `UnsupportedError` for device nodes,
    sockets and FIFOs, and for entries only their own overlay can read."""
    return [_entry(item, first, digest) for item in items]


def check_unchanged(root: Path, entries: Sequence[Entry]) -> None:
    """Compare the layers with what `list_layers` found in them, by stat alone. Raises `DataError` for the first
    difference: somebody writes there, so nothing read meanwhile can be relied upon."""
    if path := first_difference(root, entries, "state"):
        raise DataError(f"{path.partition('/')[2] or 'a target'} changed while it was captured")


def first_difference(root: Path, entries: Sequence[Entry], what: Literal["state", "shape", "content"]) -> str:
    """The path of the first entry that ``root`` does not hold as ``entries`` say; empty when it holds them all.
    Compared are kinds, the names in each directory, the text of links and sizes. The ``state`` has modes, owners and
    times too; the ``shape`` which files are one file; the ``content`` has, beside the shape, what files hold."""
    names: dict[str, set[str]] = {"": set()}
    for entry in entries:
        parent, _, name = entry.path.rpartition("/")
        names.setdefault(parent, set()).add(name)
    if set(os.listdir(root)) != names[""]:
        return "."
    for entry in entries:
        try:
            if not _is_same(root, entry, names.get(entry.path, set()), what):
                return entry.path
        except FileNotFoundError:
            return entry.path
    return ""


def _is_same(root: Path, entry: Entry, names: set[str], what: str) -> bool:
    path = f"{root}/{entry.path}"
    info = os.lstat(path)
    if stat.S_IFMT(info.st_mode) != _TYPES[entry.kind]:
        return False
    if what == "state":
        attributes = (stat.S_IMODE(info.st_mode), info.st_uid, info.st_gid, info.st_mtime_ns)
        if attributes != (entry.mode, entry.uid, entry.gid, entry.mtime_ns):
            return False
    if entry.kind in ("d", "o"):
        return set(os.listdir(path)) == names
    if entry.kind == "l":
        return os.readlink(path) == entry.data
    if entry.kind == "w":
        return info.st_rdev == 0
    if entry.kind == "h" and what != "state":
        return os.path.samestat(info, os.lstat(root / entry.data))
    if info.st_size != entry.size or what != "content":
        return info.st_size == entry.size
    with open(path, "rb") as file:
        return bool(hashlib.file_digest(file, blake3).hexdigest() == entry.data)  # type: ignore[arg-type]


def _walk(root: Path, stack: list[str]) -> Iterator[tuple[str, os.stat_result, dict[str, bytes]]]:
    """(path, lstat, extended attributes) of each entry at and below the paths of ``stack``."""
    while stack:
        path = stack.pop()
        full = f"{root}/{path}"
        info = os.lstat(full)
        yield path, info, xattrs(full)
        if stat.S_ISDIR(info.st_mode):
            stack.extend(f"{path}/{name}" for name in os.listdir(full))


def xattrs(path: str | Path) -> dict[str, bytes]:
    """The extended attributes of ``path`` itself; none where its file system has none, or does not let them be read."""
    try:
        names = os.listxattr(path, follow_symlinks=False)
        return {name: os.getxattr(path, name, follow_symlinks=False) for name in names} if names else {}
    except OSError as exc:
        if exc.errno in _NO_XATTRS:
            return {}
        raise


def _entry(item: Item, first: Mapping[tuple[int, int], Item], digest: Digest) -> Entry:
    path, info = item.path, item.status
    kind, size, data = _kind(path, info, item.xattrs), 0, ""
    if kind == "f":
        origin, size = first[info.st_dev, info.st_ino], info.st_size
        kind, data = ("f", digest(info)) if origin.path == path else ("h", origin.path)
    elif kind == "l":
        data = os.readlink(item.full)
    kept = {} if kind == "w" else {n: v for n, v in item.xattrs.items() if not n.startswith("trusted.overlay.")}
    return Entry(path, kind, stat.S_IMODE(info.st_mode), info.st_uid, info.st_gid, size, info.st_mtime_ns, data, kept)


def _kind(path: str, info: os.stat_result, xattrs: dict[str, bytes]) -> Kind:
    mode = info.st_mode
    if any(name in xattrs for name in _FOREIGN):
        raise UnsupportedError(f"cannot capture {path}: the overlay only refers to its content")
    if stat.S_ISDIR(mode):
        return "o" if xattrs.get(_OPAQUE) == b"y" else "d"
    if stat.S_ISREG(mode):
        return "f"
    if stat.S_ISLNK(mode):
        return "l"
    if stat.S_ISCHR(mode) and info.st_rdev == 0:
        return "w"
    raise UnsupportedError(f"cannot capture {path.partition('/')[2]}: it is a device, a socket or a FIFO")


def unfold(layer: Path, shown: Path) -> None:
    """Make copies of the folders that were renamed in ``shown``, the overlay whose upper directory is ``layer``, where
    they only refer to those beneath. Raises `OSError`, `subprocess.SubprocessError`; what is shown is whole then."""
    shown = Path(str(shown).replace("/proc/self/", f"/proc/{os.getpid()}/", 1))  # for another process
    for folder, _, _ in os.walk(layer):
        if _REDIRECT not in xattrs(folder):
            continue
        here = shown / os.path.relpath(folder, layer)
        copy, old = (here.with_name(f".bootseer-{kind}-{here.name[:200]}") for kind in ("copy", "old"))
        times = os.stat(here.parent)
        subprocess.run(["cp", "-a", "--", here, copy], check=True, stdout=subprocess.DEVNULL)
        os.rename(here, old)
        os.rename(copy, here)
        shutil.rmtree(old)
        os.utime(here.parent, ns=(times.st_atime_ns, times.st_mtime_ns))


def merged(base: Mapping[str, str], entries: Sequence[Entry], target: int, *, content: bool = False) -> dict[str, str]:
    """The `scan.rows` of a target that had the rows ``base``, with the layer ``entries`` over it; with ``content``
    the `place.Held` of it."""
    new: dict[str, str] = {}
    digests = {entry.path: entry.data for entry in entries if content and entry.kind == "f"}
    hidden: set[str] = set()
    """Below these, nothing of the base is left."""
    for entry in entries:
        if entry.target != target:
            continue
        if entry.kind != "d":
            hidden.add(entry.inner)
        if entry.inner and entry.kind != "w" and scan.counts(entry.inner):
            file = entry.data if entry.kind == "h" else entry.path
            text = entry.data if entry.kind == "l" else digests.get(file, "")
            new[entry.inner] = scan.row(_TYPES[entry.kind] | entry.mode, entry.size, text)
    gone = {path for path in hidden if path not in new}
    kept = {path: text for path, text in base.items() if path not in gone and hidden.isdisjoint(scan.above(path))}
    return kept | new


def stage_layer(
    host: Path,
    layer: Path,
    changed: Sequence[str],
    deleted: Sequence[str],
    marks: Mapping[str, scan.Mark] | None = None,
) -> None:
    """Make ``layer`` an overlayfs layer of the difference of ``host``: files as hard links (copies on another file
    system), deletions as whiteouts, directories anew with mode, owner, xattrs and times. With ``marks`` files must be
    as these say, and directories become so, whatever they are by now. Raises `DataError` when ``host`` changes
    meanwhile, `OSError`."""
    marks = marks or {}
    folders = {""}
    for path in (*changed, *deleted):
        while path := path.rpartition("/")[0]:
            folders.add(path)
    with beneath.folder(host) as root:
        folders |= {path for path in changed if _is_dir(root, path)}
        for path in sorted(folders, key=sort_key):
            (layer / path).mkdir(parents=True, exist_ok=True)
        links: dict[tuple[int, int], Path] = {}
        for path in changed:
            if path not in folders:
                _stage_file(root, path, layer / path, links, marks.get(path))
        for path in deleted:
            os.mknod(layer / path, stat.S_IFCHR, 0)
        for path in sorted(folders, key=sort_key, reverse=True):
            with _named(root, path) as source:
                _copy_attributes(source, layer / path, marks.get(path))


@contextlib.contextmanager
def _named(root: int, path: str) -> Iterator[str]:
    """A path of the entry ``path`` below the folder ``root``, for calls that do not follow it when it is a link."""
    if not path:
        yield f"{beneath.shown(root)}/."
        return
    with _still_there(path), beneath.parent(root, path) as (folder, name):
        yield f"{beneath.shown(folder)}/{name}"


@contextlib.contextmanager
def _still_there(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        if exc.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise DataError(f"{path} went away while it was captured") from None
        raise


def _is_dir(root: int, path: str) -> bool:
    with _named(root, path) as source:
        return stat.S_ISDIR(os.lstat(source).st_mode)


def _stage_file(root: int, path: str, dest: Path, links: dict[tuple[int, int], Path], mark: scan.Mark | None) -> None:
    with _named(root, path) as source:
        info = os.lstat(source)
        earlier = links.setdefault((info.st_dev, info.st_ino), dest)
        found = scan.mark_of(info)
        if mark and found != mark and (earlier == dest or found[:4] != mark[:4]):  # a link to it is a change of it
            raise DataError(f"{path} changed before it was captured")
        try:
            os.link(source, dest, follow_symlinks=False)
            return
        except OSError as exc:
            if exc.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EACCES):
                raise
        if earlier != dest:
            os.link(earlier, dest, follow_symlinks=False)
        elif stat.S_ISLNK(info.st_mode):
            os.symlink(os.readlink(source), dest)
            _copy_attributes(source, dest)
        elif stat.S_ISREG(info.st_mode):
            with open(beneath.open_regular(source), "rb") as file, dest.open("wb") as copy:
                shutil.copyfileobj(file, copy)
            _copy_attributes(source, dest)
        else:
            raise UnsupportedError(f"cannot capture {path}: it is a device, a socket or a FIFO")


def _copy_attributes(source: str, dest: Path, mark: scan.Mark | None = None) -> None:
    """Owner (as root), mode, extended attributes and times of ``source``, links not followed; but for the attributes
    those of ``mark``, if there is one."""
    info = os.lstat(source)
    mark = mark or scan.mark_of(info)
    if os.geteuid() == 0:
        os.chown(dest, *mark.owner, follow_symlinks=False)
    if not stat.S_ISLNK(info.st_mode):
        os.chmod(dest, stat.S_IMODE(mark.mode))
    for name, value in xattrs(source).items():
        if not name.startswith("trusted.overlay."):
            os.setxattr(dest, name, value, follow_symlinks=False)
    os.utime(dest, ns=(info.st_atime_ns, mark.mtime_ns), follow_symlinks=False)
