"""Apply an image's layers to a folder, as the container will see them (OCI image-spec 1.1, "Applying changesets").

The layers are applied in memory (`bootseer.oci.layers`); contents are written as they come, to numbered files of a
working folder inside the root. Then the tree is made: folders, what is in them, and at last the folders' attributes,
the deepest first. No path of a layer is ever resolved on the disk, so nothing in one can lead out of the root."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from bootseer import faults
from bootseer.closing import descriptor
from bootseer.erofs import Buffer, Hole, Node, Tree
from bootseer.errors import PrivilegeError, doing
from bootseer.folders import spread
from bootseer.oci.image import Image, past_mirrors
from bootseer.oci.layers import LayeredTree
from bootseer.oci.pipeline import Layers

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def unpack(image: Image, root: Path) -> None:
    """Apply all layers of ``image`` to ``root``, an empty or new folder; needs root, for owners and devices. Raises
    `DataError` naming the layer (truncated, corrupt, hostile), `PrivilegeError`, `FullError`. Downloads are spooled in
    the folder of ``root`` as unlinked files; contents that later layers hide take room until the end."""
    if os.geteuid() != 0:
        raise PrivilegeError("unpacking an image needs root: files get their owners and devices", hint="run with sudo")
    with doing(f"unpack {image.ref} to {root}"):
        root.mkdir(parents=True, exist_ok=True)
        past_mirrors(image.source, lambda: _unpack(image, root))


def _unpack(image: Image, root: Path) -> None:
    with (
        Layers(image, root.parent) as layers,
        tempfile.TemporaryDirectory(prefix=".unpack-", dir=root) as work,
    ):
        folder = FolderTree(work)
        tree = LayeredTree(folder)
        for index in range(len(image.layers)):
            layers.apply(index, tree.apply, "unpack")
            faults.point("oci.unpack.after-layer")
        folder.finish(root)


class FolderTree(Tree):
    """A tree whose contents wait in the folder ``work`` until `finish` makes it."""

    def __init__(self, work: str) -> None:
        super().__init__()
        self._work = os.fsencode(work)
        spread(Path(work))
        os.mkdir(b"%s/files" % self._work)
        self._places: dict[Node, bytes] = {}
        """Where a file is now, and so whatever has several names in the tree."""
        self._linked: set[Node] = set()

    def add_hardlink(self, path: bytes, existing: bytes | Node, *, at: Node | None = None) -> Node:
        node = super().add_hardlink(path, existing, at=at)
        self._linked.add(node)
        return node

    def _store(self, node: Node, chunks: Iterable[Buffer | Hole], extents: int | None) -> None:
        with descriptor(os.open(self._new_place(node), _NEW, 0o600)) as fd:
            for chunk in chunks:
                if isinstance(chunk, Hole):
                    os.lseek(fd, chunk.length, os.SEEK_CUR)
                else:
                    _write(fd, memoryview(chunk))
            if extents is not None:
                os.ftruncate(fd, node.size)  # a hole at its end
            _set_attributes(fd, node)

    def _new_place(self, node: Node) -> bytes:
        place = self._places[node] = b"%s/files/%d" % (self._work, len(self._places))
        return place

    def finish(self, root: Path) -> None:
        """Make the tree in ``root``, on the same file system, and remove ``work``. Nothing may be added afterwards."""
        with descriptor(os.open(root, _FOLDER)) as top:
            # Each folder with the index of the one it is in: paths would take much more memory. The list grows
            # while it is gone through.
            folders: list[tuple[Node, int, bytes]] = [(self.root, 0, b"")]
            for index, (node, _, _) in enumerate(folders):
                with _opened(top, folders, index) as fd:
                    for name, child in (node.children or {}).items():
                        if child.children is None:
                            self._put(child, fd, name)
                        else:
                            os.mkdir(name, 0o700, dir_fd=fd)
                            folders.append((child, index, name))
            shutil.rmtree(self._work)
            for index in range(len(folders) - 1, -1, -1):
                with _opened(top, folders, index) as fd:
                    _set_attributes(fd, folders[index][0])

    def _put(self, node: Node, folder: int, name: bytes) -> None:
        """Give a file, link or special file its name."""
        if node in self._linked:
            if node not in self._places:
                _make(node, self._new_place(node))
            os.link(self._places[node], name, dst_dir_fd=folder, follow_symlinks=False)
        elif node in self._places:
            os.rename(self._places[node], name, dst_dir_fd=folder)
        else:
            _make(node, b"/proc/self/fd/%d/%s" % (folder, name))


@contextlib.contextmanager
def _opened(top: int, folders: list[tuple[Node, int, bytes]], index: int) -> Iterator[int]:
    """A descriptor of a folder that has been made."""
    parts = []
    while index:
        _, index, name = folders[index]
        parts.append(name)
    with descriptor(os.open(b"/".join(reversed(parts)) or b".", _FOLDER, dir_fd=top)) as fd:
        yield fd


def _make(node: Node, path: bytes) -> None:
    """A link or special file with its attributes."""
    if node.kind == stat.S_IFLNK:
        os.symlink(node.target, path)
    else:
        os.mknod(path, node.mode, node.rdev)
    os.chown(path, node.uid, node.gid, follow_symlinks=False)
    if node.kind != stat.S_IFLNK:
        os.chmod(path, stat.S_IMODE(node.mode))
    for key, value in node.xattrs:
        os.setxattr(path, key, value, follow_symlinks=False)
    os.utime(path, ns=(node.mtime_ns, node.mtime_ns), follow_symlinks=False)


def _set_attributes(fd: int, node: Node) -> None:
    # Order matters: chown clears setuid bits and security.capability
    os.fchown(fd, node.uid, node.gid)
    os.fchmod(fd, stat.S_IMODE(node.mode))
    for key, value in node.xattrs:
        os.setxattr(fd, key, value)
    os.utime(fd, ns=(node.mtime_ns, node.mtime_ns))


def _write(fd: int, piece: memoryview) -> None:
    while piece:
        piece = piece[os.write(fd, piece) :]
