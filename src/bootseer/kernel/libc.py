"""The few libc calls Python lacks, through ctypes; each releases the GIL and raises `OSError` with the call's errno."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import struct

from bootseer.closing import descriptor

_libc = ctypes.CDLL(None, use_errno=True)

_libc.mount.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p]
_libc.umount2.argtypes = [ctypes.c_char_p, ctypes.c_int]
_libc.unshare.argtypes = [ctypes.c_int]
_libc.prctl.argtypes = [ctypes.c_int, ctypes.c_ulong]
_libc.fanotify_init.argtypes = [ctypes.c_uint, ctypes.c_uint]
_libc.fanotify_mark.argtypes = [ctypes.c_int, ctypes.c_uint, ctypes.c_uint64, ctypes.c_int, ctypes.c_char_p]
_libc.inotify_add_watch.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_uint32]
_libc.statx.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_char_p]
_libc.fallocate64.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]

CLONE_NEWNS, CLONE_FS, CLONE_NEWUSER, CLONE_NEWPID = 0x20000, 0x200, 0x10000000, 0x20000000
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
_OPEN_TREE, _MOVE_MOUNT, _FSOPEN, _FSCONFIG, _FSMOUNT, _MOUNT_SETATTR = 428, 429, 430, 431, 432, 442  # on all machines
_FSCONFIG_CMD_CREATE = 6
_OPEN_TREE_CLONE, _MOVE_MOUNT_F_EMPTY_PATH, _MOUNT_ATTR_RDONLY, _AT_RECURSIVE = 1, 4, 1, 0x8000
_MOUNT_ATTR_IDMAP = 0x100000
_KEYCTL = {"x86_64": 250, "aarch64": 219}
_KEYCTL_JOIN_SESSION_KEYRING = 1
_OPENAT2, _PIDFD_GETFD, _RENAME_NOREPLACE = 437, 438, 1
_TRIES = 1000
_RESOLVE_IN_ROOT, _RESOLVE_BENEATH, _RESOLVE_NO_SYMLINKS, _RESOLVE_NO_MAGICLINKS = 0x10, 0x08, 0x04, 0x02
_AT_FDCWD, _AT_SYMLINK_NOFOLLOW, _AT_EMPTY_PATH, _STATX_BTIME = -100, 0x100, 0x1000, 0x800
_STATFS = struct.Struct("=q48xQ")
_STATX = struct.Struct("=I24xH2xQQ32xqI4xqI4xqI4x8xII")


def _check(result: int, name: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)
    return result


def mount(source: str, target: str, fstype: str, flags: int, data: str) -> None:
    """mount(2). ``data`` longer than a page is cut short by the kernel without an error: check it before."""
    args = [os.fsencode(text) for text in (source, target, fstype)]
    _check(_libc.mount(args[0], args[1], args[2], flags, os.fsencode(data)), target)


def umount2(target: str, flags: int) -> None:
    _check(_libc.umount2(os.fsencode(target), flags), target)


def unshare(flags: int) -> None:
    """unshare(2) of the calling thread."""
    _check(_libc.unshare(flags), "unshare")


def die_with_parent() -> None:
    """prctl(2): the kernel kills this process when the thread that forked it has ended."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL), "prctl")


def no_new_privileges() -> None:
    """prctl(2): set-uid programs and file capabilities give this process and its children nothing, for good."""
    zero = ctypes.c_ulong(0)
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, zero, zero, zero), "prctl")


def pivot_root() -> None:
    """pivot_root(2): the working folder, a mount, becomes the root; the old one lies on it until ``.`` is unmounted."""
    _check(_libc.pivot_root(b".", b"."), "pivot_root")


def open_tree(path: str, *, read_only: bool = False) -> int:
    """open_tree(2): a descriptor of a copy of what is mounted on and below ``path``, which is mounted nowhere yet.
    ``read_only`` is set by mount_setattr(2), for all of it (Linux 5.12)."""
    how = _OPEN_TREE_CLONE | os.O_CLOEXEC | _AT_RECURSIVE
    fd: int = _check(_libc.syscall(_OPEN_TREE, _AT_FDCWD, os.fsencode(path), how), path)
    if read_only:
        try:
            _set_attributes(fd, _MOUNT_ATTR_RDONLY)
        except OSError:
            os.close(fd)
            raise
    return fd


