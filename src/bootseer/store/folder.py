"""A store in a folder: the embedded default, and what a site with NFS, Lustre or GPFS uses.

Publication writes a temporary file beside the target, syncs it, and links it into place (``link`` fails when the name
exists, so the first publication wins without locks); overwriting uses ``rename``. Temporary names start with ``.tmp-``.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path

from bootseer import faults
from bootseer.errors import DataError, NotFoundError, NotWritableError, from_os_error
from bootseer.store.base import ObjectInfo, RangeReader, Store, check_key

log = logging.getLogger(__name__)

_TMP = ".tmp-"
_NO_OBJECT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""A key that is a folder of others, or below one that is an object, names none."""
_ABANDONED = 86400.0
"""Seconds without a write after which a temporary file has no writer: no single object takes a day."""


class _FileReader(RangeReader):
    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        info = os.fstat(self._fd)
        if not stat.S_ISREG(info.st_mode):
            self.close()
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        self.size = info.st_size

    def read(self, offset: int, length: int) -> bytes:
        data = b""
        while len(data) < length:
            try:
                more = os.pread(self._fd, length - len(data), offset + len(data))
            except OSError as exc:
                raise from_os_error(exc, f"read {self._path}") from exc
            if not more:
                raise DataError(f"{self._path} ends at {offset + len(data)}, wanted {offset + length}")
            data += more
        return data

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class FolderStore(Store):
    """Objects as files under ``root``. The folder is made by the first publication."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.url = str(root)
        self._swept: set[Path] = set()

    def _path(self, key: str) -> Path:
        return self.root / check_key(key)

    def _missing(self, key: str) -> NotFoundError:
        return NotFoundError(f"no object {key} in store {self.url}")

    def get(self, key: str) -> bytes:
        try:
            return self._path(key).read_bytes()
        except _NO_OBJECT:
            raise self._missing(key) from None
        except OSError as exc:
            raise from_os_error(exc, f"read {key} from store {self.url}") from exc

    def open(self, key: str) -> RangeReader:
        try:
            return _FileReader(self._path(key))
        except _NO_OBJECT:
            raise self._missing(key) from None
        except OSError as exc:
            raise from_os_error(exc, f"read {key} from store {self.url}") from exc

    def stat(self, key: str) -> ObjectInfo:
        try:
            info = self._path(key).stat()
        except _NO_OBJECT:
            raise self._missing(key) from None
        except OSError as exc:
            raise from_os_error(exc, f"look up {key} in store {self.url}") from exc
        if not stat.S_ISREG(info.st_mode):
            raise self._missing(key)
        return ObjectInfo(key, info.st_size)

    def put(self, key: str, data: bytes | Path, *, overwrite: bool = False) -> bool:
        target = self._path(key)
        tmp = target.parent / f"{_TMP}{uuid.uuid4().hex}"
        try:
            if not overwrite and target.exists():
                return False
            target.parent.mkdir(parents=True, exist_ok=True)
            with open(tmp, "xb") as out:
                if isinstance(data, Path):
                    with open(data, "rb") as src:
                        shutil.copyfileobj(src, out, 1 << 20)
                else:
                    out.write(data)
                self._sweep(target.parent, os.fstat(out.fileno()).st_mtime)
                out.flush()
                faults.point("store.put.before-sync")
                os.fsync(out.fileno())
            faults.point("store.put.before-publish")
            return self._publish(tmp, target, overwrite)
        except FileExistsError as exc:
            raise NotWritableError(f"cannot write {key} to store {self.url}: a file is in the way", hint="") from exc
        except OSError as exc:
            raise from_os_error(exc, f"write {key} to store {self.url}") from exc
        finally:
            with contextlib.suppress(OSError):  # the failure that brought us here counts, not this one
                tmp.unlink(missing_ok=True)

    def _sweep(self, folder: Path, now: float) -> None:
        """Remove what writers that were killed left in ``folder``; ``now`` by the clock of the folder's server."""
        if folder in self._swept:
            return
        self._swept.add(folder)
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith(_TMP) and entry.stat(follow_symlinks=False).st_mtime < now - _ABANDONED:
                    log.info("removing %s: its writer is gone", entry.path)
                    os.unlink(entry.path)

    def _publish(self, tmp: Path, target: Path, overwrite: bool) -> bool:
        if overwrite:
            os.replace(tmp, target)
        else:
            try:
                os.link(tmp, target)
            except FileExistsError:
                return False
        fd = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        return True

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        base = self._path(prefix.rstrip("/")) if prefix.strip("/") else self.root
        found = []
        for folder, _, files in os.walk(base, onerror=self._unreadable):
            for path in (Path(folder, name) for name in files if not name.startswith(_TMP)):
                with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                    found.append(ObjectInfo(str(path.relative_to(self.root)), path.stat().st_size))
        yield from sorted(found, key=lambda info: info.key)

    def _unreadable(self, exc: OSError) -> None:
        if not isinstance(exc, FileNotFoundError | NotADirectoryError):
            raise from_os_error(exc, f"list store {self.url}") from exc

    def delete(self, key: str) -> None:
        try:
            self._path(key).unlink(missing_ok=True)
        except OSError as exc:
            raise from_os_error(exc, f"delete {key} from store {self.url}") from exc
