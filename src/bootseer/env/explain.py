"""Why a key is new: a readable difference between two key documents, and between two inventories."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterable, Sequence

from bootseer.env import hardware, variables
from bootseer.env.inputs import Observed
from bootseer.env.inventory import Entry
from bootseer.env.key import KeyDocument
from bootseer.env.keyfile import FileInput

_PIN = re.compile(r"^\s*([A-Za-z0-9._-]+(?:\[[^\]]*\])?)\s*==\s*([^\s;#\\]+)")
_LINES = 6
_MOST_LINES = 3000
"""Longer texts are not compared line by line, which may take minutes."""


def changes(old: KeyDocument, new: KeyDocument) -> list[str]:
    """One phrase per input that differs, the most telling first: files, command, variables, platform."""
    out: list[str] = []
    for name in sorted(old.files.keys() | new.files.keys()):
        out += _file_change(name, old.files.get(name), new.files.get(name))
    if old.command != new.command:
        out.append(f"command changed: {shlex.join(old.command)} -> {shlex.join(new.command)}")
    for name in sorted(old.env.keys() | new.env.keys()):
        before, after = old.env.get(name), new.env.get(name)
        if before != after or (name in old.env) != (name in new.env):
            what = f"variable {name} changed: {_shown(before)} -> {_shown(after)}"
            out.append(f"{hardware.SHOWN[name]} is another" if name in hardware.SHOWN else what)
    if old.python != new.python:
        before, after = (f"{p.implementation} {p.version} {p.soabi}".strip() for p in (old.python, new.python))
        out.append(f"Python changed: {_shown(before)} -> {_shown(after)}")
    for field in ("image", "libc", "machine", "salt", "tenant", "version"):
        before, after = getattr(old, field), getattr(new, field)
        if before != after:
            out.append(f"{field} changed: {_shown(before)} -> {_shown(after)}")
    if old.cwd != new.cwd:
        out.append(f"working folder changed: {_shown(old.cwd)} -> {_shown(new.cwd)}")
    for path in sorted(set(old.mounts) ^ set(new.mounts)):
        out.append(f"{path} is {'not ' if path in old.mounts else ''}mounted now")
    if old.targets != new.targets:
        out.append(f"targets changed: {' '.join(old.targets)} -> {' '.join(new.targets)}")
    return out


def nearest(document: KeyDocument, others: Iterable[KeyDocument]) -> KeyDocument | None:
    """The document that differs in the fewest inputs; of equals the last, so pass them oldest first."""
    distances = [(len(found), other) for other in others if (found := changes(other, document))]
    return min(reversed(distances), key=lambda item: item[0], default=(0, None))[1]


def explain(document: KeyDocument, others: Sequence[KeyDocument]) -> str:
    """``"missed because requirements.txt changed: + flash-attn 2.8"``; `others` oldest first."""
    near = nearest(document, others)
    if near is None:
        return "missed because no snapshot of these targets exists yet"
    return "missed because " + "; ".join(changes(near, document))


def _shown(value: str | None) -> str:
    return "unset" if value is None else value or "none"


def _file_change(name: str, old: FileInput | None, new: FileInput | None) -> list[str]:
    if old == new:
        return []
    if old is None:
        return [f"{name} is new"]
    if new is None:
        return [f"{name} is no longer an input"]
    lines = _line_changes(old.text, new.text) if old.text and new.text else []
    return [f"{name} changed: {', '.join(lines)}" if lines else f"{name} changed"]


def _line_changes(old: str, new: str) -> list[str]:
    before, after = old.splitlines(), new.splitlines()
    if max(len(before), len(after)) > _MOST_LINES:
        return []
    rows = difflib.unified_diff(before, after, lineterm="", n=0)
    found = [row for row in rows if row[:1] in "+-" and row[:3] not in ("+++", "---") and row[1:].strip()]
    shown = [f"{row[0]} {_requirement(row[1:])}" for row in found[:_LINES]]
    return [*shown, f"and {len(found) - _LINES} more lines"] if len(found) > _LINES else shown


def _requirement(line: str) -> str:
    pin = _PIN.match(line)
    return f"{pin[1]} {pin[2]}" if pin else line.strip()[:120]


def input_changes(old: Observed, new: Observed) -> list[str]:
    """One phrase per file that the commands read and that differs."""
    both = sorted(old.files.keys() & new.files.keys())
    out = [f"{path}, which the command reads, changed" for path in both if old.files[path] != new.files[path]]
    names = sorted(old.variables.keys() | new.variables.keys())
    out += [f"{variables.shown(name)} changed" for name in names if old.variables.get(name) != new.variables.get(name)]
    names = sorted(old.names.keys() & new.names.keys())
    out += [f"{name} leads elsewhere" for name in names if old.names[name] != new.names[name]]
    out += [f"{path} is read now" for path in sorted(new.files.keys() - old.files.keys())]
    return out + [f"{path} is no longer read" for path in sorted(old.files.keys() - new.files.keys())]


def entry_changes(old: Iterable[Entry], new: Iterable[Entry]) -> list[tuple[str, str]]:
    """(sign, path) of entries that differ: ``+`` new, ``-`` gone, ``~`` changed content or mode."""
    before = {entry.path: entry for entry in old}
    after = {entry.path: entry for entry in new}
    out: list[tuple[str, str]] = []
    for path in sorted(before.keys() | after.keys()):
        a, b = before.get(path), after.get(path)
        if a is None:
            out.append(("+", path))
        elif b is None:
            out.append(("-", path))
        elif (a.kind, a.mode, a.size, a.data) != (b.kind, b.mode, b.size, b.data):
            out.append(("~", path))
    return out
