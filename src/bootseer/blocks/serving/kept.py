"""What outlives each process of a block server, and so is there in whichever is the next."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from bootseer.blocks.serving.channel import Channel
from bootseer.blocks.serving.link import Link
from bootseer.blocks.serving.shared import JOURNAL_SLOTS, Shared
from bootseer.blocks.serving.spec import ServerSpec
from bootseer.store import Store

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Ends(NamedTuple):
    """Both ends of the link to the fetcher and of the channel between front and fetcher."""

    link: Link
    far_link: Link
    channel: Channel
    far_channel: Channel

    @classmethod
    def make(cls) -> Ends:
        return cls(*Link.pair(), *Channel.pair())

    def keep_fetchers(self) -> None:
        """In a fetcher: the other ends must end with holder and front."""
        self.link.close()
        self.channel.close()


class Kept(NamedTuple):
    """What outlives each process."""

    spec: ServerSpec
    folder: Path
    store_for: Callable[[str], Store]
    ends: Ends
    shared: Shared
    data_fd: int
    lock_fd: int

    def close_others(self, fds: Sequence[int]) -> None:
        """Close every descriptor above 2 but these and ``fds``: in a new process, what the one before had besides."""
        own = {self.shared.fd, self.data_fd, self.lock_fd, *(end.fileno() for end in self.ends), *fds}
        last = 2
        for fd in [*sorted(own), JOURNAL_SLOTS]:
            os.closerange(last + 1, fd)
            last = fd


def calm() -> None:
    """In a child: signals to the process group are the holder's business."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
