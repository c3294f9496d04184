"""Striped stores as a file system of fsspec: ``bsx+hdfs://host:8020/ckpt/x``, and every client of fsspec. What differs
from other file systems: docs/howto/fsspec.md.

Paths are absolute in the storage that the URL names: "/ckpt/x". Those of
``StripeFileSystem(url="hdfs://host:8020/ckpt")`` are relative to that folder: "/x". Errors are `OSError`, each with the
`bootseer.errors` one as its cause."""

from __future__ import annotations

import contextlib
import datetime
import errno
import os
from collections.abc import Iterator
from glob import has_magic
from hashlib import sha256
from pathlib import Path
from typing import IO, Any, cast

from fsspec.callbacks import DEFAULT_CALLBACK, Callback
from fsspec.compression import compr
from fsspec.core import get_compression
from fsspec.utils import isfilelike, stringify_path

from bootseer.backends.interface import clean
from bootseer.backends.open import absolute
from bootseer.errors import BootseerError, NotWritableError, UnsupportedError
from bootseer.fsspecfs.file import WINDOW, Compressed, StripeFile, StripeOutput, Wanted, gather
from bootseer.fsspecfs.paths import StripePaths, doing, os_error
from bootseer.stripefs.checkpoint.commit import is_manifest, refuse_removal
from bootseer.stripefs.copy import commit_copy, copy_tree
from bootseer.stripefs.files.namespace import copy_open, new_folder
from bootseer.stripefs.files.stat import FileStat

Info = dict[str, object]


