"""What tests of striped stores ask and do again and again."""

from __future__ import annotations

from pathlib import Path

from bootseer.stripefs.store import StripeFS


def content(fs: StripeFS, path: str) -> bytes:
    """All bytes of the file at ``path``."""
    with fs.open(path) as file:
        return file.read(0, file.size)


def flip(path: Path, offset: int) -> None:
    """Change one bit of a local file."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)
