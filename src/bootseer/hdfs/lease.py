"""What keeps files that are being written alive while their writers think: leases at the NameNode, idle pipelines.

After a minute without a renewal the NameNode lets others take over a file, and a DataNode closes a pipeline on which
nothing came for a minute. Checkpoints are written by threads that stop for longer than that.

Concurrency: one daemon thread per process, while there are files open; it holds no lock while it asks. A forked child
has no such thread and none of its parent's files."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from typing import Protocol

from bootseer.errors import logged
from bootseer.hdfs.namenode import NameNode

_log = logging.getLogger(__name__)

RENEW = 10.0
"""Seconds between two renewals; also how often idle pipelines are looked after."""
_ASK = 10.0


class Open(Protocol):
    """A file being written."""

    namenode: NameNode

    def keep_alive(self) -> None:
        """Say something to the DataNodes if that is due. Never waits for the file's own user."""


held: weakref.WeakSet[Open] = weakref.WeakSet()
lock = threading.Lock()
_thread: threading.Thread | None = None


def _forget() -> None:
    global held, lock, _thread
    held, lock, _thread = weakref.WeakSet(), threading.Lock(), None


os.register_at_fork(after_in_child=_forget)


def hold(file: Open) -> None:
    """Renew the lease of ``file`` until `release`, or until nobody has the object any more."""
    global _thread
    with lock:
        held.add(file)
        if _thread is None or not _thread.is_alive():
            _thread = threading.Thread(target=_work, name="bootseer-leases", daemon=True)
            _thread.start()


def release(file: Open) -> None:
    with lock:
        held.discard(file)


def _work() -> None:
    while True:
        time.sleep(RENEW)
        if not _renew_all():
            return


def _renew_all() -> bool:
    """One round; False when no files are open. A function of its own: no variable may hold on to a file meanwhile."""
    global _thread
    with lock:
        files = list(held)
        if not files:
            _thread = None
            return False
    # leases first: they are lost for all files, a pipeline for one, and DataNodes may take their time
    for namenode in {file.namenode for file in files}:
        with logged(_log.warning, "leases not renewed, trying again in %.0f s", RENEW, kinds=Exception):
            namenode.renew_lease(deadline=_ASK)
    for file in files:
        try:
            file.keep_alive()
        except Exception as exc:  # of one file, which its writer will meet again: the others need this thread
            _log.warning("an idle write has failed: %s", exc)
    return True
