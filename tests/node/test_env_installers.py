"""What each installer makes works after it was restored, mounted and unpacked: imports, programs, byte code, metadata.

Needs the registries that the installers use; one that does not answer is a skip with its reason.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from bootseer import env
from bootseer.config import Config
from bootseer.env import EnvSpec, Outcome, Target, overlay
from support import devcache

pytestmark = [pytest.mark.root, pytest.mark.timeout(500)]

INSTALLERS = devcache.folder("installers/bin")
UV = Path(sys.executable).with_name("uv")
PYPROJECT = """
[project]
name = "demo"
version = "0.1"
requires-python = ">=3.11,<4"
dependencies = ["six==1.16.0", "pygments==2.18.0"]
"""
SIMPLE = """[[tool.poetry.source]]
name = "simple"
url = "https://pypi.org/simple/"
"""
"""Mirrors of an index have its pages for pip; poetry asks for others unless it is told."""
BUILT = '[project.scripts]\ndemo = "demo:main"\n[build-system]\nrequires = ["{0}"]\nbuild-backend = "{1}"\n'
SETUPTOOLS = PYPROJECT + BUILT.format("setuptools==75.8.0", "setuptools.build_meta")
SOURCE = {"src/demo/__init__.py": "def main(): print('demo')\n", "src/spaced/inner/x.py": "X = 1\n"}
IMPORTS = "import six, pygments, importlib.metadata as m; assert m.version('six') == '1.16.0'; print(six.__file__)"


class Case(msgspec.Struct):
    """In the folder of a project with ``files``, ``command`` fills ``target``; then each of ``checks`` ends well.
    ``{T}`` is the target, ``{W}`` the folder, ``{P}`` a Python with pip. ``first`` makes lock files."""

    target: str
    command: str
    checks: list[str]
    files: dict[str, str] = {}
    first: str = ""
    needs: Sequence[str] = ()
    environ: dict[str, str] = {}


VENV = ['{T}/bin/python -c "' + IMPORTS + '"', "{T}/bin/pygmentize -V"]
CASES = {
    "pip target": Case(
        "t", "{P} -m pip install -q --target {T} six==1.16.0 pygments==2.18.0",
        ['PYTHONPATH={T} python3 -c "' + IMPORTS + '"', "PYTHONPATH={T} {T}/bin/pygmentize -V"],
    ),
    "pip venv": Case("v", "python3 -m venv {T} && {T}/bin/pip install -q six==1.16.0 pygments==2.18.0", VENV),
    "uv": Case(
        "v", f"{UV} venv -q -p /usr/bin/python3 {{T}} && {UV} pip install -q -p {{T}} six==1.16.0 pygments==2.18.0",
        [*VENV, f"{UV} pip check -p {{T}}"],
    ),
    "uv sync": Case(
        ".venv", f"{UV} sync -q -p /usr/bin/python3", [*VENV, "{T}/bin/demo"],
        {"pyproject.toml": PYPROJECT + BUILT.format("hatchling==1.27.0", "hatchling.build"), **SOURCE},
        first=f"{UV} lock -q -p /usr/bin/python3",
    ),
    "poetry": Case(
        ".venv", "{C}/poetry -q install --no-interaction", VENV,
        {"pyproject.toml": PYPROJECT + "[tool.poetry]\npackage-mode = false\n" + SIMPLE},
        first="{C}/poetry lock", needs=["{C}/poetry"], environ={"POETRY_VIRTUALENVS_IN_PROJECT": "true"},
    ),
    "pdm": Case(
        ".venv", "{C}/pdm install -q", VENV, {"pyproject.toml": PYPROJECT + "[tool.pdm]\ndistribution = false\n"},
        first="{C}/pdm lock -q && rm -rf .venv", needs=["{C}/pdm"], environ={"PDM_CHECK_UPDATE": "false"},
    ),
    "editable": Case(
        "v", "python3 -m venv --without-pip {T} && {P} -m pip --python {T} install -q -e .",
        [*VENV, "{T}/bin/demo", '{T}/bin/python -c "import spaced.inner.x; assert spaced.inner.x.X"'],
        {"pyproject.toml": SETUPTOOLS, **SOURCE},
    ),
    "extension": Case(
        "t", "{P} -m pip install -q --target {T} ./c",
        ['PYTHONPATH={T} python3 -c "import made; assert made.f() == 7"'],
        {
            "c/pyproject.toml": '[build-system]\nrequires = ["setuptools==75.8.0"]\n',
            "c/setup.py": "from setuptools import *\nsetup(name='made', version='1', ext_modules=[Extension('made', "
            "['m.c'])])\n",
            "c/m.c": '#include <Python.h>\n#include "value.h"\nstatic PyObject*f(PyObject*s,PyObject*a)'
            '{return PyLong_FromLong(VALUE);}static PyMethodDef d[]={{"f",f,METH_NOARGS,""},{0}};'
            'static struct PyModuleDef m={PyModuleDef_HEAD_INIT,"made",0,-1,d};'
            'PyMODINIT_FUNC PyInit_made(void){return PyModule_Create(&m);}',
            "c/value.h": "#define VALUE 7\n",
        },
        needs=["cc", "/usr/include/python3.11/Python.h" if sys.version_info[:2] == (3, 11) else "cc"],
    ),
    "uv editable": Case(
        "v", f"{UV} venv -q -p /usr/bin/python3 {{T}} && {UV} pip install -q -p {{T}} -e .", [*VENV, "{T}/bin/demo"],
        {"pyproject.toml": PYPROJECT + BUILT.format("hatchling==1.27.0", "hatchling.build"), **SOURCE},
    ),
    "npm": Case(
        "node_modules", "npm ci --silent",
        ["node -e \"if (require('own')() !== 1) process.exit(1)\"", "{T}/.bin/semver 1.2.3"],
        {
            "package.json": '{"name":"x","version":"1.0.0","workspaces":["own"],"dependencies":{"semver":"7.6.0"}}',
            "own/package.json": '{"name":"own","version":"1.0.0","dependencies":{"is-odd":"3.0.1"}}',
            "own/index.js": "module.exports = () => require('is-odd')(3) ? 1 : 0\n",
        },
        first="npm install --package-lock-only --silent", needs=["npm"],
    ),
    "apt": Case(
        "t", "mkdir -p {T}/var/lib/dpkg && touch {T}/var/lib/dpkg/status && apt-get download -q hello && "
        "dpkg --root={T} --force-depends --force-script-chrootless -i hello_*.deb && rm hello_*.deb",
        ["{T}/usr/bin/hello", "dpkg --root={T} -s hello | grep '^Status: install ok installed'", "dpkg --root={T} -V"],
        first="cd /tmp && apt-get -q --print-uris download hello", needs=["apt-get", "dpkg"],
    ),
    "cargo": Case(
        "t", "cargo install -q --root {T} --path . --target-dir {W}/build", ["{T}/bin/hello"],
        {
            "Cargo.toml": '[package]\nname = "hello"\nversion = "0.1.0"\nedition = "2021"\n'
            '[dependencies]\nitoa = "=1.0.10"\n',
            "src/main.rs": 'fn main() { println!("{}", itoa::Buffer::new().format(1)); }\n',
        },
        needs=["cargo", "cc"],
    ),
}  # fmt: skip
SOAK = ("pip target", "pdm", "uv editable")
"""Others are of their kind: `extension` fills a plain folder, `poetry` takes a lock file, `editable` is one."""


class Place:
    def __init__(self, root: Path, case: Case, python: Path) -> None:
        self.root, self.case, self.work, self.nodes, self.python = root, case, root / "work", 0, python
        self.target = self.work / case.target
        self.environ = {
            name: value
            for name, value in os.environ.items()
            if name not in ("VIRTUAL_ENV", "PYTHONPATH", "UV_LINK_MODE")
        }
        self.environ |= {"PATH": os.environ["PATH"].replace(f"{UV.parent}:", ""), **case.environ}
        for name, text in case.files.items():
            (self.work / name).parent.mkdir(parents=True, exist_ok=True)
            (self.work / name).write_text(text)
        self.work.mkdir(exist_ok=True)

    def words(self, text: str) -> str:
        for short, path in zip("TWPC", (self.target, self.work, self.python, INSTALLERS), strict=True):
            text = text.replace(f"{{{short}}}", str(path))
        return text

    def sh(self, text: str) -> subprocess.CompletedProcess[str]:
        words = ["sh", "-ec", self.words(text)]
        return subprocess.run(words, cwd=self.work, env=self.environ, capture_output=True, text=True, check=False)

    def run(self, restore: str) -> env.EnvResult:
        self.release()
        self.nodes += 1
        node = self.root / f"node-{self.nodes}"
        spec = EnvSpec(
            targets=(Target(str(self.target)),), command=("sh", "-ec", self.words(self.case.command)),
            cwd=str(self.work), restore=restore, background=False, environ=self.environ,
        )  # type: ignore[arg-type]  # fmt: skip
        said = []

        def command() -> int:
            done = self.sh(self.case.command)
            said.append(done.stderr)
            return done.returncode

        config = Config(cache_dir=str(node / "cache"), state_dir=str(node / "state"))
        result = env.run(spec, command, store_url=str(self.root / "store"), config=config)
        assert result.exit_code == 0, said
        return result

    def release(self) -> None:
        for group in overlay.groups(self.root / f"node-{self.nodes}" / "state")[::-1]:
            group.unmount()
        shutil.rmtree(self.target, ignore_errors=True)

    def check(self) -> None:
        for text in self.case.checks:
            done = self.sh(text)
            assert done.returncode == 0, (text, done.stdout, done.stderr)
        stale = [str(path) for path in self.target.rglob("*.pyc") if not _is_fresh(path)]
        assert not stale


def _is_fresh(compiled: Path) -> bool:
    """Whether a byte code file is of its source as it is, by time and size or by hash."""
    source = compiled.parent.parent / f"{compiled.name.split('.')[0]}.py"
    flags, mtime, size = struct.unpack("<4xIII", compiled.read_bytes()[:16])
    return flags != 0 or (mtime, size) == (int(source.stat().st_mtime), source.stat().st_size)


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.soak] * (name in SOAK)) for name in CASES])
def place(tmp_path: Path, request: pytest.FixtureRequest, python_with_pip: Path) -> Iterator[Place]:
    made = Place(tmp_path, CASES[request.param], python_with_pip)
    for program in map(made.words, made.case.needs):
        if not shutil.which(program) and not os.path.exists(program):
            pytest.skip(f"needs {program}")
    if made.case.first and (done := made.sh(made.case.first)).returncode:
        pytest.skip(f"no lock file, as the registry lacks something: {(done.stdout + done.stderr)[-300:]}")
    yield made
    made.release()


def test_what_an_installer_makes_works_after_a_restore(place: Place) -> None:
    first = place.run("mount")
    assert first.outcome is Outcome.RAN_AND_PUBLISHED, first.reason
    place.check()
    for restore, outcome in (("mount", Outcome.RESTORED_MOUNT), ("unpack", Outcome.RESTORED_UNPACK)):
        again = place.run(restore)
        assert again.outcome is outcome, again.reason
        place.check()


@pytest.mark.parametrize("home", ["", "/proc", "/root"], ids=["none", "read-only", "of another"])
def test_a_user_whom_nobody_knows_installs_and_restores(home: str, python_with_pip: Path) -> None:
    """A random number without an account, as containers of some platforms have it, and a home that is no use."""
    uid = 54321
    folder = Path(
        subprocess.run(
            ["mktemp", "-d", "/var/tmp/bootseer-user-XXXX"], capture_output=True, text=True, check=True
        ).stdout.strip()
    )
    try:
        folder.chmod(0o755)
        for name in ("cache", "state", "store", "work"):
            (folder / name).mkdir()
            os.chown(folder / name, uid, uid)
        environ = {"PATH": "/usr/bin:/bin", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "BOOTSEER_STORE": f"{folder}/store"}
        environ |= {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_"))}
        if home:
            environ["HOME"] = home
        target = folder / "work/t"
        for node, says in enumerate(("ran-and-published", "restored-unpack")):
            environ |= {"BOOTSEER_CACHE_DIR": f"{folder}/cache/{node}", "BOOTSEER_STATE_DIR": f"{folder}/state/{node}"}
            words = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--", sys.executable, "-m",
                     "bootseer.cli.main", "env", "run", "--no-background", "--target", str(target), "--",
                     str(python_with_pip), "-m", "pip", "install", "-q", "--target", str(target),
                     "six==1.16.0"]  # fmt: skip
            done = subprocess.run(words, cwd=folder / "work", env=environ, capture_output=True, text=True, check=False)
            assert (done.returncode, says in done.stderr) == (0, True), done.stderr
            subprocess.run(
                ["/usr/bin/python3", "-c", f"import sys; sys.path[:0] = [{str(target)!r}]; import six"], check=True
            )
            shutil.rmtree(target)
    finally:
        shutil.rmtree(folder)
