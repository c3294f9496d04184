"""The observer of a set-up command: which files it opened, and what of them counts as an input: every regular file,
unless it made the file itself, or the file lies in a target, a folder of the system, a cache of packages or the
standard library of an interpreter, or holds nothing but credentials. Of byte code its source counts."""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import itertools
import logging
import os
import select
import stat
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import TracebackType

import bootseer
from bootseer.config import Config
from bootseer.env import caches, inputs, names, variables
from bootseer.env.credentials import only_credentials
from bootseer.env.spec import EnvSpec
from bootseer.errors import DataError
from bootseer.kernel import libc
from bootseer.kernel.lookups import Lookups
from bootseer.kernel.opens import FileState, Opens, state_of, waiting
from bootseer.patterns import pattern

log = logging.getLogger(__name__)

_SYSTEM = ["/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/etc", "/boot", "/proc", "/sys", "/dev", "/run"]
_SYSTEM += ["/var/lib", "/var/cache"]
_NAMED = ("/usr/", "/bin/", "/sbin/", "/etc/", "/dev/")
"""Of the folders of the system those in which names count: of programs, and of links that lead elsewhere."""
_LANGUAGE = pattern(r"^/usr/(?:[^/]+/)*bin/(?:node|go|rustc|ruby[\d.]*)$")
"""Programs of the system whose version decides what is made, as Python's does."""
_STANDARD_LIBRARY = pattern(r"/lib/python3\.\d+/(?!(?:site|dist)-packages/)")
_BYTE_CODE = pattern(r"__pycache__/([^/.]+)\.[^/]*\.pyc(?:\.\d+)?$")
_OF_TOOLS = pattern(r"/\.git/(?:index|.*\.lock)$|\.git/(?:modules/.*/)?objects/|/[^/]+\.egg-info/|\.nb[ic]$")
"""What git, builds and numba keep in a source tree for themselves, and change when they only look; what the names of
objects say, branches and tags say, too."""
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
_FIND_LINKS = pattern(r"--find-links[= ]+[\"']?([^\s\"';&|]+)")
_GLOB = pattern(r"\*\.\w+")
MAX_VARIABLES = 10_000
_SEARCHED = 4 << 20
"""Bytes of scripts in which names are looked for."""
_LOOKED_AT, _LOOK_SECONDS = 64 << 20, 5.0
"""Bytes of files that the command read, and seconds, that are spent to look for variables: the job waits."""
_PROJECT = {"pyproject.toml", "setup.py", "setup.cfg"}
_PROJECTS = {*_PROJECT, "go.mod", *inputs.MEMBERS}
_NEVER = {errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EINVAL}
"""A kernel or a container that lets nobody observe; other errors pass."""
CLOCK_REALTIME_COARSE = 5


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
        self._lookups = Lookups(tuple(one for one in self._excluded if not one.startswith(_NAMED)))
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
                self._begin_lookups()
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
        self._lookups.end()  # in the mounts of before: what it leaves to a thread holds none of the command's
        if self._opens and kind is None:
            self._settle(self._opens)
        left, ended = _waiting_input(self._opens is not None)
        if left < self._waiting or (ended and not self._ended and not left):
            self._failure = "the command read its standard input, which is no file that is compared"

    def _begin_lookups(self) -> None:
        if not self._spec.contained:
            try:
                self._lookups.begin()
            except OSError as exc:
                if exc.errno not in _NEVER | {errno.ENODEV, errno.EOPNOTSUPP, 524}:  # the kernel's own ENOTSUPP
                    self._lookups.failure = f"what it looks for cannot be seen now: {exc.strerror}"
                log.warning("files that the command looks for in vain are not known, and do not count: %s", exc)

    def _settle(self, opens: Opens) -> None:
        """What counts of what was opened, and whether it is still as it was, before the job may write."""
        programs = opens.started & _ELSEWHERE
        self.unobserved = opens.beyond or (f"it started {min(programs)}" if programs else self._lookups.left)
        failure = opens.failure or self._lookups.failure
        self._failure = failure and f"what the command read is not known: {failure}"
        if not self.unobserved and not self._failure:
            try:
                texts = [text.decode("utf-8", "replace") for _, text in self._scripts() if caches.OPTION in text]
                named = [folder for text in texts for folder in caches.named(text, self._spec.env, self._work)]
                self._excluded += tuple(f"{folder}/" for one in named for folder in {one, os.path.realpath(one)})
                self._found = self._inputs(opens)
            except DataError as exc:
                self._failure = exc.message
            except Exception as exc:  # of what others wrote: the job goes on
                self._failure = f"what the command read cannot be examined: {exc!r}"

    def result(self) -> inputs.Opened:
        """Raises `DataError` when it is not known what the command read: by an accident, or because a file changed
        after the command had opened it. Slow digests, and the hashing of large files, are left for later."""
        if self._failure:
            raise DataError(self._failure)
        if self._opens is None or self.unobserved:
            if self._opens:
                log.warning("what the command read is not known: %s; only its stated inputs count", self.unobserved)
            return inputs.Opened(inputs.Observed(unobserved=self.unobserved))
        folders = self._folders(self._opens, self._found)
        texts = itertools.chain(self._found, folders, *folders.values())
        if any("\udc80" <= char <= "\udcff" for char in "".join(texts)):
            return inputs.Opened(inputs.Observed(unobserved="it read a file whose name is not UTF-8"))
        if max(len(self._found), sum(map(len, folders.values()))) > inputs.MAX_FILES:
            raise DataError(f"the command read more than {inputs.MAX_FILES} files that count")
        fixed = {path: inputs.fixed_state(self._spec, path) for path in self._found if path not in self._before}
        digests = inputs.Digests(self._spec, self._config, inputs.PUBLISHING_SECONDS)
        files = {path: digests.of(path) for path, was in fixed.items() if not was}
        files |= {path: digests.of_text(path, data) for path, data in self._before.items()}
        indexes = (path for path in self._opens.seen if path.endswith(inputs.INDEX) and not self._excludes(path))
        files |= {path: digest for path in indexes if (digest := digests.of(path)) not in ("", "?")}
        used = self._used(self._opens, digests)
        for path, state in self._found.items():
            if path not in self._before and _state(self._spec, path) != state:
                raise DataError(f"{path} changed while the command ran")
            if files.get(path) == "?":
                raise DataError(digests.unread(path))
        known = inputs.Observed(files, folders, variables=used, names=self._names(self._opens, folders))
        return inputs.Opened(known, {path: was for path, was in fixed.items() if was})

    def moves(self) -> bool:
        """Whether the command's text, or one that it read, may rename or link something, as far as is known: into an
        overlay nothing can be, from outside."""
        return any(_MOVES.search(_COMMENT.sub(b"", text)) for _, text in self._scripts())

    def scripts(self) -> Iterator[str]:
        """`_scripts`, as far as names are looked for in them."""
        left = _SEARCHED
        for path, data in self._scripts():
            yield variables.in_place(data[:left].decode("utf-8", "replace"), os.path.dirname(path), self._work)
            left -= len(data[:left])

    def _scripts(self) -> Iterator[tuple[str, bytes]]:
        """The command's own text, and those that it read, with their paths."""
        yield os.path.join(self._work, "."), os.fsencode(" ".join(self._spec.command))
        for path, data in self._opens.texts.items() if self._opens else ():
            if self._counts(path) and not self._of_package(path):
                source = _BYTE_CODE.sub(r"\1.py", path)
                text = data if source == path else inputs.text_of(self._spec, source)
                if inputs.is_script(text):
                    yield source, text

    def _used(self, opens: Opens, digests: inputs.Digests) -> dict[str, str | None]:
        """The variables that occur in what was read. Of a project's sources, which an installer only copies, those
        that were imported are looked at, and those beside its settings."""
        used = set[str]()
        imported = {_BYTE_CODE.sub(r"\1.py", path) for path in opens.seen if ".pyc" in path}
        projects = {os.path.dirname(path) for path in self._found if os.path.basename(path) in _PROJECT}
        copied = tuple(f"{folder}/" for folder in projects)
        left, until = _LOOKED_AT, time.monotonic() + _LOOK_SECONDS
        for path in self._found:
            is_source = path.endswith(inputs.SOURCES) and path.startswith(copied)
            if not self._of_package(path) and not (
                is_source and path not in imported and os.path.dirname(path) not in projects
            ):
                data = opens.texts.get(path) or inputs.text_of(self._spec, path)
                left -= len(data)
                if left < 0 or time.monotonic() > until:
                    raise DataError("the command read too many files to look for variables in them")
                if inputs.is_script(data):
                    used |= variables.mentioned(data.decode("utf-8", "replace"), self._spec.env)
        if not self._spec.contained:
            own = [path for path in self._found if not path.startswith("/usr/")]
            used |= names.holding(self._spec.env, own, self._work)
        found = {name: digests.variable(name) for name in sorted(used)}
        if len(found) > MAX_VARIABLES or "?" in found.values():
            raise DataError("the files that the command read name too many variables")
        return found

    def _names(self, opens: Opens, folders: Mapping[str, list[str]]) -> dict[str, str]:
        if self._spec.contained:
            return {}
        spec, work, texts = self._spec, self._work, [*self.scripts()]
        asked = names.asked(self._lookups, opens, spec.env, work, self._found, texts, self._counts_whole, self._is_old)
        kinds = dict(itertools.islice(asked, 2 * names.MOST))
        found = {name: real for name, real in kinds.items() if not name.startswith("!")}
        found |= names.before(texts, spec.env, work, self._found, self._counts)
        for path in self._found:
            folder, name = os.path.split(path)
            beside = (os.path.join(folder, one) for one in names.BESIDE.get(name, ()))
            found |= {one: "" for one in beside if self._counts(one) and not os.path.exists(one)}
        above = tuple(target.path for target in spec.targets)  # what the result says of its place counts
        seen = names.seen(self._lookups, spec.env, work, self._found, self._counts)
        for path, real in itertools.islice(seen, 2 * names.MOST):  # a million take a minute, and the job waits
            if not real or not any(one.startswith(f"{path}/") for one in above):
                found[path] = real
        copied = (os.path.join(one, name) for one, inside in folders.items() if inputs.ALL in inside for name in inside)
        found |= {path: os.path.realpath(path) for path in copied if os.path.islink(path)}
        found |= kinds
        shown = {name: real for name, real in found.items() if inputs.is_text(name + real)}
        if len(shown) > names.MOST:
            log.warning("of the names that it looks for only %d count: there are more", names.MOST)
        return dict(itertools.islice(shown.items(), names.MOST))

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
            if _BUILT.search(path):  # instead of its source, of which only the time was compared
                raise DataError(f"{path} is left from an earlier build; remove the results of that")
            source = _BYTE_CODE.sub(r"\1.py", path)
            if source != path and (origin := _state(self._spec, source)):
                if source not in opens.seen:
                    out[source] = origin
                continue
            if is_written and not state.born:  # NFS, ramfs, tmpfs of old kernels
                self.unobserved = f"the file system of {path} does not tell what the command made"
                continue
            was = opens.texts.get(path)
            if changed and now and now.mtime == state.mtime < self.began and was == inputs.text_of(self._spec, path):
                changed, state = False, now  # it has another mode, or one more name, as when it is copied by links
            if changed:
                if not now or now.file not in opens.written or path not in opens.texts or state.mtime >= self.began:
                    raise DataError(f"{path} changed while the command ran")
                self._before[path] = opens.texts[path]
            out[path] = state
        return out

    def _folders(self, opens: Opens, found: Mapping[str, FileState]) -> dict[str, list[str]]:
        roots = tuple(os.path.dirname(path) + "/" for path in found if os.path.basename(path) in _PROJECTS)
        indexes = {os.path.dirname(path) for path in found if path.endswith(inputs.PACKAGES)}
        listed = {folder for folder in opens.folders if (folder + "/").startswith(roots) or folder in indexes}
        refs = {folder for folder in opens.folders if inputs.REFS.search(folder)}
        packed = [path for path in found if os.path.basename(path) == "packed-refs" and not self._spec.contained]
        for folder in (Path(path).parent / "refs" / kind for path in packed for kind in ("heads", "tags")):
            refs |= {str(folder), *(one for one, _, _ in os.walk(folder))}  # what is there counts before what is packed
        out = {folder: inputs.sources(self._spec, folder) for folder in listed if self._counts(folder + "/.")}
        out = {folder: inside for folder, inside in out.items() if inside}
        scripts = (os.path.dirname(os.path.join(self._work, word)) for word in self._spec.command)
        own = [f"{os.path.realpath(path)}/" for path in (self._work, *scripts)]  # Python lists them when it imports
        is_own = {one: any(path.startswith(f"{one}/") for path in own) for one in opens.folders}
        globs = {kind for text in self.scripts() for kind in _GLOB.findall(text)}
        own_globs = {} if self._spec.contained else names.globbed([*self.scripts()], self._spec.env, self._work)
        links = {os.path.join(self._work, found) for text in self.scripts() for found in _FIND_LINKS.findall(text)}
        links = {os.path.realpath(one) for one in links}  # in these an installer looks for packages alone
        links -= {os.path.dirname(path) for path in found if not path.endswith(inputs.PACKAGES)}
        copied = {
            one: self._copied(one, opens, globs if mine else None, own_globs.get(one, set()))
            for one, mine in is_own.items()
            if one not in links
        }
        out |= {folder: inside for folder, inside in copied.items() if inside}
        out |= self._only_listed(opens, out)
        for at, shapes in own_globs.items():
            if os.path.isdir(os.path.dirname(at)) and not os.path.exists(at) and self._counts(at + "/."):
                out[at] = sorted(shapes)
        return out | {folder: inputs.sources(self._spec, folder) for folder in refs if self._counts(folder + "/.")}

    def _only_listed(self, opens: Opens, known: Collection[str]) -> dict[str, list[str]]:
        """The names in folders that a text names, and that the command lists without reading or changing anything."""
        if self._spec.contained:
            return {}
        read = {os.path.dirname(path) for path in self._found}
        found = names.listed(self.scripts(), self._spec.env, self._work, opens.folders)
        only = {one for one in found - read - {*known} if self._counts(one + "/.") and not self._of_package(one + "/")}
        return {
            one: [inputs.ALL, *inputs.sources(self._spec, one, [inputs.ALL])] for one in only if self._is_as_was(one)
        }

    def _is_as_was(self, folder: str) -> bool:
        with contextlib.suppress(OSError):
            return os.stat(folder).st_mtime_ns < self.began
        return False

    def _is_old(self, path: str) -> bool:
        with contextlib.suppress(OSError):
            return os.path.exists(path) and 0 < FileState(*libc.statx(path)[1:]).born < self.began
        return False

    def _copied(self, folder: str, opens: Opens, globs: set[str] | None, patterns: set[str]) -> list[str]:
        """The names in a folder all of which the command has read, as with ``cp -r``, or all of a kind, as with ``cat
        *.conf``; nothing where it did not. Only kinds of ``globs`` in a folder that jobs write to; ``patterns``: those
        for this folder, of which none may be there yet."""
        if self._spec.contained or not self._counts(folder + "/.") or self._of_package(folder + "/"):
            return []
        wanted = patterns | (globs or set())
        inside = inputs.sources(self._spec, folder, wanted) if wanted else []
        mine = {kind: [os.path.join(folder, name) for name in fnmatch.filter(inside, kind)] for kind in wanted}
        is_listed = globs is None and folder in opens.folders and self._is_as_was(folder)
        kinds = {
            one
            for one, paths in mine.items()
            if (paths or one in patterns) and ((is_listed and one in patterns) or all(map(self._is_read, paths)))
        }
        if globs is not None:
            return [*kinds, *inputs.sources(self._spec, folder, kinds)] if kinds else []
        unread, listed = set[str](), True
        for name in inputs.sources(self._spec, folder, [inputs.ALL]):
            path = os.path.join(folder, name)
            if os.path.isfile(path):
                (kinds if self._is_read(path) else unread).add(f"*{os.path.splitext(name)[1]}")
            elif not os.path.islink(path):
                listed = listed and path in opens.folders
        if listed and not unread and (kinds or any(path.startswith(f"{folder}/") for path in self._found)):
            return [inputs.ALL, *inputs.sources(self._spec, folder, [inputs.ALL])]
        kinds -= {*(unread - patterns if is_listed else unread), "*"}
        return [*kinds, *inputs.sources(self._spec, folder, kinds)] if kinds else []

    def _is_read(self, path: str) -> bool:
        return path in self._found or os.path.islink(path)

    def _of_package(self, path: str) -> bool:
        """Whether it is of a program; where the job's own folder lies says nothing of it."""
        return bool(_OF_PACKAGES.search(path.removeprefix(self._work)))

    def _excludes(self, path: str) -> bool:
        of_none = path.startswith(self._excluded) and not path.startswith(inputs.SHARED_MEMORY)
        return of_none and not _LANGUAGE.search(path)

    def _counts(self, path: str) -> bool:
        if self._excludes(path):
            return False
        own = _STANDARD_LIBRARY.search(path) or _OF_TOOLS.search(path) or caches.CONTENT in path
        return not own and not only_credentials(path)

    def _counts_whole(self, path: str) -> bool:
        """Whether ``path`` and all that may be in it count, and it says something."""
        whole = self._counts(path) and self._counts(f"{path}/.") and not self._of_package(f"{path}/")
        return whole and not inputs.are_only_logins(self._spec, path)


def _state(spec: EnvSpec, path: str) -> FileState | None:
    try:
        return state_of(spec.on_host(path))
    except OSError:
        return None


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
