"""A local package index (PEP 503) of the wheels the demo's set-up command installs, filled once."""

from __future__ import annotations

import shutil
from pathlib import Path

from bootseer.demo.ingredients import link_projects
from bootseer.demo.programs import run


def fill(folder: Path, requirements: Path) -> None:
    """Download the wheels of ``requirements`` and make the index at ``folder/simple``.

    Nothing is downloaded when the folder holds these very requirements already. Raises `BootseerError` without a
    package registry.
    """
    done = folder / "requirements.txt"
    if done.exists() and done.read_text() == requirements.read_text():
        return
    shutil.rmtree(folder, ignore_errors=True)
    wheels = folder / "wheels"
    wheels.mkdir(parents=True)
    run(["/usr/bin/python3", "-m", "venv", str(folder / "pip")])
    run([str(folder / "pip/bin/pip"), "download", "--quiet", "--disable-pip-version-check", "--only-binary=:all:",
         "--requirement", str(requirements), "--dest", str(wheels)])  # fmt: skip
    shutil.rmtree(folder / "pip")
    link_projects(wheels, folder / "simple")
    shutil.copyfile(requirements, done)
