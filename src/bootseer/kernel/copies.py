"""Copies of mounts in other mount namespaces: who makes a namespace gets one of each mount that is there. Where mounts
are private (in most virtual machines and containers), or were made so with the namespace, an unmount here leaves the
copies, and what they show has to be served for as long as the namespace lasts."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from bootseer.closing import descriptor
from bootseer.kernel import libc, mount, procfs

log = logging.getLogger(__name__)

_OWNER = 0xB701
"""ioctl_ns(2): the user namespace that a namespace belongs to."""
_SECONDS = 5.0
"""For one namespace: on the way to a mount there may be a file system that does not answer."""


def withdraw(targets: Iterable[Path]) -> None:
    """Unmount the copies of the mounts on ``targets``, the last one first, which other namespaces have on the same
    paths, and which no process uses. Call it before what is here is unmounted: then it is sure what is a copy. What
    stays is a line in the log: copies in use, and those in namespaces of other users, which nobody can unmount."""
    paths = [mount.real(path) for path in targets][::-1]
    there = {(one.target, one.device, one.source) for one in mount.entries() if one.target in paths}
    for pid, namespace in _others() if there else ():
        with contextlib.suppress(OSError, RuntimeError):  # no thread can be started
            had = [path for path in paths if path in _copied(pid, there)]
            if had and _is_ours(namespace):
                thread = threading.Thread(target=_unmount, args=(namespace, had), name="copies", daemon=True)
                thread.start()
                thread.join(_SECONDS)
            if left := [path for path in had if path in _copied(pid, there)]:
                what = "has a copy of the mount on %s in its mount namespace; what serves it stays until that ends"
                log.warning(f"%s {what}", procfs.shown(pid), left[0])


def _others() -> Iterator[tuple[int, int]]:
    """A process of each other mount namespace, and a descriptor of that."""
    seen = {os.stat("/proc/self/ns/mnt").st_ino}
    for pid in [int(name) for name in os.listdir("/proc") if name.isdecimal()]:
        with (
            contextlib.suppress(OSError),  # it has ended, or is a kernel's
            descriptor(os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)) as namespace,
        ):
            if (number := os.fstat(namespace).st_ino) not in seen:
                seen.add(number)
                yield pid, namespace


def _copied(pid: int, there: set[tuple[str, str, str]]) -> set[str]:
    return {one.target for one in mount.entries(pid) if (one.target, one.device, one.source) in there}


def _is_ours(namespace: int) -> bool:
    """Whether root made it, not a user in a user namespace: the kernel locks the mounts of such a one."""
    with descriptor(fcntl.ioctl(namespace, _OWNER)) as owner:
        return os.path.samestat(os.fstat(owner), os.stat("/proc/self/ns/user"))


def _unmount(namespace: int, paths: Sequence[str]) -> None:
    """In a thread that ends with this: it is in that namespace from now on."""
    with contextlib.suppress(OSError):
        libc.unshare(libc.CLONE_FS)  # a namespace is not changed for who shares its working directory
        libc.setns(namespace)
        for path in paths:
            above = os.fsencode(os.path.dirname(path))
            with descriptor(libc.open_without_links(above, os.O_PATH | os.O_CLOEXEC)) as folder:
                os.fchdir(folder)
                with contextlib.suppress(OSError):  # in use
                    libc.umount2(os.path.basename(path), mount.UMOUNT_NOFOLLOW)
