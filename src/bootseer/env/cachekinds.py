"""The kinds of caches that starts hand on to each other: the one table of their variables, and of what is no entry. A
kind of the group ``compile`` is filled by the training command, one of the group ``packages`` by a set-up command."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Literal, NamedTuple

from bootseer.errors import ConfigError

Group = Literal["compile", "packages"]


class Kind(NamedTuple):
    """``variables``: what makes a program use the cache; ``{}`` stands for the kind's own folder. ``left_out``: matches
    paths in it that are of one start: locks, unfinished files. ``unit``: matches the folder of entries that stay or go
    together."""

    group: Group
    variables: Mapping[str, str]
    left_out: str = r"$^"
    unit: str = r"$^"


KINDS: Mapping[str, Kind] = {
    "inductor": Kind(
        "compile",
        {
            "TORCHINDUCTOR_CACHE_DIR": "{}",
            "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
            "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
            # They lie below TMPDIR wherever the cache is, and one takes longer than it saves where all else is there.
            "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
        },
    ),
    "triton": Kind("compile", {"TRITON_CACHE_DIR": "{}"}, r"(?:^|/)tmp\.pid_"),
    "jax": Kind(
        "compile",
        {
            "JAX_COMPILATION_CACHE_DIR": "{}",
            "JAX_ENABLE_COMPILATION_CACHE": "true",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        },
        r"-atime$",
    ),
    "cuda": Kind("compile", {"CUDA_CACHE_PATH": "{}", "CUDA_CACHE_MAXSIZE": "4294967296"}),
    # one that finds the file `lock` waits until somebody removes it
    "torch-extensions": Kind("compile", {"TORCH_EXTENSIONS_DIR": "{}"}, r"(?:^|/)lock$"),
    # of the others see `packages`
    "pip": Kind("packages", {"PIP_CACHE_DIR": "{}", "PIP_NO_CACHE_DIR": ""}, r"^(?!(?:http|http-v2|wheels)/)"),
    "uv": Kind(
        "packages",
        # links into it would lead nowhere when the command has ended
        {"UV_CACHE_DIR": "{}", "UV_NO_CACHE": "0", "UV_LINK_MODE": "copy"},
        r"^(?!archive-v\d+/|(?:wheels|sdists)-v\d+/.*(?:\.http|\.rev|\.msgpack|\.whl)$)",
        r"archive-v\d+/[^/]+",
    ),
}

_OF_ONE_START = re.compile(r"(?:^|/)(?:locks(?:/|$)|\.(?!ninja_(?:log|deps)$)|[^/]*(?:\.lock|\.tmp|\.part)$|tmp[^/]*$)")
"""Of any kind that programs compile into. Without its log ninja builds all anew."""
_LONGEST = 2048
"""Bytes of a path: it is to be found below the folders of other nodes, too."""


def chosen(names: Iterable[str] | Literal["auto"], group: Group) -> list[str]:
    """The kinds of ``group`` among ``names``, in the order of the table. Raises `ConfigError` for an unknown name."""
    known = {name for name, kind in KINDS.items() if kind.group == group}
    if names == "auto":
        return [name for name in KINDS if name in known]
    names = set(names)
    if unknown := sorted(names - KINDS.keys()):
        raise ConfigError(f"there is no cache {unknown[0]!r}", hint=f"there are {', '.join(KINDS)}, and auto")
    return [name for name in KINDS if name in names & known]


def exported(names: Iterable[str], folder: str, given: Collection[str]) -> tuple[dict[str, str], list[str]]:
    """The variables of the kinds ``names`` whose folders lie in ``folder``; and those kinds that are left alone,
    because the job sets (``given``) where their cache is."""
    variables: dict[str, str] = {}
    own = []
    for name in names:
        kind = KINDS[name]
        place = next(variable for variable, value in kind.variables.items() if value == "{}")
        if place in given:
            own.append(name)
            continue
        values = {variable: value.replace("{}", f"{folder}/{name}") for variable, value in kind.variables.items()}
        variables |= {variable: value for variable, value in values.items() if variable not in given}
    return variables, own


def is_entry(path: str) -> bool:
    """Whether the file ``path``, below the folder of all kinds of a group, is handed on to other starts."""
    name, _, inner = path.partition("/")
    kind = KINDS.get(name)
    if kind is None or len(os.fsencode(path)) > _LONGEST or (kind.group == "compile" and _OF_ONE_START.search(inner)):
        return False
    return not re.search(kind.left_out, inner)


def unit_of(path: str) -> str:
    """What the entry ``path`` stays or goes with: a folder, or itself."""
    name, _, inner = path.partition("/")
    found = re.match(KINDS[name].unit, inner) if name in KINDS else None
    return f"{name}/{found[0]}" if found else path
