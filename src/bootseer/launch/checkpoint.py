"""The checkpoint of a start: a striped mount, prefetched in its turn, or a copy. What earlier starts of the job read of
their checkpoints is known from the store; just that is prefetched into the node cache. Where nothing is known, all is.
The turn of either comes after the hot blocks of the image, which the job needs first, and before the rest of it."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from bootseer import fsmount, stripefs
from bootseer.config import Config
from bootseer.errors import BootseerError, NotFoundError
from bootseer.launch.identity import Identity
from bootseer.launch.job import CheckpointTable
from bootseer.objects import open_store
from bootseer.profile import emit
from bootseer.stripefs import localcopy
from bootseer.stripefs.checkpoint import access, jobaccess
from bootseer.stripefs.checkpoint.commit import NAME as COMMIT

log = logging.getLogger(__name__)


class CheckpointStage:
    """``begin`` mounts, ``release`` lets all bytes flow, ``provide`` when the training command needs the folder,
    ``ready`` when it has what it needs of it, ``close`` at the end."""

    def __init__(self, table: CheckpointTable, folder: Path, config: Config, identity: Identity, job: str) -> None:
        """``job``: by its name the starts before are known, as for image and environment; BOOTSEER_JOB, which may name
        a single run, does not count."""
        self.table, self.folder, self.config = table, folder, config
        self._identity, self._job = identity, job
        self._mount: fsmount.FsMount | None = None
        self._name: str | None = ""
        """Path of the checkpoint below the URLs; None: there is no checkpoint yet."""
        self._span = ""
        """Of the initialisation, in which it is read."""
        self.recorded = 0
        """Bytes that the start before read, as far as is known."""

    def begin(self) -> None:
        """Look which checkpoint it is: what the job saves from now on is for the next start. Mount it; what is to be
        prefetched waits for `release`. `NotFoundError`, or `DataError` for one without COMMIT."""
        if self.table.latest:
            try:
                self._name = stripefs.open_fs(self.table.url).latest()
            except NotFoundError as exc:
                log.warning("%s; the job starts without a checkpoint", exc)
                self._name = None
        if self._name is None or not self.table.enabled:
            return
        record = access.load(open_store(self.config.store_url), self._lineage)
        self.recorded = record.bytes if record else 0
        url = _below(self.table.url, self._name)
        self._mount = fsmount.start(
            url, self.folder, config=self.config, prefetch=record or True, hold=True, commit=True
        )

    def release(self) -> None:
        """Let the prefetch begin."""
        if self._mount is not None:
            self._mount.release()

    def ready(self, events: Path) -> None:
        """Keep for the next start what this one has read until now: of the mount, and (of those that note it beside
        ``events``) by the URL."""
        if self._mount is not None:
            record = access.merged([self._mount.accessed(), jobaccess.collect(events)])
            access.save(open_store(self.config.store_url), self._lineage, record)

    @property
    def variables(self) -> dict[str, str]:
        """What processes of the job are told, so that they note what they read by the URL."""
        return {jobaccess.VARIABLE: self._mount.url} if self._mount is not None else {}

    @property
    def _lineage(self) -> access.Lineage:
        who = self._identity
        return access.Lineage(self._job, _below(self.table.url, self._name), who.rank, who.nodes)

    def provide(self, span: str) -> Path:
        """The folder that the container is to see."""
        if self._name is None:
            self.folder.mkdir(parents=True, exist_ok=True)
        elif self._mount is None:
            with emit.span("checkpoint_load", how="copy"):
                copy_checkpoint(_below(self.table.url, self._name), self.folder)
        emit.annotate(span, checkpoint=self._how)
        self._span = span
        return self.folder

    @property
    def _how(self) -> str:
        return "none" if self._name is None else "striped" if self._mount else "copied"

    def status(self) -> dict[str, object]:
        """What was moved so far (of a mount), for the record of the start."""
        if self._mount is None:
            return {"how": self._how}
        try:
            found = msgspec.to_builtins(self._mount.status())
        except BootseerError as exc:
            log.warning("the checkpoint server does not answer: %s", exc)
            return {"how": "striped"}
        emit.annotate(
            self._span,
            needed=found["bytes_read"],
            fetched=found["fetched_demand"] + found["fetched_ahead"],
            waited=found["waited_seconds"],
        )
        return {"how": "striped", "recorded": self.recorded, **found}

    def close(self, events: Path) -> None:
        """Unmount, and remove what processes of the job have handed over beside ``events``."""
        jobaccess.remove(events)
        if self._mount is not None:
            self._mount.unmount()


def _below(url: str, name: str | None) -> str:
    return f"{url.rstrip('/')}/{name}" if name else url


def copy_checkpoint(url: str, destination: Path) -> None:
    """Copy every file below ``url``, striped or plain, into the folder ``destination``. Raises `NotFoundError` where
    there is none, `DataError` for bytes that are not those of its COMMIT."""
    fs = stripefs.open_fs(url, shown=True)
    names = fs.files()
    if COMMIT in names:
        fs.checkpoint("")  # else a file that is missing would not be missed
    for target, name in ((destination / name, name) for name in names if name != COMMIT):
        localcopy.folder(target.parent)
        fs.get(name, target)
