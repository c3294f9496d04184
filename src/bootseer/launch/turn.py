"""The checkpoint's turn: it flows as soon as the image's hot blocks are on the node, or when they are too late.
`HotWait` decides and has no thread; `until_hot` asks the block server in a thread, and does what was decided."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from bootseer.blocks.tree import TreeStatus
from bootseer.errors import logged
from bootseer.profile import emit

if TYPE_CHECKING:
    from bootseer.image import ImageMount
    from bootseer.launch.checkpoint import CheckpointStage
    from bootseer.node.userimage import UserImage

log = logging.getLogger(__name__)

HOT_SECONDS = 120.0
"""A checkpoint of which nothing is recorded waits so long for the hot blocks of the image."""

TURN_SECONDS = 5.0
"""One of which is known what the job reads waits only so long, so that a slow source of the image does not keep back a
checkpoint that comes from another. ``scripts/bench turn`` measures what waiting saves."""

_TELL_SECONDS = 2.0
"""So often the profile hears how many of the image's hot blocks are here."""

_LATER = 15.0
"""Seconds between two looks when nobody waits for them any more: perhaps no first step is ever told of."""


class Step(NamedTuple):
    """What to do now: ``tell`` the profile, ``release`` the checkpoint beside late hot blocks, look again after
    ``pause`` seconds; with ``over`` there is nothing to wait for."""

    tell: bool
    release: bool
    over: bool
    pause: float


class HotWait:
    """Times are monotonic seconds. ``patience``: how long the checkpoint waits; None without one."""

    def __init__(self, began: float, patience: float | None, pause: float) -> None:
        self._began, self._patience, self._pause = began, patience, pause
        self._told, self._next = -1, began + _TELL_SECONDS

    def look(self, status: TreeStatus | None, now: float) -> Step:
        hot = is_hot(status)
        tell = False
        if status and status.hot_total and status.hot_ready != self._told:
            tell = now >= self._next or (hot and self._told >= 0)
        if status and tell:
            self._told, self._next = status.hot_ready, now + _TELL_SECONDS
        pause = _LATER if now >= self._began + HOT_SECONDS else self._pause
        release = self._patience is not None and not hot and now >= self._began + self._patience
        if release:
            self._patience, self._pause = None, 1.0
        return Step(tell, release, hot, pause)


def is_hot(image: TreeStatus | None) -> bool:
    """Whether everything is here that earlier starts of the image read."""
    return image is None or image.complete or (image.hot_known and image.hot_ready >= image.hot_total)


@contextlib.contextmanager
def until_hot(
    mounted: ImageMount | UserImage | None,
    checkpoint: CheckpointStage | None,
    span: str,
    ready: Callable[[], bool],
) -> Iterator[None]:
    """Meanwhile a thread tells the profile, on ``span``, how many of the image's hot blocks are here, and lets the
    checkpoint flow as soon as they all are. The rest of the image waits until the job is ``ready``."""
    over = threading.Event()

    def wait() -> None:
        began, waiting = time.monotonic(), checkpoint
        patience = None if checkpoint is None else TURN_SECONDS if checkpoint.recorded else HOT_SECONDS
        # the node daemon has a process for each question
        policy = HotWait(began, patience, 0.2 if checkpoint and not os.geteuid() else 1.0)
        with logged(log.warning, "cannot see whether the image's hot blocks are here"):
            while mounted and not ready():
                status = mounted.status()
                step = policy.look(status, time.monotonic())
                if status and step.tell:
                    emit.annotate(span, hot_ready=status.hot_ready, hot_total=status.hot_total)
                if waiting and step.release:
                    level = logging.INFO if waiting.recorded else logging.WARNING
                    log.log(level, "the image's hot blocks are late: the checkpoint is fetched beside them")
                    waiting.release()
                    waiting = None
                if step.over or over.wait(step.pause):
                    break
        if waiting:
            waiting.release()

    thread = threading.Thread(target=wait, name="until-hot", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
