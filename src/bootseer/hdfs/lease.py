"""What keeps files that are being written alive while their writers think: leases at the NameNode, idle pipelines.

After a minute without a renewal the NameNode lets others take over a file, and a DataNode closes a pipeline on which
nothing came for a minute. Checkpoints are written by threads that stop for longer than that.

Concurrency: one daemon thread per process, while there are files open; it holds no lock while it asks. A forked child
has no such thread and none of its parent's files.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from typing import Protocol

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


_files: weakref.WeakSet[Open] = weakref.WeakSet()
_changed = threading.Condition()
_running = False


def _forget() -> None:
    global _files, _changed, _running
    _files, _changed, _running = weakref.WeakSet(), threading.Condition(), False


os.register_at_fork(after_in_child=_forget)


def hold(file: Open) -> None:
    """Renew the lease of ``file`` until `release`, or until nobody has the object any more."""
    global _running
    with _changed:
        _files.add(file)
        if not _running:
            _running = True
            threading.Thread(target=_work, name="bootseer-leases", daemon=True).start()


def release(file: Open) -> None:
    with _changed:
        _files.discard(file)
        _changed.notify_all()


def _work() -> None:
    global _running
    try:
        while _wait():
            _round()
    except BaseException:
        with _changed:
            _running = False  # the next file starts another thread
        raise


def _wait() -> bool:
    """Until the next round is due. False: no files are open, and this thread is none of `_running` any more."""
    global _running
    until = time.monotonic() + RENEW
    with _changed:
        while (left := until - time.monotonic()) > 0 and _files:
            _changed.wait(left)
        if not _files:
            _running = False
        return _running


def _round() -> None:
    """One renewal of everything. A function of its own: no variable may hold on to a file until the next round."""
    with _changed:
        files = list(_files)
    # leases first: they are lost for all files, a pipeline for one, and DataNodes may take their time
    for namenode in {file.namenode for file in files}:
        try:
            namenode.renew_lease(deadline=_ASK)
        except Exception as exc:
            _log.warning("leases not renewed, trying again in %.0f s: %s", RENEW, exc)
    for file in files:
        try:
            file.keep_alive()
        except Exception as exc:  # of one file, which its writer will meet again: the others need this thread
            _log.warning("an idle write has failed: %s", exc)
