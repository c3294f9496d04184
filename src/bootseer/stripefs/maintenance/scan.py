"""What is in the folders of a striped store, and whether a set of stripes is whole. Nothing is changed here.

A name that is not read as one of the store's own is a user's file. Whoever cannot read something raises: nobody may
take what a scan did not see for garbage. Headers and footers of a whole set of stripes say all of its pointer but the
digest, for which every byte is read and checked, and the name, which is not stored when it is too long."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from bootseer.backends.interface import Backend, Entry, Source, exists, join, read_all
from bootseer.backends.pool import parallel
from bootseer.errors import ConfigError, DataError, NotFoundError
from bootseer.stripefs import layout
from bootseer.stripefs.checkpoint import commit
from bootseer.stripefs.files.reader import PlainFile, read_pointer
from bootseer.stripefs.files.striped import StripedFile
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
    """One folder. ``entries``: all of it by name. ``stripes`` and ``trash``: uuid to index to entry. ``temporaries``:
    unfinished files, and folders that are being removed, by the uuid of their writer's file ("" for none); ``unknown``:
    what has a name like the store's own and is not, by path; ``plain``: all other files."""

    path: str
    entries: dict[str, Entry] = field(default_factory=dict)
    pointers: dict[str, Pointer] = field(default_factory=dict)
    damaged: dict[str, Damaged] = field(default_factory=dict)
    plain: dict[str, Entry] = field(default_factory=dict)
    folders: list[str] = field(default_factory=list)
    temporaries: dict[str, list[Entry]] = field(default_factory=dict)
    stripes: dict[str, dict[int, Entry]] = field(default_factory=dict)
    trash: dict[str, dict[int, Entry]] = field(default_factory=dict)
    unknown: dict[str, Entry] = field(default_factory=dict)
    _owners: dict[str, list[str]] = field(default_factory=dict)

    def add_pointer(self, name: str, pointer: Pointer) -> None:
        self.pointers[name] = pointer
        self._owners.setdefault(pointer.uuid, []).append(name)

    @property
    def store(self) -> str:
        """Path of the folder of its stripes."""
        return join(self.path, layout.FOLDER)

    def stripe_path(self, uuid: str, index: int) -> str:
        return join(self.store, f"{uuid}.{index}")

    def trash_path(self, uuid: str, index: int) -> str:
        return join(self.store, f"{TRASH}{uuid}.{index}")

    def owners(self, uuid: str) -> list[str]:
        """Names of the pointers here that name the stripes ``uuid``."""
        return self._owners.get(uuid, [])


def owner(name: str) -> str:
    """uuid of the file whose writer made the temporary file ``name``; "" when the name does not say."""
    found = _OWNER.match(name)
    return found[1] if found else ""


def folder(backend: Backend, path: str, *, known: Folder | None = None, stripes: bool = True) -> Folder:
    """Survey one folder, not those below it, by one listing, and one more of the stripes unless they are not asked for.
    Files that are as in ``known`` are not read again."""
    found = Folder(path)
    for entry in backend.list(path):
        name = entry.name
        found.entries[name] = entry
        # without a version another file may look the same
        same = known if known is not None and entry.version and known.entries.get(name) == entry else None
        if name == layout.FOLDER and entry.is_dir:
            if stripes:
                _stripes(backend, found)
        elif commit.is_temporary(name):
            found.temporaries.setdefault(owner(name), []).append(entry)
        elif name.startswith(layout.TEMPORARY):
            found.unknown[join(path, name)] = entry
        elif entry.is_dir:
            found.folders.append(name)
        elif same is not None and name in same.pointers:
            found.add_pointer(name, same.pointers[name])
        elif same is not None and name in same.plain:
            found.plain[name] = entry
        else:
            _file(backend, found, entry)
    return found


def _file(backend: Backend, found: Folder, entry: Entry) -> None:
    full = join(found.path, entry.name)
    try:
        small = len(layout.POINTER_LINE) <= entry.size <= layout.MAX_TEXT
        pointer = read_pointer(backend, full) if small else None
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
        elif not layout.CLAIM.fullmatch(entry.name):
            found.unknown[join(found.store, entry.name)] = entry


def walk(backend: Backend, path: str) -> Iterator[Folder]:
    """Survey ``path`` and every folder below it, in path order, without the store's own."""
    found = folder(backend, path)
    yield found
    for name in found.folders:
        yield from walk(backend, join(path, name))


def youngest(backend: Backend, path: str, entry: Entry) -> float:
    """Latest modification time of a file, or of a folder and all that is in it, in seconds."""
    if not entry.is_dir:
        return entry.mtime
    times = [entry.mtime]
    with contextlib.suppress(NotFoundError):  # gone since
        times += [youngest(backend, join(path, inner.name), inner) for inner in backend.list(path)]
    return max(times)


