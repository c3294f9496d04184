"""Observed inputs: the files that a set-up command read, by path and digest, beside the inputs that its key states.
`bootseer.env.observer` finds out which; here they are compared with those of this node."""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import itertools
import os
import re
import stat
import time
from collections.abc import Collection, Mapping
from io import BufferedReader
from pathlib import Path

import msgspec
from blake3 import blake3

from bootseer.config import Config
from bootseer.env import hardware, names, remembered, variables
from bootseer.env.credentials import (
    holds_credentials,
    holds_password,
    remove_credentials,
    remove_from_variable,
    slow_digest,
    without_logins,
)
from bootseer.env.spec import EnvSpec
from bootseer.errors import DataError
from bootseer.kernel import beneath
from bootseer.kernel.opens import state_of
from bootseer.patterns import pattern
from bootseer.wiretypes import json_as

MAX_FILES = 30_000
MAX_SLOW = 256
"""Files and variables of which the digest is a slow one: about 10 ms each."""
MAX_KINDS = 100
"""Patterns of names in a folder; with more all names count."""
SECONDS = 60.0
"""For the digests that a lookup compares."""
PUBLISHING_SECONDS = 1800.0
_TEXT = 1 << 20
_INDEX = 64 << 20
"""Of half a million files; a larger one counts as it is."""
_LARGE = 4 << 20
"""Digests of larger files, which are programs and libraries, are BLAKE3."""
SHARED_MEMORY = "/dev/shm/"
PACKAGES = (".whl", ".tar.gz", ".tgz", ".tar.bz2", ".zip", ".conda", ".crate", ".deb", ".rpm")
"""In a folder that the command listed and took some from, another one may be a newer version."""
SOURCES = (
    *(".py", ".pyi", ".pyx", ".pxd", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".rs", ".go"),
    *(".js", ".mjs", ".cjs", ".jsx", ".ts", ".tsx", *PACKAGES),
)
MEMBERS = ("package.json", "Cargo.toml")
"""A folder with one of these may be a member of the project above it."""
REFS = pattern(r"/refs/(?:heads|tags)(?:/|$)")
INDEX = "/.git/index"
ALL = "."
"""Among the names in a folder: no other one of any kind is there. ``*.conf``: no other one of this kind."""
_KEPT = "inputs.json"


class Observed(msgspec.Struct, frozen=True):
    """Path -> digest (hex) of each file; ``unobserved`` says why the files are not known, and is else empty."""

    files: dict[str, str] = {}
    folders: dict[str, list[str]] = {}
    """The source files in each folder of a project that the command listed: another one there is another input."""
    unobserved: str = ""
    leads: dict[str, tuple[str, str]] = {}
    """Path -> what must be there (a digest, or a kind), and which file of the result leads to it (`leads`)."""
    variables: dict[str, str | None] = {}
    """Those that occur in the text of the files, or name what was read: name -> `remove_from_variable` of the value."""
    names: dict[str, str] = {}
    """Where programs, links and files that were looked for in vain lead (`names`)."""

    @property
    def name(self) -> str:
        """Names the inputs in the store: 64 hex digits."""
        known = [sorted(self.files.items()), sorted(self.folders.items()), bool(self.unobserved)]
        known += [sorted((path, wanted) for path, (wanted, _) in self.leads.items())] if self.leads else []
        known += [{"variables": sorted(self.variables.items())}] if self.variables else []
        known += [{"names": sorted(self.names.items())}] if self.names else []
        return hashlib.sha256(msgspec.json.encode(known)).hexdigest()


