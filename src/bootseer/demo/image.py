"""The demo's container image: the Python that runs here with what it needs of this system, packages, and the job.
Nothing but the packages is downloaded. The layers are cut as those of other images are: system, packages, job."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from bootseer import oci
from bootseer.demo.programs import run
from bootseer.errors import BootseerError, UnavailableError, UnsupportedError
from bootseer.oci.write import LayerDir, write_layout
from bootseer.wiretypes import loaded

JOB = Path(__file__).parent / "job"
PYTHON = str(getattr(sys, "_base_executable", sys.executable))
"""The interpreter outside of any virtual environment."""
MOUNT_POINTS = ("checkpoint", "dev", "opt/job-env", "proc", "root", "run", "sys", "tmp", "var/tmp")
_ASK = "import json,os,site,sys,sysconfig as c; print(json.dumps([os.path.realpath(sys.executable),"
_ASK += "c.get_path('stdlib'),c.get_path('platstdlib'),site.getsitepackages()[0]]))"
_NOT_NEEDED = ("test", "tests", "idlelib", "ensurepip", "site-packages", "dist-packages", "__phello__", "config-*")
_CONFIG = oci.ContainerConfig(
    env=("PATH=/usr/local/bin:/usr/bin:/bin", "HOME=/root", "LANG=C.UTF-8"), cmd=("python3",), working_dir="/job"
)

Say = Callable[[str], None]


def pip(work: Path) -> list[str]:
    """A pip to download with: this environment's, else one in a new environment below ``work``."""
    try:
        run([sys.executable, "-P", "-m", "pip", "--version"])
    except BootseerError:
        try:
            run([PYTHON, "-P", "-m", "venv", str(work / "pip")])
        except BootseerError:
            raise UnsupportedError("this Python has no pip", hint="apt-get install python3-venv") from None
        return [str(work / "pip/bin/python"), "-P", "-m", "pip"]
    return [sys.executable, "-P", "-m", "pip"]


def fetch(pip: Sequence[str], verb: str, requirements: Path, *more: str) -> None:
    """``pip install`` or ``pip download`` what ``requirements`` pins. Raises `UnavailableError`."""
    argv = [*pip, verb, "--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:"]
    try:
        run([*argv, "--requirement", str(requirements), *more], env={"PIP_ROOT_USER_ACTION": "ignore"})
    except BootseerError as exc:
        hint = "the first demo needs a package index: PyPI, or what PIP_INDEX_URL names"
        raise UnavailableError(f"cannot get the demo's packages: {exc.message}", hint=hint) from None


def install(pip: Sequence[str], folder: Path, requirements: Path, seen_as: str, *more: str) -> None:
    """Install what ``requirements`` pins into ``folder``, with byte code as for the path ``seen_as``."""
    fetch(pip, "install", requirements, "--no-compile", "--no-cache-dir", "--target", str(folder), *more)
    compile_bytecode(PYTHON, folder, seen_as)


def compile_bytecode(python: str, folder: Path, seen_as: str) -> None:
    """Compile every module below ``folder`` as pip does at installation; the container sees it at ``seen_as``."""
    # exit code 1: some files do not compile (templates, code for other Pythons); pip leaves those out silently as well
    options = ["-q", "-j", "0", "-s", str(folder), "-p", seen_as]
    run([python, "-P", "-m", "compileall", *options, str(folder)], accept=(0, 1))


def build(layout: Path, work: Path, say: Say) -> Path:
    """Write the image as an OCI layout to ``layout``, by way of the folder ``work``; the folder of its packages, below
    that. Raises `BootseerError` without a package registry."""
    executable, *libraries, packages = _python()
    say("packages: JAX and what images of such jobs have beside it, 320 MB from the package index")
    frame, system, rest, job = (work / name for name in ("frame", "system", "packages", "job"))
    install(pip(work), rest / packages[1:], JOB / "image-requirements.txt", packages)
    say(f"system: Python {sys.version.split()[0]} of this machine with its libraries")
    for place in MOUNT_POINTS:
        (frame / place).mkdir(parents=True)
    (frame / "tmp").chmod(0o1777)
    for name in ("bin", "lib", "lib32", "lib64", "sbin"):  # how systems with one /usr have them
        if os.path.islink(f"/{name}"):
            (frame / name).symlink_to(os.readlink(f"/{name}"))
    for folder in dict.fromkeys(libraries):
        ignore = shutil.ignore_patterns(*_NOT_NEEDED)
        shutil.copytree(folder, system / folder[1:], symlinks=True, ignore=ignore, dirs_exist_ok=True)
    for file in (executable, *_shared_libraries(executable, [*libraries, str(rest)])):
        copy_in(file, system)
    python3 = system / "usr/bin/python3"
    if not os.path.lexists(python3):
        python3.parent.mkdir(parents=True, exist_ok=True)
        python3.symlink_to(executable)
    shutil.copytree(JOB, job / "job", ignore=shutil.ignore_patterns("__pycache__"))
    say("layers: packed")
    write_layout(layout, [LayerDir(f) for f in (frame, system, rest, job)], _CONFIG, "demo")
    return rest / packages[1:]


def _python() -> list[str]:
    """Of the interpreter: its program, its library, its library's binary part, where its packages are installed."""
    return list(loaded(json.loads, run([PYTHON, "-I", "-c", _ASK])))


def _shared_libraries(executable: str, folders: Sequence[str]) -> list[str]:
    """The libraries of this system that the program and the extension modules in ``folders`` are linked with."""
    modules = [str(path) for folder in folders for path in Path(folder).rglob("*.so*") if path.is_file()]
    told = run(["ldd", executable, *modules], accept=(0, 1))
    found = {word for line in told.splitlines() if line[:1].isspace() for word in line.split() if word[0] == "/"}
    return sorted(path for path in found if not path.startswith(tuple(folders)))


def copy_in(file: str, root: Path) -> None:
    """``file`` with the links that lead to it, below ``root``; folders that are links stay where they lead to."""
    name = os.path.basename(file)
    place = Path(os.path.realpath(os.path.dirname(file)))
    target = root / str(place)[1:] / name
    target.parent.mkdir(parents=True, exist_ok=True)
    if os.path.islink(place / name):
        link = os.readlink(place / name)
        if not os.path.lexists(target):
            target.symlink_to(link)
        copy_in(os.path.join(place, link), root)
    else:
        shutil.copy2(place / name, target)
