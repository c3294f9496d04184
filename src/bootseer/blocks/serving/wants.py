"""The fetcher's side of the channel: takes what a front wants, has it fetched, answers.

One thread receives; answers are sent by the fetcher's threads as blocks come.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from functools import partial

from bootseer.blocks.cache.blockfile import CacheFile
from bootseer.blocks.fetch.fetcher import Fetcher
from bootseer.blocks.serving.channel import Again, Came, Channel, Wanted
from bootseer.errors import BootseerError, UnavailableError

log = logging.getLogger(__name__)

_TICK = 0.5
_SEND_SECONDS = 1.0


class Wants:
    """Serves the requests that come over ``channel`` until ``stop`` is set or the front's end is gone.

    ``from_memory``: the front can hand out bytes that could not be cached; else those are EIO for their readers.
    """

    def __init__(
        self, channel: Channel, fetcher: Fetcher, cache: CacheFile, stop: threading.Event, *, from_memory: bool
    ) -> None:
        self._channel = channel
        self._fetcher = fetcher
        self._cache = cache
        self._stop = stop
        self._from_memory = from_memory
        self._open: set[int] = set()

    def run(self) -> None:
        """Have the front repeat what it wants, then serve."""
        self._channel.send(Again(), timeout=_SEND_SECONDS)
        while not self._stop.is_set():
            try:
                message = self._channel.receive(timeout=_TICK)
            except BootseerError as exc:
                log.error("%s", exc)
                return
            if isinstance(message, Wanted) and message.id not in self._open:
                self._want(message)

    def _want(self, message: Wanted) -> None:
        if not message.first <= message.last < self._cache.map.count:
            self._channel.send(Came(message.id, errno.EIO), timeout=_SEND_SECONDS)
            return
        self._open.add(message.id)
        try:
            self._fetcher.submit(message.first, message.last, partial(self._came, message))
        except UnavailableError as exc:
            self._came(message, exc, {})

    def _came(self, message: Wanted, error: BootseerError | None, memory: dict[int, bytes]) -> None:
        number, fd = 0, -1
        if error is not None:
            log.error("blocks %d..%d, wanted by process %d: %s", message.first, message.last, message.pid, error)
            number = errno.EIO
        elif memory and self._from_memory:
            fd = self._in_memory(message, memory)
            number = 0 if fd >= 0 else errno.EIO
        elif memory:
            log.error("blocks %d..%d came but the cache has no room for them", message.first, message.last)
            number = errno.EIO
        self._open.discard(message.id)
        if not self._channel.send(Came(message.id, number, fd), timeout=_SEND_SECONDS):
            log.warning("the front does not take the answer to request %d", message.id)
        if fd >= 0:
            os.close(fd)

    def _in_memory(self, message: Wanted, memory: dict[int, bytes]) -> int:
        """A memfd with the blocks of a request some of which could not be cached; -1 when that fails too."""
        blocks = self._cache.map
        fd = -1
        try:
            fd = os.memfd_create("bootseer-blocks", os.MFD_CLOEXEC)
            with os.fdopen(fd, "wb", closefd=False) as out:
                for block in range(message.first, message.last + 1):
                    data = memory.get(block)
                    if data is None:
                        data = self._cache.read(block << blocks.shift, blocks.length_of(block))
                    out.write(data)
        except OSError as exc:
            log.error("blocks %d..%d cannot be handed over: %s", message.first, message.last, exc)
            if fd >= 0:
                os.close(fd)
            return -1
        return fd
