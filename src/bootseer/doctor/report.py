"""Records of an examination, and the exit code they add up to."""

from __future__ import annotations

from typing import Literal

import msgspec

from bootseer.errors import PrivilegeError, UnsupportedError

Status = Literal["ok", "limited", "missing"]


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was tried."""

    name: str
    status: Status
    detail: str
    """What was found."""
    cost: str = ""
    """What goes without it."""
    fix: str = ""
    """How to get it."""
    essential: bool = False
    """The fast way needs it."""
    privilege: bool = False
    """Missing only because this process lacks a privilege."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All that was found, in the order it was tried."""

    version: str
    checks: tuple[Check, ...]
    settings: dict[str, str | int | float | bool]

    @property
    def lacking(self) -> tuple[Check, ...]:
        """The essential things that are missing."""
        return tuple(check for check in self.checks if check.essential and check.status == "missing")

    @property
    def exit_code(self) -> int:
        """0: the fast way works; 77: only privileges are missing for it; 71: something else is."""
        if not self.lacking:
            return 0
        if all(check.privilege for check in self.lacking):
            return PrivilegeError.exit_code
        return UnsupportedError.exit_code

    @property
    def driver(self) -> Literal["fuse", "full"]:
        """How images reach this node: block by block through FUSE, or in full."""
        return "full" if self.lacking else "fuse"

    def as_json(self) -> dict[str, object]:
        """The report as plain values, with what follows from it."""
        found = {"ok": not self.lacking, "exit_code": self.exit_code, "driver": self.driver}
        return {"version": self.version, **found, "checks": msgspec.to_builtins(self.checks), "settings": self.settings}
