"""Names by which a set-up command finds files: where links lead, which program ``PATH`` finds, which file it looked
for, in vain or not, which variables hold folders of files that it read.

Which files were opened is known by their true paths; by which paths a command looked, from `bootseer.kernel.lookups`.
What lists folders looks for no name: of that the words of the command and of its scripts tell.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import re
import shutil
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from bootseer.env.credentials import may_be_secret
from bootseer.env.variables import VARIABLE, decides, expanded
from bootseer.kernel.lookups import Lookups
from bootseer.kernel.opens import Opens
from bootseer.patterns import pattern

log = logging.getLogger(__name__)

MOST, _WORDS = 5000, 20_000
"""Names, and words of texts that are looked at: the job waits."""
_WORD = pattern(r"[^\s\"'`;&|<>()=,\[\]]+")
_ENTERED = pattern(r"\b(?:cd|pushd)[ \t]+([^\s;&|<>()`]+)")
_REMOVES = pattern(r"\b(?:rm|find|tar|rsync|git)[ \t][^\n;&|]*")
"""Of these a pattern is no input."""
_PLACED = pattern(
    r"(?:\[|\btest)[ \t]+(?:![ \t]+)?-[de][ \t]+([^\n;&|\]]{1,500})|\bmv\b([^\n;&|]{1,500})"
    r"|\b(?:exists|isdir|existsSync|move|rename|Path(?=\([^)\n]{1,300}\)\.(?:exists|is_dir)))\(([^\n]{1,500}?)\)"
)
_REMOVED = pattern(
    r"\b(?:rm[ \t]+-\w{0,9}[rR]\w{0,9}|rmdir|mkdir(?![^\n;&|]{0,500}[ \t]-\w*p))\b([^\n;&|]{1,500})"
    r"|\b(?:mkdir|makedirs|mkdirSync|rmtree|Path(?=\([^)\n]{1,300}\)\.mkdir))"
    r"\((?![^\n]{0,300}(?:exist_ok|recursive))([^\n]{1,500}?)\)"
)
_MARKS = ("-d", "-e", "mv", "rm", "mkdir", "move", "rename", "exists", "isdir", "is_dir", "makedirs")
"""One of them is in each of these: patterns take long to compile."""
_LOCAL = pattern(
    r"(?m)(?:^|[;&{(]|\b(?:export|local|readonly|then|do|else))[ \t]*(\w+)[ \t]*=[ \t]*[\"']?([^\s\"';&|`()]+)"
)
_DEFAULT = pattern(r"\$\{(\w+):?-([^{}$]*)\}")
_ASKED = pattern(
    r"\b(?:command[ \t]+-[vV]|which|hash|type(?:[ \t]+-\w+)?)[ \t]+([\w.+-]+)|\bwhich\(\s*[\"']([\w.+-]+)[\"']"
)
_LASTING = ("HOME", "PATH", "SHELL", "PWD", "OLDPWD", "BASH_ENV")
"""Of the variables of one start these name folders of others, too."""
_PLAIN_WORD = pattern(r"[\w.@+-]+")
_IMPORTED = pattern(r"(?m)^[ \t]*(?:import|from)[ \t]+([A-Za-z_]\w*)")
_STARTED = pattern(r"\bpython[\d.]*[ \t]+(?:-\w+[ \t]+){0,8}([^\s\"';&|]+\.py)\b")
_SOURCES, _FOLDERS, _VALUES, _LONGEST = 20, 100, 20, 4096
"""Folders of scripts in which what they import is looked for; of a list in which something is looked for."""
_LISTS = pattern(
    r"(?m)(?:^|[;&]|\bexport)[ \t]*(?:\w*PATH[ \t]*[:?+]?=|vpath[ \t]+\S+[ \t])[ \t]*[\"']?([^\n\"';&|#]+)"
)
_PATTERNS = 20
_LOOP = pattern(r"\bfor[ \t]+(\w+)[ \t]+in[ \t]+([^;\n]{1,500})")
_BRACES = pattern(r"(?<![\w./-])([\w./-]{0,200})\{([\w.-]*(?:,[\w.-]*){1,20})\}([\w./-]{0,200})")
_JOINED = pattern(r"\bjoin\([^\n]{1,300}")
_SECRET = 12
"""Characters of a secret that is looked for within names, too: a shorter one may be a word, such as ``test``."""
_NO_NAME = pattern(r"/__pycache__/|/\.git/|:/")
"""Byte code, whose source counts; what git keeps, whose branches and tags do; a URL that was tried as a path."""
BESIDE = dict.fromkeys(("Makefile", "makefile"), ("GNUmakefile", "makefile"))
"""What make takes instead of a file that it read: it lists the folder, and looks for no name."""
SYSTEM = ("/usr/", "/bin/", "/sbin/")
"""In these one version of a program is as good as another, but for those that were ``read``."""
_NO_MATTER = {"lsb_release"}
"""Programs that pip starts where they are there, to name the system to an index."""
_NO_PATTERN = re.compile(r"[$`{}\0\\^]|:/")
_NO_PATH = re.compile(r"[$`*?{}\0]|://")


def before(
    texts: Iterable[str], env: Mapping[str, str], work: str, read: Collection[str], counts: Callable[[str], bool]
) -> dict[str, str]:
    """Each with an empty value: where a module would be found before one that was ``read``, and is not there.
    ``counts``: whether a path may be an input."""
    found = itertools.islice(_before(*_plain(texts, env, work), work, read), MOST)
    return {path: "" for path in found if counts(path) and counts(f"{path}/.") and not os.path.exists(path)}


def seen(
    lookups: Lookups, env: Mapping[str, str], work: str, read: Collection[str], counts: Callable[[str], bool]
) -> Iterator[tuple[str, str]]:
    """Of the paths that a command looked for those that may be inputs, each once: what was not there, but for what lies
    in folders that it made and may have removed, or where another one says the same; and where those lead that lead
    elsewhere. Below the home folder also as ``~/``, where another user's has it."""
    shown, known, clear = _shown(env), {*lookups.absent, *lookups.made}, set[str]()

    def is_below(path: str) -> bool:
        """One of ``known``; the folders of which that is not so are looked at once."""
        passed = set[str]()
        while (path := os.path.dirname(path)) not in clear and path not in passed:
            if path in known:
                return True
            passed.add(path)
        clear.update(passed)
        return False

    for path in sorted(lookups.absent):
        if is_below(path) or path in lookups.made or not counts(path) or not counts(f"{path}/."):
            continue
        if shown(path) and not _NO_NAME.search(path) and not os.path.exists(path):
            yield path, ""
            if (own := _in_home(path, env, work)) != path:
                yield own, ""
    above, real_of = _folders(read), functools.cache(os.path.realpath)
    for path in sorted(lookups.found | lookups.opened):
        real = os.path.join(real_of(os.path.dirname(path)), os.path.basename(path))
        if is_link := os.path.islink(real):
            real = os.path.realpath(real)
        if real != path and (real in read or real in above or (is_link and counts(path))) and shown(path):
            yield path, real


