"""Observed inputs: the files that a set-up command read, by path and digest, beside the inputs that its key states.

What counts: every regular file that the command opened, unless it made the file itself, or the file lies in a target, a
folder of the system, a cache of packages or the standard library of an interpreter, or holds nothing but credentials.
Of byte code its source counts.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import logging
import os
import select
import stat
import time
from collections.abc import Collection, Iterator, Mapping
from io import BufferedReader
from pathlib import Path
from types import TracebackType

import msgspec
from blake3 import blake3

import bootseer
from bootseer.config import Config
from bootseer.env import caches, names, remembered, variables
from bootseer.env.credentials import (
    holds_credentials,
    holds_password,
    only_credentials,
    remove_credentials,
    remove_from_variable,
    slow_digest,
)
from bootseer.env.spec import EnvSpec
from bootseer.errors import DataError
from bootseer.kernel import beneath
from bootseer.kernel.opens import FileState, Opens, state_of, waiting
from bootseer.patterns import pattern
from bootseer.wiretypes import json_as

log = logging.getLogger(__name__)

MAX_FILES = 30_000
MAX_SLOW = 64
"""Files of which the digest is a slow one: about 10 ms each."""
MAX_SLOW_NAMES = 256
"""The same of variables."""
SECONDS = 60.0
"""For the digests that a lookup compares."""
_PUBLISHING_SECONDS = 1800.0
_TEXT = 1 << 20
_LARGE = 4 << 20
"""Digests of larger files, which are programs and libraries, are BLAKE3."""
_SYSTEM = ["/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/etc", "/boot", "/proc", "/sys", "/dev", "/run"]
_SYSTEM += ["/var/lib", "/var/cache"]
_SHARED_MEMORY = "/dev/shm/"
_STANDARD_LIBRARY = pattern(r"/lib/python3\.\d+/(?!(?:site|dist)-packages/)")
_INSTALLED = pattern(r"/(?:site|dist)-packages/.*\.pyi?$")
"""Code that an index shows to all: no secret of this node's is in it."""
_BYTE_CODE = pattern(r"__pycache__/([^/.]+)\.[^/]*\.pyc(?:\.\d+)?$")
_OF_TOOLS = pattern(r"/\.git/(?:index|.*\.lock)$|/[^/]+\.egg-info/")
"""What git and builds keep in a source tree for themselves, and change when they only look."""
_BUILT = pattern(r"/build/(?:lib|temp|bdist)\b[^/]*/|/(?:debug|release)/(?:deps|incremental|\.fingerprint)/")
"""What builds of Python packages and of cargo leave."""
_ELSEWHERE = {"docker", "podman", "apptainer", "singularity", "enroot", "bwrap", "unshare", "nsenter", "runc", "crun"}
_ELSEWHERE |= {"nerdctl", "ctr", "buildah", "systemd-run", "systemd-nspawn", "nsjail", "firejail", "srun"}
"""Programs that work where opens are not seen: in mounts of their own, or through a service."""
_OF_PACKAGES = pattern(
    r"/(?:(?:site|dist)-packages|node_modules|profile\.d"
    r"|\.(?:venv|cache|local|git|config|npm|nvm|cargo|rustup|pyenv|conda|mamba|tox|nox|eggs))/"
)
"""Below these, in the job's folder or elsewhere, lie programs, in whose texts no variables are looked for."""
_MOVES = pattern(
    rb"\brename\w*\s*\((?!\s*\w+\s*=)|\bos\.replace|\.replace\([^,()]*\)|\b(?:os|fs)\.link|hardlink_to|\blink(?:at)?\s*\("
    rb"|\bln\s+(?!\s|-\w*s|--s)|\bcp\s+(?:-\S+\s+)*-(?:\w*l|-link)"
)
_COMMENT = pattern(rb"(?m)(?:^|(?<=\s))#.*$")
MAX_VARIABLES = 10_000
_SEARCHED = 4 << 20
"""Bytes of scripts in which names are looked for."""
_LOOKED_AT, _LOOK_SECONDS = 64 << 20, 5.0
"""Bytes of files that the command read, and seconds, that are spent to look for variables: the job waits."""
_PROJECT = {"pyproject.toml", "setup.py", "setup.cfg"}
_PACKAGES = (".whl", ".tar.gz", ".tgz", ".tar.bz2", ".zip", ".conda", ".crate", ".deb", ".rpm")
"""In a folder that the command listed and took some from, another one may be a newer version."""
_SOURCES = (".py", ".pyi", ".pyx", ".pxd", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".rs", *_PACKAGES)
_REFS = pattern(r"/refs/(?:heads|tags)(?:/|$)")
_ALL = "."
"""Among the names in a folder: no other one of any kind is there. ``*.conf``: no other one of this kind."""
_KEPT = "inputs.json"
_NEVER = {errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EINVAL}
"""A kernel or a container that lets nobody observe; other errors pass."""
CLOCK_REALTIME_COARSE = 5


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
    """Where programs, links and files that were looked for in vain lead (`names.looked_up`)."""

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
        digests = Digests(spec, config, _PUBLISHING_SECONDS)
        with remembered.at_hand(config):
            files = {**self.known.files, **{path: digests.of(path) for path in self.fixed}}
        if reason := self.changed(spec):
            raise DataError(reason)
        if unread := [path for path, digest in files.items() if digest == "?"]:
            raise DataError(f"{unread[0]}, which the command read, cannot be read")
        return msgspec.structs.replace(self.known, files=files)

    def changed(self, spec: EnvSpec) -> str:
        """Which of ``fixed`` is not as it was; empty when none."""
        changed = [path for path, was in self.fixed.items() if _fixed(spec, path) != was]
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
        self._slow_left, self._names_left = MAX_SLOW, MAX_SLOW_NAMES
        self._until = time.monotonic() + seconds

    def of(self, path: str) -> str:
        """Empty when there is no such regular file, ``"?"`` when it cannot be read or is too much."""
        if path not in self._known:
            self._known[path] = "?" if time.monotonic() > self._until else self._compute(path)
        return self._known[path]

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
        data = _shown(name, data)
        if _INSTALLED.search(path) or not holds_password(name, data):
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
        if (value := self._spec.env.get(name)) is None:
            return None
        if name not in self._variables:
            self._names_left -= 1
            self._variables[name] = remove_from_variable(name, value) if self._names_left >= 0 else "?"
        return self._variables[name]

    def difference(self, inputs: Observed) -> str:
        """What of ``inputs`` is here otherwise than there; empty when nothing is. A node may lack a file outside of the
        job's folder, as it may lack a tool."""
        work = self._spec.cwd if self._spec.contained else os.path.realpath(self._spec.folder)
        work = "" if work in ("", "/") else f"{work}/"
        tools = tuple(f"{os.path.dirname(path)}/" for path in inputs.files if os.path.basename(path) == "pyvenv.cfg")
        for name, value in sorted(inputs.variables.items()):
            if self.variable(name) != value:
                return f"the variable {name}, which decides what the command reads, has another value"
        for path, digest in sorted(inputs.files.items()):
            if (found := self.of(path)) not in ("", digest):
                return f"{path}, which the command reads, changed"
            if not found and work and path.startswith(work) and not path.startswith(tools):
                return f"{path}, which the command reads, is not here"
        for folder, known in sorted(inputs.folders.items()):
            kinds = _kinds(known)
            here = set(_sources(self._spec, folder, kinds))
            if new := here - set(known):
                return f"{folder}/{min(new)} is new"
            if kinds and (gone := set(known) - here - kinds) and os.path.isdir(self._spec.on_host(folder)):
                return f"{folder}/{min(gone)} is not here"
        is_same = lambda here, there: there in inputs.files and self.of(here) == inputs.files[there]  # noqa: E731
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
    return path.startswith(("/proc/", "/sys/", "/dev/")) and not path.startswith(_SHARED_MEMORY)


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
    return {name for name in names if name == _ALL or name.startswith("*.")}


