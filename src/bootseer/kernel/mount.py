"""Mounts: mount(2) and umount2(2) with bootseer's errors; EROFS (file-backed or loop) and overlayfs.

mount(8) is avoided on purpose: it puts a loop device under a file that the kernel could mount itself. A mount call over
a FUSE server takes as long as the server takes to answer, so the server's own deadline bounds it.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from bootseer.closing import descriptor
from bootseer.errors import BootseerError, DataError, PrivilegeError, UnsupportedError, doing, from_os_error
from bootseer.kernel import libc, loop

_log = logging.getLogger(__name__)

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_SLAVE = 1, 2, 4, 32, 0x1000, 0x4000, 1 << 19
_HARMLESS = MS_NOSUID | MS_NODEV
_MNT_FORCE, _MNT_DETACH, _MNT_EXPIRE, UMOUNT_NOFOLLOW = 1, 2, 4, 8

_DESCRIPTORS = "/proc/self/fd/"
_MOST_LINKS = 40
_IDS = (1 << 32) - 1
_MAX_DATA = 4095  # mount(2) copies one page, and cuts what is longer without an error
_SPECIAL = re.compile(r"[,:\\\s]")


class MountEntry(NamedTuple):
    """One line of ``/proc/self/mountinfo``."""

    device: str
    """``major:minor`` of the file system."""
    target: str
    fstype: str
    source: str
    options: tuple[str, ...] = ()
    """Those of the file system."""
    ident: int = 0
    parent: int = 0
    follows: bool = False
    """It came from, and goes with, a mount of another namespace."""


def mount(source: str | Path, target: str | Path, fstype: str, *, flags: int = 0, data: str = "") -> None:
    """mount(2). Raises `PrivilegeError` without the right to, `UnsupportedError` when the kernel lacks ``fstype``,
    `NotFoundError` for a missing source or target, `BootseerError` with the kernel's reason otherwise."""
    what = f"mount {fstype or source} on {_named(target)}"
    if len(os.fsencode(data)) > _MAX_DATA:
        raise UnsupportedError(
            f"cannot {what}: its options exceed {_MAX_DATA} bytes", hint="use shorter or fewer paths"
        )
    try:
        libc.mount(str(source), str(target), fstype, flags, data)
    except OSError as exc:
        raise translate(exc, what, fstype) from exc


def translate(exc: OSError, what: str, fstype: str) -> BootseerError:
    if exc.errno in (errno.EPERM, errno.EACCES):
        return PrivilegeError(f"cannot {what}: {exc.strerror}", hint="run as root, or with CAP_SYS_ADMIN")
    if exc.errno == errno.ENODEV:
        return UnsupportedError(f"cannot {what}: the kernel has no {fstype}", hint=f"try modprobe {fstype}")
    if exc.errno == errno.EINVAL:
        return BootseerError(f"cannot {what}: the kernel refused it", hint="dmesg says why")
    if exc.errno == errno.EUCLEAN:
        return DataError(f"cannot {what}: its structure is damaged")
    return from_os_error(exc, what)


def mount_for(user: int, group: int, source: Path, target: Path) -> None:
    """Show the mount on ``source`` on ``target``, too, where ``user`` and ``group`` own what root does, and the other
    way round. Where the kernel cannot do that the owners stay, with a log line. Raises `BootseerError`."""
    with doing(f"show {source} on {target}"), ExitStack() as undo:
        tree = libc.open_tree(str(source))
        undo.callback(os.close, tree)
        if user:
            try:
                libc.map_owners(tree, undo.enter_context(_swapped(user, group)))
            except OSError as exc:
                _log.warning("on %s files of root stay root's: %s", target, exc.strerror)
        libc.move_mount(tree, str(target))


@contextmanager
def _swapped(user: int, group: int) -> Iterator[int]:
    """A user namespace in which 0 is this user or group and this one 0. Raises `OSError`."""
    ready, told = os.pipe()
    pid = os.fork()
    if not pid:
        with suppress(BaseException):
            libc.unshare(libc.CLONE_NEWUSER)
            libc.die_with_parent()
            os.write(told, b"x")
            signal.pause()
        os._exit(1)
    try:
        os.close(told)
        if os.read(ready, 1):
            for name, own in (("uid_map", user), ("gid_map", group)):
                Path(f"/proc/{pid}/{name}").write_text(_swap(own))
        namespace = os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(ready)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    with descriptor(namespace):
        yield namespace