class Opened(msgspec.Struct, frozen=True):
    """What a command read, as it ended: ``known``, and ``fixed``, by path, of what is to be examined beside the job."""

    known: Observed = Observed()
    fixed: dict[str, str] = {}

    def digested(self, spec: EnvSpec, config: Config) -> Observed:
        """All of it, once the files are hashed. Raises `DataError` when one is not as it was, or cannot be read."""
        digests = Digests(spec, config, PUBLISHING_SECONDS)
        with remembered.at_hand(config):
            files = {**self.known.files, **{path: digests.of(path) for path in self.fixed}}
        if reason := self.changed(spec):
            raise DataError(reason)
        if unread := [path for path, digest in files.items() if digest == "?"]:
            raise DataError(digests.unread(unread[0]))
        return msgspec.structs.replace(self.known, files=files)

    def changed(self, spec: EnvSpec) -> str:
        """Which of ``fixed`` is not as it was; empty when none."""
        changed = [path for path, was in self.fixed.items() if fixed_state(spec, path) != was]
        return f"{changed[0]}, which the command read, has changed since" if changed else ""

    def keep(self, area: Path) -> None:
        """In the folder ``area`` of the group that shows the result, for `kept`. Raises `OSError`."""
        part = area / f"{_KEPT}.part"
        part.write_bytes(msgspec.json.encode(self))
        os.replace(part, area / _KEPT)

    def kept(self, area: Path) -> Opened:
        """It, or what is known of it by now."""
        try:
            return json_as((area / _KEPT).read_bytes(), Opened)
        except FileNotFoundError:
            return self


class Digests:
    """Digests of files on this node, named as the job of ``spec`` sees them, each computed once. Bounded in seconds and
    in slow digests, as others choose the names that are looked up: what comes later counts as unknown."""

    def __init__(self, spec: EnvSpec, config: Config, seconds: float = SECONDS) -> None:
        self._spec = spec
        self._config = config
        self._plain = not spec.contained
        self._known: dict[str, str] = {}
        self._variables: dict[str, str] = {}
        self._slow_left = MAX_SLOW
        self._until = time.monotonic() + seconds

    def of(self, path: str) -> str:
        """Empty when there is no such regular file, ``"?"`` when it cannot be read or is too much."""
        if path not in self._known:
            self._known[path] = "?" if time.monotonic() > self._until else self._compute(path)
        return self._known[path]

    def unread(self, path: str) -> str:
        """Why the digest of ``path`` is ``"?"``."""
        if self._slow_left < 0:
            return f"more than {MAX_SLOW} files and variables that the command read may hold a password"
        return f"{path}, which the command read, cannot be read"

    def _compute(self, path: str) -> str:
        kind = f"input {os.path.basename(path)!r}"
        with remembered.at_hand(self._config) as facts:
            try:
                if self._plain and (found := facts.known(os.stat(path), kind)):
                    return found
                if (fd := _opened(self._spec, path)) < 0:
                    return ""
                with open(fd, "rb") as file:
                    return facts.of(fd, kind, lambda: self._read(path, file))
            except (FileNotFoundError, NotADirectoryError):
                return ""
            except (OSError, ValueError):
                return "?"

    def _read(self, path: str, file: BufferedReader) -> str:
        """Raises `OSError`, `ValueError` for what has no digest now."""
        size = os.fstat(file.fileno()).st_size
        if path.endswith(INDEX) and size <= _INDEX:
            return hashlib.sha256(_entries(file.read(size) or b"")).hexdigest()
        if size <= _TEXT:
            data = file.read(size + 1)  # in /proc there are files without an end, and without a size
            if len(data or b"") != size or (digest := self.of_text(path, data)) == "?":
                raise ValueError
            return digest
        if size <= _LARGE:
            return hashlib.file_digest(file, "sha256").hexdigest()
        return self._of_large(file)

    def of_text(self, path: str, data: bytes) -> str:
        """The digest of ``path`` when it holds ``data``, of at most 1 MiB."""
        name = os.path.basename(path)
        data = _shown(path, data)
        if not holds_password(name, data):
            return hashlib.sha256(data).hexdigest()
        self._slow_left -= 1
        return slow_digest(data) if self._slow_left >= 0 else "?"

    def _of_large(self, file: BufferedReader) -> str:
        hasher, block = blake3(), memoryview(bytearray(_TEXT))
        while length := file.readinto(block):
            if time.monotonic() > self._until:
                raise TimeoutError
            hasher.update(block[:length])
        return str(hasher.hexdigest())

    def variable(self, name: str) -> str | None:
        """What is compared of the variable ``name``; None when it is not set, ``"?"`` when that is too much."""
        if (value := variables.value(name, self._spec.env)) is None:
            return None
        if name not in self._variables:
            self._slow_left -= 1
            self._variables[name] = remove_from_variable(name, value) if self._slow_left >= 0 else "?"
        return self._variables[name]

    def difference(self, inputs: Observed) -> str:
        """What of ``inputs`` is here otherwise than there; empty when nothing is. A node may lack a file outside of the
        job's folder, as it may lack a tool."""
        work = self._spec.cwd if self._spec.contained else os.path.realpath(self._spec.folder)
        work = "" if work in ("", "/") else f"{work}/"
        tools = tuple(f"{os.path.dirname(path)}/" for path in inputs.files if os.path.basename(path) == "pyvenv.cfg")
        for name, value in sorted(inputs.variables.items()):
            if self.variable(name) != value:
                if name in hardware.SHOWN:
                    return f"{hardware.SHOWN[name]} of this node is another, and the command asks for it"
                return f"{variables.shown(name)}, which decides what the command reads, has another value"
        for path, digest in sorted(inputs.files.items()):
            if (found := self.of(path)) not in ("", digest):
                return f"{path}, which the command reads, changed"
            if not found and work and path.startswith(work) and not path.startswith(tools):
                return f"{path}, which the command reads, is not here"
        for folder, known in sorted(inputs.folders.items()):
            kinds = _kinds(known)
            here = set(sources(self._spec, folder, kinds))
            if new := here - set(known):
                return f"{folder}/{min(new)} is new"
            if kinds and (gone := set(known) - here - kinds) and os.path.isdir(self._spec.on_host(folder)):
                return f"{folder}/{min(gone)} is not here"

        def is_same(here: str, there: str) -> bool:
            if there in inputs.files:
                return self.of(here) == inputs.files[there]
            of_system = here.startswith(names.SYSTEM) and there.startswith(names.SYSTEM)
            return of_system or (not there and are_only_logins(self._spec, here))

        return names.difference(inputs.names, self._spec.env, is_same)


