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
_NO_PATH = re.compile(r"[$`*?{}\0]|://")


def looked_up(
    texts: Iterable[str],
    started: Iterable[str],
    env: Mapping[str, str],
    work: str,
    read: Collection[str],
    counts: Callable[[str], bool],
) -> dict[str, str]:
    """Name -> where it leads, for a program that was ``started`` or a link in a path to what was ``read``; empty for a
    file that ``texts`` ask for and that is not there. ``counts``: whether a path may be an input."""
    found, above = dict[str, str](), _folders(read)
    shown = {name: value for name, value in env.items() if not may_be_secret(name, value)}
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
        if real != path and (real in read or real in above):
            found[path] = real
    for path in _paths(texts, _LOOKED_FOR, shown, work):
        if counts(path) and not os.path.lexists(path):
            found[path] = ""
    return dict(sorted(found.items())[:MOST])


def difference(looked_up: Mapping[str, str], env: Mapping[str, str], is_same: Callable[[str, str], bool]) -> str:
    """What leads elsewhere here, to what is not the same (path here, path there); empty when nothing does."""
    for name, there in sorted(looked_up.items()):
        here = os.path.realpath(name) if "/" in name else _program(name, env)
        if not there:
            if os.path.isfile(name):
                return f"{name} is new"
        elif here != there and os.path.exists(here) and not is_same(here, there):
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
