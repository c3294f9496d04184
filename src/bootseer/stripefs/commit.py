"""COMMIT: the manifest that makes a directory a checkpoint (docs/internals/stripe.md).

It is published last, by one rename that does not overwrite, so a directory has it wholly or not at all.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Iterator

import msgspec
from blake3 import blake3

from bootseer import faults
from bootseer.errors import BootseerError, DataError, NotFoundError, NotWritableError, UnavailableError, from_os_error
from bootseer.stripefs import layout
from bootseer.stripefs.backend import Backend, Entry, exists, join, read_all
from bootseer.stripefs.read import open_file, read_pointer

_log = logging.getLogger(__name__)

NAME = "COMMIT"
_LINE = b"bootseer checkpoint 1\n"
_LIMIT = 256 << 20
_PIECE = 16 << 20


class CommittedFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``path`` is relative to the directory; ``digest`` is BLAKE3 of the content; ``uuid`` is "" for a plain file."""

    path: str
    size: int
    digest: str
    uuid: str


class Commit(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The files of one checkpoint, in path order; ``created`` in seconds since the epoch."""

    created: float
    files: tuple[CommittedFile, ...]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


def is_hidden(name: str) -> bool:
    """Whether a name is the store's own: stripes and temporary files."""
    return name == layout.FOLDER or name.startswith(layout.TEMPORARY)


def walk(backend: Backend, folder: str) -> Iterator[tuple[str, Entry]]:
    """Every file below ``folder`` as (path relative to it, entry), in path order; without the store's own."""
    for entry in backend.list(folder):
        if is_hidden(entry.name):
            continue
        if entry.is_dir:
            for path, found in walk(backend, join(folder, entry.name)):
                yield f"{entry.name}/{path}", found
        else:
            yield entry.name, entry


def encode(commit: Commit) -> bytes:
    return layout.encode_text(_LINE, commit)


def decode(data: bytes, name: str) -> Commit:
    try:
        return msgspec.json.decode(layout.decode_text(_LINE, data, name), type=Commit)
    except msgspec.DecodeError as exc:
        raise DataError(f"{name} is damaged: {exc}") from None


def digest_of(backend: Backend, path: str) -> str:
    """BLAKE3 of the content of the file at ``path``, read through the store."""
    digest = blake3()
    with open_file(backend, path) as file:
        buffer = memoryview(bytearray(min(_PIECE, file.size)))
        for offset in range(0, file.size, _PIECE):
            piece = buffer[: min(_PIECE, file.size - offset)]
            file.readinto(offset, piece)
            digest.update(piece)
    return digest.hexdigest()


def commit(backend: Backend, folder: str) -> Commit:
    """Publish the manifest of ``folder``. Raises `NotWritableError` when it has one, `DataError` when it is empty.

    The digest of a striped file is the one its writer computed; plain files are read.
    """
    refuse_committed(backend, folder)
    files = []
    for path, entry in sorted(walk(backend, folder)):
        full = join(folder, path)
        pointer = read_pointer(backend, full)
        if pointer is None:
            files.append(CommittedFile(path=path, size=entry.size, digest=digest_of(backend, full), uuid=""))
        else:
            files.append(CommittedFile(path=path, size=pointer.size, digest=pointer.digest, uuid=pointer.uuid))
    if not files:
        raise DataError(f"checkpoint {folder or backend.url} has no files to commit")
    made = Commit(created=time.time(), files=tuple(files))
    tmp = join(folder, f"{layout.TEMPORARY}{uuid.uuid4().hex}")
    try:
        sink = backend.create(tmp)
        try:
            faults.point("stripefs.commit.write")
            sink.write(encode(made))
            sink.close()
            faults.point("stripefs.commit.rename")
            backend.rename(tmp, join(folder, NAME), overwrite=False)
        except BaseException:
            sink.abandon()
            raise
    except FileExistsError:
        raise NotWritableError(f"checkpoint {folder} was committed by another writer meanwhile") from None
    except OSError as exc:
        raise from_os_error(exc, f"commit {folder}") from exc
    return made


def refuse_committed(backend: Backend, folder: str) -> None:
    """Raise `NotWritableError` when ``folder`` has a COMMIT."""
    if exists(backend, join(folder, NAME)):
        raise NotWritableError(f"checkpoint {folder or backend.url} has a COMMIT already", hint="save to a new folder")


def read(backend: Backend, folder: str) -> Commit:
    """The manifest of ``folder``. Raises `NotFoundError` for a missing folder, `DataError` without a right COMMIT."""
    shown = folder or backend.url
    try:
        data = read_all(backend, join(folder, NAME), limit=_LIMIT)
    except NotFoundError:
        try:
            backend.stat(folder)
        except NotFoundError:
            raise NotFoundError(f"no checkpoint {shown}", hint="list what there is with `bootseer fs ls`") from None
        raise DataError(
            f"checkpoint {shown} has no COMMIT: its save did not finish", hint="use `bootseer fs latest`"
        ) from None
    return decode(data, join(folder, NAME))


def check(backend: Backend, folder: str) -> Commit:
    """`read`, and compare size and uuid of every listed file with what is there (contents are not read)."""
    found = read(backend, folder)
    for file in found.files:
        path = join(folder, file.path)
        try:
            pointer = read_pointer(backend, path)
            size = backend.stat(path).size if pointer is None else pointer.size
        except NotFoundError:
            raise DataError(f"checkpoint {folder} lacks {file.path}", hint="use `bootseer fs latest`") from None
        if (size, pointer.uuid if pointer else "") != (file.size, file.uuid):
            raise DataError(f"{path} was changed after COMMIT", hint="use `bootseer fs latest`")
    return found


def _age(entry: Entry) -> tuple[int, float]:
    numbers = re.findall(r"\d+", entry.name)
    return (int(numbers[-1]) if numbers else -1, entry.mtime)


def latest(backend: Backend, folder: str) -> str:
    """Path of the newest complete checkpoint directly below ``folder``; `NotFoundError` when there is none.

    Incomplete ones are skipped with a warning; a storage that does not answer is an error, not a reason to go back.
    """
    folders = [entry for entry in backend.list(folder) if entry.is_dir and not is_hidden(entry.name)]
    for entry in sorted(folders, key=_age, reverse=True):
        path = join(folder, entry.name)
        try:
            check(backend, path)
            return path
        except UnavailableError:
            raise
        except BootseerError as exc:
            _log.warning("not using %s: %s", path, exc.message)
    raise NotFoundError(f"no complete checkpoint in {folder or backend.url}")
