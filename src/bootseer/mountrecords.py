"""Records of mounts: what a process that comes later must know of each, to use it, or to end it when its owner died.

A record is a JSON file, written in one step before anything is mounted, and removed last. Who mounts adds fields of its
own. `end_left` is the sweep of what processes that were killed had begun, in owned folders (`owned_folder`).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from bootseer import __version__
from bootseer.errors import doing, logged
from bootseer.folders import adopted, remove
from bootseer.kernel import mount as mounts
from bootseer.wiretypes import json_as

log = logging.getLogger(__name__)


class Record(msgspec.Struct, kw_only=True):
    """Of a mount that was made, or begun, in the ``boot`` of the machine that has this id, by this ``version``.
    ``since``: in seconds since 1970."""

    id: str
    boot: str = msgspec.field(default_factory=mounts.boot_id)
    version: str = __version__
    since: float = msgspec.field(default_factory=time.time)


R = TypeVar("R", bound=Record)


class Records(Generic[R]):
    """Those of one ``kind`` in ``folder``: ``<id>.json``, or with another ``ending``."""

    def __init__(self, folder: Path, kind: type[R], ending: str = ".json") -> None:
        self._folder, self._kind, self._ending = folder, kind, ending

    def path(self, id: str) -> Path:
        return self._folder / f"{id}{self._ending}"

    def _begun(self, id: str) -> Path:
        path = self.path(id)
        return path.with_name(f".{path.name}")

    def save(self, record: R) -> None:
        """Raises `BootseerError`; what was known before still is then."""
        path, new = self.path(record.id), self._begun(record.id)
        with doing(f"write {path}"):
            new.write_bytes(msgspec.json.encode(record))
            new.replace(path)

    def read(self, id: str) -> R:
        """Raises `FileNotFoundError`, other `OSError`, and `ValueError` for something else."""
        return json_as(self.path(id).read_bytes(), self._kind)

    def find(self, id: str) -> R | None:
        """None where there is none that can be read."""
        try:
            return self.read(id)
        except (OSError, ValueError):
            return None

    def delete(self, id: str) -> None:
        """Safe to call twice. Raises `OSError`."""
        self._begun(id).unlink(missing_ok=True)  # what a full disk, or a kill, took of the last one
        self.path(id).unlink(missing_ok=True)

    def clean(self) -> None:
        """Remove what processes that were killed had begun to write, where nobody writes just now. Raises `OSError`."""
        for path in self._folder.glob(f".*{self._ending}"):
            path.unlink()

    def all(self) -> list[R]:
        """The oldest first, without those that cannot be read, which are logged. None where this user cannot look."""
        found, paths = [], list[Path]()
        with contextlib.suppress(PermissionError):
            paths = list(self._folder.glob(f"[!.]*{self._ending}"))
        for path in paths:
            try:
                found.append((path.stat().st_mtime_ns, json_as(path.read_bytes(), self._kind)))
            except FileNotFoundError:
                continue  # unmounted just now
            except (OSError, ValueError) as exc:
                log.warning("ignoring the mount record %s: %s", path, exc)
        return [record for _, record in sorted(found, key=lambda item: item[0])]


def end_left(folders: Iterable[Path], end: Callable[[Path], None], until: float) -> None:
    """Have ``end`` empty each of the owned ``folders`` whose process was killed, all at once, and remove the folder.
    What goes wrong is a line in the log: it is no reason not to start what is to start now. What has not ended at
    ``until`` (`time.monotonic`) goes on in the background."""

    def work(folder: Path) -> None:
        with logged(log.warning, "cannot end what is left in %s", folder), adopted(folder) as ours:
            if ours:
                log.warning("%s was left by a process that was killed", folder)
                end(folder)
                remove(folder)

    threads = [threading.Thread(target=work, args=(folder,), name="sweep", daemon=True) for folder in folders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    if slow := sum(thread.is_alive() for thread in threads):
        log.warning("ending what killed processes left takes long: %d of %d go on behind this", slow, len(threads))
