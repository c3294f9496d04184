"""The folders in which users find what was mounted for them: ``<node_dir>/mounts/<id>/private/root``.

The image itself is mounted on ``closed/tree`` beside ``private``; ``closed`` only root can enter. It is shown on
``root`` with the user as the owner of root's files: so that the user may change them, in an overlay of the user's own.

``private`` is a file system of its own, of a few kilobytes, with the one folder ``root`` in it. It belongs to the user
and only the user can enter it. It is read-only before the user can reach it at all, so that even its owner can open it
to nobody else, nor put anything else where ``root`` is, in no mount namespace."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from bootseer import image
from bootseer.errors import NotFoundError, doing
from bootseer.kernel import mount as mounts
from bootseer.node.access import User
from bootseer.served.client import unmount

_PRIVATE, _ROOT, _CLOSED, _TREE = "private", "root", "closed", "tree"
_SAFE = mounts.MS_NOSUID | mounts.MS_NODEV


def root_of(place: Path) -> Path:
    return place / _PRIVATE / _ROOT


def tree_of(place: Path) -> Path:
    return place / _CLOSED / _TREE


def make(place: Path, user: User) -> None:
    """Make ``place`` for ``user``. On any failure, `remove` ends what there is of it."""
    private = place / _PRIVATE
    with doing(f"make the folder {place}"):
        place.mkdir(mode=0o700)  # nobody gets further until all is done
        private.mkdir(mode=0o700)
        (place / _CLOSED).mkdir(mode=0o700)
        tree_of(place).mkdir()
        options = f"mode=0500,uid={user.uid},gid={user.gid},size=64k,nr_inodes=16"
        mounts.mount("bootseer", private, "tmpfs", flags=_SAFE, data=options)
        root_of(place).mkdir(mode=0o755)
        mounts.mount("bootseer", private, "", flags=_SAFE | mounts.MS_REMOUNT | mounts.MS_RDONLY)
        place.chmod(0o711)


def show(place: Path, user: User) -> None:
    """Let the user see the image that is mounted on `tree_of` this ``place``. Raises `BootseerError`."""
    mounts.mount_for(user.uid, user.gid, tree_of(place), root_of(place))


def remove(place: Path, state_dir: Path, *, killed: bool) -> None:
    """Unmount the image and remove ``place``; nothing of it need be there. A mount in use is detached, and ends with
    its last user. ``killed``: the process that was mounting it was killed. Raises `BootseerError`; then call it again
    later."""
    tree = tree_of(place)
    if killed:
        image.sweep(state_dir)
    unmount(root_of(place))
    with contextlib.suppress(NotFoundError):
        image.attach(tree, state_dir).unmount()
    unmount(tree)
    unmount(place / _PRIVATE)
    for folder in (place / _PRIVATE, tree, tree.parent, place):
        with doing(f"remove the folder {folder}"), contextlib.suppress(FileNotFoundError):
            os.rmdir(folder)
