"""The folders of a root that layers are applied to, as the kernel finds them, and their times.

Every path is resolved inside the root (``openat2`` with ``RESOLVE_IN_ROOT``): what a member's name says and where it
really is differ where links lead on.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from bootseer.errors import DataError
from bootseer.oci.inroot import open_in_root

O_PATH = os.O_PATH | os.O_CLOEXEC
_LETTERS = 256 << 20
"""Bytes of the paths of folders whose times are kept; an image with 100,000 of them has 6 MB."""


class Folders:
    """Those below ``root``. One parent is open at a time. Not safe for use by several threads."""

    def __init__(self, root: Path) -> None:
        self.root = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._prefix = os.readlink(b"/proc/self/fd/%d" % self.root)
        self._times: dict[bytes, int] = {b"": 0}
        self._letters = _LETTERS
        self._parent_name: bytes | None = None
        self._parent_fd = -1
        self._parent_real = b""

    def close(self) -> None:
        self.forget_parent()
        if self.root >= 0:
            os.close(self.root)
            self.root = -1

    def note_time(self, real: bytes, mtime_ns: int) -> None:
        """The folder that is really at ``real`` gets this time in the end."""
        if real not in self._times:
            self._letters -= len(real)
            if self._letters < 0:
                raise DataError(f"the paths of its folders have more than {_LETTERS >> 20} MiB")
        self._times[real] = mtime_ns

    def set_times(self) -> None:
        """When nothing more is made in any folder."""
        for path, mtime in self._times.items():
            try:
                fd = self.open(path or b".", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except OSError as exc:
                if exc.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                    raise
                continue  # removed or replaced by a later layer
            try:
                if b"/".join(self.real_of(fd)) == path:  # else: through a link that took a folder's place
                    os.utime(fd, ns=(mtime, mtime))
            finally:
                os.close(fd)

    def open_parent(self, parts: list[bytes]) -> int:
        """A descriptor of the folder ``parts``, made if missing; valid until the next call."""
        wanted = b"/".join(parts)
        if wanted == self._parent_name:
            return self._parent_fd
        self.forget_parent()
        try:
            fd = self.open(wanted or b".", O_PATH | os.O_DIRECTORY)
        except FileNotFoundError:
            fd = self._make_parents(parts)
        except OSError as exc:
            if exc.errno not in (errno.ENOTDIR, errno.ELOOP):
                raise
            raise DataError(f"{show(wanted)} is no directory but has members") from None
        self._parent_fd, self._parent_name = fd, wanted
        self._parent_real = b"/".join(self.real_of(fd))
        return fd

    def _make_parents(self, parts: list[bytes]) -> int:
        fd = self.open(b".", O_PATH | os.O_DIRECTORY)
        for count in range(1, len(parts) + 1):
            try:
                below = self.open(b"/".join(parts[:count]), O_PATH | os.O_DIRECTORY)
            except FileNotFoundError:
                try:
                    os.mkdir(parts[count - 1], 0o755, dir_fd=fd)
                except FileExistsError:
                    os.close(fd)
                    raise DataError(f"{show(b'/'.join(parts[:count]))} is a dangling link with members") from None
                below = os.open(parts[count - 1], O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=fd)
                os.chown(b"/proc/self/fd/%d" % below, 0, 0)
                os.chmod(b"/proc/self/fd/%d" % below, 0o755)
                self.note_time(b"/".join(self.real_of(below)), 0)
            os.close(fd)
            fd = below
        return fd

    def forget_parent(self) -> None:
        """Close the parent of the last `open_parent`."""
        if self._parent_fd >= 0:
            os.close(self._parent_fd)
        self._parent_fd, self._parent_name, self._parent_real = -1, None, b""

    def real(self, name: bytes) -> bytes:
        """Where ``name`` in that parent really is."""
        return self._parent_real + b"/" + name if self._parent_real else name

    def real_of(self, fd: int) -> list[bytes]:
        """Where the folder ``fd`` really is. Raises `DataError` when that is outside of the root."""
        path = os.readlink(b"/proc/self/fd/%d" % fd)
        if path != self._prefix and not path.startswith(self._prefix.rstrip(b"/") + b"/"):
            raise DataError(f"a path leads out of the root: {show(path)}")
        return [part for part in path[len(self._prefix) :].split(b"/") if part]

    def open(self, path: bytes, flags: int) -> int:
        """Open ``path`` as the kernel finds it inside the root. Raises `OSError`."""
        return open_in_root(self.root, path, flags)


def show(name: bytes) -> str:
    return repr(os.fsdecode(name))