class StripeFileSystem(StripePaths):
    """The striped store at ``url``: a folder, ``hdfs://...``, or what fsspec reaches, then with its ``options``.
    ``width``, ``unit``: of new files (`StripeFS.create`)."""

    # Looking

    def _info(self, stat: FileStat) -> Info:
        info: Info = {
            "name": absolute(stat.path),
            "size": stat.size,
            "type": "directory" if stat.is_dir else "file",
            "mtime": stat.mtime,
        }
        if not stat.is_dir:
            info |= {"striped": stat.striped, "version": stat.version}
        if stat.striped:
            info |= {"width": stat.width, "unit": stat.unit, "uuid": stat.uuid, "digest": stat.digest}
        return info

    def info(self, path: str, **kwargs: object) -> Info:
        """Size, type and modification time; for a striped file also its width, unit, uuid and BLAKE3 digest."""
        with doing(path):
            return self._info(self.store.stat(self._key(path)))

    def ls(self, path: str, detail: bool = True, **kwargs: object) -> list[Any]:
        with doing(path):
            found = [self._info(stat) for stat in self.store.ls(self._key(path))]
        return found if detail else [info["name"] for info in found]

    def exists(self, path: str, **kwargs: object) -> bool:
        """Unlike those of other file systems: a store that does not answer is an error, not False."""
        return self._type(path) is not None

    def isdir(self, path: str) -> bool:
        return self._type(path) == "directory"

    def isfile(self, path: str) -> bool:
        return self._type(path) == "file"

    def _type(self, path: str) -> object:
        try:
            return self.info(path)["type"]
        except FileNotFoundError:
            return None

    def du(
        self, path: str, total: bool = True, maxdepth: int | None = None, withdirs: bool = False, **kwargs: object
    ) -> Any:
        found = self.find(path, maxdepth=maxdepth, withdirs=withdirs, detail=True, **kwargs)
        sizes = {name: (info or self.info(name))["size"] for name, info in found.items()}
        return sum(sizes.values()) if total else sizes

    def checksum(self, path: str) -> int:
        """Changes when the content does."""
        return int(self.ukey(path)[:32], 16)

    def ukey(self, path: str) -> str:
        info = self.info(path)
        what = info.get("uuid") or (info["name"], info["size"], info.get("version") or info["mtime"])
        return sha256(f"{self.url} {what}".encode("utf-8", "surrogateescape")).hexdigest()

    def modified(self, path: str) -> datetime.datetime:
        return datetime.datetime.fromtimestamp(cast(float, self.info(path)["mtime"]), tz=datetime.UTC)

    def created(self, path: str) -> datetime.datetime:
        """As `modified`: a file is never changed, only replaced."""
        return self.modified(path)

    def expand_path(
        self, path: Any, recursive: bool = False, maxdepth: int | None = None, **kwargs: object
    ) -> list[str]:
        """A name with the signs of a pattern that is there is that name alone."""
        others, found = [], set[str]()
        for one in path if isinstance(path, list) else [path]:
            if not self._exact(one):
                others.append(one)
                continue
            found.add(name := self._strip_protocol(one))
            if recursive:
                found.update(self.find(name, maxdepth, withdirs=True))
        if others or not found:
            found.update(super().expand_path(others if found else path, recursive, maxdepth, **kwargs))
        return sorted(found)

    def _exact(self, path: Any) -> bool:
        return isinstance(path, str | os.PathLike) and has_magic(text := stringify_path(path)) and self.exists(text)

    def _exact_file(self, path: Any, target: object) -> bool:
        return isinstance(target, str) and not target.endswith("/") and self._exact(path) and self.isfile(path)

    # Changes

    def copy(
        self,
        path1: Any,
        path2: Any,
        recursive: bool = False,
        maxdepth: int | None = None,
        on_error: str | None = None,
        **kwargs: object,
    ) -> None:
        """A checkpoint becomes a checkpoint again: its copy gets a COMMIT of its own, after all files."""
        manifests: list[tuple[str, str]] = []
        if self._exact_file(path1, path2) and not self.isdir(path2):
            path1, path2 = [path1], [path2]
        super().copy(path1, path2, recursive, maxdepth, on_error, _manifests=manifests, **kwargs)
        for source, target in sorted(manifests, key=lambda pair: -pair[0].count("/")):
            with doing(target):
                commit_copy(self.store, source.rpartition("/")[0], self.store, target.rpartition("/")[0])

    def cp_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        """A copy with stripes of its own, of the same shape. Not of a COMMIT, which names the stripes beside it."""
        manifests: list[tuple[str, str]] | None = kwargs.pop("_manifests", None)
        with doing(path1):
            stat = self.store.stat(self._key(path1))
            if stat.is_dir:
                self.makedirs(path2, exist_ok=True)
                return
            if stat.path == self._key(path2):
                return
            if is_manifest(self.store.backend, stat.path):
                if manifests is None:
                    raise NotWritableError(
                        f"cannot copy {path1}: it names the files beside it", hint="copy the checkpoint folder"
                    )
                manifests.append((stat.path, self._new_key(path2)))
                return
            shape = {"width": stat.width or self.width, "unit": stat.unit or self.unit, "striped": stat.striped}
            self.store.refuse_committed(self._new_key(path2))
            with (
                self.store.open(stat.path) as file,
                self.store.create(self._new_key(path2), **{**shape, **kwargs}) as writer,
            ):
                copy_open(file, writer)

    def mv(
        self, path1: Any, path2: Any, recursive: bool = False, maxdepth: int | None = None, **kwargs: object
    ) -> None:
        """One rename for a file or a folder (below, or instead of, ``path2`` as `copy` has it); others in turn."""
        if maxdepth is not None:
            raise ValueError("mv has no maxdepth: what is deeper would be removed and not copied")
        single = self._exact(path1) or (isinstance(path1, str | os.PathLike) and not has_magic(stringify_path(path1)))
        if not single or isinstance(path2, list):
            with doing(str(path1)):  # before the copies: only then are they removed
                for name in self.expand_path(path1):
                    refuse_removal(self.store.backend, clean(self._key(name)))
            super().mv(path1, path2, recursive=recursive, **kwargs)
            return
        source, target = self._strip_protocol(path1), self._strip_protocol(path2)
        if stringify_path(path2).endswith("/") or self.isdir(target):
            target = absolute(f"{target}/{source.rpartition('/')[2]}")
        if source == target:
            return
        if f"{target}/".startswith(f"{source}/"):
            raise ValueError(f"cannot move {source} into itself")
        with doing(path1):
            self.store.stat(self._key(source))
            try:
                self.store.rename(self._key(source), self._new_key(target))
            except UnsupportedError:  # a folder of an object store
                copy_tree(self.store, self._key(source), self.store, self._new_key(target))
                self.store.remove_tree(self._key(source))

    def rm_file(self, path: str) -> None:
        with doing(path):
            if self.isdir(path):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
            self.store.remove(self._key(path))

    _rm = rm_file

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        """A folder needs ``recursive`` unless it is empty, and vanishes in one step (object stores: in many)."""
        if maxdepth is not None:
            for name in reversed(self.expand_path(path, recursive=recursive, maxdepth=maxdepth)):
                self.rmdir(name) if self.isdir(name) else self.rm_file(name)
            return
        for name in self.expand_path(path):
            if not self.isdir(name):
                self.rm_file(name)
            elif not recursive:
                self.rmdir(name)
            else:
                with doing(name):
                    self.store.remove_tree(key) if (key := self._key(name)) else self.store.remove_all()

    # Folders

    def mkdir(self, path: str, create_parents: bool = True, **kwargs: object) -> None:
        """FileExistsError when it exists; NotADirectoryError below a file. Object stores have no empty folders."""
        self._make_folder(path, create_parents, exist_ok=False)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self._make_folder(path, True, exist_ok)

    def _make_folder(self, path: str, create_parents: bool, exist_ok: bool) -> None:
        key = self._new_key(path)
        if (kind := self._type(path)) == "directory" and exist_ok:
            return
        if kind:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        above = key
        while above := above.rpartition("/")[0]:
            kind = self._type(above)
            if kind == "file":
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), absolute(above))
            if kind is None and not create_parents:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), absolute(above))
            if kind:
                break
        with doing(path):
            if exist_ok or not key or not self.store.backend.has_folders:
                self.store.backend.make_folder(key)
            else:
                new_folder(self.store.backend, key)

    def rmdir(self, path: str) -> None:
        key = self._key(path)
        if not self.isdir(path):
            missing = errno.ENOTDIR if self.exists(path) else errno.ENOENT
            raise OSError(missing, os.strerror(missing), path)
        if not key or self.ls(path):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        with doing(path):
            self.store.remove_tree(key)

    # Reading

    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | None = None,
        autocommit: bool = True,
        cache_options: object = None,
        **options: Any,
    ) -> IO[bytes]:
        """Modes rb, wb, xb (fails when there is a file), ab (the old file is read, and written again first).
        ``block_size``: most bytes to read ahead. ``width``, ``unit``, ``striped`` (though it be small): of a new
        file."""
        for ignored in ("cache_type", "size", "compression", "fill_cache"):
            options.pop(ignored, None)
        with doing(path):
            if mode == "rb":
                if options:
                    raise TypeError(f"a striped file is opened without {', '.join(options)}")
                key = self._key(path)
                try:
                    return cast("IO[bytes]", StripeFile(self, key, block_size or WINDOW))
                except FileNotFoundError:
                    if self.isdir(path):
                        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path) from None
                    raise
            if mode not in ("wb", "xb", "ab"):
                raise ValueError(f"a striped file cannot be opened with mode {mode!r}, only with rb, wb, xb and ab")
            key = self._new_key(path)
            self.store.refuse_committed(key)
            shape = {"width": self.width, "unit": self.unit, **options}
            if mode == "ab":
                writer = self.store.append(key, **shape)
            else:
                new: dict[str, Any] = {"known": "", "exclusive": True} if mode == "xb" else {}
                writer = self.store.create(key, **shape, **new)
                if mode == "xb" and self.exists(path):  # one that comes later is not replaced either
                    writer.abandon()
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            errors = self._exclusive_errors if mode == "xb" else doing
            return cast("IO[bytes]", StripeOutput(writer, path, lambda: errors(path), autocommit=autocommit, mode=mode))

    def open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | None = None,
        cache_options: Any = None,
        compression: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """As of fsspec; what compresses a new file closes that, too."""
        name = get_compression(path, compression) if "b" in mode and "r" not in mode else None
        if name is None:
            return super().open(path, mode, block_size, cache_options, compression, **kwargs)
        out = super().open(path, mode, block_size, cache_options, **kwargs)
        return Compressed(compr[name](out, mode=mode[0]), out)

    @contextlib.contextmanager
    def _exclusive_errors(self, path: str) -> Iterator[None]:
        try:
            with doing(path):
                yield
        except PermissionError as exc:
            if self.exists(path):
                raise FileExistsError(errno.EEXIST, exc.strerror, path) from exc
            raise

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: object) -> bytes:
        return cast(bytes, self.cat_ranges([path], [start], [end], on_error="raise")[0])

    def cat_ranges(
        self,
        paths: list[str],
        starts: Any,
        ends: Any,
        max_gap: int | None = None,
        on_error: str = "return",
        **kwargs: object,
    ) -> list[Any]:
        """All ranges in one request per file; ``max_gap``: bytes between two of them that may be read for nothing."""
        if not isinstance(paths, list):
            raise TypeError(f"paths is a list, not {type(paths).__name__}")
        starts = starts if isinstance(starts, list) else [starts] * len(paths)
        ends = ends if isinstance(ends, list) else [ends] * len(paths)
        wanted = [Wanted(self._key(path), start, end) for path, start, end in zip(paths, starts, ends, strict=True)]
        out: list[Any] = []
        for item, found in zip(wanted, self._gather(wanted, max_gap), strict=True):
            error = os_error(found, absolute(item.path)) if isinstance(found, BootseerError) else found
            if isinstance(error, BaseException) and on_error != "return":
                raise error from (found if isinstance(found, BootseerError) else None)
            out.append(error)
        return out

    def _gather(self, wanted: list[Wanted], gap: int | None) -> list[bytes | BaseException]:
        found = gather(self.reader, wanted, gap=gap)
        self.load.tell_soon()
        return found

    def cat(self, path: Any, recursive: bool = False, on_error: str = "raise", **kwargs: object) -> Any:
        paths = self.expand_path(path, recursive=recursive)
        if len(paths) == 1 and not isinstance(path, list) and paths[0] == self._strip_protocol(path):
            return self.cat_file(paths[0])
        paths = [name for name in paths if not (recursive and self.isdir(name))]
        found = self.cat_ranges(paths, None, None, on_error="raise" if on_error == "raise" else "return")
        return {
            name: data
            for name, data in zip(paths, found, strict=True)
            if on_error == "return" or not isinstance(data, BaseException)
        }

    def get(self, rpath: Any, lpath: Any, recursive: bool = False, **kwargs: Any) -> None:
        if self._exact_file(rpath, lpath) and not os.path.isdir(lpath):
            rpath, lpath = [rpath], [lpath]
        super().get(rpath, lpath, recursive, **kwargs)

    def get_file(
        self,
        rpath: str,
        lpath: Any = None,
        callback: Callback = DEFAULT_CALLBACK,
        outfile: Any = None,
        **kwargs: object,
    ) -> None:
        """The local file appears whole or not at all."""
        if outfile is not None or isfilelike(lpath):
            super().get_file(rpath, lpath, callback=callback, outfile=outfile, **kwargs)
            return
        if self.isdir(rpath):
            os.makedirs(lpath, exist_ok=True)
            return
        local = Path(stringify_path(lpath))
        local.parent.mkdir(parents=True, exist_ok=True)
        if local.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(local))
        with doing(rpath):
            callback.set_size(self.store.stat(self._key(rpath)).size)
            self.store.get(self._key(rpath), local, progress=lambda done, size: callback.absolute_update(done))

    # Writing

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        with self.open(path, "xb" if mode == "create" else "wb", **kwargs) as out:
            out.write(value)

    def put_file(
        self, lpath: Any, rpath: str, callback: Callback = DEFAULT_CALLBACK, mode: str = "overwrite", **kwargs: Any
    ) -> None:
        local = stringify_path(lpath)
        if os.path.isdir(local):
            self.makedirs(rpath, exist_ok=True)
            return
        with (
            open(local, "rb", buffering=0) as src,
            self.open(rpath, "xb" if mode == "create" else "wb", **kwargs) as out,
        ):
            callback.set_size(os.fstat(src.fileno()).st_size)
            while data := src.read(4 << 20):  # bytes, which are stored without a copy
                out.write(data)
                callback.relative_update(len(data))