def _swap(own: int) -> str:
    """The map of ids with 0 and ``own`` exchanged."""
    if not own:
        return f"0 0 {_IDS}\n"
    ranges = ((0, own, 1), (own, 0, 1), (1, 1, own - 1), (own + 1, own + 1, _IDS - own - 1))
    return "".join(f"{inside} {outside} {count}\n" for inside, outside, count in ranges if count > 0)


def unmount(target: str | Path, *, lazy: bool = False, force: bool = False) -> None:
    """Unmount the topmost mount on ``target``, or on what that links to; on exactly that name in a folder that
    `beneath.shown` leads to. ``lazy`` detaches it now and ends it with its last user; ``force`` aborts a FUSE
    connection first, so that its readers get an error. Without root, FUSE mounts are ended through ``fusermount3``.
    Raises `BootseerError` when it is busy or no mount, `PrivilegeError` without the right to."""
    flags = UMOUNT_NOFOLLOW | (_MNT_DETACH if lazy else 0) | (_MNT_FORCE if force else 0)
    where, target = _exact(target), real(target)
    try:
        libc.umount2(where, flags)
    except OSError as exc:
        if exc.errno == errno.EBUSY:
            hint = f"end what uses it (fuser -vm {target})"
            raise BootseerError(f"cannot unmount {target}: it is in use", hint=hint) from None
        if exc.errno == errno.EINVAL:
            raise BootseerError(f"cannot unmount {target}: it is not a mount") from None
        if exc.errno != errno.EPERM:
            raise from_os_error(exc, f"unmount {target}") from None
        if os.geteuid() == 0 or not (entry := find(target)) or not entry.fstype.startswith("fuse"):
            raise PrivilegeError(f"cannot unmount {target}", hint="run as root") from None
        _fusermount_unmount(target, lazy=lazy)


def _fusermount_unmount(target: str, *, lazy: bool) -> None:
    tool = shutil.which("fusermount3") or shutil.which("fusermount")
    if tool is None:
        raise UnsupportedError(f"cannot unmount {target} without fusermount3", hint="apt install fuse3, or run as root")
    command = [tool, "-u", "-q", *(["-z"] if lazy else []), "--", target]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it is in use"]
        raise BootseerError(f"cannot unmount {target}: {lines[-1]}")