def map_owners(tree: int, user_namespace: int) -> None:
    """mount_setattr(2): in the copy ``tree`` that `open_tree` made, a file that is stored as an id of the namespace
    belongs to what that id is outside of it. EINVAL where the file system cannot do that (EROFS: before Linux 5.19)."""
    _set_attributes(tree, _MOUNT_ATTR_IDMAP, user_namespace)


def _set_attributes(tree: int, attributes: int, user_namespace: int = 0) -> None:
    packed = struct.pack("=QQQQ", attributes, 0, 0, user_namespace)
    how, size = _AT_EMPTY_PATH | _AT_RECURSIVE, ctypes.c_size_t(len(packed))
    _check(_libc.syscall(_MOUNT_SETATTR, tree, b"", how, packed, size), "mount_setattr")


def move_mount(fd: int, target: str) -> None:
    """move_mount(2): mount what `open_tree` has copied."""
    arguments = (_MOVE_MOUNT, fd, b"", _AT_FDCWD, os.fsencode(target), _MOVE_MOUNT_F_EMPTY_PATH)
    _check(_libc.syscall(*arguments), target)


def unnamed_mount(fstype: str) -> int:
    """fsmount(2): a descriptor of a new mount that has a place nowhere, and ends with it."""
    with descriptor(_check(_libc.syscall(_FSOPEN, fstype.encode(), 1), fstype)) as made:
        _check(_libc.syscall(_FSCONFIG, made, _FSCONFIG_CMD_CREATE, None, None, 0), fstype)
        return _check(_libc.syscall(_FSMOUNT, made, 1, 0), fstype)


def hide() -> None:
    """prctl(2): no process of the same user may look into this one (its memory, its descriptors), and no core file has
    its memory."""
    _check(_libc.prctl(_PR_SET_DUMPABLE, 0), "prctl")


def leave_keyring() -> None:
    """keyctl(2): an empty session keyring of its own for this process. Where the kernel has no keyrings, or a sandbox
    forbids their use, nothing happens: then there is nothing to reach. Raises `OSError` otherwise."""
    number = _KEYCTL.get(os.uname().machine)
    if number is None:
        raise OSError(errno.ENOTSUP, "the number of keyctl is not known on this machine")
    try:
        _check(_libc.syscall(ctypes.c_long(number), ctypes.c_long(_KEYCTL_JOIN_SESSION_KEYRING), None), "keyctl")
    except OSError as exc:
        if exc.errno not in (errno.ENOSYS, errno.EPERM):
            raise


def descriptor_of(pidfd: int, number: int) -> int:
    """pidfd_getfd(2): the descriptor ``number`` of another process, as one that the caller closes."""
    fd: int = _check(_libc.syscall(_PIDFD_GETFD, pidfd, number, 0), "pidfd_getfd")
    return fd


def setns(fd: int) -> None:
    """setns(2) of the calling thread, into a mount namespace."""
    _check(_libc.setns(fd, CLONE_NEWNS), "setns")


def fanotify_init(flags: int, event_flags: int) -> int:
    return _check(_libc.fanotify_init(flags, event_flags), "fanotify")


def fanotify_mark(fd: int, flags: int, mask: int, path: str) -> None:
    _check(_libc.fanotify_mark(fd, flags, mask, _AT_FDCWD, os.fsencode(path)), path)


def inotify_init() -> int:
    """inotify_init1(2), which does not wait."""
    return _check(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC), "inotify_init1")


def inotify_add_watch(fd: int, path: str, mask: int) -> int:
    return _check(_libc.inotify_add_watch(fd, os.fsencode(path), mask), path)


