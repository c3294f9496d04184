"""Apply an image's layers to a folder, as the container will see them (OCI image-spec 1.1, "Applying changesets").

Layers come from outside, so every path is resolved by the kernel inside the root (``openat2`` with
``RESOLVE_IN_ROOT``): no symbolic link and no ``..`` can lead out of it, whatever order a layer's members have.
Directory times are set at the end; a directory that no layer lists is ``0755 root:root`` with time 0.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from pathlib import Path

import msgspec

from bootseer import faults
from bootseer.errors import DataError, PrivilegeError, from_os_error
from bootseer.oci import tar
from bootseer.oci.folders import O_PATH, Folders, show
from bootseer.oci.image import Image
from bootseer.oci.pipeline import Layers, Progress, named

_WHITEOUT, _OPAQUE, _AUFS = b".wh.", b".wh..wh..opq", b".wh..wh."
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Unpacked(msgspec.Struct, frozen=True):
    """What `unpack` wrote: members applied and bytes of file content."""

    members: int
    bytes: int


def unpack(image: Image, root: Path, *, progress: Progress | None = None, spool: Path | None = None) -> Unpacked:
    """Apply all layers of ``image`` to ``root``, an empty or new folder; needs root, for owners and devices.

    Raises `DataError` naming the layer (truncated, corrupt, hostile), `PrivilegeError`, `FullError`. Downloads are
    spooled in ``spool`` (default: the folder of ``root``) as unlinked files.
    """
    if os.geteuid() != 0:
        raise PrivilegeError("unpacking an image needs root: files get their owners and devices", hint="run with sudo")
    root.mkdir(parents=True, exist_ok=True)
    with Layers(image, spool or root.parent, progress=progress) as layers, Applier(root) as applier:
        for index, layer in enumerate(image.layers):
            what = f"layer {layer.digest} of {image.ref}"
            try:
                applier.apply(tar.ChunkReader(layers.tar_chunks(index)))
                faults.point("oci.unpack.after-layer")
            except DataError as exc:
                raise named(exc, what) from None
            except OSError as exc:
                raise from_os_error(exc, f"unpack {what} to {root}") from exc
            layers.done_with(index)
        applier.finish()
        return Unpacked(applier.members, applier.bytes)


class Applier:
    """Applies layers, bottom first, to one root; not safe for use by several threads."""

    def __init__(self, root: Path) -> None:
        self.members = 0
        self.bytes = 0
        self._folders = Folders(root)
        self._fresh: set[bytes] = set()
        """`_key` of what this layer made, and of the folders above that."""
        os.fchmod(self._folders.root, 0o755)

    def close(self) -> None:
        self._folders.close()

    def __enter__(self) -> Applier:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def apply(self, reader: tar.ChunkReader) -> None:
        """Apply one layer. `DataError` for a malformed or hostile layer, `OSError` from the file system."""
        self._fresh = set()
        self._folders.forget_parent()
        for entry in tar.entries(reader):
            self.members += 1
            parts = _parts(entry.name)
            if not parts:
                if entry.kind != tar.DIRECTORY:
                    raise DataError("the root is not a directory")
                self._drop_xattrs(self._folders.root, entry)
                self._metadata(self._folders.root, entry)
                self._folders.note_time(b"", entry.mtime_ns)
                continue
            name = parts[-1]
            parent = self._folders.open_parent(parts[:-1])
            if name.startswith(_WHITEOUT):
                self._whiteout(parent, name)
                reader.skip(entry.size)
            else:
                self._member(reader, entry, parent, name, self._folders.real(name))

    def finish(self) -> None:
        """Set the directories' times."""
        self._folders.set_times()

    def _member(self, reader: tar.ChunkReader, entry: tar.Entry, parent: int, name: bytes, real: bytes) -> None:
        kind = entry.kind
        self._mark(real)
        if kind == tar.DIRECTORY:
            self._directory(entry, parent, name, real)
        elif kind == tar.REGULAR:
            fd = self._create(parent, name)
            try:
                self._content(reader, entry, fd)
                self._metadata(fd, entry)
            finally:
                os.close(fd)
        elif kind == tar.HARDLINK:
            self._hardlink(entry, parent, name, real)
        else:
            self._clear(parent, name)
            if kind == tar.SYMLINK:
                os.symlink(entry.link, name, dir_fd=parent)
            else:
                types = {tar.CHAR: stat.S_IFCHR, tar.BLOCKDEV: stat.S_IFBLK, tar.FIFO: stat.S_IFIFO}
                os.mknod(name, types[kind] | entry.mode, os.makedev(entry.major, entry.minor), dir_fd=parent)
            os.chown(name, entry.uid, entry.gid, dir_fd=parent, follow_symlinks=False)
            path = b"/proc/self/fd/%d/%s" % (parent, name)
            if kind != tar.SYMLINK:
                os.chmod(path, entry.mode)
            for key, value in entry.xattrs.items():
                os.setxattr(path, key, value, follow_symlinks=False)
            os.utime(name, ns=(entry.mtime_ns, entry.mtime_ns), dir_fd=parent, follow_symlinks=False)

    def _directory(self, entry: tar.Entry, parent: int, name: bytes, real: bytes) -> None:
        try:
            os.mkdir(name, 0o700, dir_fd=parent)
        except FileExistsError:
            if not stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
                os.unlink(name, dir_fd=parent)
                os.mkdir(name, 0o700, dir_fd=parent)
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        try:
            self._drop_xattrs(fd, entry)
            self._metadata(fd, entry)
        finally:
            os.close(fd)
        self._folders.note_time(real, entry.mtime_ns)

    def _drop_xattrs(self, fd: int, entry: tar.Entry) -> None:
        """Remove a folder's attributes that ``entry``, which replaces them, has not."""
        for key in os.listxattr(fd):
            if os.fsencode(key) not in entry.xattrs and key != "security.selinux":
                os.removexattr(fd, key)

    def _create(self, parent: int, name: bytes) -> int:
        try:
            return os.open(name, _NEW, 0o600, dir_fd=parent)
        except FileExistsError:
            self._clear(parent, name)
            return os.open(name, _NEW, 0o600, dir_fd=parent)

    def _content(self, reader: tar.ChunkReader, entry: tar.Entry, fd: int) -> None:
        if entry.extents is None:
            for piece in reader.pieces(entry.size):
                _write(fd, piece)
        else:
            os.ftruncate(fd, entry.file_size)
            for offset, length in entry.extents:
                os.lseek(fd, offset, os.SEEK_SET)
                for piece in reader.pieces(length):
                    _write(fd, piece)
        self.bytes += entry.size

    def _metadata(self, fd: int, entry: tar.Entry) -> None:
        # Order matters: chown clears setuid bits and security.capability
        os.fchown(fd, entry.uid, entry.gid)
        os.fchmod(fd, entry.mode)
        for key, value in entry.xattrs.items():
            os.setxattr(fd, key, value)
        os.utime(fd, ns=(entry.mtime_ns, entry.mtime_ns))

    def _hardlink(self, entry: tar.Entry, parent: int, name: bytes, real: bytes) -> None:
        target = _parts(entry.link)
        if not target:
            raise DataError(f"hard link {show(entry.name)} to the root")
        try:
            folder = self._folders.open(b"/".join(target[:-1]) or b".", O_PATH | os.O_DIRECTORY)
        except (FileNotFoundError, NotADirectoryError):
            raise DataError(f"hard link {show(entry.name)} to missing {show(entry.link)}") from None
        try:
            if [*self._folders.real_of(folder), target[-1]] == real.split(b"/"):
                return
            try:
                info = os.stat(target[-1], dir_fd=folder, follow_symlinks=False)
            except FileNotFoundError:
                raise DataError(f"hard link {show(entry.name)} to missing {show(entry.link)}") from None
            if stat.S_ISDIR(info.st_mode):
                raise DataError(f"hard link {show(entry.name)} to directory {show(entry.link)}")
            self._clear(parent, name)
            os.link(target[-1], name, src_dir_fd=folder, dst_dir_fd=parent, follow_symlinks=False)
        finally:
            os.close(folder)

    def _whiteout(self, parent: int, name: bytes) -> None:
        if name == _OPAQUE:
            for child in os.listdir(b"/proc/self/fd/%d/." % parent):
                self._remove_lower(parent, child, self._folders.real(child))
        elif not name.startswith(_AUFS):
            victim = name.removeprefix(_WHITEOUT)
            if victim in (b"", b".", b".."):
                raise DataError(f"bad whiteout {show(name)}")
            self._remove_lower(parent, victim, self._folders.real(victim))

    def _remove_lower(self, parent: int, name: bytes, real: bytes) -> None:
        """Remove ``name`` as far as lower layers made it: a layer's whiteouts never hide its own members."""
        if _key(real) not in self._fresh:
            self._clear(parent, name)
            return
        try:
            fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        except OSError:
            return  # no directory: made by this layer, so it stays
        try:
            for child in os.listdir(b"/proc/self/fd/%d/." % fd):
                self._remove_lower(fd, child, real + b"/" + child)
        finally:
            os.close(fd)

    def _clear(self, parent: int, name: bytes) -> None:
        """Remove whatever is at ``name``, if anything, without following it."""
        try:
            os.unlink(name, dir_fd=parent)
        except FileNotFoundError:
            return
        except IsADirectoryError:
            shutil.rmtree(name, dir_fd=parent)

    def _mark(self, real: bytes) -> None:
        while (key := _key(real)) not in self._fresh:
            self._fresh.add(key)
            real, _, _ = real.rpartition(b"/")


def _parts(name: bytes) -> list[bytes]:
    """The components of a member's name, taken from the root; `DataError` for ``..`` and NUL."""
    parts = [part for part in name.split(b"/") if part not in (b"", b".")]
    if b".." in parts or b"\0" in name:
        raise DataError(f"member whose name leads out of the root: {show(name)}")
    return parts


def _key(real: bytes) -> bytes:
    """In place of a path, which may have 4 KiB, and so may each of the 2,000 folders above it."""
    return hashlib.blake2b(real, digest_size=16).digest()


def _write(fd: int, piece: memoryview) -> None:
    while piece:
        piece = piece[os.write(fd, piece) :]
