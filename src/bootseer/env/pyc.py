"""Compile missing ``.pyc`` files before a capture, so that no node pays for it at its first import.

Installers that write none (uv) leave that to the first import: seconds for large packages, on every node. Advisory: a
failure costs nothing but that.
"""

from __future__ import annotations

import logging
import os
import subprocess
from pathlib import Path

log = logging.getLogger(__name__)

_DEADLINE = 300.0


def missing(layer: Path, version: str) -> list[str]:
    """Sources in ``layer`` (paths relative to it) without a compiled file for Python ``version`` (``"3.11.2"``). Not
    those in folders that somebody else can write to: what is compiled is named, and he could change names meanwhile."""
    suffix = f".cpython-{''.join(version.split('.')[:2])}.pyc"
    out: list[str] = []
    for folder, dirs, names in os.walk(layer):
        found = os.stat(folder)
        if found.st_uid != os.geteuid() or found.st_mode & 0o002:
            dirs.clear()
            continue
        compiled: set[str] = set()
        if "__pycache__" in dirs:
            compiled.update(os.listdir(os.path.join(folder, "__pycache__")))
            dirs.remove("__pycache__")
        for name in names:
            path = os.path.join(folder, name)
            if name.endswith(".py") and name[:-3] + suffix not in compiled and os.path.isfile(path):
                out.append(os.path.relpath(path, layer))
    return sorted(out)


def compile_missing(python: str, version: str, layer: Path, host: Path, path: str) -> None:
    """Compile what is `missing` in ``layer`` where it shows, below ``host``; tracebacks will name ``path``.

    Time stamps of the sources stay valid because a snapshot keeps mtimes.
    """
    sources = missing(layer, version)
    if not sources:
        return
    # a path by descriptor is of this process alone
    host = Path(str(host).replace("/proc/self/", f"/proc/{os.getpid()}/", 1))
    command = [python, "-I", "-m", "compileall", "-q", "-j", "2", "-s", str(host), "-p", path, "-i", "-"]
    listing = "".join(f"{host / name}\n" for name in sources if "\n" not in name)
    try:
        done = subprocess.run(
            command, input=listing.encode(errors="surrogateescape"), capture_output=True, timeout=_DEADLINE, check=False
        )
    except (OSError, subprocess.SubprocessError) as exc:
        log.warning("cannot compile Python files of %s: %s", path, exc)
        return
    if done.returncode:  # packages ship files of other Python versions, which do not compile: common and harmless
        log.info("some Python files of %s do not compile", path)
