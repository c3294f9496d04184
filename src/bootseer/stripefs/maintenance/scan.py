"""What is in the folders of a striped store, and whether a set of stripes is whole. Nothing is changed here.

A name that is not read as one of the store's own is a user's file. Whoever cannot read something raises: nobody may
take what a scan did not see for garbage.

Headers and footers of a whole set of stripes say all of its pointer but the digest, for which every byte is read and
checked, and the name, which stripes of early versions lack.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

from bootseer.errors import DataError, NotFoundError
from bootseer.storage.interface import Backend, Entry, join, read_all
from bootseer.stripefs import layout
from bootseer.stripefs.checkpoint import commit
from bootseer.stripefs.checkpoint.claim import is_claim
from bootseer.stripefs.files.reader import StripedFile, read_pointer
from bootseer.stripefs.layout import Footer, Header, Pointer

TRASH = f"{layout.TEMPORARY}gc-"
"""A stripe that is being collected, in the folder of the stripes: ``.tmp-gc-<uuid>.<i>``."""

_STRIPE = re.compile(r"([0-9a-f]{32})\.([0-9]{1,3})")
_OWNER = re.compile(re.escape(layout.TEMPORARY) + r"([0-9a-f]{32})(?:\.|$)")
_UUID = re.compile(rb'"uuid":"([0-9a-f]{32})"')


@dataclass
class Damaged:
    """A pointer that cannot be read, and the uuid that can still be made out in it ("" for none)."""

    message: str
    uuid: str


@dataclass
class Folder:
    """One folder. ``stripes`` and ``trash``: uuid to index to entry; ``stray``: unknown names beside the stripes.

    ``temporaries``: unfinished files, and folders that are being removed; ``strange``: names that look like theirs and
    are not; ``plain``: all other files.
    """

    path: str
    pointers: dict[str, Pointer] = field(default_factory=dict)
    damaged: dict[str, Damaged] = field(default_factory=dict)
    plain: dict[str, Entry] = field(default_factory=dict)
    entries: dict[str, Entry] = field(default_factory=dict)
    temporaries: dict[str, Entry] = field(default_factory=dict)
    strange: list[Entry] = field(default_factory=list)
    stripes: dict[str, dict[int, Entry]] = field(default_factory=dict)
    trash: dict[str, dict[int, Entry]] = field(default_factory=dict)
    stray: list[Entry] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    _owners: dict[str, list[str]] = field(default_factory=dict)
    _unfinished: dict[str, list[Entry]] = field(default_factory=dict)

    def add_pointer(self, name: str, pointer: Pointer) -> None:
        self.pointers[name] = pointer
        if pointer.dir == layout.FOLDER:
            self._owners.setdefault(pointer.uuid, []).append(name)

    def add_temporary(self, entry: Entry) -> None:
        self.temporaries[entry.name] = entry
        self._unfinished.setdefault(owner(entry.name), []).append(entry)

    @property
    def store(self) -> str:
        """Path of the folder of its stripes."""
        return join(self.path, layout.FOLDER)

    def stripe_path(self, uuid: str, index: int) -> str:
        return join(self.store, f"{uuid}.{index}")

    def trash_path(self, uuid: str, index: int) -> str:
        return join(self.store, f"{TRASH}{uuid}.{index}")

    def owners(self, uuid: str) -> list[str]:
        """Names of the pointers here that name the stripes ``uuid`` in the folder's own ``.bsx``."""
        return self._owners.get(uuid, [])

    def temporaries_of(self, uuid: str) -> list[Entry]:
        """Unfinished files of the writer whose file has ``uuid``."""
        return self._unfinished.get(uuid, [])


def owner(name: str) -> str:
    """uuid of the file whose writer made the temporary file ``name``; "" when the name does not say."""
    found = _OWNER.match(name)
    return found[1] if found else ""


def folder(backend: Backend, path: str, *, known: Folder | None = None, stripes: bool = True) -> Folder:
    """Survey one folder, not those below it. Files that are as in ``known`` are not read again.

    One listing, and one more of the stripes unless they are not asked for.
    """
    found = Folder(path)
    for entry in backend.list(path):
        found.entries[entry.name] = entry
        # without a version another file may look the same
        same = known if known is not None and entry.version and known.entries.get(entry.name) == entry else None
        if entry.name == layout.FOLDER and entry.is_dir:
            if stripes:
                _stripes(backend, found)
        elif entry.name.startswith(layout.TEMPORARY):
            if commit.is_temporary(entry.name):
                found.add_temporary(entry)
            else:
                found.strange.append(entry)
        elif entry.is_dir:
            found.folders.append(entry.name)
        elif same is not None and entry.name in same.pointers:
            found.add_pointer(entry.name, same.pointers[entry.name])
        elif same is not None and entry.name in same.plain:
            found.plain[entry.name] = entry
        else:
            _file(backend, found, entry)
    return found


def _file(backend: Backend, found: Folder, entry: Entry) -> None:
    full = join(found.path, entry.name)
    try:
        pointer = read_pointer(backend, full) if entry.size <= layout.MAX_TEXT else None
    except NotFoundError:
        return  # gone since it was listed
    except DataError as exc:
        text = _UUID.search(read_all(backend, full, limit=layout.MAX_TEXT))
        found.damaged[entry.name] = Damaged(exc.message, text[1].decode() if text else "")
        return
    if pointer is None:
        found.plain[entry.name] = entry
    else:
        found.add_pointer(entry.name, pointer)


