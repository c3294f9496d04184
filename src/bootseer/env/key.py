"""The key of a snapshot: SHA-256 of a document with every input that decides what the command makes. The document
(``docs/internals/snapshot.md``) travels with the snapshot, so that a miss can be explained by a diff."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import msgspec

from bootseer.config import Config
from bootseer.env import hardware, remembered, variables
from bootseer.env.canonical import sha256_of
from bootseer.env.credentials import remove_from_command, remove_from_variable
from bootseer.env.keyfile import MOST, FileInput, KeyFiles
from bootseer.env.scan import mount_points_below
from bootseer.env.spec import EnvSpec
from bootseer.errors import ConfigError, DataError
from bootseer.kernel import beneath
from bootseer.wiretypes import known

VERSION = 2
_PYTHON = re.compile(r"(?:python|pypy)(?:3(?:\.\d+)?t?)?")
_OPTION = re.compile(r"(?:-p|--python)(?:=(.+))?")
_WORD = re.compile(r"[^\s\"'`;&|<>()=,\[\]$*?\0]{1,4096}")
_SEARCHED = 1 << 16
_PROJECTS = 100
_OF_PROJECT = {name for names in variables.PROJECTS.values() for name in names}
_ATTACHED = re.compile(r"^(?:--[a-z-]+=|-[rc])(?=[^-])(.+)$", re.S)

# Without the modules platform and sysconfig, which cost more than the start of the interpreter.
_ASK = (
    "import posix,sys;from importlib.machinery import EXTENSION_SUFFIXES as s;v=sys.version_info;"
    "print(sys.implementation.name,'%d.%d.%d'%v[:3],s[0].strip('.').rpartition('.so')[0] if s else '',"
    "posix.readlink('/proc/self/exe'))"
)


class PythonInfo(msgspec.Struct, frozen=True):
    """An interpreter, as far as compiled packages care. Empty strings when there is none, or a container image stands
    for it."""

    implementation: str = ""
    version: str = ""
    soabi: str = ""


class KeyDocument(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All inputs of a key. Equal documents, equal keys."""

    format: str = "bootseer-env-key"
    version: int = VERSION
    targets: list[str]
    command: list[str]
    cwd: str = ""
    mounts: list[str] = []
    files: dict[str, FileInput] = {}
    env: dict[str, str | None] = {}
    image: str = ""
    python: PythonInfo = PythonInfo()
    libc: str = ""
    machine: str = ""
    tenant: str = ""
    salt: str = ""

    @property
    def key(self) -> str:
        """Texts are no part of it: who may see a file decides about its text."""
        files = {name: msgspec.structs.replace(one, text="") for name, one in self.files.items()}
        return sha256_of(msgspec.to_builtins(msgspec.structs.replace(self, files=files)))

    @property
    def texts(self) -> list[str]:
        """The command, and what may be shown of its files."""
        return [" ".join(self.command), *(file.text for file in self.files.values())]

    @property
    def lineage(self) -> str:
        """Names the snapshots this one may be compared with: same tenant, same targets."""
        return sha256_of([self.tenant, self.targets])[:16]


def document_from(raw: object) -> KeyDocument:
    """A document out of decoded JSON. Raises `DataError` when it is not one."""
    version = raw.get("version", VERSION) if isinstance(raw, dict) else VERSION
    if version != VERSION:
        raise DataError(f"a key document of version {version}, not {VERSION}")
    try:
        document = msgspec.convert(raw, known(KeyDocument))
    except msgspec.ValidationError as exc:
        raise DataError(f"not a key document: {exc}") from None
    if document.format != "bootseer-env-key":
        raise DataError(f"not a key document: {document.format!r}")
    return document


def build(spec: EnvSpec, config: Config | None = None) -> KeyDocument:
    """The document of ``spec`` on this node, with what the node cache of ``config`` remembers of files. Raises
    `ConfigError` for unusable key files and interpreters."""
    contained = spec.contained
    files = _files(spec, config)
    texts = [*_phrases(spec.command), *files.texts.values()]
    return KeyDocument(
        targets=[target.path for target in spec.targets],
        command=remove_from_command(spec.command),
        cwd=spec.cwd if contained else os.path.realpath(spec.folder),
        mounts=_mounts(spec),
        files=dict(sorted(files.found.items())),
        env={
            name: None
            if (value := spec.env.get(name, hardware.value(name))) is None
            else remove_from_variable(name, value)
            for name in sorted({*spec.key_env, *variables.counted(texts, spec.env, all_tools=contained)})
        },
        image=spec.image_digest,
        python=describe(find_python(spec), config),
        libc="" if contained else libc_version(),
        machine=os.uname().machine,
        salt=spec.salt,
    )