def asked(
    lookups: Lookups,
    opens: Opens,
    env: Mapping[str, str],
    work: str,
    read: Collection[str],
    texts: Iterable[str],
    counts: Callable[[str], bool],
    is_old: Callable[[str], bool],
) -> Iterator[tuple[str, str]]:
    """Of the paths that a command looked at the kinds of those that may be inputs, each with a `!`: not what was there
    only through it (not ``is_old``), not what it met in a list of a folder, unless ``texts`` name it and it did not
    only write to it, no program that started and nothing of one, and nothing in a folder that a variable of one start
    names. And where ``PATH`` finds the programs that it started, as far as they were ``read`` or are of the system, and
    whether those are there that it looked for and did not start, each with a `?`; these come first, and where lookups
    are not seen they are those that ``texts`` ask for."""
    shown, words = _shown(env), {word for text in texts for word in _PLAIN_WORD.findall(text)}
    folders = {os.path.normpath(os.path.join(work, one)) for one in (env.get("PATH") or os.defpath).split(":")}
    looked = {os.path.basename(path) for path in lookups.absent | lookups.found if os.path.dirname(path) in folders}
    if not lookups.absent:  # each program looks for something in vain: it was not seen
        looked |= {name for text in texts for pair in _ASKED.findall(text) for name in pair if name}
    programs = sorted((looked | opens.started) - _NO_MATTER, key=lambda name: (name not in opens.started, name))
    for name in itertools.islice(programs, MOST):
        program = _program(name, env)
        if os.path.basename(program) in opens.started:
            if program in read or program.startswith(SYSTEM):
                yield name, program
        elif name in looked and (not program or is_old(program)) and shown(name):
            yield f"?{name}", program
    apart = [f"{os.path.dirname(path)}/" for path in read if os.path.basename(path) == "pyvenv.cfg"]
    for path in read:
        folder, name = os.path.split(path)
        if name in opens.started and os.path.basename(folder) == "bin" and os.path.isdir(f"{folder}/../lib"):
            apart.append(f"{os.path.dirname(folder)}/")
    values = (value.rstrip("/") for name, value in env.items() if not decides(name) and name not in _LASTING)
    apart += [f"{value}/" for value in values if value.startswith("/") and os.path.dirname(value) not in ("/", "/var")]
    apart = [folder for folder in apart if not f"{work}/".startswith(folder)]
    passed = {*_folders([f"{work}/.", f"{env.get('HOME') or '/'}/.", *apart])}
    for path in sorted(lookups.found - passed):
        folder, name = os.path.split(path)
        is_apart = name in opens.started or f"{path}/".startswith(tuple(apart)) or _NO_NAME.search(path)
        if is_apart or not counts(path) or (path.startswith(f"{work}/") and os.path.realpath(path) in read):
            continue
        met = path not in lookups.wanted and os.path.realpath(folder) in opens.folders
        if met and (name not in words or _file(path) in opens.written - opens.read):
            continue
        if is_old(path) and shown(path):
            yield f"!{_in_home(path, env, work)}", _kind(path)


