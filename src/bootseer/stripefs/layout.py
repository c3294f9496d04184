"""How a striped file lies in its parts: geometry and codecs of header, footer and pointer (docs/internals/stripe.md).
Nothing here does input or output. Every decoder raises `DataError` for bytes that are not exactly right."""

from __future__ import annotations

import functools
import itertools
import re
import struct
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import msgspec
from crc32c import crc32c

from bootseer.backends import interface
from bootseer.errors import ConfigError, DataError
from bootseer.wiretypes import json_as

T = TypeVar("T")

VERSION = 2
UNIT = 1 << 20
WIDTH = 4
MAX_WIDTH = 256
MIN_UNIT, MAX_UNIT = 4096, 64 << 20
SECTOR = 64 << 10
"""What has a checksum of its own in chunks that are a multiple of it."""
PLAIN_BELOW = 4 << 20
"""Files smaller than this are stored plain: striping them costs more NameNode operations than it saves."""

FOLDER = ".bsx"
TEMPORARY = interface.TEMPORARY
ENDED = ".ended"
"""Suffix of the temporary file of a writer that a later save ended."""
MAX_EPOCH = (1 << 64) - 1
CLAIM = re.compile(r"save\.([1-9][0-9]{0,17})")
"""In `FOLDER`: the claim of a save, with its number (`bootseer.stripefs.checkpoint.claim`)."""
HEADER_SIZE = 4096
POINTER_LINE = b"bootseer striped file 1\n"
_POINTER_BODY = b'{"digest":"'
MEND = "run `bootseer fs fsck --repair` on its folder"
MAX_TEXT = 1 << 20
"""Largest pointer."""
MAX_REMNANT = 4096
"""Largest file that may be what is left of a pointer."""
_CLASSES, _APART = 1024, 8
"""Lengths of pointers are equal modulo the first when they name the same stripes, and all are multiples of the second:
one that was cut off is hardly any more, unless where storage tears."""
_TORN = 512
"""Storage tears files at multiples of so many bytes."""
_CUT = len(POINTER_LINE) + 64 + 32
"""A shorter part of a pointer does not have its uuid, which the digest precedes."""
MAX_NAME = 1024
"""Longest file name, in bytes, that a header holds."""

_HEADER = struct.Struct("<8sII16sIIQQ")
_FOOTER = struct.Struct("<8sIIQQ16sII")
_U32 = struct.Struct("<I")
_NAMED = _HEADER.size + _U32.size  # where the file name begins
_HEADER_MAGIC = b"BSXstrip"
_FOOTER_MAGIC = b"BSXfootr"


def clean_new(path: str) -> str:
    """`interface.clean` for what is to be written: `ConfigError` also for names that are not UTF-8 or the store's."""
    try:
        path.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"bad path {path!r} in a striped store: names are UTF-8", hint="rename the file") from None
    path = interface.clean(path)
    for part in path.split("/"):
        if part == FOLDER or part.startswith(TEMPORARY):
            raise ConfigError(
                f"bad path {path!r}: names {FOLDER} and {TEMPORARY}* are the store's own",
                hint="take another name",
            )
    return path


def check_shape(width: int, unit: int) -> None:
    """Raise `ConfigError` for a stripe width or unit that the format does not allow."""
    if not 1 <= width <= MAX_WIDTH:
        raise ConfigError(f"stripe width {width} is not between 1 and {MAX_WIDTH}")
    if not MIN_UNIT <= unit <= MAX_UNIT or unit % 4096:
        raise ConfigError(f"stripe unit {unit} is not a multiple of 4096 between {MIN_UNIT} and {MAX_UNIT}")


