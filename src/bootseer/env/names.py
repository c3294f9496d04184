"""Names by which a set-up command finds files: where links lead, which program ``PATH`` finds, which file it looked for
in vain, which variables hold folders of files that it read.

The kernel tells only of files that were opened, by their true paths. So the words of the command and of its scripts are
looked at.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from bootseer.env.credentials import may_be_secret
from bootseer.env.variables import decides, expanded
from bootseer.patterns import pattern

log = logging.getLogger(__name__)

MOST, _WORDS = 5000, 20_000
"""Names, and words of texts that are looked at: the job waits."""
_WORD = pattern(r"[^\s\"'`;&|<>()=,\[\]]+")
_FOUND = pattern(
    r"(?:\[|\btest|&&|\|\||\s-[ao])[ \t]+(?:![ \t]+)?-[de][ \t]+[\"']?([^\s\"'`;&|<>()\]]+)"
    r"|\b(?:exists|isdir|existsSync|Path(?=\([^)\n]{1,300}\)\.(?:exists|is_dir)))\(\s*[\"']([^\"'\n]+)[\"']"
)
"""Where it decides that something is there, or that it is not."""
_RUNNABLE = pattern(r"(?:\[|\btest|&&|\|\||\s-[ao])[ \t]+(?:![ \t]+)?-x[ \t]+[\"']?([^\s\"'`;&|<>()\]]+)")
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
_VARIABLE = pattern(r"\$(?:\{(\w+)\}|(\w+))")
_DEFAULT = pattern(r"\$\{(\w+):?-([^{}$]*)\}")
_ASKED = pattern(
    r"\b(?:command[ \t]+-[vV]|which|hash|type(?:[ \t]+-\w+)?)[ \t]+([\w.+-]+)|\bwhich\(\s*[\"']([\w.+-]+)[\"']"
)
_IMPORTED = pattern(r"(?m)^[ \t]*(?:import|from)[ \t]+([A-Za-z_]\w*)")
_STARTED = pattern(r"\bpython[\d.]*[ \t]+(?:-\w+[ \t]+){0,8}([^\s\"';&|]+\.py)\b")
_SOURCES, _FOLDERS, _VALUES, _LONGEST = 20, 100, 20, 4096
"""Folders of scripts in which what they import is looked for; of a list in which something is looked for."""
_LISTS = pattern(
    r"(?m)(?:^|[;&]|\bexport)[ \t]*(?:\w*PATH[ \t]*[:?+]?=|vpath[ \t]+\S+[ \t])[ \t]*[\"']?([^\n\"';&|#]+)"
)
_PATTERNS = 20
_OWN_FOLDER = pattern(
    r"\$\(\s*cd\s+(?:-\w\s+)?[\"']?\$\(\s*dirname[^()]*(?:\$\([^()]*\)[^()]*)?\)[\"']?((?:/[\w.]+)*)[^()]*\)"
    r"|\$\(\s*dirname\s+[^()]*(?:\$0|BASH_SOURCE)[^()]*\)|\$\{(?:0|BASH_SOURCE(?:\[0\])?)%/\*\}"
    r"|\$\{CMAKE_(?:CURRENT_)?(?:SOURCE|LIST)_DIR\}"
)
_WORKING_FOLDER = pattern(r"\$\(\s*pwd\s*\)|`pwd`|\$\(CURDIR\)|\$\{?PWD\b\}?")
_LOOP = pattern(r"\bfor[ \t]+(\w+)[ \t]+in[ \t]+([^;\n]{1,500})")
_BRACES = pattern(r"(?<![\w./-])([\w./-]{0,200})\{([\w.-]*(?:,[\w.-]*){1,20})\}([\w./-]{0,200})")
_JOINED = pattern(r"\bjoin\([^\n]{1,300}")
_SECRET = 12
"""Characters of a secret that is looked for within names, too: a shorter one may be a word, such as ``test``."""
_NO_NAME = pattern(r"/__pycache__/|/\.git/|:/")
"""Byte code, whose source counts; what git keeps, whose branches and tags do; a URL that was tried as a path."""
BESIDE = {
    **dict.fromkeys(
        ("pyproject.toml", "setup.py", "setup.cfg"), ("pyproject.toml", "setup.py", "setup.cfg", "MANIFEST.in")
    ),
    **dict.fromkeys(("Makefile", "makefile"), ("GNUmakefile", "makefile")),
    "package.json": (".npmrc", ".npmignore", "package-lock.json", "npm-shrinkwrap.json"),
    "Cargo.toml": ("build.rs", "Cargo.lock", "rust-toolchain", "rust-toolchain.toml", ".cargo/config.toml"),
    "CMakeLists.txt": ("CMakePresets.json", "CMakeUserPresets.json"),
    "go.mod": ("go.sum", "go.work", "vendor/modules.txt"),
    "HEAD": ("info/attributes",),
}
"""What tools look for, beside a file that they read, without any text that says so."""
_NO_PATTERN = re.compile(r"[$`{}\0\\^]|:/")
_NO_PATH = re.compile(r"[$`*?{}\0]|://")


def looked_up(
    scripts: Iterable[tuple[str, str]],
    started: Iterable[str],
    env: Mapping[str, str],
    work: str,
    read: Collection[str],
    counts: Callable[[str], bool],
    is_old: Callable[[str], bool],
) -> dict[str, str]:
    """Name -> where it leads, for a program that was ``started`` or a link in a path; empty for a module that would be
    found before one that was ``read``, and that is not there. With a `?` before it: a program that ``scripts`` ask for;
    with a `!` a path that they find. ``counts``: whether a path may be an input; ``is_old``: whether it is there, and
    not by the command. Each script comes with its folder, empty for what the command has made."""
    found, above = dict[str, str](), _folders(read)
    homes, given = zip(*scripts, strict=True)
    texts, known = _plain(given, env, work)
    asked = dict.fromkeys(name for text in texts for pair in _ASKED.findall(text) for name in pair if name)
    for name in itertools.islice(asked, MOST):
        found[f"?{name}"] = _program(name, env)
    for name in started:
        if (program := _program(name, env)) in read:
            found[name] = program
    for path in _named(texts, known, work):
        real = os.path.realpath(path)
        if real != path and (real in read or real in above or (os.path.islink(path) and counts(path))):
            found[path] = real
    works = [*dict.fromkeys([*_works(texts, known, work), *filter(None, dict.fromkeys(homes))])][: 2 * _SOURCES]
    for path in itertools.islice(_before(texts, known, work, read), MOST):
        if counts(path) and counts(f"{path}/.") and not os.path.exists(path):
            found[path] = ""
            if len(found) >= MOST:
                log.warning("it looks for more than %d names; the others do not count", MOST)
                break
    for path in itertools.islice(_whole(_words(texts, _FOUND), known, works), MOST):
        if counts(path) and counts(f"{path}/.") and is_old(path):
            found[f"!{path}"] = path
    runnable = _words(texts, _RUNNABLE)
    for one in works:
        for path in itertools.islice(_whole(runnable, known, [one]), MOST):
            if counts(path) and (is_old(path) if os.path.exists(path) else one == work):
                found[f"?{path}"] = _program(path, env)
    return dict(sorted(found.items())[:MOST])


def in_vain(
    absent: Collection[str], made: Collection[str], env: Mapping[str, str], work: str, counts: Callable[[str], bool]
) -> Iterator[str]:
    """Of the paths ``absent``, which a command looked for in vain, those that may be inputs: not below folders that it
    ``made`` and may have removed, nor where another one says the same. Below the home folder also as ``~/``, where
    another user's has it."""
    home = os.path.normpath(env.get("HOME") or "/")
    hidden = {value for name, value in env.items() if value and may_be_secret(name, value)}
    parts = {value for value in hidden if len(value) >= _SECRET}
    left, known = MOST, {*absent, *made}
    for path in sorted(absent):
        if not known.isdisjoint(_folders([path])) or path in made or not counts(path) or not counts(f"{path}/."):
            continue
        is_shown = hidden.isdisjoint(path.split("/")) and not any(value in path for value in parts)
        is_shown = is_shown and not may_be_secret("", path)
        if is_shown and not _NO_NAME.search(path) and not os.path.exists(path):
            yield path
            if path.startswith(f"{home.rstrip('/')}/") and not path.startswith(f"{work}/"):
                yield f"~{path[len(home.rstrip('/')) :]}"
            if not (left := left - 1):
                log.warning("it looks for more than %d names; the others do not count", MOST)
                return


