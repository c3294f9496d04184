"""`extract`: a whole tree as a plain folder, for hosts where nothing may be mounted.

Folders, links and special files are made first, from the metadata. Then blocks come, hot ones first, and go straight
into files of a hidden folder in the destination; a file gets its place by rename once all its bytes are there, verified
and with its attributes. So whoever looks early finds a file whole or not at all, and never zeros."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

from bootseer import faults
from bootseer.blocks.extract.attributes import Attributes
from bootseer.blocks.extract.extents import Shares
from bootseer.blocks.extract.writers import Writers
from bootseer.blocks.fetch.prefetch import STALLED_SECONDS, fetch_all
from bootseer.blocks.metadata import localize
from bootseer.blocks.profiles import library
from bootseer.blocks.profiles.library import ProfileKey
from bootseer.blocks.profiles.merge import merge
from bootseer.blocks.publish.packs import Progress
from bootseer.chunks.bitmap import Ready
from bootseer.chunks.blockmap import BlockMap
from bootseer.chunks.hashing import Buffer
from bootseer.closing import descriptor
from bootseer.erofs import Inode, Reader
from bootseer.errors import DataError, FullError, NotWritableError, doing, from_os_error
from bootseer.folders import spread
from bootseer.kernel import beneath, links
from bootseer.kernel.removal import discard_tree
from bootseer.objects import Store, uses

_WRITE_SECONDS = 30.0
"""What is being written when an extraction ends may take so long."""
_SMALL, _MANY, _PROCESSES = 64 << 10, 2000, 4
"""Files of at most so many bytes, when there are so many, are made by at most so many processes."""
_SHARED, _SHARED_FREE = 8, 16 << 20
"""Files may share data (mkfs.erofs stores equal chunks once), but what they have in all is at most so many times the
data, and some: 300 files over the same 4 MiB wrote 1.2 GB from a store of 4 MB."""


def extract(
    store: Store,
    digest: str,
    dest: Path,
    *,
    profile: ProfileKey | None = None,
    streams: int = 6,
    progress: Progress | None = None,
    stalled: float = STALLED_SECONDS,
    most: int | None = None,
    seen: bool = True,
) -> None:
    """Write the whole tree into ``dest`` (made when missing, must be empty), without any mount.

    Modes, times, hard links, holes and extended attributes of ``user.`` are kept, and overlayfs' whiteouts. Nothing
    that gives rights is, also for root: owners, set-id bits, capabilities, access lists, device nodes; log lines count
    what is left out. ``profile``: whose earlier starts say which files to bring first. ``progress(done, total)`` counts
    bytes. ``seen``: whether somebody may look into ``dest`` before the end. After a failure ``dest`` is empty. Nothing
    is synced to disk. Raises `DataError` (also for more than ``most`` bytes of data), `FullError`, `NotFoundError`, or
    `UnavailableError` when nothing came for ``stalled`` seconds. Who may write above ``dest``, or in it, leads
    none of it elsewhere."""
    named = Path(os.path.abspath(dest))
    with doing(f"extract into {named}"):
        named.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            named.mkdir(0o755)
        try:
            opened = links.open_followed(str(named), os.O_RDONLY | os.O_DIRECTORY, base=str(named))
        except NotADirectoryError:
            hint = "choose an empty or new folder"
            raise NotWritableError(f"cannot extract into {named}: it is no folder", hint=hint) from None
    with descriptor(opened) as fd:  # whatever others who can write above it put in its place
        _extract(store, digest, named, Path(beneath.shown(fd)), profile, streams, progress, stalled, most, seen)


def _owner_of_new_files(folder: Path) -> int:
    """The number of this user there: some network file systems map users."""
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.fstat(file.fileno()).st_uid


def _extract(
    store: Store,
    digest: str,
    named: Path,
    dest: Path,
    profile: ProfileKey | None,
    streams: int,
    progress: Progress | None,
    stalled: float,
    most: int | None,
    seen: bool,
) -> None:
    with doing(f"extract into {named}"):
        if any(dest.iterdir()):
            raise NotWritableError(
                f"cannot extract into {named}: it is not empty", hint="choose an empty or new folder"
            )
        now = os.stat(dest)
        if now.st_uid != _owner_of_new_files(dest):
            raise NotWritableError(f"cannot extract into {named}: it is another user's", hint="choose a new folder")
        mode = stat.S_IMODE(now.st_mode)
        os.chmod(dest, mode & ~0o022)  # until it has the tree's: nobody else changes names in it
    try:
        work = Path(tempfile.mkdtemp(prefix=".bootseer-extract-", dir=dest))
        tree = localize(store, digest, work)
        if most is not None and tree.map.size > most:
            raise DataError(f"tree {digest[:12]} has more than {most >> 20} MiB")
        traces = library.load(store, digest, profile, tree.map.size) if profile is not None else []
        spread(work if seen else dest)
        (files := work / "files").mkdir()
        reader = Reader(tree.meta.read_bytes(), data_size=tree.map.size)
        site = Extraction(reader, tree.map, dest, files if seen else None, named)
        site.prepare()
        wanted = site.order(merge(traces, tree.map))
        if (free := shutil.disk_usage(dest).free) < (need := sum(map(tree.map.length_of, wanted))):
            raise FullError(f"no space in {named}: it has {free >> 20} MiB free, {need >> 20} MiB are needed")
        try:
            site.begin()
            fetch_all(store, site, wanted, streams=streams, stalled=stalled, progress=_in_bytes(progress, tree.map))
        finally:
            site.close()
        if site.error is not None:
            raise site.error
        uses.note_beside(store, digest)
        shutil.rmtree(work)
        site.finish()
    except BaseException as exc:
        _empty(dest)
        os.chmod(dest, mode)
        if isinstance(exc, OSError):
            raise from_os_error(exc, f"extract into {named}") from exc
        raise


def _in_bytes(progress: Progress | None, blocks: BlockMap) -> Progress | None:
    """A ``progress`` that counts blocks, for one that counts bytes."""
    if progress is None:
        return None
    return lambda done, total: progress(*(min(count << blocks.shift, blocks.size) for count in (done, total)))


def _empty(folder: Path) -> None:
    for item in folder.iterdir():
        if item.is_dir() and not item.is_symlink():
            discard_tree(item)
        else:
            item.unlink(missing_ok=True)


class _File:
    """A regular file on its way: ``missing`` bytes of its data have not come yet; ``inline``: others are in its inode.
    Until it is ``placed`` it lies in ``work``."""

    __slots__ = ("begun", "inline", "inode", "missing", "number", "paths", "placed", "work")

    def __init__(self, number: int, work: bytes, inode: Inode, path: bytes) -> None:
        self.number, self.work = number, work
        self.inode = inode
        self.paths = [path]
        self.missing = 0
        self.inline = False
        self.begun = False
        self.placed = False


class Extraction:
    """The tree of ``reader`` on its way into ``dest``, which people call ``named``, as the cache of a fetcher; ``work``
    holds files that are not whole yet, None: they may lie in their places. `prepare`, `begin`, `write` for all blocks
    of `order` (once each, from any thread), `close`, then `finish`."""

    def __init__(self, reader: Reader, blocks: BlockMap, dest: Path, work: Path | None, named: Path) -> None:
        self.folder = work or dest
        self._work = work and os.fsencode(work)
        self.map = blocks
        self.ready: Ready = bytearray(blocks.count)
        self.error: BaseException | None = None
        """Why a block could not be written."""
        self._reader = reader
        self._dest = os.fsencode(dest)
        self._files: dict[int, _File] = {}
        self._numbered: list[_File] = []
        self._writers: Writers | None = None
        self._folders: list[tuple[bytes, Inode]] = []
        self._shares: Shares[_File] = Shares(blocks.shift)
        self._attributes = Attributes(reader, os.fsencode(named))
        self._turn = threading.Lock()
        """Of who makes files: beside each other threads spend most of their time at the lock of the folder."""
        self._cond = threading.Condition()
        # Guarded by it, as is `_File.missing`:
        self._taken = bytearray(blocks.count)
        self._writing = 0
        self._closed = False

    def prepare(self) -> None:
        """Make everything but contents; files without data are whole then."""
        made: dict[int, bytes] = {}
        links: list[tuple[bytes, bytes]] = []
        extents: list[tuple[int, _File, int, int]] = []
        room = self._reader.meta_size
        most = _SHARED * self.map.size + _SHARED_FREE
        for path, inode in self._reader.walk():
            if inode.is_dir:
                if path:
                    os.mkdir(self._at(path), 0o700)
                self._folders.append((path, inode))
            elif inode.is_file:
                if inode.nid in self._files:
                    self._files[inode.nid].paths.append(path)
                    continue
                room -= self._reader.table_size(inode)
                if room < 0:
                    raise DataError("bad EROFS image: its files share their chunk indexes")
                number = len(self._files)
                work = self._at(path) if self._work is None else b"%s/%d" % (self._work, number)
                self._files[inode.nid] = file = _File(number, work, inode, path)
                for extent in self._reader.extents(inode):
                    extents.append((extent.data_offset, file, extent.file_offset, extent.length))
                    file.missing += extent.length
                    most -= extent.length
                    if most < 0:
                        raise DataError(
                            f"bad EROFS image: its files share their data more than {_SHARED} times",
                            hint="mount the tree instead, if it can be trusted",
                        )
                file.inline = file.missing < inode.size
            elif inode.nid in made:
                links.append((made[inode.nid], path))
            elif self._make(path, inode):
                made[inode.nid] = path
        for old, path in links:
            os.link(self._at(old), self._at(path), follow_symlinks=False)
        self._shares = Shares(self.map.shift, extents)
        for file in self._files.values():
            if not file.missing:
                self._place(file)
        for block in self.map.zeros:  # they do not come: what files have in them is a hole already
            start = block << self.map.shift
            for file, _, low, high in self._shares.overlaps(start, start + self.map.length_of(block)):
                self._came(file, high - low)

    def order(self, hot: Sequence[int]) -> list[int]:
        """Blocks that files have bytes in and that are not all zero: the hot ones, then all, ascending."""
        needed = dict.fromkeys(block for block in self._shares.needed() if not self.map.is_zero(block))
        return list(dict.fromkeys(block for block in hot if block in needed) | needed)

    def write(self, block: int, data: Buffer) -> None:
        """As `bootseer.chunks.cachefile.CacheFile.write`."""
        count = -(-len(data) >> self.map.shift)
        with self._cond:
            if self._closed or self.error is not None or self._taken.find(1, block, block + count) >= 0:
                raise OSError(errno.EIO, "the extraction is over, or has this block")
            self._taken[block : block + count] = b"\1" * count
            self._writing += 1
        try:
            self._take(block, data)
            self.ready[block : block + count] = b"\1" * count
        except BaseException as exc:
            self.error = self.error or exc
            raise OSError(errno.EIO, f"cannot write a file: {exc}") from exc
        finally:
            with self._cond:
                self._writing -= 1
                self._cond.notify_all()

    def begin(self) -> None:
        """Start the processes that make files, where they are worth it. `close` ends them."""
        self._numbered = [*self._files.values()]
        small = sum(0 < file.missing <= _SMALL for file in self._numbered)
        count = min(_PROCESSES, len(os.sched_getaffinity(0)))
        if small >= _MANY and count > 1:
            before = self._attributes.lost.copy()  # what this process counts itself
            writers = Writers(count, self._make_whole, lambda: self._attributes.lost - before, _WRITE_SECONDS)
            self._writers = writers if writers.count else None

    def close(self) -> None:
        """Nothing is written after this, also by a thread that was stuck in a source."""
        with self._cond:
            self._closed = True
            self._cond.wait_for(lambda: not self._writing, _WRITE_SECONDS)
        if self._writers:
            try:
                for lost in self._writers.end():
                    self._attributes.lost.update(lost)
            except Exception as exc:
                self.error = exc

    def _take(self, block: int, data: Buffer) -> None:
        """Write the bytes from ``block`` on to the files that have them; files that are whole now get their place."""
        start = block << self.map.shift
        found = list(self._shares.overlaps(start, start + len(data)))
        with contextlib.nullcontext() if len(found) == 1 and found[0][0].begun else self._turn:
            self._put(start, data, found)

    def _put(self, start: int, data: Buffer, parts: Iterable[tuple[_File, int, int, int]]) -> None:
        came, given, view = [], [], memoryview(data)
        for file, inner, low, high in parts:
            piece = view[low - start : high - start]
            whole = high - low == file.inode.size  # then no other thread has a part
            if whole and self._writers and high - low <= _SMALL:
                given.append((file.number, piece))
                file.placed = True
                continue
            with descriptor(self._open(file, sized=not whole)) as fd:
                _write(fd, piece, inner)
                if whole:
                    self._finish(file, fd)
                else:
                    came.append((file, high - low))
        if self._writers and given:
            self._writers.give(given)
        for file, length in came:
            self._came(file, length)

    def _make_whole(self, number: int, data: bytes) -> None:
        """In a process of its own."""
        file = self._numbered[number]
        with descriptor(self._open(file, sized=False)) as fd:
            _write(fd, memoryview(data), 0)
            self._finish(file, fd)

    def _came(self, file: _File, length: int) -> None:
        with self._cond:
            file.missing -= length
            whole = not file.missing
        if whole:
            self._place(file)

    def _at(self, path: bytes) -> bytes:
        return os.path.join(self._dest, path or b".")  # which no link to a descriptor is

    def _open(self, file: _File, *, sized: bool = True) -> int:
        new = 0 if file.begun else os.O_CREAT  # which locks the folder, also where the file is there
        fd = os.open(file.work, os.O_WRONLY | new | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        if sized and not file.begun:
            # By two threads at worst, to the same size.
            os.ftruncate(fd, file.inode.size)
            file.begun = True
        return fd

    def _place(self, file: _File) -> None:
        """All data of ``file`` is there: the rest of it, attributes, then its names."""
        with descriptor(self._open(file)) as fd:
            self._finish(file, fd)

    def _finish(self, file: _File, fd: int) -> None:
        """As `_place`, of an open one."""
        for inner, data in self._reader.inline(file.inode) if file.inline else ():
            _write(fd, memoryview(data), inner)
        self._attributes.put_on(fd, file.inode, file.paths[0])
        faults.point("blocks.extract.place")
        path = self._at(file.paths[0])
        if self._work is not None:
            os.rename(file.work, path)
        for other in file.paths[1:]:
            os.link(path, self._at(other), follow_symlinks=False)
        file.placed = True

    def _make(self, path: bytes, inode: Inode) -> bool:
        """A link or special file; False for a device that is no whiteout."""
        real = self._at(path)
        if inode.is_symlink:
            os.symlink(self._reader.readlink(inode), real)
        elif inode.rdev and not stat.S_ISFIFO(inode.mode):
            self._attributes.lose("device nodes")
            return False
        else:
            try:
                os.mknod(real, stat.S_IFMT(inode.mode) | 0o600)
            except PermissionError:
                self._attributes.lose("special files")
                return False
        self._attributes.put_on(real, inode, path)
        return True

    def finish(self) -> None:
        """Folders get their attributes, the deepest first. Raises `DataError` when a file is not whole."""
        if any(not file.placed for file in self._files.values()):
            raise DataError("an extracted file is not whole")
        for path, inode in reversed(self._folders):
            self._attributes.put_on(self._at(path), inode, path)
        self._attributes.report()


def _write(fd: int, view: memoryview, offset: int) -> None:
    while view:
        done = os.pwrite(fd, view, offset)
        view, offset = view[done:], offset + done
