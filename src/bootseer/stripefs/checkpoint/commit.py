"""COMMIT: the manifest that makes a directory a checkpoint (docs/internals/stripe.md), published last, by one rename
that does not overwrite (`Save.commit`): a directory has it wholly or not at all."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec
from blake3 import blake3

from bootseer.backends.interface import Backend, Entry, exists, join, read_all
from bootseer.errors import DataError, NotFoundError, NotWritableError
from bootseer.stripefs import layout
from bootseer.stripefs.files.readahead import in_order
from bootseer.stripefs.files.reader import ChunkFile, read_pointer
from bootseer.stripefs.files.striped import open_file
from bootseer.stripefs.layout import Pointer

NAME = "COMMIT"
_LINE = b"bootseer checkpoint 1\n"
_OURS = b"bootseer checkpoint "
_BODY = b'{"created":'
_LIMIT = 256 << 20
_TEMPORARY = re.compile(
    rf"{re.escape(layout.TEMPORARY)}(?:bench-)?[0-9a-f]{{32}}(?:{re.escape(layout.ENDED)})*", re.ASCII
)


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


def is_temporary(name: str) -> bool:
    """Whether the store makes temporary files or folders of that name; other hidden ones are somebody's."""
    return _TEMPORARY.fullmatch(name) is not None


def walk(backend: Backend, folder: str, *, temporary: bool = False) -> Iterator[tuple[str, Entry]]:
    """Every file below ``folder`` as (path relative to it, entry), in path order; without the store's own.
    ``temporary``: the unfinished files instead. Ended ones are garbage, and say whose stripes are."""
    for entry in backend.list(folder):
        name, hidden = entry.name, is_hidden(entry.name)
        unfinished = is_temporary(name) and not name.endswith(layout.ENDED)
        if entry.is_dir and not hidden:
            for path, found in walk(backend, join(folder, name), temporary=temporary):
                yield f"{name}/{path}", found
        elif not entry.is_dir and (unfinished if temporary else not hidden):
            yield name, entry


def encode(commit: Commit) -> bytes:
    return layout.encode_text(_LINE, commit)


def decode(data: bytes, name: str) -> Commit:
    return layout.decode_text(_LINE, data, name, Commit)


def digest_of(backend: Backend, path: str) -> str:
    """BLAKE3 of the content of the file at ``path``, read through the store."""
    with open_file(backend, path) as file:
        return digest_of_open(file)


def digest_of_open(file: ChunkFile) -> str:
    """BLAKE3 of all that can be read from ``file``."""
    digest = blake3()
    for piece in in_order(file):
        digest.update(piece)
    return digest.hexdigest()


def refuse_committed(backend: Backend, folder: str) -> None:
    """Raise `NotWritableError` when ``folder`` has a COMMIT."""
    if exists(backend, join(folder, NAME)):
        raise NotWritableError(f"checkpoint {folder or backend.url} has a COMMIT already", hint="save to a new folder")


def above(backend: Backend, path: str) -> Iterator[tuple[Backend, str, str]]:
    """The folders that hold ``path``, the nearest first, up to the root of the storage (of an object store: the bucket;
    of storage by fsspec that can only be read: the store), each as (store, folder in it, ``path`` relative to the
    folder). The store is another one above the base of ``backend``."""
    folder, rest = path, ""
    while folder:
        folder, _, name = folder.rpartition("/")
        rest = join(name, rest)
        yield backend, folder, rest
    store, base = backend.whole()
    while base:
        base, _, name = base.rpartition("/")
        rest = join(name, rest)
        yield store, base, rest


def nearest(backend: Backend, path: str) -> tuple[Backend, str, str, str] | None:
    """What `above` says of the nearest folder with a COMMIT of ours, and the version of that; None for none."""
    for store, folder, rest in above(backend, path):
        if (found := _manifest(store, folder)) is not None:
            return store, folder, rest, found.version
    return None


def is_manifest(backend: Backend, path: str) -> bool:
    """Whether the file at ``path`` is a COMMIT of ours, also a damaged one."""
    folder, _, name = path.rpartition("/")
    return name == NAME and _manifest(backend, folder) is not None


