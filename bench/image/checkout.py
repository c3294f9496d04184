"""Whose code a start runs: that of this checkout, or of another one to compare it with."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec

from bench.image.node import Order
from bootseer.errors import NotFoundError

BEFORE = "@before"
"""Ends the names of variants that run from the other checkout."""


class Checkout:
    """The checkout at ``root``, with its own interpreter where it has one.

    ``suffix`` keeps what its starts record apart: it ends the names of variants, profiles, caches and of the store.
    """

    def __init__(self, root: Path, suffix: str = "") -> None:
        self.root, self.suffix = root.absolute(), suffix
        if not (self.root / "bench/image/node.py").exists():
            raise NotFoundError(f"{self.root} is no checkout of this project", hint="see git worktree add")
        own = self.root / ".venv/bin/python"
        self._python = str(own) if suffix and own.exists() else sys.executable

    def argv(self, order: Order) -> list[str]:
        """The command of one start."""
        return [self._python, "-m", "bench.image.node", msgspec.json.encode(order).decode()]

    def environ(self) -> dict[str, str]:
        """With the packages of this checkout before any that the interpreter has installed."""
        return {**os.environ, "PYTHONPATH": f"{self.root}/src:{self.root}"}


HERE = Checkout(Path(__file__).parents[2])
