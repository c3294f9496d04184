"""What the processes of a job read of its checkpoint by themselves, by URL: handed over to who started the job. The
launcher names the checkpoint in `VARIABLE`. A process that reads of it keeps an `AccessRecord` beside the job's events,
and the launcher merges these with what was read through its mount. Advice: trouble is a log line."""

from __future__ import annotations

import contextlib
import glob
import logging
import os
from pathlib import Path

from bootseer.closing import whole
from bootseer.errors import logged
from bootseer.kernel.beneath import read_regular
from bootseer.stripefs.checkpoint.access import MAX_STORED, AccessLog, AccessRecord, decode, encode, merged

_log = logging.getLogger(__name__)

VARIABLE = "BOOTSEER_CHECKPOINT"
"""URL of the job's checkpoint, as `StripeFS.url` has it: without a login."""
_EVENTS = "BOOTSEER_EVENTS"


class JobAccess:
    """Notes reads of this process. ``add`` may be called from any thread, ``write`` from one at a time."""

    def __init__(self, url: str, events: Path) -> None:
        self._below = f"{url.rstrip('/')}/"
        self._path = events.with_name(f"{events.stem}.{os.getpid()}.access")
        self.key = self._below, self._path
        self._noted = AccessLog()
        self._written = 0

    @classmethod
    def of_environment(cls) -> JobAccess | None:
        """Of the job that this process belongs to; None for none, or one without a checkpoint."""
        url, events = os.environ.get(VARIABLE), os.environ.get(_EVENTS)
        return cls(url, Path(events)) if url and events else None

    def add(self, url: str, size: int, offset: int, length: int) -> None:
        """Note a read of the file at ``url``, if that is in the checkpoint."""
        if url.startswith(self._below):
            self._noted.add(url.removeprefix(self._below), size, offset, length)

    def write(self) -> None:
        """Hand over what is new."""
        if (changes := self._noted.changes) == self._written:
            return
        with logged(_log.info, "what was read of the checkpoint is not noted for the next start", kinds=OSError):
            with whole(self._path) as out:
                out.write(encode(self._noted.record()))
            self._written = changes


def collect(events: Path) -> AccessRecord:
    """What the processes of the start with the file ``events`` have handed over."""
    found, room = [], MAX_STORED
    for path in _files(events):
        with logged(_log.warning, "%s is not used for the next start", path):
            data = read_regular(path, room)
            room -= len(data)
            found.append(decode(data))
    return merged(found)


def remove(events: Path) -> None:
    """Remove what they have handed over, once nobody asks for it any more."""
    for path in _files(events):
        with contextlib.suppress(OSError):
            path.unlink()


def _files(events: Path) -> list[Path]:
    return sorted(events.parent.glob(f"{glob.escape(events.stem)}.*.access"))