def _sources(spec: EnvSpec, folder: str, kinds: Collection[str] = ()) -> list[str]:
    """The source files and packages in ``folder``, and what is of these ``kinds``, or its branches and tags, as the job
    sees it, by name; none when there is no such folder. Below what a container is shown no link is followed."""
    host = spec.on_host(folder)
    source = spec.root_of(host) if spec.contained and host else ""
    try:
        with contextlib.ExitStack() as stack:
            base = stack.enter_context(beneath.folder(source)) if source else None
            fd = stack.enter_context(beneath.folder(os.path.relpath(host, source) if source else host, root=base))
            items = stack.enter_context(os.scandir(fd))
            found, kinds = [], tuple(kind.lstrip("*") for kind in kinds)
            for item in items:
                of_kind = _ALL in kinds or (item.name.endswith(kinds) and not item.is_dir())
                if _REFS.search(folder) or (of_kind and item.name != "__pycache__"):
                    found.append(item.name)
                elif item.is_dir(follow_symlinks=False):
                    with contextlib.suppress(OSError), beneath.folder(item.name, root=fd) as inner:
                        os.stat("__init__.py", dir_fd=inner, follow_symlinks=False)
                        found.append(item.name)
                elif item.name.endswith(_SOURCES) and item.is_file(follow_symlinks=not source):
                    found.append(item.name)
            return sorted(found)
    except (OSError, ValueError):
        return []