def check_names(inputs: Observed) -> None:
    """Raise `DataError` for more names than are ever published, or such as are never."""
    paths = [*inputs.files, *inputs.folders]
    sources = [name for listed in inputs.folders.values() for name in listed]
    plain = all(
        path.startswith("/") and os.path.normpath(path) == path and not _elsewhere(path) and is_text(path)
        for path in paths
    )
    plain = plain and names.are_plain(inputs.names) and all(map(is_text, itertools.chain(*inputs.names.items())))
    if not plain or any("/" in name or not name or not is_text(name) for name in sources):
        raise DataError("its observed inputs have bad names")
    if not all(name.isidentifier() and name.isascii() for name in inputs.variables):
        raise DataError("its variables have bad names")
    if max(len(inputs.files), len(inputs.folders), len(sources), len(inputs.variables)) > MAX_FILES:
        raise DataError(f"its observed inputs are more than {MAX_FILES} names")
    if len(inputs.names) > names.MOST:
        raise DataError(f"its observed inputs are more than {names.MOST} names that lead elsewhere")


def _elsewhere(path: str) -> bool:
    return path.startswith(("/proc/", "/sys/", "/dev/")) and not path.startswith(SHARED_MEMORY)


def is_text(name: str) -> bool:
    """Whether it is UTF-8, and a name."""
    return "\0" not in name and not any("\ud800" <= char <= "\udfff" for char in name)


def compared(spec: EnvSpec, config: Config, files: Mapping[str, str]) -> list[tuple[str, str]]:
    """(path, ``same``, ``changed`` or ``absent``) of each file on this node."""
    digests = Digests(spec, config)
    states = {path: digests.of(path) for path in sorted(files)}
    return [
        (path, "same" if found == files[path] else "changed" if found else "absent") for path, found in states.items()
    ]


def _kinds(names: Collection[str]) -> set[str]:
    found = {name for name in names if name == ALL or "*" in name or "?" in name}
    return found if len(found) <= MAX_KINDS else {ALL}