class Stripe(NamedTuple):
    """``crc`` is the footer's, which the pointer names."""

    header: Header
    footer: Footer
    crc: int

    def belongs(self, pointer: Pointer, index: int) -> bool:
        """Whether it is stripe ``index`` of the file that has this pointer."""
        header, footer, geometry = self.header, self.footer, pointer.geometry
        return (
            (header.uuid.hex(), header.stripe) == (pointer.uuid, index)
            and (header.width, header.unit, header.epoch) == (pointer.width, pointer.unit, pointer.epoch)
            and (footer.uuid, footer.stripe, footer.size) == (header.uuid, index, pointer.size)
            and (len(footer.crcs), footer.data) == (geometry.stripe_chunks(index), geometry.stripe_data(index))
            and self.crc == pointer.footers[index]
        )


def read_footer(source: Source, path: str, unit: int) -> tuple[Footer, int]:
    """The footer of the stripe ``source`` of chunks of ``unit`` bytes, and its CRC, found from its end. Raises
    `DataError`."""
    most = max(0, source.size - layout.HEADER_SIZE)
    said = source.read(source.size - 8, 4) if most >= 8 else b""
    # The largest footer that a stripe of this size can have: what says more is no footer, and is not read.
    if (length := int.from_bytes(said, "little")) > min(most, layout.footer_length(most // layout.MIN_UNIT + 1)):
        raise DataError(f"the footer of {path} is damaged, or its writer did not finish")
    footer, crc = layout.decode_footer(source.read(source.size - length, length), path)
    if layout.HEADER_SIZE + footer.data + 4 * layout.sectors(footer.data, unit) + length != source.size:
        raise DataError(f"the footer of {path} is damaged, or its writer did not finish")
    return footer, crc


def _read(backend: Backend, path: str) -> Stripe:
    with contextlib.closing(backend.open(path)) as source:
        header = layout.decode_header(source.read(0, min(layout.HEADER_SIZE, source.size)), path)
        return Stripe(header, *read_footer(source, path, header.unit))


def inspect(backend: Backend, folder: str, uuid: str, indices: Iterable[int]) -> Pointer:
    """The pointer, but for its digest, of the set ``uuid`` of ``folder``, of which the stripes ``indices`` are there.
    Its name is that which the writer knew, "" when it did not say. Chunks are not read. Raises `DataError` that says
    why the set is not whole."""
    store, there = join(folder, layout.FOLDER), sorted(indices)
    if 0 not in there:
        raise DataError(f"{store}/{uuid}.0 is missing")
    try:
        first = _read(backend, f"{store}/{uuid}.0")
        width = first.header.width
        layout.check_shape(width, first.header.unit)
        if missing := set(range(width)).difference(there):
            raise DataError(f"{store}/{uuid}: {len(missing)} of {width} stripes are missing")
        stripes = [first, *parallel(lambda index: _read(backend, f"{store}/{uuid}.{index}"), there[1:])]
    except NotFoundError as exc:
        raise DataError(exc.message) from None
    pointer = Pointer(
        uuid=uuid,
        size=first.footer.size,
        unit=first.header.unit,
        width=width,
        footers=tuple(stripe.crc for stripe in stripes),
        digest="",
        epoch=first.header.epoch,
        name=first.header.name,
    )
    for index, stripe in enumerate(stripes):
        if index >= width or not stripe.belongs(pointer, index):
            raise DataError(f"{store}/{uuid}.{index} does not belong to the others")
    return pointer


def lost_sets(backend: Backend, parent: str) -> dict[str, str]:
    """The whole sets of stripes in the folder ``parent`` that nothing names: uuid by the name of the file written."""
    found: dict[str, str] = {}
    if not exists(backend, join(parent, layout.FOLDER)):
        return found
    seen = folder(backend, parent)
    for uuid, stripes in seen.stripes.items():
        if not seen.owners(uuid) and uuid not in seen.temporaries:
            with contextlib.suppress(DataError, ConfigError):
                found[inspect(backend, parent, uuid, stripes).name] = uuid
    if found:  # they may have been completed and published since the folder was listed
        seen = folder(backend, parent, known=seen)
    return {name: uuid for name, uuid in found.items() if not seen.owners(uuid) and uuid not in seen.temporaries}


def refuse_lost(file: PlainFile, lost: Callable[[str], dict[str, str]]) -> None:
    """Raise `DataError` when ``file`` is what is left of a pointer; ``lost``: `lost_sets` of a folder."""
    if file.size == len(file.head) and layout.is_remnant(file.head):
        parent, _, name = file.path.rpartition("/")
        if uuid := lost(parent).get(name):
            raise DataError(
                f"the pointer {file.path} is damaged: nothing of it is left, and its stripes are there ({uuid})",
                hint=f"{layout.MEND}, then `bootseer fs mv` what that recovers over it",
            )


def check_content(backend: Backend, folder: str, pointer: Pointer) -> str:
    """Read and check every chunk of a whole set. Returns the BLAKE3 of its content; `DataError` for damaged bytes."""
    with StripedFile(backend, join(folder, pointer.name), pointer) as file:
        return commit.digest_of_open(file)
