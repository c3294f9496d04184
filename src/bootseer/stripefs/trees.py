"""Trees of files between a local folder and a store: small ones side by side, in as few requests as storage needs.

A listing tells what is where, so no file is looked up by itself: a name that is not listed is new, and where files are
opened as they are listed, many small ones are read in one request. Large files, which have many streams each, go one
after another."""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from blake3 import blake3

from bootseer.backends.interface import Entry, Page, Piece, Source, join
from bootseer.backends.pool import in_turn
from bootseer.errors import BootseerError, NotFoundError
from bootseer.stripefs import layout, localcopy
from bootseer.stripefs.checkpoint import commit
from bootseer.stripefs.files.writer import Written
from bootseer.stripefs.layout import Pointer

if TYPE_CHECKING:
    from bootseer.stripefs.store import StripeFS

_log = logging.getLogger(__name__)
Progress = Callable[[str, int, int], None]
"""Called with (what, bytes done, bytes in all), by any thread."""

_WRITES = 16
_READS = 3
"""Small files that are written, and requests for many of them that are read, side by side."""
_LISTED = 16
"""Files that go into one folder, from which on that is listed first: one that is there may have many others."""
_MANY, _BYTES = 1000, 16 << 20
"""Files and bytes of one such request, at most."""
_SMALL = 1 << 20
"""Files below this share a request."""


def put(
    fs: StripeFS,
    local: Path,
    files: Sequence[tuple[Path, int]],
    path: str,
    *,
    width: int,
    unit: int,
    progress: Progress,
    before: Callable[[Pointer | None], None] | None = None,
) -> Iterator[tuple[str, Written]]:
    """`StripeFS.put` of ``files``, with their sizes, which are below the folder ``local``, to their places below
    ``path``. Yields each with its path: the small ones in order, then the others. The first error ends it."""
    listed: dict[str, set[str]] = {}
    done = 0

    def target(file: Path) -> str:
        return join(path, *file.relative_to(local).parts)

    def one(file: Path) -> tuple[str, Written]:
        to = target(file)
        folder, _, name = to.rpartition("/")
        known = None if name in listed.get(folder, (name,)) else ""  # one that somebody has made since is not replaced
        return to, fs.put(file, to, width=width, unit=unit, before=before, known=known)

    small = [file for file, size in files if size < layout.PLAIN_BELOW]
    total = sum(size for _, size in files if size < layout.PLAIN_BELOW)
    for folder, count in Counter(target(file).rpartition("/")[0] for file in small).items():
        if count >= _LISTED:
            try:
                listed[folder] = {entry.name for entry in fs.backend.list(folder)}
            except NotFoundError:
                listed[folder] = set()
            except BootseerError as exc:  # such as where one may write, and not list
                _log.info("each file is looked for: %s", exc)
    for to, written in in_turn(one, small, _WRITES):
        done += written.size
        progress(f"{len(small)} small files", done, total)
        yield to, written
    for file, size in files:
        if size >= layout.PLAIN_BELOW:
            report = functools.partial(progress, file.name)
            yield target(file), fs.put(file, target(file), width=width, unit=unit, before=before, progress=report)


class _Batch(NamedTuple):
    """Files of one page of the folder ``folder``, and what a COMMIT says of each, by name."""

    folder: str
    page: Page
    files: Sequence[tuple[Entry, Source | None]]
    digest: Callable[[str], str]


def get(fs: StripeFS, path: str, local: Path, *, progress: Progress) -> Iterator[tuple[str, Path, int]]:
    """`StripeFS.get` of every file below the folder ``path``, to its place below ``local``, but for COMMIT. Yields
    each with its path, where it is, and its size. The first error ends it."""
    done = 0

    def copy(batch: _Batch) -> list[tuple[str, Path, int]]:
        return _copy(fs, batch, local.joinpath(*batch.folder.removeprefix(path).strip("/").split("/")), progress)

    for copied in in_turn(copy, _batches(fs, path), _READS):
        done += sum(size for _, _, size in copied)
        progress("files", done, 0)
        yield from copied


def _batches(fs: StripeFS, folder: str) -> Iterator[_Batch]:
    digest, folders = fs.committed_digests(folder), list[str]()
    for page in fs.backend.pages(folder):
        files, size = list[tuple[Entry, Source | None]](), 0
        for entry, source in page.entries:
            full = join(folder, entry.name)
            if commit.is_hidden(entry.name):
                continue
            if entry.is_dir:
                folders.append(full)
            elif not commit.is_manifest(fs.backend, full):  # that speaks of the stored form, which the copy has not
                if files and (size + entry.size > _BYTES or len(files) >= _MANY):
                    yield _Batch(folder, page, files, digest)
                    files, size = [], 0
                files.append((entry, source))
                size += entry.size
        if files:
            yield _Batch(folder, page, files, digest)
    for below in sorted(folders):
        yield from _batches(fs, below)


def _copy(fs: StripeFS, batch: _Batch, to: Path, progress: Progress) -> list[tuple[str, Path, int]]:
    localcopy.folder(to)
    small, done = _read(fs, batch), list[tuple[str, Path, int]]()
    for entry, _ in batch.files:
        path, local, expected = join(batch.folder, entry.name), to / entry.name, batch.digest(entry.name)
        localcopy.refuse_folder(local)
        data = small.get(entry.name)
        if data is None or layout.is_pointer(data) or layout.is_remnant(data):
            report = functools.partial(progress, path)
            done.append((path, local, fs.get(path, local, progress=report, expected=expected)))
            continue
        if expected and blake3(data).hexdigest() != expected:
            raise commit.other_digest(path)
        with localcopy.new(localcopy.place(local)) as out:
            out.write(data)
        done.append((path, local, len(data)))
    return done


def _read(fs: StripeFS, batch: _Batch) -> dict[str, bytearray]:
    """The content of the small files that were opened as they were listed, and are still what they were."""
    found, pieces = dict[str, bytearray](), list[Piece]()
    for entry, source in batch.files:
        if source is not None and not source.unfinished and source.size == entry.size < _SMALL:
            data = found[entry.name] = bytearray(entry.size)
            if entry.size:
                pieces.append(Piece(source, 0, [memoryview(data)], name=join(batch.folder, entry.name)))
    if not found:
        return found
    try:
        fs.backend.read_many(pieces)
        now = {entry.name: entry.version for entry in batch.page.now()}
    except BootseerError:
        return {}  # which of them it is, and why, is found when each is read by itself
    then = {entry.name: entry.version for entry, _ in batch.files}
    return {name: data for name, data in found.items() if now.get(name) == then[name]}
