"""Who may do what with a striped file: its stripes have the owner, group and mode of its pointer."""

from __future__ import annotations

import contextlib
import logging
from typing import Unpack

from bootseer.backends.interface import Attributes, Backend, Permissions
from bootseer.backends.pool import parallel
from bootseer.errors import NotFoundError, NotWritableError, logged
from bootseer.stripefs.layout import Pointer

_log = logging.getLogger(__name__)


def change(backend: Backend, path: str, pointer: Pointer | None, *, at: str = "", **rights: Unpack[Attributes]) -> None:
    """Change the rights of the file at ``path``: of the stripes that ``pointer`` (None: a plain file) names, then of
    the pointer, so that nobody is promised a privacy that the bytes do not have yet. ``at``: where the pointer lies as
    long as it is not published. Errors as of `Backend.change`."""

    def of_stripe(stripe: str) -> None:
        with contextlib.suppress(NotFoundError):  # the file is damaged, or was replaced just now
            backend.change(stripe, **rights)

    if all(right is None for right in rights.values()):
        return
    if pointer is not None:
        parallel(of_stripe, [pointer.stripe_path(path, index) for index in range(pointer.width)])
    backend.change(at or path, **rights)


def keep_owner(
    backend: Backend, path: str, pointer: Pointer | None, old: Permissions, new: Permissions | None, *, at: str
) -> None:
    """Let a new version or a copy, which lies at ``at`` with the rights ``new`` and is to be ``path``, belong to whom
    the ``old`` one did: only HDFS's superuser can. Else, with a log line, it belongs to who wrote it."""
    if new is None or old.owner in (None, new.owner):
        return
    with logged(_log.warning, "%s gets another owner or group", path, kinds=NotWritableError):
        change(backend, path, pointer, at=at, owner=old.owner)