def _stripes(backend: Backend, found: Folder) -> None:
    for entry in backend.list(found.store):
        trash = entry.name.startswith(TRASH)
        match = _STRIPE.fullmatch(entry.name.removeprefix(TRASH))
        if match and not entry.is_dir:
            (found.trash if trash else found.stripes).setdefault(match[1], {})[int(match[2])] = entry
        elif not is_claim(entry.name):
            found.stray.append(entry)


def walk(backend: Backend, path: str) -> Iterator[Folder]:
    """Survey ``path`` and every folder below it, in path order, without the store's own."""
    found = folder(backend, path)
    yield found
    for name in found.folders:
        if not commit.is_hidden(name):
            yield from walk(backend, join(path, name))


def youngest(backend: Backend, path: str, entry: Entry) -> float:
    """Latest modification time of a file, or of a folder and all that is in it, in seconds."""
    if not entry.is_dir:
        return entry.mtime
    times = [entry.mtime]
    with contextlib.suppress(NotFoundError):  # gone since
        times += [youngest(backend, join(path, inner.name), inner) for inner in backend.list(path)]
    return max(times)


_THREADS = 8
_TAIL = 8


class Stripe(NamedTuple):
    """``crc`` is the footer's, which the pointer names."""

    header: Header
    footer: Footer
    crc: int


@dataclass(frozen=True)
class Whole:
    """A complete set of stripes: ``pointer`` without digest; ``name`` as the writer knew it, "" when it did not say."""

    pointer: Pointer
    name: str


def read_header(backend: Backend, path: str) -> Header:
    """The header of the stripe at ``path``. Raises `DataError`, `NotFoundError`."""
    data = bytearray(layout.HEADER_SIZE)
    source = backend.open(path)
    try:
        if source.size < layout.HEADER_SIZE:
            raise DataError(f"{path} ends within its header")
        source.readinto(0, [memoryview(data)])
    finally:
        source.close()
    return layout.decode_header(bytes(data), path)


def read_footer(backend: Backend, path: str) -> tuple[Footer, int]:
    """The footer of the stripe at ``path`` and its CRC, found from its end. Raises `DataError`, `NotFoundError`."""
    damaged = DataError(f"the footer of {path} is damaged, or its writer did not finish")
    source = backend.open(path)
    try:
        if source.size < layout.HEADER_SIZE + layout.footer_length(0):
            raise damaged
        tail = bytearray(_TAIL)
        source.readinto(source.size - _TAIL, [memoryview(tail)])
        length = int.from_bytes(tail[:4], "little")
        if not layout.footer_length(0) <= length <= source.size - layout.HEADER_SIZE:
            raise damaged
        data = bytearray(length)
        source.readinto(source.size - length, [memoryview(data)])
        footer, crc = layout.decode_footer(bytes(data), path)
        if layout.HEADER_SIZE + footer.data + length != source.size:
            raise damaged
    finally:
        source.close()
    return footer, crc


def _read(backend: Backend, path: str) -> Stripe:
    return Stripe(read_header(backend, path), *read_footer(backend, path))


def inspect(backend: Backend, folder: str, uuid: str, indices: list[int]) -> Whole:
    """The set ``uuid`` of ``folder`` (path of the logical files), of which the stripes ``indices`` are there.

    Raises `DataError` that says why it is not whole. Chunks are not read.
    """
    store = join(folder, layout.FOLDER)
    if 0 not in indices:
        raise DataError(f"{store}/{uuid}.0 is missing")
    try:
        first = read_header(backend, f"{store}/{uuid}.0")
        if sorted(indices) != list(range(first.width)):
            missing = sorted(set(range(first.width)) - set(indices))
            what = (
                f"{len(missing)} of {first.width} stripes are missing" if missing else "there are more than its width"
            )
            raise DataError(f"{store}/{uuid}: {what}")
        layout.check_shape(first.width, first.unit)
        with ThreadPoolExecutor(min(_THREADS, first.width)) as pool:
            stripes = list(pool.map(lambda index: _read(backend, f"{store}/{uuid}.{index}"), range(first.width)))
    except NotFoundError as exc:
        raise DataError(exc.message) from None
    pointer = Pointer(
        uuid=uuid,
        size=stripes[0].footer.size,
        unit=first.unit,
        width=first.width,
        footers=tuple(stripe.crc for stripe in stripes),
        digest="",
        epoch=first.epoch,
        name=first.name,
    )
    for index, (header, footer, _) in enumerate(stripes):
        chunks, data = pointer.geometry.stripe_chunks(index), pointer.geometry.stripe_data(index)
        if (
            header != first._replace(stripe=index)
            or header.uuid.hex() != uuid
            or (footer.uuid, footer.stripe, footer.size) != (header.uuid, index, pointer.size)
            or (len(footer.crcs), footer.data) != (chunks, data)
        ):
            raise DataError(f"{store}/{uuid}.{index} does not belong to the others")
    return Whole(pointer, first.name)


def check_content(backend: Backend, folder: str, whole: Whole) -> str:
    """Read and check every chunk of a whole set. Returns the BLAKE3 of its content; `DataError` for damaged bytes."""
    with StripedFile(backend, join(folder, whole.name or whole.pointer.uuid), whole.pointer) as file:
        return commit.digest_of_open(file)
