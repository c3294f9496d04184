"""A local package index (PEP 503) of the wheels the demo's set-up command installs, filled once."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from pathlib import Path
from urllib.parse import quote

from bootseer.errors import BootseerError, UnavailableError

_DEADLINE = 900.0


def fill(folder: Path, requirements: Path) -> None:
    """Download the wheels of ``requirements`` and write the index pages at ``folder/simple``.

    Nothing is downloaded when the folder holds these very requirements already. Raises `UnavailableError` without
    a package registry.
    """
    done = folder / "requirements.txt"
    if done.exists() and done.read_text() == requirements.read_text():
        return
    shutil.rmtree(folder, ignore_errors=True)
    wheels = folder / "wheels"
    wheels.mkdir(parents=True)
    argv = ["/usr/bin/python3", "-m", "venv", str(folder / "pip")]
    _run(argv)
    _run([str(folder / "pip/bin/pip"), "download", "--quiet", "--disable-pip-version-check", "--only-binary=:all:",
          "--requirement", str(requirements), "--dest", str(wheels)])  # fmt: skip
    shutil.rmtree(folder / "pip")
    write_pages(wheels, folder / "simple")
    shutil.copyfile(requirements, done)


def write_pages(wheels: Path, simple: Path) -> None:
    """Write ``simple/<name>/index.html`` for every wheel, linking to it by a relative path."""
    projects: dict[str, list[str]] = {}
    for wheel in sorted(wheels.glob("*.whl")):
        name = re.sub(r"[-_.]+", "-", wheel.name.split("-")[0]).lower()
        projects.setdefault(name, []).append(wheel.name)
    for name, files in projects.items():
        page = simple / name
        page.mkdir(parents=True, exist_ok=True)
        links = "".join(f'<a href="../../wheels/{quote(file)}">{html.escape(file)}</a><br>\n' for file in files)
        (page / "index.html").write_text(f"<!DOCTYPE html><html><body>\n{links}</body></html>\n")


def _run(argv: list[str]) -> None:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_DEADLINE, check=False)
    except subprocess.TimeoutExpired:
        raise UnavailableError(f"{argv[0]} did not end within {_DEADLINE:.0f} s") from None
    if done.returncode:
        raise BootseerError(
            f"cannot fill the package index: {(done.stderr.strip().splitlines() or ['no message'])[-1]}"
        )
