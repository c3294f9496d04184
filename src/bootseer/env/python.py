"""What a Python interpreter is, as far as compiled packages care: implementation, version, SOABI."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib.machinery import EXTENSION_SUFFIXES

import msgspec

from bootseer.errors import ConfigError

# Without the modules platform and sysconfig, which cost more than the start of the interpreter.
_ASK = (
    "import sys;from importlib.machinery import EXTENSION_SUFFIXES as s;v=sys.version_info;"
    "print(sys.implementation.name,'%d.%d.%d'%v[:3],s[0].strip('.').rpartition('.so')[0] if s else '')"
)


class PythonInfo(msgspec.Struct, frozen=True):
    """Empty strings when there is no interpreter, or when a container image stands for it."""

    implementation: str = ""
    version: str = ""
    soabi: str = ""


def find_python(named: str, environ: Mapping[str, str]) -> str:
    """The interpreter asked for, else ``python3`` on PATH, else an empty string."""
    return named or shutil.which("python3", path=environ.get("PATH", os.defpath)) or ""


def describe(python: str) -> PythonInfo:
    """Facts of the interpreter ``python``, asked from itself (10-20 ms). Raises `ConfigError` when it does not run."""
    if not python:
        return PythonInfo()
    if os.path.realpath(python) == os.path.realpath(sys.executable):
        soabi = EXTENSION_SUFFIXES[0].strip(".").rpartition(".so")[0]
        return PythonInfo(sys.implementation.name, "{}.{}.{}".format(*sys.version_info), soabi)
    try:
        done = subprocess.run([python, "-I", "-S", "-c", _ASK], capture_output=True, text=True, timeout=30, check=True)
        return PythonInfo(*done.stdout.rstrip("\n").split(" "))
    except (OSError, subprocess.SubprocessError, ValueError, TypeError) as exc:
        raise ConfigError(f"cannot ask the interpreter {python} for its version: {exc}") from None
