"""LATEST: a hint beside checkpoints at which is the newest, for people and other tools; and the finding of the newest.

`newest` never depends on the hint. `publish` never moves it back, also when the process slept at the worst moment: see
docs/internals/stripe.md.
"""

from __future__ import annotations

import contextlib
import logging
import re
import uuid

import msgspec

from bootseer import faults
from bootseer.errors import BootseerError, DataError, NotFoundError, NotWritableError, UnavailableError
from bootseer.stripefs import layout
from bootseer.stripefs.checkpoint import commit
from bootseer.stripefs.storage.backend import Backend, exists, join, read_all

_log = logging.getLogger(__name__)

NAME = "LATEST"
TEMPORARY = f"{layout.TEMPORARY}{NAME}."
_LINE = b"bootseer latest 1\n"
_OURS = b"bootseer latest "
_LIMIT = 64 << 10
_TRIES = 10


class Latest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``checkpoint``: name of a folder beside the hint; ``created``: of its COMMIT, in seconds since the epoch."""

    checkpoint: str
    created: float

    @property
    def order(self) -> tuple[int, float]:
        """Later checkpoints have a larger one."""
        return number(self.checkpoint), self.created


def number(name: str) -> int:
    """The last number in the name of a checkpoint, -1 when it has none."""
    numbers = re.findall(r"\d+", name)
    return int(numbers[-1]) if numbers else -1


def encode(latest: Latest) -> bytes:
    return layout.encode_text(_LINE, latest)


def decode(data: bytes, name: str) -> Latest:
    try:
        found = msgspec.json.decode(layout.decode_text(_LINE, data, name), type=Latest)
    except msgspec.DecodeError as exc:
        raise DataError(f"{name} is damaged: {exc}") from None
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


def publish(backend: Backend, folder: str, latest: Latest, *, force: bool = False) -> Latest:
    """Make the hint in ``folder`` name ``latest``, unless it names a later checkpoint. Returns what it names then.

    ``force``: also when it names a later one, which is then known to be none.

    Raises `NotWritableError` when a file of another kind has that name, or others replaced the hint all the time.
    """
    path = join(folder, NAME)
    for _ in range(_TRIES):
        if (later := _later(backend, folder, latest)) is not None and not force:
            return later
        tmp = join(folder, f"{TEMPORARY}{uuid.uuid4().hex}")
        faults.point("stripefs.latest.write")
        sink = backend.create(tmp)
        try:
            sink.write(encode(latest))
            sink.close()
            if (later := _later(backend, folder, latest)) is not None and not force:
                backend.delete(tmp)
                return later
            faults.point("stripefs.latest.rename")
            backend.rename(tmp, path, overwrite=True)
        except BaseException as exc:
            taken = (
                isinstance(exc, BootseerError) and not isinstance(exc, UnavailableError) and not exists(backend, tmp)
            )
            sink.abandon()
            if taken:
                continue  # whoever moved LATEST meanwhile took the temporary file away
            with contextlib.suppress(BootseerError, OSError):
                backend.delete(tmp)  # a closed file stays when its sink is abandoned
            raise
        # One who wrote its temporary file before this cannot rename it now; one who writes it later sees ours.
        for entry in backend.list(folder):
            if entry.name.startswith(TEMPORARY):
                backend.delete(join(folder, entry.name))
        if (now := _read_quietly(backend, folder)) is not None and now.order >= latest.order:
            return now
    raise NotWritableError(f"{path} is replaced by others all the time")


def follow(backend: Backend, folder: str, *, came: str = "") -> None:
    """Make the hint in ``folder`` name the newest complete checkpoint, after one went or came; without any it goes.

    ``came``: the folder that did; nothing is done when it is no checkpoint.
    Nothing depends on the hint, so what cannot be done about it is a line in the log.
    """
    try:
        if came and not exists(backend, join(came, commit.NAME)):
            return
        hint = read(backend, folder)
        if (path := _newest(backend, folder)) is None:
            if hint is None or read(backend, folder) != hint:
                return
            faults.point("stripefs.latest.remove")
            backend.delete(join(folder, NAME))
            hint = None
            if (path := _newest(backend, folder)) is None:  # else the hint that went may have been that of a new one
                return
        name = path.rpartition("/")[2]
        if hint is None or hint.checkpoint != name:
            publish(backend, folder, Latest(checkpoint=name, created=commit.read(backend, path).created))
    except (BootseerError, OSError) as exc:
        _log.warning("%s was not updated: %s", join(folder, NAME), exc)


def _newest(backend: Backend, folder: str) -> str | None:
    try:
        return newest(backend, folder, quiet=True)
    except NotFoundError:
        return None


def names(backend: Backend, path: str) -> bool:
    """Whether the hint beside the folder ``path`` names it. One that cannot be read does not; silence is an error."""
    parent, _, name = path.rpartition("/")
    try:
        hint = read(backend, parent)
    except UnavailableError:
        raise
    except BootseerError as exc:
        _log.debug("%s does not say what it names: %s", join(parent, NAME), exc)
        return False
    return hint is not None and hint.checkpoint == name


def _read_quietly(backend: Backend, folder: str) -> Latest | None:
    try:
        return read(backend, folder)
    except DataError as exc:
        _log.warning("replacing %s", exc.message)
        return None


def _later(backend: Backend, folder: str, latest: Latest) -> Latest | None:
    """What the hint names when that is at least as late and still there."""
    path = join(folder, NAME)
    if (now := _read_quietly(backend, folder)) is None:
        if exists(backend, path) and not is_hint(read_all(backend, path, limit=len(_OURS))):
            raise NotWritableError(f"{path} is a file of another kind", hint="rename it to have the newest named there")
        return None
    if now.order < latest.order or not exists(backend, join(folder, now.checkpoint, commit.NAME)):
        return None
    return now


def newest(backend: Backend, folder: str, *, quiet: bool = False) -> str:
    """Path of the newest complete checkpoint directly below ``folder``; `NotFoundError` when there is none.

    Newest: largest last number in the name; for equal or no numbers, committed last. Incomplete ones are skipped with
    a warning (unless ``quiet``); a storage that does not answer is an error, not a reason to go back.
    """
    groups: dict[int, list[str]] = {}
    for entry in backend.list(folder):
        if entry.is_dir and not commit.is_hidden(entry.name):
            groups.setdefault(number(entry.name), []).append(entry.name)
    for key in sorted(groups, reverse=True):
        for name in _by_commit(backend, folder, groups[key]):
            try:
                commit.check(backend, join(folder, name))
            except UnavailableError:
                raise
            except BootseerError as exc:
                if not quiet:
                    _log.warning("not using %s: %s", join(folder, name), exc.message)
                continue
            if not quiet:
                _compare(backend, folder, name)
            return join(folder, name)
    raise NotFoundError(f"no complete checkpoint in {folder or backend.url}")


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


def _compare(backend: Backend, folder: str, name: str) -> None:
    try:
        hint = read(backend, folder)
    except (DataError, NotFoundError) as exc:
        _log.warning("%s; the newest complete checkpoint was looked for", exc.message)
        return
    if hint is not None and hint.checkpoint != name:
        _log.info("%s names %s, the newest complete one is %s", join(folder, NAME), hint.checkpoint, name)
