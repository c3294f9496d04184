"""What is closed at the end of its ``with`` block."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Self


@contextlib.contextmanager
def descriptor(fd: int) -> Iterator[int]:
    """``fd``, which is closed at the end."""
    try:
        yield fd
    finally:
        os.close(fd)


class Closing:
    """A ``with`` block gives it and closes it."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
