"""Bitmaps of a cache folder: one bit per block, with the digest of the block map and a checksum; atomic to replace.
``bitmap`` says which blocks are on disk for sure, ``hot`` (advice) which ones starts touch. Format:
``docs/internals/blockmap.md``, "Cache folder"."""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

from bootseer import faults
from bootseer.chunks import hashing
from bootseer.closing import descriptor

Ready = bytearray | mmap.mmap
"""One byte per block, 1 when it is there; a mapping where processes share it."""
READY = b"BSBITMAP"
HOT = b"BSHOTSET"
_VERSION = 1
_HEADER = struct.Struct("<8sII32sQ")
_MAX_COUNT = 1 << 31
_DIGITS = bytes.maketrans(b"\0\1", b"01")


def encode(magic: bytes, digest: bytes, flags: hashing.Buffer) -> bytes:
    """``flags``: one byte per block, 0 or 1; ``digest``: that of the encoded block map."""
    count = len(flags)
    bits = int(bytes(flags)[::-1].translate(_DIGITS), 2) if count else 0
    body = _HEADER.pack(magic, _VERSION, 0, digest, count) + bits.to_bytes((count + 7) // 8, "little")
    return body + hashing.digest(body)


def decode(raw: bytes, magic: bytes, digest: bytes, count: int | None = None) -> bytearray | None:
    """One byte per block; None for anything but a whole bitmap of that map (with ``count`` blocks, when given)."""
    body = raw[: -hashing.SIZE]
    if len(body) < _HEADER.size or hashing.digest(body) != raw[-hashing.SIZE :]:
        return None
    found = _HEADER.unpack_from(body)[4]
    if body[: _HEADER.size] != _HEADER.pack(magic, _VERSION, 0, digest, found) or found > _MAX_COUNT:
        return None
    if len(body) != _HEADER.size + (found + 7) // 8 or (count is not None and found != count):
        return None
    bits = int.from_bytes(body[_HEADER.size :], "little")
    if bits >> found:
        return None
    return bytearray(int(char) for char in reversed(f"{bits:0{found}b}")) if found else bytearray()


def read(path: Path, magic: bytes, digest: bytes, count: int | None = None) -> bytearray | None:
    """`decode` the file; None when it is missing. Raises `OSError`."""
    try:
        return decode(path.read_bytes(), magic, digest, count)
    except FileNotFoundError:
        return None


def replace(path: Path, raw: bytes, point: str, *, final: bool = False) -> None:
    """Put ``raw`` in the place of ``path``, whole or not at all; ``final``: so that it, and not the old one, outlives a
    power failure. Raises `OSError`; the old one then stays, or with ``final`` one of the two."""
    tmp = path.with_name(f"{path.name}.tmp")
    try:
        with open(tmp, "wb") as out:
            faults.point(f"{point}.write")
            out.write(raw)
            out.flush()
            faults.point(f"{point}.fsync")
            os.fsync(out.fileno())
        faults.point(f"{point}.before-rename")
        os.replace(tmp, path)
    except OSError:
        tmp.unlink(missing_ok=True)
        raise
    if final:
        faults.point(f"{point}.folder")
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in ``folder`` durable. Raises `OSError`."""
    with descriptor(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as fd:
        os.fsync(fd)
