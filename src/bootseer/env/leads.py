"""Leads: what a result names outside of the targets, and needs there: the other end of a link, the interpreter of a
script or a virtual environment, the folder of a ``.pth`` file, of an editable install or of a library's libraries.

A snapshot holds the name alone, so that what it leads to is an input: a file must be there with the same content. A
folder must be there, with the programs and modules in it that the command wrote; the rest of it is the node's own, as
with the command. In a container's image it must be there, for which the image's digest stands.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import struct
import urllib.parse
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from bootseer.config import Config
from bootseer.env.inputs import MAX_FILES, Digests, Observed, is_text
from bootseer.env.inventory import Entry
from bootseer.env.spec import EnvSpec, Target, resolve_in
from bootseer.errors import ConfigError, DataError
from bootseer.units import one_line
from bootseer.wiretypes import json_as

FILE, FOLDER = "file", "folder"
"""Instead of a digest: of which kind it must be."""
_HEAD = 64 << 10
_SHEBANG = re.compile(rb"#!/bin/sh\n'''exec' \"?(/[^\"\n]+?)\"? \"\$0\"|#![ \t]*(/\S+)")
_SYSTEM = ("/usr/", "/bin/", "/sbin/", "/lib/", "/lib64/", "/etc/")
_EVERYWHERE = ("/proc/", "/sys/", "/dev/")
_HOME = re.compile(rb"(?m)^home[ \t]*=[ \t]*(/[^\n]*?)[ \t]*$")
_METADATA = "*.egg-info/[Pe][Kn]*"
"""PKG-INFO and entry_points.txt."""
_OF_TOOLS = re.compile(r"\.egg-info$|^(?:__pycache__|\.git|node_modules)$")
_LOADED = re.compile(r"\.(?:py|pth|js|mjs|cjs|node)$|\.so\b")
_LIBRARY = re.compile(r"\.so\b")
_OF_SYSTEM = tuple(map(os.fsencode, _SYSTEM))
_LOADED_PART, _DYNAMIC, _STRINGS, _PATHS = 1, 2, 5, (15, 29)
"""Of ELF: kinds of program headers, then tags."""
_LONGEST = 4096
_LISTED = 10_000
"""Entries of a folder among which those are looked for that the command wrote."""


Read = Callable[..., bytes]
"""(path, most, where they begin)."""


def added(
    spec: EnvSpec,
    config: Config,
    known: Observed,
    entries: Iterable[Entry],
    read: Read,
    since: int,
) -> Observed:
    """``known`` with the leads out of ``entries``, of whose files ``read`` gives so many bytes; ``since``: when the
    command began (ns). Raises `DataError` for what another node cannot have, `OSError`."""
    digests, found = Digests(spec, config), dict[str, tuple[str, str]]()
    for by, path, is_link in sorted(set(_named(spec, entries, read))):
        if path in _places(spec):
            found[_places(spec)[path].path] = _place_of(path), by
        elif path not in found or found[path][0] == FILE:
            found.update((name, (wanted, by)) for name, wanted in _needs(spec, digests, by, path, is_link, since))
        if len(found) > MAX_FILES:
            raise DataError(f"its files lead to more than {MAX_FILES} outside of the targets, such as {by} to {path}")
    return msgspec.structs.replace(known, leads=found)


def check(inputs: Observed) -> None:
    """Raise `DataError` for leads that are never published."""
    for path, (wanted, by) in inputs.leads.items():
        plain = all(os.path.isabs(one) and os.path.normpath(one) == one and is_text(one) for one in (path, by))
        if not plain or path.startswith(_EVERYWHERE) or not re.fullmatch(f"{FILE}|{FOLDER}|[0-9a-f]{{64}}", wanted):
            raise DataError("its leads have bad names")
    if len(inputs.leads) > MAX_FILES:
        raise DataError(f"its leads are more than {MAX_FILES}")


def difference(spec: EnvSpec, digests: Digests, inputs: Observed) -> str:
    """What of ``inputs`` is here otherwise than there; empty when nothing is."""
    if reason := digests.difference(inputs):
        return reason
    for path, (wanted, by) in sorted(inputs.leads.items(), key=lambda item: (item[1][0] == FOLDER, item)):
        with contextlib.suppress(OSError, ValueError, ConfigError):
            if any(path == target.path for target in _places(spec).values()):
                if wanted != _place_of(os.path.realpath(path)):
                    return one_line(f"{by} leads to the true place of {path}, which is another one here")
                continue
            mode = os.stat(_host(spec, path)).st_mode
            kind = FOLDER if stat.S_ISDIR(mode) else FILE
            if wanted == kind or (kind == FILE and digests.of(path) == wanted):
                continue
            return one_line(f"{by} leads to {path}, which is another one here")
        return one_line(f"{by} leads to {path}, which is not here")
    return ""


def _places(spec: EnvSpec) -> dict[str, Target]:
    """Where the targets truly lie: what names that is of use nowhere else."""
    return {} if spec.contained else {os.path.realpath(target.host): target for target in spec.targets}


def _place_of(path: str) -> str:
    return hashlib.sha256(os.fsencode(path)).hexdigest()


def _named(spec: EnvSpec, entries: Iterable[Entry], read: Read) -> Iterator[tuple[str, str, bool]]:
    """(path of an entry, what it names, whether it is a link), as the job sees them."""
    places = [os.path.realpath(one.host) if not spec.contained else one.path for one in spec.targets]
    shown_places = {target.path.rstrip("/") for target in spec.targets}
    inside = tuple(f"{path.rstrip('/')}/" for path in (*places, *shown_places))
    for entry in entries:
        if entry.kind == "l":
            texts = [entry.data]
        elif entry.kind == "f":
            texts = [os.fsdecode(text) for text in _texts(spec, entry, read)]
        else:
            continue
        shown = os.path.join(spec.targets[entry.target].path, entry.inner)
        for text in texts:
            path = os.path.join(places[entry.target], os.path.dirname(entry.inner), text)
            through_link = "/../" in text.lstrip("./") and not spec.contained
            path = os.path.realpath(path) if through_link else os.path.normpath(path)
            true = [place for place in places if place not in shown_places and f"{path}/".startswith(f"{place}/")]
            if true and text.startswith("/"):
                yield shown, true[0], False
            elif not f"{path}/".startswith(inside + _EVERYWHERE) and "\0" not in path:
                yield shown, path, entry.kind == "l"


def _texts(spec: EnvSpec, entry: Entry, read: Read) -> list[bytes]:
    name = os.path.basename(entry.path)
    if name.endswith((".pth", ".egg-link")):
        lines = [line.strip() for line in read(entry.path, _HEAD).splitlines()]
        return [line for line in lines if line.startswith((b"/", b".."))]
    if name == "direct_url.json":
        with contextlib.suppress(ValueError, AttributeError):
            found = json_as(read(entry.path, _HEAD), dict[str, Any])
            url = urllib.parse.urlsplit(str(found.get("url")))
            if url.scheme == "file" and (found.get("dir_info") or {}).get("editable"):
                return [os.fsencode(urllib.parse.unquote(url.path))]
        return []
    if name == "pyvenv.cfg":
        return _HOME.findall(read(entry.path, _HEAD))
    if entry.mode & 0o111 and (first := _SHEBANG.match(read(entry.path, 512))):
        return [program for program in first.groups() if program]
    if entry.mode & 0o111 or _LIBRARY.search(name):
        with contextlib.suppress(struct.error, OverflowError):  # it may be a damaged one, as tests of parsers have
            return [path for path in _library_paths(entry, read) if _may_lead(spec, path)]
    return []


def _may_lead(spec: EnvSpec, folder: bytes) -> bool:
    """Whether ``folder`` may be a lead. Most libraries name folders of the machine where they were built, too, which
    nobody misses: not even in a user's container, where nobody knows what the command has made, and lost."""
    if folder.startswith(_OF_SYSTEM) or not spec.contained:
        return not folder.startswith(_OF_SYSTEM)
    with contextlib.suppress(OSError, ValueError, ConfigError):
        return _host(spec, os.fsdecode(folder)).is_dir()
    return False


