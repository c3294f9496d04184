"""Caches of package managers: what is in them changes with every start, and is no input of the command that uses them.
Each holds what its manager fetched and checks by itself. What it was told to fetch is in files of the project."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping

# Variable that moves it (or ""), the folder without that variable, and what in it is a cache when not all is. A name
# without "/" at its begin lies below HOME.
_CACHES = """
XDG_CACHE_HOME          .cache
PIP_CACHE_DIR           .cache/pip
UV_CACHE_DIR            .cache/uv
POETRY_CACHE_DIR        .cache/pypoetry
PDM_CACHE_DIR           .cache/pdm
PIPENV_CACHE_DIR        .cache/pipenv
PIXI_CACHE_DIR          .cache/rattler
RATTLER_CACHE_DIR       .cache/rattler
CONDA_PKGS_DIRS         .conda/pkgs
MAMBA_ROOT_PREFIX       micromamba              pkgs
MAMBA_ROOT_PREFIX       .local/share/mamba      pkgs
CONDA_ROOT              miniconda3              pkgs
CONDA_ROOT              anaconda3               pkgs
CONDA_ROOT              miniforge3              pkgs
CONDA_ROOT              /opt/conda              pkgs
CARGO_HOME              .cargo                  registry git .global-cache .package-cache .package-cache-mutate
RUSTUP_HOME             .rustup                 downloads tmp
GOPATH                  go                      pkg/mod pkg/sumdb
GOMODCACHE              go/pkg/mod
GOCACHE                 .cache/go-build
npm_config_cache        .npm
NPM_CONFIG_CACHE        .npm
YARN_CACHE_FOLDER       .cache/yarn
YARN_GLOBAL_FOLDER      .yarn/berry             cache metadata index
npm_config_store_dir    .local/share/pnpm/store
PNPM_HOME               .local/share/pnpm       store
XDG_DATA_HOME           .local/share            pnpm/store
BUN_INSTALL_CACHE_DIR   .bun/install/cache
DENO_DIR                .cache/deno
TMPDIR                  /tmp                    v8-compile-cache-0 node-compile-cache
CCACHE_DIR              .ccache
SCCACHE_DIR             .cache/sccache
GRADLE_USER_HOME        .gradle                 caches
MAVEN_REPOSITORY        .m2/repository
"""

CONTENT = "/_cacache/"
"""In the path of what npm has, wherever its settings put it."""

OPTION = b"--cache-dir"
_OPTION = re.compile(r"\s--cache-dir(?:=| {1,99})[\"']?([^\s;&|\"']+)")
_COMMAND = re.compile(r"\b(?:pip3?|uvx?)\b[^\n;&|]*\Z")
_LONG = 1000
"""Characters of a command before the option."""


def named(text: str, environ: Mapping[str, str], work: str) -> Iterator[str]:
    """The caches that commands in a shell's text name by an option, as `folders`."""
    text = text.replace("\\\n", " ")
    for found in _OPTION.finditer(text):
        begin = max(text.rfind("\n", 0, found.start()), found.start() - _LONG, 0)
        if not _COMMAND.search(text, begin, found.start()):
            continue
        path = re.sub(r"\$\{?(\w+)\}?", lambda one: environ.get(one[1], one[0]), found[1])
        folder = os.path.normpath(os.path.join(work, path))
        if "$" not in path and not (work + "/").startswith(folder.rstrip("/") + "/"):
            yield folder


def folders(environ: Mapping[str, str], work: str) -> Iterator[str]:
    """The caches of a command with these variables: absolute paths, of which not all are there. One with the working
    folder ``work`` in it is none."""
    home = environ.get("HOME") or "/root"
    conda = environ.get("CONDA_EXE", "")  # PREFIX/bin/conda
    named = {**environ, "CONDA_ROOT": os.path.dirname(os.path.dirname(conda))}
    for line in _CACHES.strip().splitlines():
        variable, default, *parts = line.split()
        moved = [place for place in named.get(variable, "").replace(",", ":").split(":") if place.startswith("/")]
        for place in moved or [os.path.join(home, default)]:
            for folder in (os.path.join(place, part).rstrip("/") for part in parts or [""]):
                if folder and not (work + "/").startswith(folder + "/"):
                    yield folder
