"""The newest complete checkpoint of a folder, found by a listing."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator

from bootseer.backends.interface import Backend, join
from bootseer.errors import BootseerError, DataError, NotFoundError, NotWritableError, UnavailableError
from bootseer.stripefs.checkpoint import commit

_log = logging.getLogger(__name__)

_OF_DISK = "lost+found"
"""A folder of root's at the top of many file systems, which nobody else may read."""


def _number(name: str) -> int:
    """The last number in the name of a checkpoint, -1 when it has none."""
    numbers = re.findall(r"\d+", name)
    return int(numbers[-1]) if numbers else -1


def find(backend: Backend, folder: str) -> str:
    """Path of the newest complete checkpoint directly below ``folder``; `NotFoundError` when there is none. Newest:
    largest last number in the name; for equal or no numbers, committed last. Incomplete ones are skipped with a
    warning; a storage that does not answer, and one that this user may not read, are errors, no reasons to go back."""
    for path in listing(backend, folder):
        try:
            commit.check(backend, path)
            return path
        except (UnavailableError, NotWritableError):
            raise
        except BootseerError as exc:
            _log.warning("not using %s: %s", path, exc.message)
    raise NotFoundError(f"no complete checkpoint in {folder or backend.url}")


def listing(backend: Backend, folder: str) -> Iterator[str]:
    """The folders directly below ``folder``, the newest first; which are complete checkpoints is not looked at."""
    groups: dict[int, list[str]] = {}
    for entry in backend.list(folder):
        if entry.is_dir and not commit.is_hidden(entry.name) and entry.name != _OF_DISK:
            groups.setdefault(_number(entry.name), []).append(entry.name)
    for key in sorted(groups, reverse=True):
        for name in _by_commit(backend, folder, groups[key]):
            yield join(folder, name)


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