def statx(file: int | str) -> tuple[int, ...]:
    """statx(2) of a descriptor or a path, links not followed: mode, device, inode, size, and the times of the last
    write, the last change and the making, in nanoseconds since the epoch; the last is 0 where it is not kept."""
    data = ctypes.create_string_buffer(256)
    at, path = (file, b"") if isinstance(file, int) else (_AT_FDCWD, os.fsencode(file))
    _check(_libc.statx(at, path, _AT_SYMLINK_NOFOLLOW | _AT_EMPTY_PATH, 0xFFF, data), str(file))
    mask, mode, inode, size, bs, bn, cs, cn, ms, mn, major, minor = _STATX.unpack_from(data)
    born = bs * 10**9 + bn if mask & _STATX_BTIME else 0
    return mode, os.makedev(major, minor), inode, size, ms * 10**9 + mn, cs * 10**9 + cn, born


def file_system(fd: int) -> tuple[int, int]:
    """fstatfs(2): the kernel's numbers of the kind of file system, and of this one."""
    data = ctypes.create_string_buffer(256)
    _check(_libc.fstatfs(fd, data), "fstatfs")
    kind, number = _STATFS.unpack_from(data)
    return kind, number


def punch_hole(fd: int, offset: int, length: int) -> None:
    """fallocate(2): the range becomes a hole that reads as zeros; the file keeps its size."""
    _check(_libc.fallocate64(fd, 3, offset, length), "fallocate")  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE


def syncfs(folder: str) -> None:
    """syncfs(2): all that was written to the file system of ``folder`` is on its disk."""
    with descriptor(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as fd:
        _check(_libc.syncfs(fd), folder)


def rename_new(source_folder: int, source: str, target_folder: int, target: str) -> None:
    """renameat2(2), of names in folder descriptors: a rename that fails with EEXIST when there is a ``target``. EINVAL
    or ENOSYS where the file system or the C library cannot do that."""
    if not hasattr(_libc, "renameat2"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), "renameat2")
    names = os.fsencode(source), os.fsencode(target)
    _check(_libc.renameat2(source_folder, names[0], target_folder, names[1], _RENAME_NOREPLACE), target)


def open_in_root(root: int, path: bytes, flags: int) -> int:
    """openat2(2) of ``path`` below the folder descriptor ``root``: absolute paths, links and ``..`` stay inside it.
    Returns a descriptor the caller closes. ENOSYS before Linux 5.6; EAGAIN when somebody has a lease on the file."""
    for _ in range(_TRIES):  # a ``..`` on the way, while anything is renamed or mounted on the machine, is EAGAIN, too
        with contextlib.suppress(BlockingIOError):
            return _openat2(root, path, flags, 0, _RESOLVE_IN_ROOT | _RESOLVE_NO_MAGICLINKS)
    return _openat2(root, path, flags, 0, _RESOLVE_IN_ROOT | _RESOLVE_NO_MAGICLINKS)


def open_beneath(root: int, path: bytes, flags: int, mode: int) -> int:
    """openat2(2) of ``path`` below the folder descriptor ``root``: EXDEV when it leads out, ELOOP when a link is on its
    way. Returns a descriptor the caller closes. ENOSYS before Linux 5.6."""
    how = _RESOLVE_BENEATH | _RESOLVE_NO_SYMLINKS | _RESOLVE_NO_MAGICLINKS
    return _openat2(root, path, flags, mode if flags & os.O_CREAT else 0, how)


def open_without_links(path: bytes, flags: int) -> int:
    """openat2(2) of an absolute path: ELOOP when a link is on its way, or at its end. Returns a descriptor the caller
    closes. ENOSYS before Linux 5.6."""
    return _openat2(_AT_FDCWD, path, flags, 0, _RESOLVE_NO_SYMLINKS | _RESOLVE_NO_MAGICLINKS)


def _openat2(root: int, path: bytes, flags: int, mode: int, resolve: int) -> int:
    how = struct.pack("=QQQ", flags, mode, resolve)
    fd: int = _check(_libc.syscall(_OPENAT2, root, path, how, ctypes.c_size_t(len(how))), os.fsdecode(path))
    return fd
