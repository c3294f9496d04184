"""The tutorial runs as it is written: its shell blocks in order, in an empty home. It prints what the page shows.

Two programs are doubles, since a test asks nobody outside this machine. ``docker pull`` does nothing; ``docker save``
copies an archive of an image that is made here of this machine's Python, in Docker's format. ``pip`` finds its packages
in a folder, and leaves out ``pip install bootseer``: ``bootseer`` is this checkout.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pip
import pytest

from bootseer import oci
from support.images import programs
from support.layouts import LayerDir, write_layout

pytestmark = [pytest.mark.root, pytest.mark.runtime, pytest.mark.timeout(400)]

TUTORIAL = Path(__file__).parents[2] / "docs/tutorial.md"
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PACKAGE = "packaging"


def blocks(text: str) -> list[tuple[str, str]]:
    """The ``sh`` blocks of a page, each with the ``text`` block that follows it: what it prints (else empty)."""
    found = FENCE.findall(text)
    after = [*found[1:], ("", "")]
    return [
        (body, shown if kind == "text" else "")
        for (language, body), (kind, shown) in zip(found, after, strict=True)
        if language == "sh"
    ]


def shape(line: str) -> str:
    """A line of output without what differs from run to run: folders, numbers with their units, digests, bars."""
    line = re.sub(r"/\S*/", "/", line)
    line = re.sub(r"\d[\d.,:]*", "N", re.sub(r"(sha256:)?\b[0-9a-f]{8,}\b", "N", line))
    line = re.sub(r"N (B|kB|MB|GB|s|ms|min)\b", "N", line)
    return " ".join(re.sub(r"[-─# ]+|\bN(-N)+", " ", line).split())


def wheel(name: str, to: Path) -> None:
    """An installed pure package as the wheel that it came from."""
    installed = importlib.metadata.distribution(name)
    with zipfile.ZipFile(to / f"{name}-{installed.version}-py3-none-any.whl", "w") as out:
        for file in installed.files or ():
            if file.suffix != ".pyc" and ".." not in file.parts:
                out.write(str(file.locate()), str(file))


def python_image(base: Path) -> Path:
    """An archive of an image with this machine's Python and pip, as ``docker save`` writes it."""
    root = base / "root"
    stdlib = Path(sysconfig.get_path("stdlib", vars={"base": sys.base_prefix, "installed_base": sys.base_prefix}))
    target = root / "usr/local/lib" / stdlib.name
    left_out = shutil.ignore_patterns("test", "__pycache__", "site-packages", "dist-packages", "config-*", "idlelib")
    shutil.copytree(stdlib, target, ignore=left_out, symlinks=False, ignore_dangling_symlinks=True)
    for packages in ("site-packages", "dist-packages"):
        shutil.copytree(pip.__path__[0], target / packages / "pip", ignore=left_out)
    extensions = [str(path) for path in stdlib.glob("lib-dynload/*.so")]
    python = os.path.realpath(sys._base_executable)  # type: ignore[attr-defined]
    listed = subprocess.run(["ldd", python, *extensions], capture_output=True, text=True, timeout=30, check=False)
    for member in programs("sh"):
        if member.kind == "file":
            (root / member.name).parent.mkdir(parents=True, exist_ok=True)
            (root / member.name).write_bytes(member.data)
            (root / member.name).chmod(member.mode)
    for library in {word for word in listed.stdout.split() if word.startswith("/") and not word.endswith(":")}:
        (root / library.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, root / library.lstrip("/"))
    (root / "usr/local/bin").mkdir(parents=True)
    shutil.copy(python, root / "usr/local/bin/python3")
    for made in ("wheels", "etc", "opt", "tmp", "checkpoint"):
        (root / made).mkdir(exist_ok=True)
    wheel(PACKAGE, root / "wheels")
    (root / "etc/pip.conf").write_text("[global]\nno-index = true\nfind-links = /wheels\nroot-user-action = ignore\n")
    pip_script = root / "usr/local/bin/pip"
    pip_script.write_text('#!/bin/sh\nexec python3 -m pip "$@"\n')
    pip_script.chmod(0o755)
    config = oci.ContainerConfig(env=("PATH=/usr/local/bin:/bin",), cmd=("python3",))
    write_layout(base / "layout", [LayerDir(root)], config, "v1")
    archive = base / "python.tar"
    copy = ["skopeo", "copy", "--quiet", f"oci:{base}/layout:v1", f"docker-archive:{archive}:python:3-slim"]
    subprocess.run(copy, check=True, timeout=120)
    return archive


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An empty home, settings that keep this machine's own cache out of it, and the doubles on PATH."""
    commands = {
        "bootseer": f'exec {sys.executable} -m bootseer.cli.main "$@"',
        "docker": f'[ "$1" = pull ] || cp {python_image(tmp_path)} "$4"',
        "pip": f'[ "$*" = "install bootseer" ] || exec {sys.executable} -m pip "$@"',
        "python": f'exec {sys.executable} "$@"',
    }
    for name, line in commands.items():
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "home").mkdir()
    (tmp_path / "wheels").mkdir()
    wheel(PACKAGE, tmp_path / "wheels")
    return {
        **{k: v for k, v in os.environ.items() if not k.startswith(("BOOTSEER_", "PIP_"))},
        "BOOTSEER_TEST_RUN": os.environ["BOOTSEER_TEST_RUN"],
        "BOOTSEER_CACHE_DIR": str(tmp_path / "cache"),
        "BOOTSEER_STATE_DIR": str(tmp_path / "state"),
        "HOME": str(tmp_path / "home"),
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tmp_path / "wheels"),
        "PIP_ROOT_USER_ACTION": "ignore",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }


def test_the_tutorial_runs_as_written(tmp_path: Path, environment: dict[str, str]) -> None:
    found = blocks(TUTORIAL.read_text())
    assert len(found) > 8
    assert found[0][0].startswith("pip install bootseer\n")
    transcript = tmp_path / "transcript"
    for number, (script, shown) in enumerate(found):
        done = subprocess.run(
            ["sh", "-eux", "-c", script],
            cwd=tmp_path / "home",
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
            check=False,
        )
        with transcript.open("a") as out:
            out.write(f"{script}\n{done.stdout}\n")
        assert done.returncode == 0, f"block {number}:\n{script}\n{done.stdout}"
        printed = [shape(line) for line in done.stdout.splitlines()]
        for line in shown.splitlines():
            if line.strip() not in ("", "..."):
                assert shape(line) in printed, f"block {number} does not print\n{line}\nbut\n{done.stdout}"
