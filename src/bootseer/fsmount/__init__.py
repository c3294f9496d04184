"""Striped files as a FUSE mount: `start` one in a process of its own, `find` one."""

from bootseer.fsmount.client import FsMount, find, start
from bootseer.fsmount.record import LATEST, SERVER, FsStatus

__all__ = ["LATEST", "SERVER", "FsMount", "FsStatus", "find", "start"]
