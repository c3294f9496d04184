"""Forgeries: what somebody who may read a file makes of it, so that its checksums and its uuid still hold."""

from __future__ import annotations

import shutil
from pathlib import Path

from crc32c import crc32c

from bootseer.stripefs import layout
from bootseer.stripefs.files.reader import read_pointer
from bootseer.stripefs.store import StripeFS


def same_crc(data: bytes, begin: bytes) -> bytes:
    """As many bytes as ``data`` has, and its CRC-32C, but with ``begin`` at their start."""
    made = bytearray(begin + data[len(begin) : -4] + bytes(4))
    head = crc32c(made[:-4])
    base, rows = crc32c(bytes(4), head), list[tuple[int, int]]()
    for bit in range(32):  # the CRC is linear in each bit of the last four bytes
        effect, bits = crc32c((1 << bit).to_bytes(4, "little"), head) ^ base, 1 << bit
        for other, of in rows:
            if effect ^ other < effect:
                effect, bits = effect ^ other, bits ^ of
        rows.append((effect, bits))
        rows.sort(reverse=True)
    left, found = crc32c(data) ^ base, 0
    for effect, bits in rows:
        if left ^ effect < left:
            left, found = left ^ effect, found ^ bits
    made[-4:] = found.to_bytes(4, "little")
    assert crc32c(made) == crc32c(data)
    assert made != data
    return bytes(made)


def forge(fs: StripeFS, path: str, to: Path, begin: bytes = b"FORGED") -> None:
    """Put at ``to`` a copy of the striped file ``path`` of the folder ``fs``, each of whose chunks has other bytes with
    the same CRC; pointer and footers are those of the original."""
    pointer = read_pointer(fs.backend, path)
    assert pointer is not None
    source = Path(fs.url, path)
    to.parent.mkdir(parents=True, exist_ok=True)
    (to.parent / layout.FOLDER).mkdir(exist_ok=True)
    shutil.copy2(source, to)
    for stripe in range(pointer.width):
        raw = bytearray((source.parent / layout.FOLDER / f"{pointer.uuid}.{stripe}").read_bytes())
        at = layout.HEADER_SIZE
        end = pointer.geometry.table_offset(stripe)
        while at < end:
            length = min(layout.SECTOR, pointer.unit, end - at)
            raw[at : at + length] = same_crc(bytes(raw[at : at + length]), begin)
            at += length
        (to.parent / layout.FOLDER / f"{pointer.uuid}.{stripe}").write_bytes(raw)