def find_python(spec: EnvSpec) -> str:
    """The interpreter asked for, else that which the command names (as a program, with ``-p``, in the first line of its
    script, or uv's in its variables), else ``python3`` on PATH; empty in a container. None in a target: there it is
    only after the command."""
    if spec.python or spec.contained:
        return spec.python
    path = spec.env.get("PATH", os.defpath)
    for named in _named_pythons(spec, path):
        named = f"python{named}" if re.fullmatch(r"3(\.\d+)?", named) else named
        whole = os.path.join(spec.folder, named)
        within = os.path.join(whole, "bin/python3")
        named = within if os.path.isfile(within) else whole if "/" in named else named
        found = shutil.which(named, path=path) if _PYTHON.fullmatch(os.path.basename(named)) else None
        if found and not _inside_target(spec, Path(found)):
            return found
    return shutil.which("python3", path=path) or ""


def _named_pythons(spec: EnvSpec, path: str) -> Iterator[str]:
    words = spec.command
    yield words[0]
    for word, following in itertools.pairwise([*words, ""]):
        if option := _OPTION.fullmatch(word):
            yield option[1] or following
    if os.path.basename(words[0]) == "uv":
        yield from (spec.env.get(name, "") for name in ("UV_PYTHON", "VIRTUAL_ENV"))
    with contextlib.suppress(OSError):
        program = shutil.which(os.path.join(spec.folder, words[0]) if "/" in words[0] else words[0], path=path)
        with open(beneath.open_regular(os.path.realpath(program or "")), "rb") as file:
            first = os.fsdecode(file.readline(4096)).split()
        if first and first[0].startswith("#!"):
            yield first[-1].removeprefix("#!")


