"""The checkpoint of a start: a striped mount, prefetched while the environment is restored, or an ordinary copy."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from bootseer import stripefs
from bootseer.config import Config
from bootseer.errors import BootseerError
from bootseer.launch.job import CheckpointTable
from bootseer.launch.ordinary import copy_checkpoint
from bootseer.profile import emit

log = logging.getLogger(__name__)


class CheckpointStage:
    """``begin`` when bytes may flow, ``provide`` when the training command needs the folder, ``close`` at the end."""

    def __init__(self, table: CheckpointTable, folder: Path, config: Config) -> None:
        self.table, self.folder, self.config = table, folder, config
        self._mount: stripefs.FsMount | None = None

    def begin(self) -> None:
        """Mount and start to prefetch; once is enough. `NotFoundError`, or `DataError` for one without COMMIT."""
        if self._mount is not None or not self.table.enabled:
            return
        self._mount = stripefs.mount.start(self.table.url, self.folder, config=self.config, prefetch=True, commit=True)

    def provide(self, span: str) -> Path:
        """The folder that the container is to see."""
        if self._mount is None:
            with emit.span("checkpoint_load", how="copy"):
                copy_checkpoint(self.table.ordinary_url or self.table.url, self.folder)
        emit.annotate(span, checkpoint="striped" if self._mount else "copied")
        return self.folder

    def status(self) -> dict[str, object]:
        """What was moved so far (of a mount), for the record of the start."""
        if self._mount is None:
            return {"how": "copied"}
        try:
            found = msgspec.to_builtins(self._mount.status())
        except BootseerError as exc:
            log.warning("the checkpoint server does not answer: %s", exc)
            return {"how": "striped"}
        return {"how": "striped", **found}

    def close(self) -> None:
        """Unmount."""
        if self._mount is not None:
            self._mount.unmount()
