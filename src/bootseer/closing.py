"""What is closed at the end of its ``with`` block."""

from __future__ import annotations

from typing import Self


class Closing:
    """A ``with`` block gives it and closes it."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
