"""Byte code of a captured layer, compiled before the snapshot is made so that no node pays for it at its first import:
seconds for large packages of installers that write none (uv). It is compiled by the interpreter that will import it,
into a folder beside the layer, which nobody sees. Advisory: a failure costs nothing but that."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from bootseer.env import key
from bootseer.env.spec import EnvSpec, Target
from bootseer.errors import ConfigError
from bootseer.folders import settled
from bootseer.kernel.links import believed

log = logging.getLogger(__name__)

_DEADLINE = 300.0
_PROCESSES = 2
_TAG = "import sys; print(sys.implementation.cache_tag)"
_COMPILE = """
import os, py_compile, sys
parent, done = os.getppid(), 0
for line in sys.stdin.buffer:
    source, cfile, dfile = map(os.fsdecode, line.rstrip(b"\\n").split(b"\\0"))
    if os.getppid() != parent:
        break
    try:
        py_compile.compile(source, cfile, dfile, doraise=True)
    except Exception:
        done += 1
sys.exit(done > 0)
"""


class Home(NamedTuple):
    """A folder of a layer that ``python`` imports from; ``folder`` is relative to the layer."""

    python: str
    folder: str


def homes(spec: EnvSpec, target: Target, layer: Path) -> Iterator[Home]:
    """Where the layer has packages, and the interpreter for them on this host: that of a virtual or conda environment
    there (in a container the one that is named); for a folder that is itself one of packages, that of the command."""
    for base in ("", *sorted(name for name in os.listdir(layer) if os.path.isdir(layer / name))):
        python = spec.python if spec.contained else _program(target.host / base / "bin/python")
        for found in sorted((layer / base).glob("lib/python3*/site-packages")) if python else ():
            yield Home(python, os.path.relpath(found, layer))
    if any(layer.glob("*.dist-info")) and (python := key.find_python(spec)):
        yield Home(python, "")


def _program(path: Path) -> str:
    """``path`` when there is such a program and, as root, nobody else can put another one in its place."""
    with contextlib.suppress(OSError, ConfigError):
        real = settled(path) if os.geteuid() == 0 else path.resolve()
        if believed(os.stat(real).st_uid) and os.access(real, os.X_OK):
            return str(real)
    return ""


def missing(folder: Path, tag: str) -> list[str]:
    """Sources below ``folder`` (paths relative to it) without a compiled file for Pythons of the cache tag ``tag``
    (``cpython-311``). Not in folders that others can write to: they could change names meanwhile."""
    suffix = f".{tag}.pyc"
    out: list[str] = []
    for where, dirs, names in os.walk(folder):
        found = os.stat(where)
        if found.st_uid != os.geteuid() or found.st_mode & 0o002:
            dirs.clear()
            continue
        compiled: set[str] = set()
        if "__pycache__" in dirs:
            compiled.update(os.listdir(os.path.join(where, "__pycache__")))
            dirs.remove("__pycache__")
        for name in names:
            path = os.path.join(where, name)
            if name.endswith(".py") and name[:-3] + suffix not in compiled and os.path.isfile(path):
                out.append(os.path.relpath(path, folder))
    return sorted(out)


def compile_missing(spec: EnvSpec, target: Target, layer: Path, out: Path) -> None:
    """Compile what is `missing` in ``layer`` of ``target`` into ``out``, which is laid out as the layer is; tracebacks
    will name the path that the job sees. Time stamps of the sources stay valid because a snapshot keeps mtimes."""
    for home in homes(spec, target, layer):
        try:
            asked = subprocess.run(
                [home.python, "-I", "-S", "-c", _TAG], capture_output=True, text=True, timeout=30, check=True
            )
            tag = asked.stdout.strip()
            version = re.search(r"python3\.?(\d+)/site-packages$", home.folder)
            if not re.fullmatch(r"\w+-\d+", tag) or (version and not tag.endswith(f"-3{version[1]}")):
                continue
            sources = missing(layer / home.folder, tag)
            if sources:
                _compile(home, tag, [os.path.join(home.folder, name) for name in sources], target, layer, out)
        except (OSError, subprocess.SubprocessError) as exc:
            log.warning("cannot compile Python files of %s: %s", target.path, exc)


def _compile(home: Home, tag: str, sources: list[str], target: Target, layer: Path, out: Path) -> None:
    def compile_some(some: list[str]) -> None:
        lines = []
        for name in some:
            folder, file = os.path.split(name)
            cfile = out / folder / "__pycache__" / f"{file[:-3]}.{tag}.pyc"
            lines.append(f"{layer / name}\0{cfile}\0{os.path.join(target.path, name)}\n")
        data = "".join(line for line in lines if line.count("\n") == 1).encode(errors="surrogateescape")
        try:
            command = [home.python, "-I", "-S", "-c", _COMPILE]
            done = subprocess.run(command, input=data, capture_output=True, timeout=_DEADLINE, check=False)
            if done.returncode:  # packages ship files of other Python versions, which do not compile: common
                log.info("some Python files of %s do not compile", target.path)
        except (OSError, subprocess.SubprocessError) as exc:
            log.warning("cannot compile Python files of %s: %s", target.path, exc)

    beside = [threading.Thread(target=compile_some, args=[sources[n::_PROCESSES]]) for n in range(_PROCESSES)]
    for one in beside:
        one.start()
    for one in beside:
        one.join()
