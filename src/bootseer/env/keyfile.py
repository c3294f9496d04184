"""Key files: what a file or folder holds that decides about the command, read so that nothing else of the host gets in.

Who writes a requirements file chooses what it includes, and whoever may write beside it what a name leads to. So a
container's files are opened below the folder of this host that they lie in, with no link followed by then. Without one
root reads, outside of the job's folder and those of the files that were named, only what everybody may read. No text is
kept of what lies outside, nor as root of what is not root's own or not for everybody. Nothing waits for a pipe."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import logging
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from bootseer import folders
from bootseer.closing import descriptor
from bootseer.config import Config
from bootseer.env import remembered
from bootseer.env.canonical import sha256_of
from bootseer.env.credentials import (
    holds_credentials,
    holds_password,
    redact,
    remove_credentials,
    slow_digest,
    without_logins,
)
from bootseer.env.spec import EnvSpec, resolve_in
from bootseer.errors import ConfigError
from bootseer.kernel import beneath, links

log = logging.getLogger(__name__)

TEXT_LIMIT = 64 << 10
_WHOLE = 16 << 20
"""Larger files are hashed as they are."""
_SHORT = 64
"""Bytes of a file that may be nothing but a password."""
_MOST = 8 << 30
"""Bytes of all key files together."""
MOST = 1000
_SEARCHED = 4 << 20
"""Characters of all texts in which names are looked for."""
_FOLDER_LIMIT = 10_000
_OF_TOOLS = re.compile(r"\.git|__pycache__")
_BUILT = re.compile(r"\.git|__pycache__|build|dist|target|node_modules|\.?venv|\.[a-z]+(?:_cache|ox)|.*\.egg-info")
_INCLUDE = re.compile(r"(?m)^[^\S\n]*(?:-r|-c|--requirement|--constraint)[ =]?\s*(\S+)")


class FileInput(msgspec.Struct, frozen=True):
    """Content of one script or key file. ``digest`` is its SHA-256, without the credentials of URLs and the like, or a
    slow hash of what may hold a secret; which of them depends on the content and the file's name alone. ``text`` is for
    explanations, and redacted."""

    digest: str
    size: int
    text: str = ""


class KeyFiles:
    """The files of ``spec`` as they come, by name: `add` for each that is named."""

    def __init__(self, spec: EnvSpec, config: Config | None = None) -> None:
        self.found: dict[str, FileInput] = {}
        self.texts: dict[str, str] = {}
        """As they were read, for what they name; not of credentials."""
        self._config = config
        self._spec = spec
        self._left, self._of_projects = _MOST, _FOLDER_LIMIT
        self._to_search = _SEARCHED

    def add(self, name: str, path: Path, *, required: bool, named: bool = True) -> None:
        """Also what the file includes, and what that includes. ``named``: by the caller, not by another file. Raises
        `ConfigError` when a ``required`` one cannot be read; another is left out then."""
        try:
            if required and path.is_dir():
                self.found[name] = self._folder(path, _OF_TOOLS, _FOLDER_LIMIT)
            else:
                self._file(name, path, self._places(path if named else self._spec.folder / "x"))
        except OSError as exc:
            if required:
                raise ConfigError(f"cannot read key file {path}: {exc.strerror}") from None
            log.info("%s does not count for the key: %s", path, exc.strerror)
        except ConfigError as exc:
            if required:
                raise
            log.info("%s does not count for the key: %s", path, exc)

    def add_project(self, name: str, path: Path) -> None:
        """A folder of sources, without what builds leave in it; not one that cannot be read. All together have at most
        as many files as one key folder, as a start waits for them: what comes later does not count."""
        try:
            self.found[name] = self._folder(path, _BUILT, self._of_projects)
        except (OSError, ConfigError) as exc:
            self._of_projects = 0 if isinstance(exc, ConfigError) else self._of_projects
            log.warning("%s does not count for the key: %s", path, exc)

    def _file(self, name: str, path: Path, places: tuple[str, ...]) -> None:
        with self._opened(path, places) as (fd, shown):
            content, text = self._content(str(path), fd, shown)
        self.found[name] = content
        if not holds_credentials(str(path)):
            self.texts[name] = text[: self._to_search]
            self._to_search -= len(self.texts[name])
        if path.suffix not in (".txt", ".in"):
            return
        for include in itertools.islice(dict.fromkeys(_INCLUDE.findall(text)), MOST):
            inner = os.path.normpath(os.path.join(os.path.dirname(name), include))
            if inner in self.found or "://" in include or "\0" in include or len(self.found) >= MOST:
                continue
            try:
                self._file(inner, Path(os.path.normpath(path.parent / include)), places)
            except (OSError, ConfigError) as exc:
                why = exc.strerror if isinstance(exc, OSError) else exc
                log.warning("%s, which %s includes, does not count for the key: %s", include, path, why)

    def _places(self, path: Path) -> tuple[str, ...]:
        """The folders whose files are the job's: its own, and that of the file it names; in a container the folder of
        this host that it lies in."""
        if self._spec.contained and (root := self._spec.root_of(path)):
            return (root,)
        return tuple(_settled(folder) for folder in (self._spec.folder, (self._spec.folder / path).parent))

    @contextlib.contextmanager
    def _opened(self, path: Path, places: tuple[str, ...]) -> Iterator[tuple[int, bool]]:
        """A descriptor of the regular file ``path``, and whether its text may be shown: it is one of the job's that
        nobody need guess. Raises `OSError`."""
        if len(places) == 1:
            with beneath.folder(places[0]) as base:
                inner = os.path.relpath(path, places[0])
                if inner.startswith(".."):
                    raise OSError(errno.EXDEV, f"it lies outside of {places[0]}", str(path))
                real = os.path.relpath(resolve_in(Path(places[0]), inner), places[0])
                fd, inside = beneath.open_regular(real, root=base), True
        else:
            fd = _open_plainly(path)
            real = os.readlink(beneath.shown(fd))
            inside = any(real.startswith(place.rstrip("/") + "/") for place in places)
        try:
            mode, owner = os.fstat(fd).st_mode, os.fstat(fd).st_uid
            public = os.geteuid() != 0 or bool(mode & 0o004)
            if os.geteuid() == 0 and not inside and not (public and folders.enterable(Path(real))):
                raise OSError(errno.EACCES, "it is private, and lies outside of the job's folder", str(path))
            yield fd, inside and public and (os.geteuid() != 0 or links.believed(owner))
        finally:
            os.close(fd)

    def _content(self, path: str, fd: int, shown: bool) -> tuple[FileInput, str]:
        """The input, and the text in which includes are looked for."""
        name = os.path.basename(path)
        size = os.fstat(fd).st_size
        self._take(size)
        if size > _WHOLE:
            return FileInput(remembered.digest(self._config, fd), size), ""
        data = b""
        while more := os.read(fd, _WHOLE + 1 - len(data)):
            data += more
        data = without_logins(path, data)

        def slow(data: bytes | str) -> str:
            return remembered.fact(self._config, fd, f"key file {name!r}", lambda: slow_digest(data))

        if holds_credentials(path):
            return FileInput(slow(data), len(data)), ""
        try:
            text = remove_credentials(data.decode()) if b"\0" not in data[:8192] else None
        except UnicodeDecodeError:
            text = None
        raw = data.decode(errors="replace") if b"\0" not in data else ""
        if text is None:
            guessable = len(data) <= _SHORT or holds_password(name, data)
            return FileInput(slow(data) if guessable else hashlib.sha256(data).hexdigest(), len(data)), raw
        size = len(text.encode())
        seen = redact(text) if size <= TEXT_LIMIT else ""
        guessable = size <= _SHORT or seen != text or holds_password(name, text.encode())
        digest = slow(text) if guessable else hashlib.sha256(text.encode()).hexdigest()
        return FileInput(digest, size, seen if shown else ""), raw

    def _take(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise OSError(errno.EFBIG, f"key files have more than {_MOST >> 30} GiB")

    def _folder(self, path: Path, without: re.Pattern[str], most: int) -> FileInput:
        """A folder as one input: hash over the names and contents of its files, links as text; ``without`` folders of
        such names. Raises `ConfigError` for more than ``most`` files."""
        rows: list[Any] = []
        size = 0
        root = self._spec.root_of(path) if self._spec.contained else ""
        with contextlib.ExitStack() as stack:
            base = stack.enter_context(beneath.folder(root)) if root else None
            real = os.path.relpath(resolve_in(Path(root), os.path.relpath(path, root)), root) if root else path
            top = stack.enter_context(beneath.folder(real, root=base))
            if base is None:
                self._refuse_private(path, top)
            shown = os.geteuid() != 0 or links.believed(os.fstat(top).st_uid)
            todo, folders_seen = [""], 0
            while todo:  # os.fwalk opens a name that was a folder a moment ago, and waits for a pipe
                folder = todo.pop()
                with beneath.folder(folder, root=top) as fd, os.scandir(fd) as found:
                    kept = (one for one in found if not without.fullmatch(one.name) or not one.is_dir())
                    items = sorted(itertools.islice(kept, most + 1), key=lambda item: item.name)
                    inner = [one.name for one in items if one.is_dir(follow_symlinks=False)]
                    for name in (one.name for one in items if not one.is_dir(follow_symlinks=False)):
                        digest, length = self._row(name, fd)
                        size += length
                        rows.append([os.path.join(folder, name), digest])
                        if len(rows) > most:
                            break
                todo += [os.path.join(folder, name) for name in reversed(inner)]
                folders_seen += 1
                if max(len(items), len(rows), len(todo) + folders_seen) > most:
                    hint = "name fewer files"
                    raise ConfigError(f"key folder {path} holds more than {most} files", hint=hint)
        self._of_projects -= len(rows) if without is _BUILT else 0
        listing = "".join(f"{found[:16]} {name}\n" for name, found in rows) if shown else ""
        return FileInput(sha256_of(rows), size, listing[:TEXT_LIMIT])

    def _refuse_private(self, path: Path, top: int) -> None:
        """Raise `PermissionError` when root is led to a folder that is not the job's and not everybody's."""
        real, mode = os.readlink(beneath.shown(top)), os.fstat(top).st_mode
        inside = any(f"{real}/".startswith(f"{place.rstrip('/')}/") for place in self._places(path))
        if os.geteuid() == 0 and not inside and not (mode & 0o005 == 0o005 and folders.enterable(Path(real))):
            raise OSError(errno.EACCES, "it is private, and lies outside of the job's folder", str(path))

    def _row(self, name: str, folder: int) -> tuple[str, int]:
        kind = os.lstat(f"{beneath.shown(folder)}/{name}").st_mode
        if stat.S_ISLNK(kind):
            text = os.fsencode(os.readlink(name, dir_fd=folder))
            return slow_digest(text) if holds_password(name, text) else hashlib.sha256(text).hexdigest(), len(text)
        if not stat.S_ISREG(kind):
            return "no file", 0
        with open(beneath.open_regular(name, root=folder), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            self._take(size)
            if size > _WHOLE:
                return remembered.digest(self._config, file.fileno()), size
            data = file.read(_WHOLE + 1)
        return slow_digest(data) if holds_password(name, data) else hashlib.sha256(data).hexdigest(), len(data)


def _settled(folder: Path) -> str:
    """The folder by its real path; as root with those links alone in it that nobody else can change."""
    if os.geteuid() == 0:
        with contextlib.suppress(ConfigError):
            return str(folders.settled(folder))
        return os.path.abspath(folder)
    return os.path.realpath(folder)


def _open_plainly(path: Path) -> int:
    """Links are followed; nothing but a regular file is opened, not even for a moment."""
    with descriptor(os.open(path, os.O_PATH | os.O_CLOEXEC)) as held:
        if not stat.S_ISREG(os.fstat(held).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        return os.open(beneath.shown(held), os.O_RDONLY | os.O_CLOEXEC)