def describe(python: str, config: Config | None = None) -> PythonInfo:
    """Facts of the interpreter ``python``, asked from itself (10-20 ms), or remembered of the program that it is (not
    of one that chooses another). Raises `ConfigError` when it does not run."""
    if not python:
        return PythonInfo()
    if os.path.realpath(python) == os.path.realpath(sys.executable):
        soabi = EXTENSION_SUFFIXES[0].strip(".").rpartition(".so")[0]
        return PythonInfo(sys.implementation.name, "{}.{}.{}".format(*sys.version_info), soabi)

    def ask() -> str:
        done = subprocess.run([python, "-I", "-S", "-c", _ASK], capture_output=True, text=True, timeout=30, check=True)
        if done.stdout.count(" ") < 2:
            raise ValueError(f"it says {done.stdout[:80]!r}")
        return done.stdout.rstrip("\n")

    fd = -1
    try:
        with contextlib.suppress(OSError):
            fd = os.open(python, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        is_program = fd >= 0 and stat.S_ISREG(os.fstat(fd).st_mode) and os.pread(fd, 4, 0) == b"\x7fELF"
        found = (remembered.fact(config, fd, "interpreter", ask) if is_program else ask()).split(" ", 3)
        if is_program and os.path.realpath(found[-1]) != os.path.realpath(python):  # mise and rye look at the folder
            found = ask().split(" ", 3)
        return PythonInfo(*found[:3])
    except (OSError, subprocess.SubprocessError, ValueError) as exc:
        raise ConfigError(f"cannot ask the interpreter {python} for its version: {exc}") from None
    finally:
        if fd >= 0:
            os.close(fd)


def libc_version() -> str:
    """For example ``"glibc 2.36"``; ``"unknown"`` with another C library."""
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or "unknown"
    except (ValueError, OSError):
        return "unknown"


def _mounts(spec: EnvSpec) -> list[str]:
    """What is mounted below a target, whose content is not captured: by place, in a container also by source. (For a
    target that is a mount itself, what it holds is compared.)"""
    if not spec.contained:
        return sorted(path for target in spec.targets for path in mount_points_below(target.host))
    targets = [target.path for target in spec.targets]
    below = [item for item in spec.mounts if item[1] not in targets and any(_is_below(item[1], one) for one in targets)]
    return sorted(f"{source}:{path}" for source, path in below)


def _is_below(path: str, folder: str) -> bool:
    return (path.rstrip("/") + "/").startswith(folder.rstrip("/") + "/")


def _files(spec: EnvSpec, config: Config | None) -> KeyFiles:
    files = KeyFiles(spec, config)
    for given in spec.key_files:
        files.add(_document_name(given, files.found), spec.folder / given, required=True)
    # In a container the command's words name files of the container, not of this host.
    for word in () if spec.contained else _words(spec):
        path = spec.folder / word
        if word not in files.found and os.path.isfile(path) and not _inside_target(spec, path):
            files.add(word, path, required=False)
    if not spec.contained:
        _add_named(spec, files)
    return files


def _add_named(spec: EnvSpec, files: KeyFiles) -> None:
    """What the command's text and its scripts name, and the settings of the installers in them."""
    todo = [("", text) for text in spec.command if " " in text] + list(files.texts.items())
    while todo:
        by, text = todo.pop(0)
        for name, path in variables.files_named(text, by, spec.env):
            whole = spec.folder / path
            if (
                name not in files.found
                and len(files.found) < MOST
                and os.path.isfile(whole)
                and not _inside_target(spec, whole)
            ):
                files.add(name, whole, required=False, named=False)
                todo += [(path, files.texts[name])] if name in files.texts else []
    texts, unseen = [*_phrases(spec.command), *files.texts.values()], os.geteuid() != 0
    for name, path in variables.settings_of(texts, spec.env, unseen=unseen):
        if name not in files.found and os.path.isfile(spec.folder / path):
            files.add(name, spec.folder / path, required=False, named=False)
            if name in files.found and not files.found[name].size:
                del files.found[name]  # an empty one, or one of logins alone, is as none
    for word, project in _projects(spec, texts) if unseen else ():
        if word not in files.found:
            files.add_project(word, project)


def _phrases(command: Sequence[str]) -> Iterator[str]:
    """The words of a command, those beside each other in one that are no texts of their own (``uv pip install``)."""
    for is_text, words in itertools.groupby(command, lambda word: re.search(r"\s", word) is not None):
        found = [*words]
        yield from found if is_text else [" ".join(found)]


def _projects(spec: EnvSpec, texts: list[str]) -> Iterator[tuple[str, Path]]:
    """The folders of projects that are named, but not the one that the command starts in, to which jobs write."""
    here = set[str]()  # not each word is asked for in a shared folder
    with contextlib.suppress(OSError):
        here.update(os.listdir(spec.folder), (".", ".."))
    words = dict.fromkeys(_WORD.findall("\n".join(texts)[:_SEARCHED]))
    for word in itertools.islice((one for one in words if one[0] == "/" or one.split("/")[0] in here), _PROJECTS):
        path = Path(os.path.normpath(spec.folder / word))
        own = [str(spec.folder), *(str(target.host) for target in spec.targets)]
        apart = not any(_is_below(one, str(path)) for one in own) and not _inside_target(spec, path)
        if apart and any(os.path.isfile(path / name) for name in _OF_PROJECT):
            yield word, path


def _document_name(given: str, taken: dict[str, FileInput]) -> str:
    # An absolute path may hold a folder made for one start only (the root of a container), so it is no input.
    name = base = os.path.basename(given.rstrip("/")) if given.startswith("/") else given
    number = 2
    while name in taken:
        name, number = f"{base}-{number}", number + 1
    return name


def _words(spec: EnvSpec) -> Iterator[str]:
    for number, word in enumerate(spec.command):
        if "\0" in word or len(word) > 4096 or (number == 0 and "/" not in word):
            continue
        yield word
        if attached := _ATTACHED.match(word):
            yield attached[1]


def _inside_target(spec: EnvSpec, path: Path) -> bool:
    # A file the command makes may be named in the command: absent before, there after, so never an input.
    whole = os.path.abspath(path)
    return any(_is_below(whole, prefix) for t in spec.targets for prefix in (t.path, str(t.host)))
