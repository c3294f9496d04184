"""Striped stores as a file system of fsspec: ``bsx+hdfs://host:8020/ckpt/x``, and every client of fsspec.

Paths are absolute in the storage that the URL names: "/ckpt/x". Those of ``StripeFileSystem(url="hdfs://host:8020/ckpt")``
are relative to that folder: "/x". Errors are what clients of fsspec expect (FileNotFoundError and other OSError), each
with the `bootseer.errors` one as its cause.

Nothing is cached: what others publish is seen at once. A new file is published when it is closed, as a whole; an
exception inside of its ``with`` block gives it up.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

from fsspec.callbacks import DEFAULT_CALLBACK, Callback
from fsspec.utils import isfilelike, stringify_path

from bootseer.errors import BootseerError
from bootseer.stripefs.adapter.fsspec_names import Info, StripeNames
from bootseer.stripefs.adapter.fsspec_urls import absolute
from bootseer.stripefs.adapter.ranges import Wanted, gather
from bootseer.stripefs.adapter.readstream import WINDOW, StripeReader
from bootseer.stripefs.adapter.writestream import StripeOutput
from bootseer.stripefs.storage.oserrors import os_error, os_errors


class StripeFile(StripeReader):
    """A file open for reading, with what clients of fsspec look for (``fs``, ``path``, ``details``); can be pickled."""

    def __init__(self, fs: StripeFileSystem, path: str, window: int) -> None:
        self.fs, self.path, self.blocksize = fs, path, window
        super().__init__(lambda: fs.store.open(path), path, lambda: os_errors(path), window)

    @property
    def full_name(self) -> str:
        return self.fs.unstrip_protocol(self.path)

    @property
    def details(self) -> Info:
        return self.fs.info(self.path)

    def info(self) -> Info:
        return self.details

    def __reduce__(self) -> tuple[object, ...]:
        return _reopen, (self.fs, self.path, self.blocksize, self.tell())


def _reopen(fs: StripeFileSystem, path: str, window: int, position: int) -> StripeFile:
    file = StripeFile(fs, path, window)
    file.seek(position)
    return file


class StripeFileSystem(StripeNames):
    """The striped store at ``url``: a folder, ``hdfs://...``, or what fsspec reaches, then with its ``options``.

    ``width``, ``unit``: of new files (`StripeFS.create`).
    """

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

        ``block_size``: most bytes to read ahead. ``width``, ``unit``, ``striped`` (though it be small): of a new file.
        """
        for ignored in ("cache_type", "size", "compression", "fill_cache"):
            options.pop(ignored, None)
        with os_errors(path):
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
                writer = self.store.create(key, **shape)
                if mode == "xb" and self.exists(path):  # one that comes later is not replaced either
                    writer.abandon()
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            errors = self._exclusive_errors if mode == "xb" else os_errors
            return cast("IO[bytes]", StripeOutput(writer, path, lambda: errors(path), autocommit=autocommit, mode=mode))

    @contextlib.contextmanager
    def _exclusive_errors(self, path: str) -> Iterator[None]:
        try:
            with os_errors(path):
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
        for item, found in zip(wanted, gather(self.store.open, wanted, gap=max_gap), strict=True):
            error = os_error(found, absolute(item.path)) if isinstance(found, BootseerError) else found
            if isinstance(error, BaseException) and on_error != "return":
                raise error from (found if isinstance(found, BootseerError) else None)
            out.append(error)
        return out

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
        with os_errors(rpath):
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
            buffer = memoryview(bytearray(4 << 20))
            while count := src.readinto(buffer):
                out.write(buffer[:count])
                callback.relative_update(count)
