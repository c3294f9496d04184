"""The newest complete checkpoint of a folder, found by a listing; and LATEST, a file that names it for people.

LATEST is a hint: `find` never depends on it, so a wrong or missing one costs nothing but a look.
"""

from __future__ import annotations

import contextlib
import logging
import re
import uuid

import msgspec

from bootseer import faults
from bootseer.backends.interface import Backend, exists, join, read_all, write_file
from bootseer.errors import BootseerError, DataError, NotFoundError, NotWritableError, UnavailableError
from bootseer.stripefs import layout
from bootseer.stripefs.checkpoint import commit

_log = logging.getLogger(__name__)

NAME = "LATEST"
TEMPORARY = f"{layout.TEMPORARY}{NAME}."
_LINE = b"bootseer latest 1\n"
_OURS = b"bootseer latest "
_LIMIT = 64 << 10
_OF_DISK = "lost+found"
"""A folder of root's at the top of many file systems, which nobody else may read."""


class Latest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``checkpoint``: name of a folder beside the hint; ``created``: of its COMMIT, in seconds since the epoch."""

    checkpoint: str
    created: float


def _number(name: str) -> int:
    """The last number in the name of a checkpoint, -1 when it has none."""
    numbers = re.findall(r"\d+", name)
    return int(numbers[-1]) if numbers else -1


def encode(latest: Latest) -> bytes:
    return layout.encode_text(_LINE, latest)


def decode(data: bytes, name: str) -> Latest:
    found = layout.decode_text(_LINE, data, name, Latest)
    if found.checkpoint in ("", ".", "..") or "/" in found.checkpoint or "\0" in found.checkpoint:
        raise DataError(f"{name} is damaged: {found.checkpoint!r} is no name")
    return found


def is_hint(data: bytes) -> bool:
    """Whether a file named LATEST with this content is the store's own: another's is never replaced."""
    return not data or data.startswith(_OURS)


def read(backend: Backend, folder: str) -> Latest | None:
    """The hint in ``folder``, None when there is none. Raises `DataError` for a damaged one."""
    path = join(folder, NAME)
    try:
        if backend.stat(path).is_dir:
            return None
        data = read_all(backend, path, limit=_LIMIT)
    except NotFoundError:
        return None
    return decode(data, path) if is_hint(data) else None


def write_hint(backend: Backend, folder: str, *, complete: str = "") -> str:
    """Make LATEST in ``folder`` name the newest complete checkpoint that a listing shows now; without any, remove it.

    ``complete``: name of a checkpoint that was committed just now, and need not be looked at again. Returns its name,
    "" for none. Two processes that do this at one moment may leave the older name there.

    Raises `NotWritableError` when a file of another kind has that name.
    """
    path, name = join(folder, NAME), name_of_newest(backend, folder, complete=complete)
    try:
        hint = read(backend, folder)
        if hint is None and exists(backend, path):
            raise NotWritableError(f"{path} is a file of another kind", hint="rename it to have the newest named there")
        if (hint.checkpoint if hint is not None else "") == name:
            return name
    except DataError as exc:
        _log.warning("replacing %s", exc.message)
    if not name:
        faults.point("stripefs.latest.remove")
        backend.delete(path)
        return name
    created = commit.read(backend, join(folder, name)).created
    tmp = join(folder, f"{TEMPORARY}{uuid.uuid4().hex}")
    faults.point("stripefs.latest.write")
    write_file(backend, tmp, encode(Latest(checkpoint=name, created=created)))
    try:
        faults.point("stripefs.latest.rename")
        backend.rename(tmp, path, overwrite=True)
    except BaseException:
        with contextlib.suppress(BootseerError, OSError):
            backend.delete(tmp)
        raise
    return name


def update_hint(backend: Backend, folder: str, *, complete: str = "") -> None:
    """`write_hint`, where a failure is only a line in the log: nothing depends on the hint."""
    try:
        write_hint(backend, folder, complete=complete)
    except (BootseerError, OSError) as exc:
        _log.warning("%s was not updated: %s", join(folder, NAME), exc)


def find(backend: Backend, folder: str) -> str:
    """Path of the newest complete checkpoint directly below ``folder``; `NotFoundError` when there is none.

    Newest: largest last number in the name; for equal or no numbers, committed last. Incomplete ones are skipped with
    a warning; a storage that does not answer, and one that this user may not read, are errors, no reasons to go back.
    """
    if not (name := name_of_newest(backend, folder, strict=True)):
        raise NotFoundError(f"no complete checkpoint in {folder or backend.url}")
    return join(folder, name)


def name_of_newest(backend: Backend, folder: str, *, complete: str = "", strict: bool = False) -> str:
    """The name of what `find` finds, "" for none. ``complete``: as in `write_hint`; ``strict``: with the warnings and
    errors of `find`; else one that may not be read counts as incomplete."""
    groups: dict[int, list[str]] = {}
    for entry in backend.list(folder):
        if entry.is_dir and not commit.is_hidden(entry.name) and entry.name != _OF_DISK:
            groups.setdefault(_number(entry.name), []).append(entry.name)
    for key in sorted(groups, reverse=True):
        for name in _by_commit(backend, folder, groups[key]):
            try:
                if name != complete:
                    commit.check(backend, join(folder, name))
                return name
            except BootseerError as exc:
                if isinstance(exc, UnavailableError) or (strict and isinstance(exc, NotWritableError)):
                    raise
                level = logging.WARNING if strict else logging.DEBUG
                _log.log(level, "not using %s: %s", join(folder, name), exc.message)
    return ""


def _by_commit(backend: Backend, folder: str, names: list[str]) -> list[str]:
    """``names`` with the one committed last first; those without a right COMMIT at the end."""
    if len(names) < 2:
        return names
    created = {}
    for name in names:
        try:
            created[name] = commit.read(backend, join(folder, name)).created
        except (DataError, NotFoundError):  # NotFoundError: removed meanwhile
            created[name] = float("-inf")
    return sorted(names, key=lambda name: (created[name], name), reverse=True)