def _manifest(store: Backend, folder: str) -> Entry | None:
    """COMMIT of ``folder``, None when there is none of ours."""
    name = join(folder, NAME)
    try:
        found = store.stat(name)
        head = b"" if found.is_dir else read_all(store, name, limit=len(_LINE + _BODY))
    except NotFoundError:
        return None
    # also one with a damaged first line, and what is left of one
    ours = head.startswith(_OURS) or head.startswith(_BODY, len(_LINE)) or (head and _OURS.startswith(head))
    if not found.is_dir and not head.strip(b"\0"):  # or a user's: every commit leaves a claim
        ours = exists(store, join(folder, layout.FOLDER))
    return found if ours else None


def other_digest(path: str) -> DataError:
    """The plain file at ``path`` is not what a COMMIT says."""
    return DataError(f"{path} does not have the digest of its COMMIT", hint="restore it from a copy")


def shown(backend: Backend, path: str) -> str:
    """``path`` with the place of its store, for messages about what may be outside of the store at hand."""
    base = backend.url if backend.url.endswith("://") else f"{backend.url.rstrip('/')}/"
    return f"{base}{path}".rstrip("/") or "/"


def refuse_inside(backend: Backend, path: str) -> None:
    """Raise `NotWritableError` when ``path`` is a checkpoint with COMMIT, or a file or folder in one."""
    refuse_committed(backend, path)
    if (found := nearest(backend, path)) is not None:
        raise NotWritableError(
            f"cannot write {shown(backend, path)}: checkpoint {shown(*found[:2])} has a COMMIT already",
            hint="save to a new folder",
        )


def refuse_removal(backend: Backend, path: str) -> None:
    """Raise `NotWritableError` when a COMMIT above ``path``, at any height, is it, or lists it or what is below it, or
    stripes in it. What a damaged one lists is not known. One in the folder ``path`` itself goes with it, and does not
    count."""
    for store, folder, rest in above(backend, path):
        if _manifest(store, folder) is None:
            continue
        where = shown(store, folder)
        if (why := _why_kept(store, folder, rest)) != "":
            raise NotWritableError(
                f"cannot remove or rename {shown(backend, path)}: {why} of checkpoint {where}",
                hint="remove or rename the whole checkpoint; --force breaks it",
            )


def _why_kept(store: Backend, folder: str, rest: str) -> str:
    """What ``rest`` is to the COMMIT of ``folder``, "" when nothing."""
    if rest == NAME:
        return "it is the COMMIT"
    if layout.FOLDER in rest.split("/"):
        return "it has stripes of what is listed by the COMMIT"
    try:
        files = read(store, folder).files
    except DataError:
        return "it may be listed by the damaged COMMIT"
    except NotFoundError:
        return ""  # removed meanwhile
    return "it is listed by the COMMIT" if any(f"{file.path}/".startswith(f"{rest}/") for file in files) else ""


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
            f"checkpoint {shown} has no COMMIT: its save did not finish", hint="use `bootseer fs ls --latest`"
        ) from None
    return decode(data, join(folder, NAME))


def check(backend: Backend, folder: str) -> Commit:
    """`read`, and compare size and uuid of every listed file, and the lengths of its stripes, with what is there.
    Contents are not read. Each folder of stripes is listed once."""
    found = read(backend, folder)
    lists: dict[str, dict[str, int]] = {}
    for file in found.files:
        path = join(folder, file.path)
        try:
            pointer = read_pointer(backend, path)
            size = backend.stat(path).size if pointer is None else pointer.size
        except NotFoundError:
            raise DataError(f"checkpoint {folder} lacks {file.path}", hint="use `bootseer fs ls --latest`") from None
        if (size, pointer.uuid if pointer else "") != (file.size, file.uuid):
            raise DataError(f"{path} was changed after COMMIT", hint="use `bootseer fs ls --latest`")
        if pointer is not None:
            _check_stripes(backend, path, pointer, lists)
    return found


def _check_stripes(backend: Backend, path: str, pointer: Pointer, lists: dict[str, dict[str, int]]) -> None:
    """Compare the stripes that ``pointer`` names with what its folder lists; ``lists`` keeps what was listed."""
    for index in range(pointer.width):
        where, _, name = pointer.stripe_path(path, index).rpartition("/")
        if where not in lists:
            try:
                lists[where] = {entry.name: entry.size for entry in backend.list(where)}
            except NotFoundError:
                lists[where] = {}
        size, expected = lists[where].get(name), pointer.geometry.stripe_length(index)
        if size is None:
            raise DataError(f"{path} lacks its stripe {join(where, name)}", hint="use `bootseer fs ls --latest`")
        if size != expected:
            raise DataError(
                f"stripe {join(where, name)} of {path} has {size} bytes of {expected}",
                hint="use `bootseer fs ls --latest`",
            )