def _shown(name: str, data: bytes) -> bytes:
    """``data`` without the credentials that do not count."""
    if not holds_credentials(name) and not name.endswith(".py") and _is_script(data):
        return remove_credentials(data.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")
    return data


def _is_script(data: bytes) -> bool:
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


def _fixed(spec: EnvSpec, path: str) -> str:
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


def _text(spec: EnvSpec, path: str) -> bytes:
    """What ``path`` holds; nothing of a large one, or none."""
    with contextlib.suppress(OSError, ValueError):
        if (fd := _opened(spec, path)) >= 0:
            with open(fd, "rb") as file:
                return file.read(_TEXT) if os.fstat(fd).st_size <= _TEXT else b""
    return b""


def _state(spec: EnvSpec, path: str) -> FileState | None:
    try:
        return state_of(spec.on_host(path))
    except OSError:
        return None


class Observer:
    """Observes the command of ``spec``, which is run inside a ``with``; then `result` says what it read."""

    def __init__(self, spec: EnvSpec, config: Config) -> None:
        self.unobserved = ""
        """Why it cannot be observed by nature: another start of it will not be, either."""
        self._failure = ""
        """By which accident nothing is to be published."""
        self._opens: Opens | None = None
        self._found: dict[str, FileState] = {}
        self._before: dict[str, bytes] = {}
        """What those held that the command itself has changed."""
        self._spec, self._config, self.began = spec, config, 0
        self._excluded = _excluded(spec, config)
        self._work = spec.cwd if spec.contained else os.path.realpath(spec.folder)
        if spec.contained and not spec.mounts:
            return  # all it reads is in its image
        if os.geteuid() != 0:
            self.unobserved = "that needs root"
        else:
            self._opens = Opens([inside for _, inside in spec.mounts] if spec.contained else (), self._excluded)

    def __enter__(self) -> Observer:
        self.began = _next_tick()
        if self._opens:
            try:
                self._opens.begin()
            except OSError as exc:
                self._opens = None
                if exc.errno in _NEVER:
                    self.unobserved = f"the kernel refused it: {exc.strerror}"
                else:
                    self._failure = f"what the command reads cannot be observed now: {exc.strerror}"
        if self.unobserved:
            log.warning("what the command reads is not observed: %s; only its stated inputs count", self.unobserved)
        self._waiting, self._ended = _waiting_input(self._opens is not None)
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        if self._opens:
            self._opens.end()
            if kind is None:
                self._settle(self._opens)
        left, ended = _waiting_input(self._opens is not None)
        if left < self._waiting or (ended and not self._ended and not left):
            self._failure = "the command read its standard input, which is no file that is compared"

    def _settle(self, opens: Opens) -> None:
        """What counts of what was opened, and whether it is still as it was, before the job may write."""
        programs = opens.started & _ELSEWHERE
        self.unobserved = opens.beyond or (f"it started {min(programs)}" if programs else "")
        self._failure = opens.failure and f"what the command read is not known: {opens.failure}"
        if not self.unobserved and not self._failure:
            try:
                texts = [text.decode("utf-8", "replace") for text in self._scripts() if caches.OPTION in text]
                named = [folder for text in texts for folder in caches.named(text, self._spec.env, self._work)]
                self._excluded += tuple(f"{folder}/" for one in named for folder in {one, os.path.realpath(one)})
                self._found = self._inputs(opens)
            except DataError as exc:
                self._failure = exc.message
            except Exception as exc:  # of what others wrote: the job goes on
                self._failure = f"what the command read cannot be examined: {exc!r}"

    def result(self) -> Opened:
        """Raises `DataError` when it is not known what the command read: by an accident, or because a file changed
        after the command had opened it. Slow digests, and the hashing of large files, are left for later."""
        if self._failure:
            raise DataError(self._failure)
        if self._opens is None or self.unobserved:
            if self._opens:
                log.warning("what the command read is not known: %s; only its stated inputs count", self.unobserved)
            return Opened(Observed(unobserved=self.unobserved))
        folders = self._folders(self._opens, self._found)
        texts = itertools.chain(self._found, folders, *folders.values())
        if any("\udc80" <= char <= "\udcff" for char in "".join(texts)):
            return Opened(Observed(unobserved="it read a file whose name is not UTF-8"))
        if max(len(self._found), sum(map(len, folders.values()))) > MAX_FILES:
            raise DataError(f"the command read more than {MAX_FILES} files that count")
        fixed = {path: _fixed(self._spec, path) for path in self._found if path not in self._before}
        digests = Digests(self._spec, self._config, _PUBLISHING_SECONDS)
        files = {path: digests.of(path) for path, was in fixed.items() if not was}
        files |= {path: digests.of_text(path, data) for path, data in self._before.items()}
        used = self._used(self._opens, digests)
        for path, state in self._found.items():
            if path not in self._before and _state(self._spec, path) != state:
                raise DataError(f"{path} changed while the command ran")
            if files.get(path) == "?":
                raise DataError(f"{path}, which the command read, cannot be read")
        known = Observed(files, folders, variables=used, names=self._names(self._opens))
        return Opened(known, {path: was for path, was in fixed.items() if was})

    def moves(self) -> bool:
        """Whether the command's text, or one that it read, may rename or link something, as far as is known: into an
        overlay nothing can be, from outside."""
        return any(_MOVES.search(_COMMENT.sub(b"", text)) for text in self._scripts())

    def _scripts(self) -> Iterator[bytes]:
        """The command's own text, and those that it read."""
        yield os.fsencode(" ".join(self._spec.command))
        for path, data in self._opens.texts.items() if self._opens else ():
            if self._counts(path) and not self._of_package(path):
                source = _BYTE_CODE.sub(r"\1.py", path)
                text = data if source == path else _text(self._spec, source)
                if _is_script(text):
                    yield text

    def _used(self, opens: Opens, digests: Digests) -> dict[str, str | None]:
        """The variables that occur in what was read. Of a project's sources, which an installer only copies, those
        that were imported are looked at, and those beside its settings."""
        used = set[str]()
        imported = {_BYTE_CODE.sub(r"\1.py", path) for path in opens.seen if ".pyc" in path}
        projects = {os.path.dirname(path) for path in self._found if os.path.basename(path) in _PROJECT}
        copied = tuple(f"{folder}/" for folder in projects)
        left, until = _LOOKED_AT, time.monotonic() + _LOOK_SECONDS
        for path in self._found:
            is_source = path.endswith(_SOURCES) and path.startswith(copied)
            if not self._of_package(path) and not (
                is_source and path not in imported and os.path.dirname(path) not in projects
            ):
                data = opens.texts.get(path) or _text(self._spec, path)
                left -= len(data)
                if left < 0 or time.monotonic() > until:
                    raise DataError("the command read too many files to look for variables in them")
                if _is_script(data):
                    used |= variables.mentioned(data.decode("utf-8", "replace"), self._spec.env)
        if not self._spec.contained:
            used |= names.holding(self._spec.env, self._found, self._work)
        found = {name: digests.variable(name) for name in sorted(used)}
        if len(found) > MAX_VARIABLES or "?" in found.values():
            raise DataError("the files that the command read name too many variables")
        return found

    def _names(self, opens: Opens) -> dict[str, str]:
        if self._spec.contained:
            return {}
        left, texts = _SEARCHED, list[str]()
        for data in self._scripts():
            texts.append(data[:left].decode("utf-8", "replace"))
            left -= len(data[:left])
        found = names.looked_up(texts, opens.started, self._spec.env, self._work, self._found, self._counts)
        return {name: real for name, real in found.items() if is_text(name + real)}

    def _inputs(self, opens: Opens) -> dict[str, FileState]:
        out: dict[str, FileState] = {}
        for path, state in opens.seen.items():
            if not self._counts(path):
                continue
            now, is_written = _state(self._spec, path), state.file in opens.written
            changed = now != state or (is_written and state.ctime >= self.began)
            changed = changed or state.mtime >= self.began > state.born  # by others, before or after it was opened
            if changed and (state.born >= self.began or (is_written and state.file not in opens.read)):
                continue  # the command made it, or only wrote to it, as to a log
            if is_written and not state.born:  # NFS, ramfs, tmpfs of old kernels
                self.unobserved = f"the file system of {path} does not tell what the command made"
                continue
            was = opens.texts.get(path)
            if changed and now and now.mtime == state.mtime < self.began and was == _text(self._spec, path):
                changed, state = False, now  # it has another mode, or one more name, as when it is copied by links
            if changed:
                if not now or now.file not in opens.written or path not in opens.texts or state.mtime >= self.began:
                    raise DataError(f"{path} changed while the command ran")
                self._before[path] = opens.texts[path]
            if _BUILT.search(path):  # instead of its source, of which only the time was compared
                raise DataError(f"{path} is left from an earlier build; remove the results of that")
            source = _BYTE_CODE.sub(r"\1.py", path)
            if source != path and (origin := _state(self._spec, source)):
                out.setdefault(source, opens.seen.get(source, origin))
            else:
                out[path] = state
        return out

    def _folders(self, opens: Opens, found: Mapping[str, FileState]) -> dict[str, list[str]]:
        roots = tuple(os.path.dirname(path) + "/" for path in found if os.path.basename(path) in _PROJECT)
        indexes = {os.path.dirname(path) for path in found if path.endswith(_PACKAGES)}
        listed = {folder for folder in opens.folders if (folder + "/").startswith(roots) or folder in indexes}
        refs = {folder for folder in opens.folders if _REFS.search(folder)}
        packed = [path for path in found if os.path.basename(path) == "packed-refs" and not self._spec.contained]
        for folder in (Path(path).parent / "refs" / kind for path in packed for kind in ("heads", "tags")):
            refs |= {str(folder), *(one for one, _, _ in os.walk(folder))}  # what is there counts before what is packed
        out = {folder: _sources(self._spec, folder) for folder in listed if self._counts(folder + "/.")}
        out = {folder: inside for folder, inside in out.items() if inside}
        scripts = (os.path.dirname(os.path.join(self._work, word)) for word in self._spec.command)
        own = [f"{os.path.realpath(path)}/" for path in (self._work, *scripts)]  # Python lists them when it imports
        others = (one for one in opens.folders if not any(path.startswith(f"{one}/") for path in own))
        out |= {folder: inside for folder in others if (inside := self._copied(folder, opens))}
        return out | {folder: _sources(self._spec, folder) for folder in refs if self._counts(folder + "/.")}

    def _copied(self, folder: str, opens: Opens) -> list[str]:
        """The names in a folder all of which the command has read, as with ``cp -r``, or all of a kind, as with ``cat
        *.conf``; nothing where it did not."""
        if self._spec.contained or not self._counts(folder + "/.") or self._of_package(folder + "/"):
            return []
        kinds, unread, listed = set[str](), set[str](), True
        for name in _sources(self._spec, folder, [_ALL]):
            path = os.path.join(folder, name)
            if os.path.isfile(path):
                known = path in self._found or os.path.islink(path)
                (kinds if known else unread).add(f"*{os.path.splitext(name)[1]}")
            elif not os.path.islink(path):
                listed = listed and path in opens.folders
        if listed and not unread and (kinds or any(path.startswith(f"{folder}/") for path in self._found)):
            return [_ALL, *_sources(self._spec, folder, [_ALL])]
        kinds -= {*unread, "*"}
        return [*kinds, *_sources(self._spec, folder, kinds)] if kinds else []

    def _of_package(self, path: str) -> bool:
        """Whether it is of a program; where the job's own folder lies says nothing of it."""
        return bool(_OF_PACKAGES.search(path.removeprefix(self._work)))

    def _counts(self, path: str) -> bool:
        if path.startswith(self._excluded) and not path.startswith(_SHARED_MEMORY):
            return False
        own = _STANDARD_LIBRARY.search(path) or _OF_TOOLS.search(path) or caches.CONTENT in path
        return not own and not only_credentials(os.path.basename(path))


def _excluded(spec: EnvSpec, config: Config) -> tuple[str, ...]:
    own = [config.cache_dir, config.state_dir, str(Path(bootseer.__file__).parent)]
    work = ""
    with contextlib.suppress(FileNotFoundError):  # it may be in a target that was taken down just now
        work = str(spec.folder)
    folders = [*_SYSTEM, *caches.folders(spec.env, work), *own, *(target.path for target in spec.targets)]
    named = [folder for folder in folders if folder.startswith("/")]
    return tuple({folder.rstrip("/") + "/" for folder in (*named, *map(os.path.realpath, named))})


def _waiting_input(observed: bool) -> tuple[int, bool]:
    """Bytes that wait in the standard input, and whether there will be no more; 0 for a terminal, and for a file with a
    name where opens are ``observed``. A shell's own text may be a file without one."""
    with contextlib.suppress(OSError):
        status = os.fstat(0)
        if stat.S_ISFIFO(status.st_mode) or stat.S_ISSOCK(status.st_mode):
            poll = select.poll()
            poll.register(0, select.POLLIN | select.POLLRDHUP)
            ended = select.POLLHUP | select.POLLRDHUP
            return waiting(0), any(event & ended for _, event in poll.poll(0))
        if stat.S_ISREG(status.st_mode) and not (observed and status.st_nlink):
            return status.st_size - os.lseek(0, 0, os.SEEK_CUR), False
    return 0, False


def _next_tick() -> int:
    """A time (ns) that no file made before has, and every file made from now on has at least: clocks of file systems
    move in ticks."""
    before = time.clock_gettime_ns(CLOCK_REALTIME_COARSE)
    while (now := time.clock_gettime_ns(CLOCK_REALTIME_COARSE)) == before:
        time.sleep(0.001)
    return now
