"""The names of a striped store for clients of fsspec: what there is, copies, renames, removals, folders."""

from __future__ import annotations

import datetime
import errno
import os
from glob import has_magic
from hashlib import sha256
from typing import Any, cast

from fsspec.utils import stringify_path

from bootseer.errors import NotWritableError, UnsupportedError
from bootseer.stripefs.adapter.fsspec_paths import StripePaths
from bootseer.stripefs.adapter.fsspec_urls import absolute
from bootseer.stripefs.checkpoint.commit import is_manifest
from bootseer.stripefs.fs import FileStat
from bootseer.stripefs.namespace import copy_into
from bootseer.stripefs.storage.oserrors import os_errors
from bootseer.stripefs.transfer import commit_copy, copy_tree

Info = dict[str, object]


class StripeNames(StripePaths):
    """The part of `bootseer.stripefs.adapter.fsspec_fs.StripeFileSystem` that knows what there is, and changes it.

    Contents are not its concern: a copy goes from store to store, everything else is done to names.
    """

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
        with os_errors(path):
            return self._info(self.store.stat(self._key(path)))

    def ls(self, path: str, detail: bool = True, **kwargs: object) -> list[Any]:
        with os_errors(path):
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
        super().copy(path1, path2, recursive, maxdepth, on_error, _manifests=manifests, **kwargs)
        for source, target in sorted(manifests, key=lambda pair: -pair[0].count("/")):
            with os_errors(target):
                commit_copy(self.store, source.rpartition("/")[0], self.store, target.rpartition("/")[0])

    def cp_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        """A copy with stripes of its own, of the same shape. Not of a COMMIT, which names the stripes beside it."""
        manifests: list[tuple[str, str]] | None = kwargs.pop("_manifests", None)
        with os_errors(path1):
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
            with self.store.create(self._new_key(path2), **{**shape, **kwargs}) as writer:
                copy_into(self.store.backend, stat.path, writer)

    def mv(
        self, path1: Any, path2: Any, recursive: bool = False, maxdepth: int | None = None, **kwargs: object
    ) -> None:
        """One rename for a file or a folder (below, or instead of, ``path2`` as `copy` has it); others in turn."""
        if maxdepth is not None:
            raise ValueError("mv has no maxdepth: what is deeper would be removed and not copied")
        single = isinstance(path1, str | os.PathLike) and not has_magic(stringify_path(path1))
        if not single or isinstance(path2, list):
            with os_errors(str(path1)):  # before the copies: only then are they removed
                for name in self.expand_path(path1):
                    self.store.refuse_removal(self._key(name))
            super().mv(path1, path2, recursive=recursive, **kwargs)
            return
        source, target = self._strip_protocol(path1), self._strip_protocol(path2)
        if stringify_path(path2).endswith("/") or self.isdir(target):
            target = absolute(f"{target}/{source.rpartition('/')[2]}")
        if source == target:
            return
        if f"{target}/".startswith(f"{source}/"):
            raise ValueError(f"cannot move {source} into itself")
        with os_errors(path1):
            self.store.stat(self._key(source))
            try:
                self.store.rename(self._key(source), self._new_key(target))
            except UnsupportedError:  # a folder of an object store
                copy_tree(self.store, self._key(source), self.store, self._new_key(target))
                self.store.remove_tree(self._key(source))

    def rm_file(self, path: str) -> None:
        with os_errors(path):
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
            elif name == self.root_marker:
                self._remove_all()
            else:
                self._remove_tree(name)

    def _remove_all(self) -> None:
        with os_errors(self.root_marker):
            self.store.remove_all()

    def _remove_tree(self, path: str) -> None:
        with os_errors(path):
            self.store.remove_tree(self._key(path))

    # Folders

    def mkdir(self, path: str, create_parents: bool = True, **kwargs: object) -> None:
        """FileExistsError when it exists; NotADirectoryError below a file. Object stores have no empty folders."""
        key = self._new_key(path)
        if self.exists(path):
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
        with os_errors(path):
            self.store.backend.make_folder(key)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        if not (exist_ok and self.isdir(path)):
            self.mkdir(path)

    def rmdir(self, path: str) -> None:
        key = self._key(path)
        if not self.isdir(path):
            missing = errno.ENOTDIR if self.exists(path) else errno.ENOENT
            raise OSError(missing, os.strerror(missing), path)
        if not key or self.ls(path):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        self._remove_tree(path)
