"""Opening ``/dev/fuse`` and mounting it: mount(2) with the right to, else Debian's setuid ``fusermount3``."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bootseer.errors import BootseerError, NotFoundError, PrivilegeError, UnsupportedError
from bootseer.kernel import mount
from bootseer.kernel.fuse_ops import Options
from bootseer.kernel.fuse_wire import MAX_READ

_DEADLINE = 20.0


@dataclass(frozen=True)
class Device:
    """A connection to the kernel: where it is mounted, and its open descriptor, of which any duplicate keeps the mount
    alive when the process that serves it dies."""

    mountpoint: Path
    entry: mount.MountEntry | None
    """The line of the mount table it made."""
    fd: int
    """-1: none, as of a device that another process keeps."""

    @classmethod
    def open(cls, mountpoint: Path, options: Options) -> Device:
        """Mount; the kernel's INIT request is still to be answered, and all uses of the mount wait for that. Raises
        `UnsupportedError` (no FUSE, or no fusermount3 where root is missing), `PrivilegeError`, `NotFoundError`."""
        mountpoint = Path(mountpoint).absolute()
        fd = _open_and_mount(mountpoint, options)
        return cls(mountpoint, mount.find(mountpoint), fd)

    @property
    def mounted(self) -> bool:
        """Whether it is still mounted where it was."""
        return self.entry is not None and mount.find(self.entry.target) == self.entry

    def abort(self) -> None:
        """Unmount at once what is still mounted: its users get ECONNABORTED. Errors as of `kernel.mount.unmount`."""
        if self.entry is not None:
            detach(self.entry, force=True)

    def close(self) -> None:
        """Close the descriptor; where nobody else has it open the connection is aborted."""
        if self.fd >= 0:
            os.close(self.fd)


def _open_and_mount(mountpoint: Path, options: Options) -> int:
    if not os.path.isdir(mountpoint):
        raise NotFoundError(f"cannot mount {options.name} on {mountpoint}: there is no such folder")
    name, said = options.name, [f"max_read={MAX_READ}", "default_permissions"]
    said += ["allow_other"] if options.allow_other else []
    try:
        return _as_root(mountpoint, name, said, writable=options.writable)
    except PrivilegeError:
        if os.geteuid() == 0:
            raise
    said += [] if options.writable else ["ro"]
    return _as_user(mountpoint, name, [*said, "nosuid", "nodev", f"subtype={name}", f"fsname={name}"])


def _as_root(mountpoint: Path, name: str, options: Sequence[str], *, writable: bool) -> int:
    try:
        fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError as exc:
        if exc.errno in (errno.EACCES, errno.EPERM):
            raise PrivilegeError(
                "cannot open /dev/fuse: permission denied", hint="chmod 666 /dev/fuse, or run as root"
            ) from None
        hint = "modprobe fuse; in a container add --device /dev/fuse; images without it: bootseer image extract"
        raise UnsupportedError(f"cannot open /dev/fuse: {exc.strerror}", hint=hint) from None
    try:
        data = f"fd={fd},rootmode=40000,user_id={os.geteuid()},group_id={os.getegid()}," + ",".join(options)
        flags = mount.MS_NOSUID | mount.MS_NODEV | (0 if writable else mount.MS_RDONLY)
        mount.mount(name, mountpoint, f"fuse.{name}", flags=flags, data=data)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _as_user(mountpoint: Path, name: str, options: Sequence[str]) -> int:
    tool = shutil.which("fusermount3")
    if tool is None:
        hint = "apt install fuse3, or run as root"
        raise UnsupportedError(f"cannot mount {name} on {mountpoint} without root: no fusermount3", hint=hint)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, theirs:
        ours.settimeout(_DEADLINE)
        process = subprocess.Popen(
            [tool, "-o", ",".join(options), "--", str(mountpoint)],
            env={**os.environ, "_FUSE_COMMFD": str(theirs.fileno())},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        with process:
            theirs.close()
            try:
                _, fds, _, _ = socket.recv_fds(ours, 1, 1)
            except (TimeoutError, OSError):
                fds = []
            try:
                _, stderr = process.communicate(timeout=_DEADLINE)
            except subprocess.TimeoutExpired:
                process.kill()
                stderr = "it did not answer"
    if not fds:
        reason = (stderr.strip().splitlines() or ["no reason given"])[-1]
        raise PrivilegeError(f"cannot mount {name} on {mountpoint}: {reason}", hint="run as root")
    os.set_inheritable(fds[0], False)
    return fds[0]


def detach(ours: mount.MountEntry, *, force: bool) -> bool:
    """Unmount ``ours``, and nothing else: what is topmost on its target and looks the same (the device number alone is
    given out again). ``force`` aborts the connection (readers get ECONNABORTED) and detaches. True when it is gone."""
    if mount.find(ours.target) != ours:
        return True
    try:
        mount.unmount(ours.target, lazy=force, force=force)
    except BootseerError:
        if force:
            raise
        return False
    return True
