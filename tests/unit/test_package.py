"""What `pip install` brings: the same bytes whenever it is built, and all files that a user needs."""

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def built(place: Path, *, umask: int, time: int) -> dict[str, bytes]:
    """Source distribution and wheel, built from a copy of the checkout with other times and modes."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    for name in filter(None, listed.split("\0")):
        if (source := ROOT / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, place / name)
            (place / name).chmod(0o666 & ~umask)
            os.utime(place / name, (time, time))
    command = [sys.executable, "-m", "hatchling", "build", "-d", "made"]
    subprocess.run(command, cwd=place, check=True, capture_output=True, umask=umask, timeout=120)
    return {path.name: path.read_bytes() for path in sorted((place / "made").iterdir())}


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("once")
    built(place, umask=0o022, time=1_700_000_000)
    return place / "made"


def test_two_builds_are_the_same_bytes(once: Path, tmp_path: Path) -> None:
    again = built(tmp_path / "elsewhere", umask=0o077, time=1_780_000_000)
    assert len(again) == 2
    assert {path.name: path.read_bytes() for path in once.iterdir()} == again


def test_the_wheel_has_what_a_user_without_a_checkout_needs(once: Path) -> None:
    with zipfile.ZipFile(next(once.glob("*.whl"))) as wheel:
        names = set(wheel.namelist())
        shared = "bootseer-0.1.0.data/data/share/"
        for folder, place in (
            ("deploy", "bootseer/deploy"),
            ("examples", "bootseer/examples"),
            ("docs", "doc/bootseer"),
        ):
            files = [path for path in (ROOT / folder).rglob("*") if path.is_file()]
            assert files
            assert {f"{shared}{place}/{path.relative_to(ROOT / folder)}" for path in files} <= names
        code = {
            str(path.relative_to(ROOT / "src")) for path in (ROOT / "src").rglob("*") if path.suffix not in (".pyc", "")
        }
        assert code <= names
        told = Parser().parsestr(wheel.read("bootseer-0.1.0.dist-info/METADATA").decode())
    assert told["License-File"] == "LICENSE"
    named = {line.rpartition(" ")[2] for line in told.get_all("Classifier", []) if ":: Python :: 3." in line}
    assert named == {"3.11", "3.12", "3.13", "3.14"}
    assert told.get_all("Project-URL")
    needs = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert told["Requires-Python"] == needs


def test_the_source_distribution_builds_the_same_wheel(once: Path, tmp_path: Path) -> None:
    with tarfile.open(next(once.glob("*.tar.gz"))) as source:
        source.extractall(tmp_path)
    place = next(tmp_path.iterdir())
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", "made"]
    subprocess.run(command, cwd=place, check=True, capture_output=True, timeout=120)
    (made,) = (place / "made").iterdir()
    assert made.read_bytes() == next(once.glob("*.whl")).read_bytes()
