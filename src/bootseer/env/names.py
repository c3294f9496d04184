"""Names by which a set-up command finds files: where links lead, which program ``PATH`` finds, which file it looked for
in vain, which variables hold folders of files that it read.

The kernel tells only of files that were opened, by their true paths. So the words of the command and of its scripts are
looked at.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from bootseer.env.credentials import may_be_secret
from bootseer.env.variables import decides, expanded
from bootseer.patterns import pattern

MOST, _WORDS = 1000, 20_000
"""Names, and words of texts that are looked at: the job waits."""
_WORD = pattern(r"[^\s\"'`;&|<>()=,\[\]]+")
_LOOKED_FOR = pattern(
    r"(?:\[|\btest|&&|\|\||\s-[ao])[ \t]+(?:![ \t]+)?-[efrs][ \t]+[\"']?([^\s\"'`;&|<>()\]]+)"
    r"|\b(?:exists|isfile|open|existsSync|Path(?=\([^)\n]{1,300}\)\.(?:exists|is_file|read)))\(\s*[\"']([^\"'\n]+)[\"']"
)
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
_LOCAL = pattern(r"(?m)(?:^|[;&]|\b(?:export|local|readonly))[ \t]*(\w+)[ \t]*=[ \t]*[\"']?([^\s\"';&|`()]+)")
_DEFAULT = pattern(r"\$\{(\w+):?-([^{}$]*)\}")
_ASKED = pattern(
    r"\b(?:command[ \t]+-[vV]|which|hash|type(?:[ \t]+-\w+)?)[ \t]+([\w.+-]+)|\bwhich\(\s*[\"']([\w.+-]+)[\"']"
)
_IMPORTED = pattern(r"(?m)^[ \t]+(?:import|from)[ \t]+([A-Za-z_]\w*)")
"""In a block: often what need not be there."""
_STARTED = pattern(r"\bpython[\d.]*[ \t]+(?:-\w+[ \t]+){0,8}([^\s\"';&|]+\.py)\b")
_SOURCES, _FOLDERS = 20, 100
"""Folders of scripts in which what they import is looked for; of a list in which something is looked for."""
_INCLUDED = pattern(r"(?<![\w-])-(?:I|isystem|iquote)[ \t]*([^\s\"',;)]+)")
_NO_PATH = re.compile(r"[$`*?{}\0]|://")


def looked_up(
    texts: Iterable[str],
    started: Iterable[str],
    env: Mapping[str, str],
    work: str,
    read: Collection[str],
    counts: Callable[[str], bool],
) -> dict[str, str]:
    """Name -> where it leads, for a program that was ``started`` or a link in a path; empty for a file that ``texts``
    ask for, or that would be found before one that was ``read``, and that is not there. With a `?` before it: a program
    that they ask for. ``counts``: whether a path may be an input."""
    found, above = dict[str, str](), _folders(read)
    shown = {name: value for name, value in env.items() if not may_be_secret(name, value)}
    texts = [text.partition("\0")[0] for text in texts]  # a script that unpacks itself has its data behind its text
    asked = dict.fromkeys(name for text in texts for pair in _ASKED.findall(text) for name in pair if name)
    for name in itertools.islice(asked, MOST):
        found[f"?{name}"] = _program(name, env)
    for name in started:
        if (program := _program(name, env)) in read:
            found[name] = program
    here = set[str]()  # most words are no names in it, and to ask a shared folder for each would take long
    with contextlib.suppress(OSError):
        here.update(os.listdir(work))
    for path in _paths(texts, _WORD, shown, work):
        if os.path.dirname(path) == work and os.path.basename(path) not in here:
            continue
        real = os.path.realpath(path)
        if real != path and (real in read or real in above or (os.path.islink(path) and counts(path))):
            found[path] = real
    before = itertools.islice(_before(texts, shown, work, read), MOST)
    for path in itertools.chain(_paths(texts, _LOOKED_FOR, shown, work), before):
        if counts(path) and not os.path.lexists(path):
            found[path] = ""
    return dict(sorted(found.items())[:MOST])


def _before(texts: list[str], env: Mapping[str, str], work: str, read: Collection[str]) -> Iterator[str]:
    """Where a module, header or library may lie that would be taken instead of one that was ``read``, or of none."""
    lists = [value.split(":") for name, value in env.items() if ":" in value and decides(name)]
    lists.append([folder for text in texts for folder in _INCLUDED.findall(text)])
    for folders in ([*dict.fromkeys(filter(None, one))][:_FOLDERS] for one in lists):
        folders = [os.path.normpath(os.path.join(work, expanded(folder, env))) for folder in folders]
        for number, folder in enumerate(map(os.path.realpath, folders[1:]), 1):
            for path in (path for path in read if path.startswith(f"{folder}/")):
                yield from (os.path.join(one, os.path.relpath(path, folder)) for one in folders[:number])
    started = (os.path.join(work, expanded(name, env)) for text in texts for name in _STARTED.findall(text))
    sources = [*dict.fromkeys([work, *(os.path.dirname(os.path.normpath(path)) for path in started)])][:_SOURCES]
    for name in dict.fromkeys(name for text in texts for name in _IMPORTED.findall(text)):
        ways = [os.path.join(folder, f"{name}{end}") for folder in sources for end in (".py", "/__init__.py")]
        if not any(map(os.path.lexists, ways)):
            yield from ways


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
    for name, there in sorted(looked_up.items()):
        if name.startswith("?"):
            if bool(here := _program(name[1:], env)) != bool(there):
                return f"the program {name[1:]}, which the command looks for, is {'here' if here else 'not here'}"
            continue
        here = os.path.realpath(name) if "/" in name else _program(name, env)
        if not there:
            if os.path.isfile(name):
                return f"{name} is new"
        elif here != there and (os.path.exists(here) or os.path.islink(name)) and not is_same(here, there):
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


def _paths(texts: Iterable[str], what: re.Pattern[str], env: Mapping[str, str], work: str) -> Iterator[str]:
    """The paths that the first words of ``texts`` name, as far as they are whole there."""
    words = (next(filter(None, found.groups()), found[0]) for text in texts for found in what.finditer(text))
    for word in dict.fromkeys(itertools.islice(words, _WORDS)):
        if not _NO_PATH.search(path := expanded(word, env)):
            yield os.path.normpath(os.path.join(work, path))
