"""The fronts a holder can run: what they hold, how they serve, when they may end. One class per driver."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from bootseer.blocks.cache.cache import in_use
from bootseer.blocks.serving import driver, takeover
from bootseer.blocks.serving.channel import Channel
from bootseer.blocks.serving.keeper import Keeper
from bootseer.blocks.serving.pulse import keep_beating
from bootseer.blocks.serving.shared import Count, Shared
from bootseer.blocks.serving.spec import FUSE_FOLDER, ServerSpec
from bootseer.errors import BootseerError
from bootseer.kernel import fanotify, mount

if TYPE_CHECKING:
    from bootseer.kernel import fuse

log = logging.getLogger(__name__)

_BUSY_SECONDS = 3.0
"""The caller's unmount has waited for longer; a holder must answer within five seconds."""

Revive = Callable[[], int]
"""In the front process: start a new holder, return its pid."""


class Front(Protocol):
    """What the holder keeps of a front, whichever process serves at the moment."""

    name: str

    @property
    def fds(self) -> tuple[int, ...]:
        """Descriptors that must stay open while the tree is mounted, and that a fetcher has no use for."""
        ...

    def serve(self, channel: Channel, holder: int, revive: Revive) -> None:
        """In the front process: serve until the end."""
        ...

    def busy(self) -> bool:
        """Whether ending now would give readers wrong bytes."""
        ...

    def stop(self) -> None:
        """Have the kernel ask no more; the process may then be killed. For a front that is not `busy`."""
        ...

    def give_up(self, seconds: float) -> bool:
        """No front process stays alive: see to it that readers get errors, for ``seconds``. True: it may be tried
        again after that."""
        ...

    def close(self) -> None:
        """Close the descriptors."""
        ...


class FanotifyFront:
    """A group with a mark on the data file. It fails open, so it stays until nobody has the data file open."""

    name = "keeper"

    def __init__(self, shared: Shared, data_fd: int, cache: Path) -> None:
        self._shared = shared
        self._data_fd = data_fd
        self.group = driver.guard(data_fd, cache)

    @property
    def fds(self) -> tuple[int, ...]:
        return (self.group.fileno(),)

    def serve(self, channel: Channel, holder: int, revive: Revive) -> None:
        Keeper(self._shared, self.group, channel, holder, revive).run()

    def busy(self) -> bool:
        return in_use(self._data_fd)

    def stop(self) -> None:
        self.group.unmark(self._data_fd)

    def give_up(self, seconds: float) -> bool:
        takeover.deny_all(self._shared, self.group, seconds)
        return True

    def close(self) -> None:
        self.group.close()


class FuseFront:
    """A FUSE mount with the data file in it. It fails closed: without a process readers get errors."""

    name = "FUSE front"

    def __init__(self, shared: Shared, data_fd: int, folder: Path, spec: ServerSpec) -> None:
        # Here, as a server of the other driver has no use for a third of all modules it would wait for; and before
        # any front is forked.
        from bootseer.blocks.serving import fusefront

        self._shared = shared
        self._data_fd = data_fd
        self._max_readahead = spec.max_readahead
        self._device: fuse.Device | None = fusefront.mount(folder / FUSE_FOLDER, spec.max_readahead)

    @property
    def fds(self) -> tuple[int, ...]:
        return (self._device.fd,) if self._device is not None else ()

    def serve(self, channel: Channel, holder: int, revive: Revive) -> None:
        from bootseer.blocks.serving import fusefront

        if self._device is not None:
            keep_beating(self._shared.counts, Count.FRONT_BEAT)
            shared, device, ahead = self._shared, self._device, self._max_readahead
            fusefront.run(shared, device, channel, self._data_fd, holder, max_readahead=ahead, revive=revive)

    def busy(self) -> bool:
        return False

    @property
    def mounted(self) -> bool:
        device = self._device
        return device is not None and device.entry is not None and mount.find(device.entry.target) == device.entry

    def stop(self) -> None:
        """Unmount; while it is busy try for three seconds, then abort it: its users get errors."""
        until = time.monotonic() + _BUSY_SECONDS
        device = self._device
        while device is not None and self.mounted:
            late = time.monotonic() >= until
            if late:
                log.warning("%s is still in use, aborting it: its users get errors", device.mountpoint)
            try:
                mount.unmount(device.mountpoint, lazy=late, force=late)
            except BootseerError:
                if late:
                    raise
                time.sleep(0.05)

    def give_up(self, seconds: float) -> bool:
        log.error("no FUSE front stays alive: readers get errors from now on")
        self.close()
        return False

    def close(self) -> None:
        device, self._device = self._device, None
        if device is not None:
            with contextlib.suppress(OSError):
                device.close()


def group_of(front: Front | None) -> fanotify.Group | None:
    """The fanotify group, which a fetcher holds too."""
    return front.group if isinstance(front, FanotifyFront) else None
