"""What a test needs of this machine, by the name of its marker, and why it is not here."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from bootseer.doctor import canary, checks
from bootseer.errors import BootseerError
from support import hadoop, kerberos, slurm


def _hadoop() -> str:
    try:
        hadoop.jars()
    except BootseerError as exc:
        return str(exc)
    return ""


def _doctor(check: Callable[[Path], str | checks.Found]) -> str:
    """One of ``bootseer doctor``'s trials: what is missing when it finds less than all."""
    with tempfile.TemporaryDirectory(prefix="bootseer-pytest-needs-", dir="/var/tmp") as folder:
        try:
            found = check(Path(folder))
        except BootseerError as exc:
            return str(exc)
    return "" if isinstance(found, str) else found.detail


def _linux() -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"[0-9]+", os.uname().release)[:2])


_INSTALLED: dict[str, Callable[[], str]] = {
    "root": lambda: "" if os.geteuid() == 0 else "needs root and mount rights",
    "hdfs": _hadoop,
    "registry": lambda: "" if shutil.which("docker-registry") else "needs docker-registry (scripts/setup installs it)",
    "runtime": lambda: "" if shutil.which("runc") or shutil.which("crun") else "needs runc or crun",
    "slurm": lambda: (
        "" if slurm.installed() else "needs slurmctld, slurmd, slurm-client, munge (scripts/setup does it)"
    ),
    "kerberos": kerberos.missing,
    "torch": lambda: "" if importlib.util.find_spec("torch") else "torch is not installed",
}
_KERNEL: dict[str, Callable[[], str]] = {
    # by its version: a trial of our own code would skip the tests when that is what broke
    "takeover": lambda: "" if _linux() >= (6, 9) else "requests of a killed server are lost before Linux 6.9",
    "file_mounts": lambda: _doctor(lambda folder: checks.erofs(folder, canary.make(folder))),
}


@functools.cache
def _why(name: str) -> str:
    if name in _INSTALLED:
        return "" if os.environ.get("CI") else _INSTALLED[name]()
    return _KERNEL[name]()


def missing(names: Iterable[str]) -> Iterator[str]:
    """Why a test with these markers cannot run here. Where ``CI`` is set, only the kernel may lack something: what
    ``scripts/setup`` installs has to be there."""
    for name in sorted(set(names) & (_INSTALLED.keys() | _KERNEL.keys())):
        if why := _why(name):
            yield why