def entries(process: int | str = "thread-self") -> Iterator[MountEntry]:
    """The mounts this thread, or a process, sees, in mount order: of two on one target, the later one is on top."""
    with open(f"/proc/{process}/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            left, _, right = line.partition(" - ")
            fields, tail = left.split(" "), right.split(" ")
            yield MountEntry(
                fields[2],
                _unescape(fields[4]),
                tail[0],
                _unescape(tail[1]),
                tuple(tail[2].strip().split(",")),
                int(fields[0]),
                int(fields[1]),
                any(field.startswith("master:") for field in fields[6:]),
            )


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def real(target: str | Path) -> str:
    """The path of ``target`` without symbolic links, as mount(2) follows them; its mount is never touched."""
    path = os.path.abspath(target)
    for _ in range(_MOST_LINKS):
        folder, name = os.path.split(path.rstrip("/"))
        if name in ("", ".", ".."):
            return os.path.realpath(path)
        path = os.path.join(os.path.realpath(folder), name)
        try:
            path = os.path.join(os.path.dirname(path), os.readlink(path))
        except OSError:  # no link
            break
    return path


def _exact(target: str | Path) -> str:
    """For a call that follows no link: `real`, but what begins with a descriptor (`beneath.shown`) as it is."""
    return str(target) if str(target).startswith(_DESCRIPTORS) else real(target)


def _named(target: str | Path) -> str:
    """For messages: what begins with a descriptor, by its name."""
    return real(target) if str(target).startswith(_DESCRIPTORS) else str(target)


def find(target: str | Path) -> MountEntry | None:
    """The topmost mount on exactly ``target``, or on what that links to, or None. Never touches the mount itself, which
    may be dead or slow; nor the folders above it, where something is mounted by that very name."""
    found = {entry.target: entry for entry in entries()}
    return found.get(os.path.abspath(target)) or found.get(real(target))


def fstype(path: str | Path) -> str:
    """Type of the file system on which ``path`` lies, or would if it was made; "" when none is seen."""
    there = f"{os.path.realpath(path).rstrip('/')}/"
    above = [entry for entry in entries() if there.startswith(f"{entry.target.rstrip('/')}/")]
    # of two on one target, the later one is on top
    return max(reversed(above), key=lambda entry: len(entry.target)).fstype if above else ""


def below(folder: str | Path) -> list[MountEntry]:
    """The mounts strictly below ``folder``, in mount order, as this process sees them."""
    prefix = os.path.realpath(folder).rstrip("/") + "/"
    return [entry for entry in entries() if entry.target.startswith(prefix)]


def is_mounted(target: str | Path) -> bool:
    """Whether something is mounted on exactly ``target``."""
    return find(target) is not None


def in_use(target: str | Path) -> bool:
    """Whether a process that sees the mount on ``target`` has a file or a working directory in it, or something is
    mounted on it. Raises `BootseerError` when it is no mount, `PrivilegeError` without the right to unmount."""
    try:
        libc.umount2(_exact(target), _MNT_EXPIRE | UMOUNT_NOFOLLOW)
    except OSError as exc:
        if exc.errno == errno.EAGAIN:  # it is marked as not in use, and would go if it were asked for again
            os.close(os.open(target, os.O_PATH | os.O_CLOEXEC))
        elif exc.errno != errno.EBUSY:
            raise translate(exc, f"look at {_named(target)}", "overlay") from exc
        return exc.errno == errno.EBUSY
    raise BootseerError(f"{_named(target)} was unmounted by another process")


def namespace() -> str:
    """The mount namespace of this process, such as ``mnt:[4026531841]``; the number of one that ended is used again."""
    return os.readlink("/proc/self/ns/mnt")


def boot_id() -> str:
    """What no other boot of any machine has: mounts and processes that were noted with another one are gone."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def copy_root(source: Path, upper: Path) -> None:
    """Give ``upper`` the owner, mode and times of ``source``: an overlay's root shows those of its upper folder."""
    found = os.stat(source)
    os.chown(upper, found.st_uid, found.st_gid)
    os.chmod(upper, found.st_mode & 0o7777)
    os.utime(upper, ns=(found.st_atime_ns, found.st_mtime_ns))


@contextmanager
def _plain(paths: Sequence[Path]) -> Iterator[list[str]]:
    """Names of ``paths`` that a mount option can hold: themselves, or ``/proc/self/fd/N`` for those with a comma,
    colon, backslash or space (kernels differ in how these are escaped)."""
    with ExitStack() as stack:
        names = []
        for path in paths:
            if not _SPECIAL.search(str(path)):
                names.append(str(path))
                continue
            with doing(f"open {path}"):
                fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
            stack.callback(os.close, fd)
            names.append(f"/proc/self/fd/{fd}")
        yield names


def mount_erofs(meta: Path, data: Path | None, target: Path, *, direct: bool = False) -> str:
    """Mount an EROFS image read-only on ``target``, without set-uid programs and device nodes; ``data`` is the second
    device of a two-part image.

    The kernel reads the files itself where it can (Linux 6.12, ``CONFIG_EROFS_FS_BACKED_BY_FILE``, not on tmpfs or
    overlayfs); elsewhere loop devices are put under them, with a log line. Returns the way taken, ``"file"`` or
    ``"loop"``. ``direct``: past the page cache of the files (``directio``), where the kernel can do that. Raises
    `UnsupportedError` when the kernel has no EROFS, `PrivilegeError`, `NotFoundError`, `DataError` when ``meta`` is no
    EROFS image."""
    meta, data = meta.absolute(), data.absolute() if data else None
    with doing(f"open {meta}"), meta.open("rb") as file:
        file.seek(1024)
        if file.read(4) != b"\xe2\xe1\xf5\xe0":
            raise DataError(f"{meta} is not an EROFS image")
    what = f"mount erofs on {target}"
    with _plain([data] if data else []) as names:
        option = f"device={names[0]}" if names else ""
        if direct and names:
            with suppress(OSError):  # an option that the kernel does not know is EINVAL, as much else
                libc.mount(str(meta), str(target), "erofs", MS_RDONLY | _HARMLESS, f"{option},directio")
                return "file"
        try:
            libc.mount(str(meta), str(target), "erofs", MS_RDONLY | _HARMLESS, option)
            return "file"
        except OSError as exc:
            # ENOTBLK: not built in. EINVAL: this backing file system is not fit for it (tmpfs, overlay over it).
            if exc.errno not in (errno.ENOTBLK, errno.EINVAL):
                raise translate(exc, what, "erofs") from exc
            _log.warning("kernel does not mount %s as a file (%s), using loop devices", meta, exc.strerror)
    with ExitStack() as stack:
        source = stack.enter_context(loop.attached(meta))
        option = f"device={stack.enter_context(loop.attached(data))}" if data else ""
        mount(source, target, "erofs", flags=MS_RDONLY | _HARMLESS, data=option)
    return "loop"


def mount_overlay(
    lower: Sequence[Path],
    target: Path,
    *,
    upper: Path,
    work: Path,
    options: str = "",
    privileged: bool = False,
    source: str = "bootseer",
    volatile: bool = False,
) -> None:
    """Mount a writable overlayfs on ``target``: ``lower`` topmost first.

    ``upper`` and ``work`` are two empty folders of one file system (not overlayfs). ``options`` are added as they are
    (``"xino=off"``). ``privileged``: set-uid programs and device nodes work in it, which only a folder may show that no
    other user of the node can enter. ``source`` is what the list of mounts calls it. ``volatile``: nobody needs
    ``upper`` after a crash, so that nothing waits for its disk, as an unmount else does; ``work`` is used once.
    """
    with _plain([path.absolute() for path in (*lower, upper, work)]) as names:
        parts = ["lowerdir=" + ":".join(names[:-2]), f"upperdir={names[-2]}", f"workdir={names[-1]}"]
        parts += [*([options] if options else []), *(["volatile"] if volatile else [])]
        mount(source, target, "overlay", flags=0 if privileged else _HARMLESS, data=",".join(parts))


def upper_in_use(upper: Path, spare: Path) -> bool:
    """Whether an overlay with this upper directory still lives, in whichever mount namespace, or only in the hands of
    processes that have files of it. Also true where the kernel does not tell. ``spare``: a folder for this ``upper``
    alone, made when missing, on the same file system. Only for an ``upper`` that is mounted no more. Raises
    `OSError`."""
    lower, point, work = (spare / name for name in ("lower", "point", "work"))
    for folder in (lower, point, work):
        folder.mkdir(parents=True, exist_ok=True)
    with suppress(BootseerError):  # else one that was killed here would keep it for ever
        unmount(point)
    try:  # with an index no two overlays may have one upper directory
        mount_overlay([lower], point, upper=upper, work=work, options="redirect_dir=off,metacopy=off,index=on")
    except BootseerError as exc:
        if not isinstance(exc.__cause__, OSError) or exc.__cause__.errno != errno.EBUSY:
            _log.warning("%s; taking %s for in use", exc, upper)
        return True
    try:
        return not any(entry.target == os.path.realpath(point) and "index=on" in entry.options for entry in entries())
    finally:
        unmount(point)


def unshare() -> None:
    """A copy of all mounts for the calling thread and the children it starts from now on. Raises `OSError`."""
    libc.unshare(libc.CLONE_NEWNS)
    libc.mount("none", "/", "", MS_REC | MS_SLAVE, "")


def in_own_namespace() -> bool:
    """Whether this process sees other mounts than the first of its pid namespace; True where that cannot be told."""
    try:
        return os.readlink("/proc/self/ns/mnt") != os.readlink("/proc/1/ns/mnt")
    except OSError:
        return True


def private_namespace() -> bool:
    """Give this process (call it before it has threads) mounts of its own, that nobody else sees and that end with it
    and its children. False without the right to.

    Mounts of others are copied too. Where they are shared (as systemd makes them) an unmount outside is one here as
    well; else what is unmounted outside, such as a FUSE mount, lives on until this process ends: be quick."""
    try:
        unshare()
    except OSError as exc:
        _log.info("no mount namespace of its own: %s", exc.strerror)
        return False
    return True