def _library_paths(entry: Entry, read: Read) -> list[bytes]:
    """The absolute folders in which an ELF file of 64 bits has its libraries looked for (RPATH, RUNPATH)."""
    head = read(entry.path, _HEAD)
    if head[:6] != b"\x7fELF\x02\x01":
        return []
    at, size, count = *struct.unpack_from("<Q", head, 32), *struct.unpack_from("<HH", head, 54)
    parts = [struct.unpack_from("<IIQQQQ", head, at + size * number) for number in range(count)]
    found = list[tuple[int, int]]()
    for kind, _, start, _, _, length in parts:
        if kind == _DYNAMIC:
            data = read(entry.path, min(length, _HEAD), min(start, entry.size))
            found = [*struct.iter_unpack("<QQ", data[: len(data) // 16 * 16])]  # there is one
    names = dict(found)
    place = next(
        (
            start + names[_STRINGS] - there
            for kind, _, start, there, _, length in parts
            if kind == _LOADED_PART and _STRINGS in names and there <= names[_STRINGS] < there + length
        ),
        0,
    )
    begins = [min(place + offset, entry.size) for tag, offset in found if place and tag in _PATHS]
    texts = [read(entry.path, _LONGEST, begin) for begin in begins]
    return [one for text in texts for one in text.partition(b"\0")[0].split(b":") if one.startswith(b"/")]


def _needs(spec: EnvSpec, digests: Digests, by: str, path: str, is_link: bool, since: int) -> Iterator[tuple[str, str]]:
    """(name, what must be there) of what ``path`` leads to. Nothing when it leads nowhere here, either."""
    if not is_text(by + path):
        raise DataError(f"{by!a} leads to {path!a}, which is no UTF-8")
    host = _host(spec, path)
    in_image = spec.contained and not spec.on_host(path)
    try:
        status = os.stat(host)
    except OSError:
        if in_image and os.geteuid() and spec.rootfs:
            raise DataError(
                f"{by} leads to {path}, which ends with the command: make its folder a target, too"
            ) from None
        return
    if in_image and status.st_ctime_ns >= since:
        raise DataError(f"{by} leads to {path}, which the command made: make its folder a target, too")
    if stat.S_ISDIR(status.st_mode):
        yield path, FOLDER
        for inner in () if in_image else _written(spec, host, since):
            yield (name := os.path.join(path, inner)), _digest(digests, name)
        if by.endswith(".egg-link") and not in_image:
            yield from ((os.path.join(path, os.path.relpath(one, host)), FILE) for one in host.glob(_METADATA))
    elif stat.S_ISREG(status.st_mode):
        # Of the shell of a script any version of the system does.
        any_does = path.startswith(_SYSTEM) and not is_link and not os.path.basename(path).startswith("py")
        yield path, FILE if in_image or any_does else _digest(digests, path)


def _digest(digests: Digests, path: str) -> str:
    return FILE if (found := digests.of(path)) in ("", "?") else found


def _written(spec: EnvSpec, folder: Path, since: int) -> Iterator[str]:
    """What the command wrote below ``folder``, outside of the targets, that is run or loaded."""
    targets = {os.path.realpath(target.host) for target in spec.targets}
    seen, todo = 0, [""]
    while todo and seen < _LISTED:
        inner = todo.pop()
        with contextlib.suppress(OSError), os.scandir(folder / inner) as items:
            for item in items:
                seen += 1
                path = os.path.join(inner, item.name)
                if item.is_dir(follow_symlinks=False):
                    if not _OF_TOOLS.search(item.name) and os.path.realpath(item.path) not in targets:
                        todo.append(path)
                elif item.is_file(follow_symlinks=False):
                    status = item.stat(follow_symlinks=False)
                    if status.st_ctime_ns >= since and (status.st_mode & 0o111 or _LOADED.search(item.name)):
                        yield path


def _host(spec: EnvSpec, path: str) -> Path:
    """Where ``path``, as the job sees it, lies on this host; links of a container are followed in what it sees."""
    if not spec.contained:
        return Path(path)
    root = spec.root_of(spec.on_host(path)) if spec.on_host(path) else spec.rootfs
    inner = os.path.relpath(spec.on_host(path), root) if spec.on_host(path) else path
    return resolve_in(Path(root), inner) if root else Path(path)