def sectors(data: int, unit: int) -> int:
    """Number of checksums of sectors in a stripe with ``data`` bytes of chunks; 0 when a chunk has one alone."""
    return -(-data // SECTOR) if unit > SECTOR and not unit % SECTOR else 0


class Geometry(NamedTuple):
    """Where each byte of a file of ``size`` bytes is. Pure arithmetic."""

    size: int
    unit: int
    width: int

    @property
    def grain(self) -> int:
        """How many bytes have a checksum that can be known without the others: a sector, or a chunk."""
        return SECTOR if sectors(self.unit, self.unit) else self.unit

    @property
    def chunks(self) -> int:
        return -(-self.size // self.unit)

    def chunk_length(self, chunk: int) -> int:
        return min(self.unit, self.size - chunk * self.unit)

    def stripe_chunks(self, stripe: int) -> int:
        """Number of chunks in ``stripe``."""
        return max(0, -(-(self.chunks - stripe) // self.width))

    def stripe_data(self, stripe: int) -> int:
        """Bytes of chunk data in ``stripe``."""
        count = self.stripe_chunks(stripe)
        if not count:
            return 0
        last = (count - 1) * self.width + stripe
        return (count - 1) * self.unit + self.chunk_length(last)

    def table_offset(self, stripe: int) -> int:
        """Offset in its stripe file of the checksums of the sectors."""
        return HEADER_SIZE + self.stripe_data(stripe)

    def footer_offset(self, stripe: int) -> int:
        return self.table_offset(stripe) + 4 * sectors(self.stripe_data(stripe), self.unit)

    def stripe_length(self, stripe: int) -> int:
        """Bytes of the whole stripe file."""
        return self.footer_offset(stripe) + footer_length(self.stripe_chunks(stripe))

    def chunk_offset(self, position: int) -> int:
        """Offset in its stripe file of the chunk at ``position``."""
        return HEADER_SIZE + position * self.unit


class Header(NamedTuple):
    """``name``: last part of the logical path as the writer knew it; "" for one that is too long."""

    uuid: bytes
    stripe: int
    width: int
    unit: int
    epoch: int
    name: str = ""


def encode_header(header: Header) -> bytes:
    """`HEADER_SIZE` bytes. A name that is too long for it is left out."""
    body = _HEADER.pack(
        _HEADER_MAGIC, VERSION, HEADER_SIZE, header.uuid, header.stripe, header.width, header.unit, header.epoch
    )
    body += _U32.pack(crc32c(body))
    name = header.name.encode("utf-8", "surrogateescape")
    if 0 < len(name) <= MAX_NAME:
        named = _U32.pack(len(name)) + name
        body += named + _U32.pack(crc32c(named))
    return body.ljust(HEADER_SIZE, b"\0")


def check_version(data: bytes, name: str) -> None:
    """Raise `DataError` where the header or footer ``data`` of the stripe ``name`` is of another version."""
    version = (
        _U32.unpack_from(data, 8)[0] if data[:8] in {_HEADER_MAGIC, _FOOTER_MAGIC} and len(data) >= 12 else VERSION
    )
    if version < VERSION:
        raise DataError(f"{name} was written by an earlier version of bootseer", hint="write it again")
    if version > VERSION:
        raise DataError(f"{name} has stripe format {version}, this bootseer reads {VERSION}", hint="update bootseer")


def decode_header(data: bytes, name: str) -> Header:
    """``name`` is the stripe's, for messages."""
    if len(data) < HEADER_SIZE or data[:8] != _HEADER_MAGIC:
        raise DataError(f"{name} is not a stripe")
    check_version(data, name)
    _, _, length, uuid, index, width, unit, epoch = _HEADER.unpack_from(data)
    if length != HEADER_SIZE or _U32.unpack_from(data, _HEADER.size)[0] != crc32c(data[: _HEADER.size]):
        raise DataError(f"the header of {name} is damaged")
    return Header(uuid, index, width, unit, epoch, _header_name(data, name))


def _header_name(data: bytes, name: str) -> str:
    length = _U32.unpack_from(data, _NAMED)[0]
    end = _NAMED + 4 + length
    if not length:
        return ""
    if length > MAX_NAME or _U32.unpack_from(data, end)[0] != crc32c(data[_NAMED:end]):
        raise DataError(f"the header of {name} is damaged")
    return data[_NAMED + 4 : end].decode("utf-8", "surrogateescape")


def sector_crcs(pieces: Sequence[memoryview]) -> list[int]:
    """CRC-32C of each sector of the chunk that ``pieces`` make up. It keeps the interpreter's lock for the microseconds
    that a sector takes: a busy thread gives it back after 5 ms only."""
    found, crc, room = list[int](), 0, SECTOR
    for piece in pieces:
        for low, high in itertools.pairwise([0, *range(room, len(piece), SECTOR), len(piece)]):
            crc, room = crc32c(piece[low:high], crc, gil_release_mode=0), room - (high - low)
            if not room:
                found.append(crc)
                crc, room = 0, SECTOR
    return found if room == SECTOR else [*found, crc]


def joined(crcs: Sequence[int], size: int) -> int:
    """CRC-32C of the ``size`` bytes whose sectors have ``crcs``."""
    crc, full = 0, size // SECTOR
    for some, length in ((crcs[:full], SECTOR), (crcs[full:], size % SECTOR)):
        first, second, third, fourth = _moved(length)
        for following in some:
            crc = first[crc & 255] ^ second[crc >> 8 & 255] ^ third[crc >> 16 & 255] ^ fourth[crc >> 24] ^ following
    return crc


@functools.lru_cache(64)
def _moved(length: int) -> list[list[int]]:
    """What becomes of each byte of the CRC of some bytes, when ``length`` more follow: CRC is linear in each bit."""
    zeros, tables = bytes(length), list[list[int]]()
    for shift in range(0, 32, 8):
        table = [0]
        for bit in range(shift, shift + 8):
            moved = crc32c(zeros, 1 << bit) ^ crc32c(zeros)
            table += [moved ^ value for value in table]
        tables.append(table)
    return tables


class Footer(NamedTuple):
    """``crcs``: CRC-32C of each chunk of the stripe; ``data``: bytes of chunks in it; ``size``: of the whole file."""

    uuid: bytes
    stripe: int
    data: int
    size: int
    crcs: tuple[int, ...]


def footer_length(chunks: int) -> int:
    return _FOOTER.size + 4 * chunks + 8


def encode_footer(footer: Footer) -> tuple[bytes, int]:
    """The footer and its CRC, which the pointer names."""
    count = len(footer.crcs)
    body = _FOOTER.pack(_FOOTER_MAGIC, VERSION, count, footer.data, footer.size, footer.uuid, footer.stripe, 0)
    body += struct.pack(f"<{count}I", *footer.crcs) + _U32.pack(footer_length(count))
    crc = crc32c(body)
    return body + _U32.pack(crc), crc


def decode_footer(data: bytes, name: str) -> tuple[Footer, int]:
    """The footer and its CRC."""
    damaged = DataError(f"the footer of {name} is damaged, or its writer did not finish")
    if len(data) < footer_length(0) or data[:8] != _FOOTER_MAGIC:
        raise damaged
    check_version(data, name)
    _, _, count, length, size, uuid, index, zero = _FOOTER.unpack_from(data)
    if len(data) != footer_length(count) or zero or _U32.unpack_from(data, len(data) - 8)[0] != len(data):
        raise damaged
    crc = crc32c(data[:-4])
    if _U32.unpack_from(data, len(data) - 4)[0] != crc:
        raise damaged
    return Footer(uuid, index, length, size, struct.unpack_from(f"<{count}I", data, _FOOTER.size)), crc


class Pointer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the file at the logical path says. ``dir`` is always `FOLDER`. ``name`` is the last part of that path as the
    writer knew it; a pointer under another name may be a copy."""

    uuid: str
    size: int
    unit: int
    width: int
    footers: tuple[int, ...]
    digest: str
    epoch: int
    dir: str = FOLDER
    name: str = ""

    @property
    def geometry(self) -> Geometry:
        return Geometry(self.size, self.unit, self.width)

    def stripe_path(self, logical: str, index: int) -> str:
        """Path of a stripe of the file at ``logical``."""
        parent = logical.rpartition("/")[0]
        return interface.join(parent, FOLDER, f"{self.uuid}.{index}")


def encode_text(line: bytes, body: object, *, spaces: int = 0) -> bytes:
    """The three-line framing of pointers and manifests: magic line, JSON with sorted keys and spaces, CRC."""
    text = line + msgspec.json.encode(body, order="sorted") + b" " * spaces + b"\n"
    return text + b"crc32c %08x\n" % crc32c(text)


def decode_text(line: bytes, data: bytes, name: str, kind: type[T], *, hint: str = "") -> T:
    """The JSON between a magic line and a right CRC. Raises `DataError`."""
    lines = data.splitlines(keepends=True)
    if len(lines) != 3 or lines[0] != line or lines[2] != b"crc32c %08x\n" % crc32c(lines[0] + lines[1]):
        raise DataError(f"{name} is damaged", hint=hint)
    try:
        return json_as(lines[1], kind)
    except ValueError as exc:
        raise DataError(f"{name} is damaged: {exc}", hint=hint) from None


def is_pointer(data: bytes | bytearray) -> bool:
    """Whether a file that begins with ``data`` is a pointer, also one with a damaged first line."""
    return data.startswith(POINTER_LINE) or data.startswith(_POINTER_BODY, len(POINTER_LINE))


def may_be_pointer(size: int) -> bool:
    """Whether a file of so many bytes may be a pointer."""
    return len(POINTER_LINE) < size <= MAX_TEXT


def is_remnant(data: bytes | bytearray) -> bool:
    """Whether a file with this content may be all that is left of a pointer: a part of its first line, or zeros."""
    return POINTER_LINE.startswith(data) or not data.strip(b"\0")


def _length_class(uuid: str) -> int:
    """Of the length of every pointer that names the stripes ``uuid``, modulo `_CLASSES`."""
    return int(uuid[:8], 16) % (_CLASSES // _APART) * _APART


def encode_pointer(pointer: Pointer) -> bytes:
    """Spaces behind the JSON make its length say whose stripes it may name, to who only lists it (`may_name`)."""
    short = encode_text(POINTER_LINE, pointer)
    return encode_text(POINTER_LINE, pointer, spaces=(_length_class(pointer.uuid) - len(short)) % _CLASSES)


def may_name(size: int, pointer: Pointer) -> bool:
    """Whether a file of so many bytes may name the stripes of ``pointer``: as a pointer, or as a part of a copy of it.
    Also one that has no spaces."""
    whole = size <= MAX_TEXT and size % _CLASSES == _length_class(pointer.uuid)
    cut = (size % _APART > 0 or size % _TORN == 0) and _CUT < size <= len(encode_pointer(pointer)) + _APART
    return whole or cut or size == len(encode_text(POINTER_LINE, pointer))


def decode_pointer(data: bytes, name: str) -> Pointer:
    pointer = decode_text(POINTER_LINE, data, f"the pointer {name}", Pointer, hint=MEND)
    try:
        check_shape(pointer.width, pointer.unit)
        uuid = bytes.fromhex(pointer.uuid)
    except (ConfigError, ValueError) as exc:
        raise DataError(f"the pointer {name} is damaged: {exc}", hint=MEND) from None
    if (
        len(uuid) != 16
        or pointer.uuid != uuid.hex()
        or pointer.size < 0
        or not 0 <= pointer.epoch <= MAX_EPOCH
        or len(pointer.footers) != pointer.width
        or pointer.dir != FOLDER  # any other may be somebody's
    ):
        raise DataError(f"the pointer {name} is damaged", hint=MEND)
    return pointer
