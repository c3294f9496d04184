"""Striped files as a FUSE mount: `start` one in a process of its own, `find` one."""

from bootseer.stripefs.mount.client import FsMount, find, start
from bootseer.stripefs.mount.prefetch import LATEST
from bootseer.stripefs.mount.server import FsStatus

__all__ = ["LATEST", "FsMount", "FsStatus", "find", "start"]