def in_place(text: str, folder: str, work: str) -> str:
    """``text`` of a script in ``folder``, with the places that it takes from where it lies and starts."""
    text = _OWN_FOLDER.sub(lambda one: folder + (one[1] or ""), text.partition("\0")[0])
    return _WORKING_FOLDER.sub(lambda _: work, text)


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
    for found in _VARIABLE.finditer(word):
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
    """What leads elsewhere here, to what is not the same (path here, path there); empty when nothing does."""
    for name, there in sorted(looked_up.items(), key=lambda item: (not item[0].startswith("?"), item)):
        if name.startswith("?"):
            if bool(here := _program(name[1:], env)) != bool(there):
                return f"the program {name[1:]}, which the command looks for, is {'here' if here else 'not here'}"
            continue
        if name.startswith("!"):
            if not os.path.exists(name[1:]):
                return f"{name[1:]}, which the command looks for, is not here"
            continue
        if not there:
            path = os.path.join(env.get("HOME") or "/", name[2:]) if name.startswith("~/") else name
            if os.path.exists(path):
                return f"{path} is new"
            continue
        here = os.path.realpath(name) if "/" in name else _program(name, env)
        if here != there and (os.path.exists(here) or os.path.islink(name)) and not is_same(here, there):
            return f"{name} leads to {here} here, not to {there}"
    return ""


def are_plain(looked_up: Mapping[str, str]) -> bool:
    """Whether they are such as are published."""
    absolute = all(path.startswith("/") and os.path.normpath(path) == path for path in looked_up.values() if path)
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