def sources(spec: EnvSpec, folder: str, kinds: Collection[str] = ()) -> list[str]:
    """The source files and packages in ``folder``, and what is of these ``kinds``, or its branches and tags, as the job
    sees it, by name; none when there is no such folder. Below what a container is shown no link is followed."""
    host = spec.on_host(folder)
    source = spec.root_of(host) if spec.contained and host else ""
    try:
        with contextlib.ExitStack() as stack:
            base = stack.enter_context(beneath.folder(source)) if source else None
            fd = stack.enter_context(beneath.folder(os.path.relpath(host, source) if source else host, root=base))
            items = stack.enter_context(os.scandir(fd))
            found, shape = [], re.compile("|".join(map(fnmatch.translate, kinds)) or r"(?!)")
            for item in items:
                of_kind = ALL in kinds or (shape.match(item.name) and not item.is_dir())
                if REFS.search(folder) or (of_kind and item.name != "__pycache__"):
                    found.append(item.name)
                elif item.is_dir(follow_symlinks=False):
                    with contextlib.suppress(OSError), beneath.folder(item.name, root=fd) as inner:
                        if not {"__init__.py", *MEMBERS}.isdisjoint(os.listdir(inner)):
                            found.append(item.name)
                elif item.name.endswith(SOURCES) and item.is_file(follow_symlinks=not source):
                    found.append(item.name)
            return sorted(found)
    except (OSError, ValueError):
        return []


def _shown(path: str, data: bytes) -> bytes:
    """``data`` without the credentials that do not count."""
    data = without_logins(path, data)
    if not holds_credentials(path) and not path.endswith(".py") and is_script(data):
        return remove_credentials(data.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")
    return data


def _entries(index: bytes) -> bytes:
    """What git's index says of each file, without times and the like, which git renews when it only looks."""
    if index[:4] != b"DIRC" or index[4:8] not in (b"\0\0\0\2", b"\0\0\0\3"):
        return index
    found, at = [], 12
    for _ in range(int.from_bytes(index[8:12])):
        flags = int.from_bytes(index[at + 60 : at + 62])
        name = at + (64 if flags & 0x4000 else 62)
        end = index.find(b"\0", name)
        if end < name:
            return index
        found.append(index[at + 24 : at + 28] + index[at + 40 : at + 60] + index[name:end])
        at += (end - at) // 8 * 8 + 8
    return b"\0".join(found)


def are_only_logins(spec: EnvSpec, path: str) -> bool:
    """Whether ``path`` is settings of an installer with nothing in them but logins: as if there were none."""
    data = text_of(spec, path)
    return bool(data) and not without_logins(path, data)


def is_script(data: bytes) -> bool:
    """Whether it is text, and no program or data."""
    return b"\0" not in data[:8192]


def _opened(spec: EnvSpec, path: str) -> int:
    """A descriptor of the regular file ``path``, as the job sees it; -1 for what is none, or lies in a container's
    image. Nothing else is opened, and below what a container is shown no link is followed. Raises `OSError`."""
    with contextlib.ExitStack() as stack:
        host = spec.on_host(path)
        if not host:
            return -1
        source = spec.root_of(host) if spec.contained else ""
        if source and os.path.relpath(host, source) != ".":
            base = stack.enter_context(beneath.folder(source))
            held = beneath.open_at(base, os.path.relpath(host, source), os.O_PATH)
        else:
            held = os.open(host, os.O_PATH | os.O_CLOEXEC)
        stack.callback(os.close, held)
        regular = stat.S_ISREG(os.fstat(held).st_mode)
        return os.open(beneath.shown(held), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK) if regular else -1


def fixed_state(spec: EnvSpec, path: str) -> str:
    """What stays equal as long as a file's content does, at little cost: a digest of a small one, the state of a large
    one. Empty where that says nothing, or it is no file."""
    try:
        if (fd := _opened(spec, path)) < 0:
            return ""
        with open(fd, "rb") as file:
            if os.fstat(fd).st_size <= _TEXT:
                return hashlib.sha256(file.read(_TEXT)).hexdigest()
            return repr(state_of(fd)) if remembered.has_times(fd) else ""
    except (OSError, ValueError):
        return ""


def text_of(spec: EnvSpec, path: str) -> bytes:
    """What ``path`` holds; nothing of a large one, or none."""
    with contextlib.suppress(OSError, ValueError):
        if (fd := _opened(spec, path)) >= 0:
            with open(fd, "rb") as file:
                return file.read(_TEXT) if os.fstat(fd).st_size <= _TEXT else b""
    return b""