def _in_home(path: str, env: Mapping[str, str], work: str) -> str:
    """``path``; with ``~`` for the home folder, unless it is the job's own."""
    home = os.path.normpath(env.get("HOME") or "/").rstrip("/")
    return f"~{path[len(home) :]}" if path.startswith(f"{home}/") and not path.startswith(f"{work}/") else path


def _shown(env: Mapping[str, str]) -> Callable[[str], bool]:
    """Whether no secret is in a path."""
    hidden = {value for name, value in env.items() if value and may_be_secret(name, value)}
    parts = {value for value in hidden if len(value) >= _SECRET}

    def is_shown(path: str) -> bool:
        named = not hidden.isdisjoint(path.split("/")) or any(value in path for value in parts)
        return not named and not may_be_secret("", path)

    return is_shown


def _file(path: str) -> tuple[int, int]:
    with contextlib.suppress(OSError):
        found = os.stat(path)
        return found.st_dev, found.st_ino
    return 0, 0


def _kind(path: str) -> str:
    """Empty for what is not there."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return ""
    return "folder" if stat.S_ISDIR(mode) else "program" if mode & 0o111 else "file"


def _plain(texts: Iterable[str], env: Mapping[str, str], work: str) -> tuple[list[str], dict[str, list[str]]]:
    """``texts`` with names in one piece, and the values of the variables in them that may be shown."""
    texts = [text.partition("\0")[0] for text in texts]  # a script that unpacks itself has its data behind its text
    texts = [_DEFAULT.sub(lambda one: env.get(one[1]) or one[2], text) for text in texts]
    texts = [re.sub(r"[\"']\)?[ \t]*/[ \t]*[\"']", "/", text) if "/" in text else text for text in texts]
    texts = [_JOINED.sub(lambda one: re.sub(r"[\"'][ \t]*,[ \t]*[\"']", "/", one[0]), text) for text in texts]
    texts = [
        _BRACES.sub(lambda one: " ".join(f"{one[1]}{part}{one[3]}" for part in one[2].split(",")), text)
        for text in texts
    ]
    known = {name: [value] for name, value in env.items() if not may_be_secret(name, value)}
    given = ((name, [value]) for text in texts for name, value in _LOCAL.findall(text))
    loops = ((name, words.split()[:_VALUES]) for text in texts for name, words in _LOOP.findall(text))
    for name, words in itertools.islice(itertools.chain(given, loops), MOST):
        if len(before := known.get(name, [])) < _VALUES:
            values = (one for word in words for one in _expansions(word.strip("\"'"), known))
            shown = (one for one in values if one not in before and not may_be_secret(name, one))
            known[name] = [*before, *itertools.islice(shown, _VALUES - len(before))]
    return texts, known


def _expansions(word: str, known: Mapping[str, list[str]]) -> list[str]:
    """``word`` with each of the values that its variables have."""
    out = [word]
    for found in VARIABLE.finditer(word):
        if values := known.get(found[1] or found[2]):
            out = [one.replace(found[0], value) for one in out for value in values][:_VALUES]
            out = [one for one in out if len(one) < _LONGEST]
    return out


def _named(texts: Iterable[str], known: Mapping[str, list[str]], work: str) -> Iterator[str]:
    """The paths that the words of ``texts`` name, without what is no name in ``work``: most are none, and to ask a
    shared folder for each would take long."""
    here = set[str]()
    with contextlib.suppress(OSError):
        here.update(os.listdir(work))
    paths = _whole(_words(texts, _WORD), known, [work])
    return (path for path in paths if os.path.dirname(path) != work or os.path.basename(path) in here)


def _works(texts: Iterable[str], known: Mapping[str, list[str]], work: str) -> list[str]:
    """The folders that they work in."""
    entered = [name.strip("\"'") for text in texts for name in _ENTERED.findall(text)][:_SOURCES]
    return [work, *dict.fromkeys(path for path in _whole(entered, known, [work]) if os.path.isdir(path))]


def globbed(texts: Collection[str], env: Mapping[str, str], work: str) -> dict[str, set[str]]:
    """Folder -> patterns of names in it that ``texts`` have."""
    out = dict[str, set[str]]()
    texts, known = _plain(texts, env, work)
    words = (word for text in texts for word in _WORD.findall(_REMOVES.sub("", text)) if re.search(r"[*?]", word))
    works = _works(texts, known, work)
    for path in (one for word in dict.fromkeys(itertools.islice(words, MOST)) for one in _expansions(word, known)):
        folder, name = os.path.split(path)
        if (
            len(name) < 256  # no longer name is one of a file
            and re.fullmatch(r"[*?]?[\w.-]+[\w.*?-]*", name)
            and not re.search(r"[*?]", folder)
            and not _NO_PATTERN.search(f"{folder}/{name}")
        ):
            for one in works:
                out.setdefault(os.path.realpath(os.path.join(one, folder)), set()).add(name)
    for at in [at for at, found in out.items() if len(found) > _PATTERNS]:  # they stand in a program, not in a shell
        log.info("its %d patterns of names in %s do not count: more than %d", len(out.pop(at)), at, _PATTERNS)
    return out


def listed(texts: Iterable[str], env: Mapping[str, str], work: str, folders: Collection[str]) -> set[str]:
    """Which of ``folders``, that were listed, ``texts`` name, with those below them; not those the job works in."""
    texts, known = _plain((re.sub(r"/\*+(?=[\s\"'/;&|)]|$)", "", text) for text in texts), env, work)
    named = {os.path.realpath(path) for one in _works(texts, known, work) for path in _named(texts, known, one)}
    named = {path for path in named & {*folders} if not f"{work}/".startswith(f"{path.rstrip('/')}/")}
    below = tuple(f"{path}/" for path in named)
    return {path for path in folders if path in named or path.startswith(below)} if named else named


def _before(texts: list[str], known: Mapping[str, list[str]], work: str, read: Collection[str]) -> Iterator[str]:
    """Where a module may lie that would be taken instead of one that was ``read``, or of none: Python lists folders,
    and does not look for each name."""
    lists = [value.split(":") for name, values in known.items() if decides(name) for value in values if ":" in value]
    lists += [re.split(r"[\s:]+", found) for text in texts for found in _LISTS.findall(text)]
    for folders in ([*dict.fromkeys(filter(None, one))][:_FOLDERS] for one in lists):
        folders = [*map(os.path.realpath, _whole(folders, known, [work]))]
        for number, folder in enumerate(folders[1:], 1):
            for path in (path for path in read if path.startswith(f"{folder}/")):
                yield from (os.path.join(one, os.path.relpath(path, folder)) for one in folders[:number])
    started = map(os.path.dirname, _whole(_words(texts, _STARTED), known, [work]))
    folders = [*dict.fromkeys([work, *started])][:_SOURCES]
    for name in dict.fromkeys(name for text in texts for name in _IMPORTED.findall(text)):
        for folder in folders:
            ways = [os.path.join(folder, f"{name}{end}") for end in ("/__init__.py", ".py")]  # in this order
            yield from itertools.takewhile(lambda path: not os.path.lexists(path), ways)


def placed(texts: Iterable[str], env: Mapping[str, str], work: str, targets: Collection[str], *, failed: bool) -> bool:
    """Whether ``texts`` ask if one of the folders ``targets`` is there, or put another one in its place: what is
    mounted on it is there before, and stays. If they ``failed``, also whether they make or remove it, which fails then.
    """
    texts = [text for text in texts if any(mark in text for mark in _MARKS)]
    texts = [_DEFAULT.sub(lambda one: env.get(one[1]) or one[2], text) for text in texts]
    known = {**env, **{name: expanded(value, env) for text in texts for name, value in _LOCAL.findall(text)}}
    shapes = (_PLACED, _REMOVED) if failed else (_PLACED,)
    found = ("".join(groups) for text in texts for shape in shapes for groups in shape.findall(text))
    words = itertools.islice((word for text in found for word in re.split(r"[\s,\"']+", text)), _WORDS)
    paths = (os.path.join(work, expanded(word, known)) for word in dict.fromkeys(words))
    wanted = set(map(os.path.realpath, targets))
    return any("\0" not in path and os.path.realpath(path) in wanted for path in paths)


def difference(looked_up: Mapping[str, str], env: Mapping[str, str], is_same: Callable[[str, str], bool]) -> str:
    """What leads elsewhere here, to what is not the same (path here, path there; nothing was there, and what is here
    says nothing); empty when nothing does."""
    for name, there in sorted(looked_up.items(), key=lambda item: (not item[0].startswith("?"), item)):
        if name.startswith("?"):
            if bool(here := _program(name[1:], env)) != bool(there):
                return f"the program {name[1:]}, which the command looks for, is {'here' if here else 'not here'}"
            continue
        path = name.removeprefix("!")
        path = os.path.join(env.get("HOME") or "/", path[2:]) if path.startswith("~/") else path
        if name.startswith("!"):
            if (kind := _kind(path)) == there:
                continue
            if kind and "program" in (kind, there) and "folder" not in (kind, there):
                return (
                    f"the program {path}, which the command looks for, is {'here' if kind == 'program' else 'not here'}"
                )
            return f"{path}, which the command looks for, is {f'a {kind}' if kind else 'not'} here"
        if not there:
            if os.path.exists(path) and not is_same(path, ""):
                return f"{path} is new"
            continue
        here = os.path.realpath(name) if "/" in name else _program(name, env)
        if here != there and (os.path.exists(here) or os.path.islink(name)) and not is_same(here, there):
            return f"{name} leads to {here} here, not to {there}"
    return ""


def are_plain(looked_up: Mapping[str, str]) -> bool:
    """Whether they are such as are published."""
    leads = (path for name, path in looked_up.items() if path and not name.startswith("!"))
    absolute = all(path.startswith("/") and os.path.normpath(path) == path for path in leads)
    return absolute and all("/" not in name or os.path.normpath(name) == name for name in looked_up)


def holding(env: Mapping[str, str], read: Collection[str], work: str) -> set[str]:
    """The variables that name a file that was ``read``, or a folder of such files: another value is another file. What
    lies in the folder ``work``, where the command starts, is not found by the folders above it."""
    below = f"{work.rstrip('/')}/"
    above, outside = _folders(read), _folders(path for path in read if not path.startswith(below))
    out = set[str]()
    for name, value in env.items():
        if "/" in value and (name in ("HOME", "BASH_ENV") or decides(name)):
            for path in filter(lambda part: part.startswith("/"), value.split(":")):
                real = os.path.realpath(path)
                if real in read or real in (outside if below.startswith(f"{real.rstrip('/')}/") else above):
                    out.add(name)
    return out


def _folders(paths: Iterable[str]) -> set[str]:
    """All folders that these lie in."""
    out = set[str]()
    for path in paths:
        while (path := os.path.dirname(path)) not in out:
            out.add(path)
    return out


def _program(name: str, env: Mapping[str, str]) -> str:
    found = shutil.which(name, path=env.get("PATH") or os.defpath)
    return os.path.realpath(found) if found else ""


def _words(texts: Iterable[str], what: re.Pattern[str]) -> list[str]:
    """The first words of ``texts`` that are ``what``."""
    words = (next(filter(None, found.groups()), found[0]) for text in texts for found in what.finditer(text))
    return [*dict.fromkeys(itertools.islice(words, _WORDS))]


def _whole(words: Iterable[str], known: Mapping[str, list[str]], folders: Sequence[str]) -> Iterator[str]:
    """The paths that ``words`` name in each of ``folders``, as far as they are whole."""
    for path in dict.fromkeys(one for word in words for one in _expansions(word, known)):
        if path.startswith("~/") and known.get("HOME"):
            path = known["HOME"][0] + path[1:]
        if not _NO_PATH.search(path):
            yield from (os.path.normpath(os.path.join(folder, path)) for folder in folders)
