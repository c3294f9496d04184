"""The files of one checkpoint folder: what may be read of it, and each file opened once."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence

from blake3 import blake3

from bootseer.backends.interface import exists, join
from bootseer.closing import Closing
from bootseer.errors import DataError, NotFoundError
from bootseer.ranges import flat
from bootseer.stripefs import ChunkFile, Given, layout, place
from bootseer.stripefs.checkpoint import claim, commit
from bootseer.stripefs.checkpoint.commit import CommittedFile
from bootseer.stripefs.files.reader import PlainFile, Views
from bootseer.stripefs.files.striped import StripedFile
from bootseer.stripefs.local import Load
from bootseer.torch.destination import Request
from bootseer.torch.shared_read import read_shared

_log = logging.getLogger(__name__)


class SmallFile(ChunkFile):
    """A small plain file whose content was compared with the digest in its COMMIT, and is served from memory."""

    def __init__(self, file: PlainFile, digest: str) -> None:
        super().__init__(file._backend, file.path, file.geometry)
        self.content, self.identity = file.content, file.identity
        self._content = memoryview(file.read(0, file.size))
        if blake3(self._content).hexdigest() != digest:
            raise commit.other_digest(file.path)

    def readinto_many(self, ranges: Views) -> int:
        for offset, target in ranges:
            view = flat(target)
            self.check_range(offset, len(view))
            view[:] = self._content[offset : offset + len(view)]
        return 0


class CheckpointFolder(Closing):
    """The folder ``url`` for reading; any thread may use it. With COMMIT it is a checkpoint, and so is one without in
    which no save of bootseer began: another program wrote it. `DataError` when a save began and did not finish,
    `NotFoundError` when there is no such folder."""

    def __init__(self, url: Given, how: str) -> None:
        """``how``: by what it is loaded, for `load`."""
        self.fs, self.path = place(url)
        self.url = os.fsdecode(url).rstrip("/")
        self.load = Load(self.fs.url, how)
        self._lock = threading.Lock()
        self._files: dict[str, ChunkFile] = {}
        backend = self.fs.backend
        self._listed: dict[str, CommittedFile] | None = None
        if exists(backend, join(self.path, commit.NAME)) or claim.claimed(backend, self.path):
            self._listed = {file.path: file for file in commit.read(backend, self.path).files}
        elif not self.fs.stat(self.path).is_dir:
            raise NotFoundError(f"{self.url} is a file, not a folder")

    def has(self, name: str) -> bool:
        if self._listed is not None:
            return name in self._listed
        return exists(self.fs.backend, join(self.path, layout.clean_new(name)))

    def names(self) -> list[str]:
        """Paths of the files, relative to the folder, in order."""
        if self._listed is not None:
            return list(self._listed)
        return [path.removeprefix(f"{self.path}/") for path in self.fs.files(self.path)]

    def version(self, name: str) -> str:
        """Another one when the file ``name`` has another content."""
        if self._listed is None:
            return self.open(name).identity
        return self._listed[name].digest if name in self._listed else ""

    def open(self, name: str) -> ChunkFile:
        """The file ``name``, which stays open until `close`. `DataError` when it is not the one that COMMIT lists."""
        with self._lock:
            if (found := self._files.get(name)) is not None:
                return found
        opened = self._open(name)
        with self._lock:
            found = self._files.setdefault(name, opened)
        if found is not opened:
            opened.close()
        return found

    def _open(self, name: str) -> ChunkFile:
        listed = None
        if self._listed is not None and (listed := self._listed.get(name)) is None:
            raise DataError(f"checkpoint {self.url} lacks {name}: its COMMIT does not list it")
        file = self.fs.open(join(self.path, layout.clean_new(name)))
        try:
            if listed is None:
                return self.load.use(file)
            plain = isinstance(file, PlainFile)
            if file.size != listed.size or (isinstance(file, StripedFile) and file.pointer.uuid != listed.uuid):
                raise DataError(f"{file.path} was changed after COMMIT", hint="use `bootseer fs ls --latest`")
            if isinstance(file, PlainFile) and file.size < layout.PLAIN_BELOW:
                return SmallFile(file, listed.digest)
            if plain and listed.uuid:
                _log.warning("%s was striped: this is a mount or a copy, whose bytes are checked by the storage", name)
            return self.load.use(file)
        except BaseException:
            file.close()
            raise

    def read(self, requests: Sequence[Request]) -> None:
        """Fill the memory of ``requests`` of files of this folder."""
        with self.load.reading(sum(len(view) for _, _, view in requests)):
            read_shared(requests, None)

    def close(self) -> None:
        """Not while another thread reads."""
        with self._lock:
            files, self._files = self._files, {}
        for file in files.values():
            file.close()
        self.load.tell()
