"""What is closed at the end of its ``with`` block."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from io import BufferedWriter
from pathlib import Path
from typing import Self


@contextlib.contextmanager
def descriptor(fd: int) -> Iterator[int]:
    """``fd``, which is closed at the end."""
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def whole(path: Path) -> Iterator[BufferedWriter]:
    """A new file, which takes the place of ``path`` after the context, unless that raises. Not made durable."""
    tmp = path.parent / f".tmp-{os.urandom(16).hex()}"
    try:
        with open(tmp, "xb") as out:
            yield out
        os.replace(tmp, path)
    finally:
        tmp.unlink(missing_ok=True)


class Closing:
    """A ``with`` block gives it and closes it."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
