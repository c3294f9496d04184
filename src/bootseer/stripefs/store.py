"""`StripeFS`: files, folders and checkpoints of one striped store."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection
from pathlib import Path

from blake3 import blake3

from bootseer.backends.interface import FILE_MODE, Backend, Entry, clean, is_folder, join
from bootseer.backends.open import Given, locate, open_storage
from bootseer.backends.pool import parallel
from bootseer.errors import BootseerError, DataError, NotFoundError, UnavailableError, doing
from bootseer.stripefs import layout, localcopy
from bootseer.stripefs.checkpoint import commit, newest
from bootseer.stripefs.checkpoint.claim import Save, begin
from bootseer.stripefs.checkpoint.commit import Commit
from bootseer.stripefs.files import namespace, rights
from bootseer.stripefs.files.readahead import in_order
from bootseer.stripefs.files.reader import ChunkFile, PlainFile, read_pointer, refuse_unfinished
from bootseer.stripefs.files.stat import FileStat, of_entry
from bootseer.stripefs.files.stripe import again_when_lost
from bootseer.stripefs.files.striped import StripedFile, open_file
from bootseer.stripefs.files.writer import StripeWriter, Written
from bootseer.stripefs.layout import Pointer, clean_new
from bootseer.stripefs.maintenance.scan import lost_sets, refuse_lost

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""


class StripeFS:
    """A striped store over ``backend``. Paths are relative to its base. Any method may be called from any thread.
    Errors: `NotFoundError`, `DataError` (damaged, incomplete, replaced meanwhile), `NotWritableError`, `FullError`,
    `UnavailableError`."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.url = backend.url
        self._manifest: tuple[str, str, dict[str, str]] = ("", "", {})  # folder, version of its COMMIT, digests

    def put(
        self,
        local: Path,
        path: str,
        *,
        width: int = layout.WIDTH,
        unit: int = layout.UNIT,
        progress: Progress | None = None,
        before: Callable[[Pointer | None], None] | None = None,
        known: str | None = None,
    ) -> Written:
        """Store the local file ``local`` at ``path``, atomically; an existing file is replaced. When the storage loses
        a stripe meanwhile, everything is written once more, under fresh names. ``before``, ``known``: as of `create`.
        `DataError` when ``local`` is changed meanwhile."""

        def write() -> Written:
            src.seek(0)
            info = os.fstat(src.fileno())
            name = clean_new(path)
            with StripeWriter(self.backend, name, width=width, unit=unit, before=before, known=known) as out:
                while data := src.read(4 << 20):
                    out.write(data)
                    if progress:
                        progress(out.size, info.st_size)
                now = os.fstat(src.fileno())
                if (now.st_size, now.st_mtime_ns) != (info.st_size, info.st_mtime_ns):
                    raise DataError(f"{local} was changed while it was stored", hint="store it again when it is whole")
                return out.finish()

        with doing(f"read {local}"), open(local, "rb", buffering=0) as src:
            return again_when_lost(write, str(local))

    def create(
        self,
        path: str,
        *,
        width: int = layout.WIDTH,
        unit: int = layout.UNIT,
        striped: bool = False,
        mode: int = FILE_MODE,
        before: Callable[[Pointer | None], None] | None = None,
        known: str | None = None,
        exclusive: bool = False,
    ) -> StripeWriter:
        """A writer for a new file at ``path``; ``striped`` also when it is small; the rest as in `StripeWriter`."""
        path = clean_new(path)
        return StripeWriter(
            self.backend, path, width=width, unit=unit, striped=striped, mode=mode, before=before,
            known=known, exclusive=exclusive,
        )  # fmt: skip

    def get(self, path: str, local: Path, *, progress: Progress | None = None, expected: str | None = None) -> int:
        """Copy the file at ``path`` to ``local``, which appears whole or not at all. Returns its size. ``expected``:
        its `committed_digest`, where that is known. A link is followed. `DataError` also for a plain file that does not
        have the digest which a COMMIT beside or above it says; `NotWritableError` for one that its writer has not
        closed, and for a ``local`` that is no file."""
        local = localcopy.place(local)
        with self.open(path) as file:
            refuse_unfinished(file)
            if not isinstance(file, PlainFile):
                expected = ""
            elif expected is None:
                expected = self.committed_digest(path)
            digest = blake3()
            with localcopy.new(local) as out:
                for piece in in_order(file):
                    if expected:
                        digest.update(piece)
                    out.write(piece)
                    if progress:
                        progress(out.tell(), file.size)
                if expected and digest.hexdigest() != expected:
                    raise commit.other_digest(path)
            return file.size

    def open(self, path: str) -> ChunkFile:
        """Open a file, striped or plain, for parallel reads."""
        path = clean(path)
        try:
            file = open_file(self.backend, path)
        except NotFoundError as exc:
            if is_folder(self.backend, path):
                raise NotFoundError(f"{join(self.url, path)} is a folder, not a file") from None
            raise NotFoundError(f"no file {path} in {self.url}") from exc
        if isinstance(file, PlainFile):
            try:
                refuse_lost(file, lambda parent: lost_sets(self.backend, parent))
            except BaseException:
                file.close()
                raise
        return file

    def stat(self, path: str) -> FileStat:
        path = clean(path)
        try:
            entry = self.backend.stat(path)
        except NotFoundError:
            where = f"/{path}" if self.url == "/" else f"{path} in {self.url}"
            what = f"no file or folder {where}" if path else f"no folder {self.url}"
            raise NotFoundError(what) from None
        return of_entry(self.backend, path, entry)

    def ls(self, path: str = "") -> list[FileStat]:
        """The entries of a folder in name order; a file lists itself. Sizes are those of the contents."""
        path = clean(path)
        if not (found := self.stat(path)).is_dir:
            return [found]
        entries = [entry for entry in self.backend.list(path) if not commit.is_hidden(entry.name)]

        def stat(entry: Entry) -> FileStat | None:
            try:
                return of_entry(self.backend, join(path, entry.name), entry)
            except NotFoundError:
                return None  # gone since
            except UnavailableError:
                raise
            except BootseerError as exc:  # who opens it is told; it hides no others
                log.warning("%s; it is listed as what it seems to be", exc.message)
                return of_entry(self.backend, join(path, entry.name), entry, plain=True)

        # side by side: a small file is read, to see whether it is a pointer
        return [one for one in parallel(stat, entries) if one is not None]

    def files(self, path: str = "") -> list[str]:
        """Paths of every file at or below ``path``, in order."""
        path = clean(path)
        if not self.stat(path).is_dir:
            return [path]
        return sorted(join(path, name) for name, _ in commit.walk(self.backend, path))

    def verify(self, path: str = "", *, progress: Progress | None = None) -> list[FileStat]:
        """Read and check everything at or below ``path``: headers, footers, every chunk, digests, and each COMMIT, also
        one above. Returns the checked files; raises `DataError` for the first that is wrong. Plain files outside of a
        checkpoint are only read: nothing says what they should hold."""
        stats = [self.stat(name) for name in self.files(path)]
        total, done = sum(stat.size for stat in stats), 0
        expected: dict[str, str] = {}
        for stat in stats:
            if stat.path.rpartition("/")[2] == commit.NAME:
                folder = stat.path.rpartition("/")[0]
                found = commit.check(self.backend, folder)
                expected |= {join(folder, file.path): file.digest for file in found.files}
        for stat in stats:
            with self.open(stat.path) as file:
                if isinstance(file, StripedFile):
                    file.check_rest()
                digest = commit.digest_of_open(file)
            wanted = expected.get(stat.path) or self.committed_digest(stat.path)
            if wanted not in ("", digest) or stat.digest not in ("", digest):
                raise DataError(f"{stat.path} does not have its digest", hint="restore it from a copy")
            done += stat.size
            if progress:
                progress(done, total)
        return stats

    def save(self, folder: str, *, epoch: int = 0) -> Save:
        """Begin a save of the checkpoint ``folder``: its `Save.create` and `Save.commit` fail once a later one began.
        Other saves of that folder, and writes into it, are ended. ``epoch``: join the save that another process of the
        job began, whose ``epoch`` it is. Raises `NotWritableError` for a folder with COMMIT."""
        folder = clean_new(folder)
        self.backend.check_new(folder)
        return Save(self.backend, folder, epoch) if epoch else begin(self.backend, folder)

    def commit(
        self,
        path: str,
        *,
        before: Callable[[Commit], None] | None = None,
        only: Collection[str] | None = None,
    ) -> Commit:
        """Publish the directory as a checkpoint: everything in it now, nothing later. The first commit wins. Writes
        into it that are under way are ended. ``before`` and ``only``: as in `Save.publish`."""
        path = clean(path)
        if not self.stat(path).is_dir:
            raise NotFoundError(f"{path} is a file, a checkpoint is a folder")
        return begin(self.backend, path).publish(before=before, only=only)

    def refuse_committed(self, path: str) -> None:
        """Raise `NotWritableError` when ``path`` is a committed checkpoint or in one, also when the COMMIT is above the
        base of the store: writing there would break it."""
        commit.refuse_inside(self.backend, clean(path))

    def checkpoint(self, path: str) -> Commit:
        """The manifest of the checkpoint at ``path``, compared with the files there. Raises `NotFoundError` for a
        missing directory, `DataError` when its save did not finish."""
        return commit.check(self.backend, clean(path))

    def committed_digest(self, path: str) -> str:
        """BLAKE3 that the nearest COMMIT beside or above the file at ``path`` says of it, also one above the base of
        the store; "" for none. `DataError` for a damaged one."""
        folder, _, name = clean(path).rpartition("/")
        return self.committed_digests(folder)(name)

    def committed_digests(self, folder: str) -> Callable[[str], str]:
        """`committed_digest` of the files in ``folder``, by their names there."""
        if (found := commit.nearest(self.backend, join(folder, commit.NAME))) is None:
            return lambda name: ""
        store, folder, manifest, version = found
        where = commit.shown(store, folder)
        seen = self._manifest  # one tuple, so that another thread's is seen whole
        if seen[:2] != (where, version):
            files = commit.read(store, folder).files
            seen = self._manifest = (where, version, {file.path: file.digest for file in files})
        return lambda name: seen[2].get(join(manifest.rpartition("/")[0], name), "")

    def latest(self, path: str = "") -> str:
        """Path of the newest complete checkpoint in the folder ``path``; `NotFoundError` when there is none."""
        path = clean(path)
        if not self.stat(path).is_dir:
            raise NotFoundError(f"{path} is a file, not a folder of checkpoints")
        return newest.find(self.backend, path)

    def remove(self, path: str, *, force: bool = False) -> None:
        """Remove a file: first its pointer, then its stripes, unless another file's pointer may name them.
        `NotWritableError` for what a COMMIT names, and for COMMIT itself, without ``force``."""
        path = clean(path)
        if not force:
            commit.refuse_removal(self.backend, path)
        namespace.remove(self.backend, path)

    def remove_tree(self, path: str, *, force: bool = False) -> None:
        """Remove a folder with everything in it; it vanishes in one step. A whole checkpoint goes COMMIT first.
        `NotWritableError` for a part of a checkpoint with COMMIT, without ``force``."""
        path = clean(path)
        if not path or not self.stat(path).is_dir:
            raise NotFoundError(f"{path or self.url} is no folder in the store")
        if not force:
            commit.refuse_removal(self.backend, path)
        namespace.remove_tree(self.backend, path)

    def remove_all(self) -> None:
        """Remove what is in the store; its folder stays. COMMIT goes first. `NotWritableError` for a part of a
        checkpoint with COMMIT."""
        commit.refuse_removal(self.backend, "")
        namespace.remove_all(self.backend)

    def rename(self, src: str, dst: str, *, overwrite: bool = True, force: bool = False) -> None:
        """`namespace.rename`. Raises `NotWritableError` without ``force`` also for what a COMMIT names, and for a
        ``dst`` in a checkpoint with COMMIT."""
        src, dst = clean(src), clean_new(dst)
        if not force and src != dst:
            self.backend.stat(src)  # a name that is not there is that error
            commit.refuse_removal(self.backend, src)
            commit.refuse_inside(self.backend, dst)
        namespace.rename(self.backend, src, dst, overwrite=overwrite)

    def append(
        self, path: str, *, width: int = layout.WIDTH, unit: int = layout.UNIT, striped: bool = False
    ) -> StripeWriter:
        """A writer whose file begins with what is at ``path`` now: that is read and written again. A striped file keeps
        its width and unit; a missing file is an empty one."""
        path = clean_new(path)
        try:
            pointer = read_pointer(self.backend, path)
        except NotFoundError:
            return self.create(path, width=width, unit=unit, striped=striped)
        if pointer is not None:
            width, unit, striped = pointer.width, pointer.unit, True
        old = self.backend.stat(path).permissions

        def keep(pointer: Pointer | None) -> None:
            if old is not None:
                new = self.backend.stat(writer.temporary).permissions
                rights.keep_owner(self.backend, path, pointer, old, new, at=writer.temporary)

        mode = old.kept if old else FILE_MODE
        writer = self.create(path, width=width, unit=unit, striped=striped, mode=mode, before=keep)
        try:
            with self.open(path) as file:
                namespace.copy_open(file, writer)
        except BaseException:
            writer.abandon()
            raise
        return writer


def open_fs(url: Given, *, shown: bool = False) -> StripeFS:
    """The striped store at ``url``: a path or a URL, as of `bootseer.backends.open.locate`. Touches no storage yet.
    ``shown``: as of `bootseer.backends.open.open_storage`."""
    return StripeFS(open_storage(url, shown=shown))


def place(url: Given) -> tuple[StripeFS, str]:
    """The store of the folder above ``url``, and the path in it: "" for the root of a storage."""
    found = locate(url)
    return open_fs(found.parent.url), found.name
