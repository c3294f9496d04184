"""Owners and modes of files in HDFS, in numbers of this node: never more rights than the NameNode grants."""

from __future__ import annotations

import functools
import grp
import pwd

from bootseer.backends.interface import Permissions
from bootseer.errors import NotWritableError
from bootseer.hdfs.records import FileStatus


def permissions(status: FileStatus) -> Permissions:
    """Those of HDFS, or fewer: none for an owner or group that this node does not know, none but the owner's beside an
    access control list, none for others that the group has not (the NameNode may know more members of it), and none at
    all in an encryption zone, whose keys have permissions of their own."""
    uid, gid = _uid(status.owner), _gid(status.group)
    mode = status.mode & (0o1770 | (status.mode >> 3 & 0o007))
    if status.acl:
        mode &= 0o1700
    if status.encrypted:
        mode = 0
    if uid is None:
        mode &= 0o1077
    if gid is None:
        mode &= 0o1707
    # beside an access control list the bits of the group are not what the group may
    kept = mode if status.acl else status.mode & 0o1777
    return Permissions(uid or 0, gid or 0, mode, kept, (status.owner, status.group))


@functools.lru_cache(4096)
def _uid(name: str) -> int | None:
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        return None


@functools.lru_cache(4096)
def _gid(name: str) -> int | None:
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        return None


def user_name(uid: int | None) -> str | None:
    try:
        return None if uid is None else pwd.getpwuid(uid).pw_name
    except KeyError:
        raise NotWritableError(f"user {uid} has no name here, which HDFS wants to know") from None


def group_name(gid: int | None) -> str | None:
    try:
        return None if gid is None else grp.getgrgid(gid).gr_name
    except KeyError:
        raise NotWritableError(f"group {gid} has no name here, which HDFS wants to know") from None
