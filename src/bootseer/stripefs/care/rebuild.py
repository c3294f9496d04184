"""Sets of stripes without their pointer: whether one is whole, and the pointer that it had.

Headers and footers say all of a pointer but the digest, for which every byte is read and checked, and the name, which
stripes of early versions lack.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

from bootseer.errors import DataError, NotFoundError
from bootseer.stripefs import layout
from bootseer.stripefs.checkpoint import commit
from bootseer.stripefs.layout import Footer, Header, Pointer
from bootseer.stripefs.read import StripedFile
from bootseer.stripefs.storage.backend import Backend, join

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
