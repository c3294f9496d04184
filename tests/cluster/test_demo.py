"""The product's first minute: the wheel in an empty environment, `bootseer demo` in it, and nothing left behind."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.common.debian import uv as uv_program
from bootseer.demo import workplace
from support import devcache

pytestmark = [pytest.mark.root, pytest.mark.runtime, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]


def uv(*args: object) -> None:
    subprocess.run([uv_program(), *map(str, args)], check=True, timeout=300)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    uv("build", "--quiet", "--wheel", "--out-dir", folder, ROOT)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def bootseer(wheel: Path) -> Iterator[Path]:
    """The program, in an environment with nothing but the wheel and its dependencies, which every user may enter."""
    with tempfile.TemporaryDirectory(prefix="bootseer-empty-", dir="/var/tmp") as place:
        os.chmod(place, 0o755)
        subprocess.run(["/usr/bin/python3", "-m", "venv", place], check=True, timeout=120)
        uv("pip", "install", "--quiet", "--python", f"{place}/bin/python", wheel)
        yield Path(place, "bin/bootseer")


@pytest.fixture(scope="module")
def cache() -> Path:
    """Kept from run to run: image, index and checkpoint take minutes to make."""
    return devcache.folder("demo-light-test")


def bare() -> dict[str, str]:
    """Variables of a fresh shell, with nothing of this checkout."""
    kept = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "UV_")) or "proxy" in name}
    return {**kept, "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}


def left_over(cache: Path) -> list[str]:
    """Work folders, processes and mounts of a demo."""
    mounts = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(cache) in line]
    folders = [str(path) for path in cache.glob("run-*")]
    processes = subprocess.run(["pgrep", "-af", str(cache / "run-")], capture_output=True, text=True).stdout
    return [*folders, *mounts, *processes.splitlines()]


def test_the_wheel_has_no_harness(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert "bootseer/demo/job/train.py" in names
    assert "bootseer/demo/job/image-requirements.txt" in names
    assert [name for name in names if not name.startswith(("bootseer/", "bootseer-"))] == []
    names = [name for name in names if ".data/data/share/" not in name]  # documents
    assert [name for name in names if "support" in name or "bench" in name or "hadoop" in name] == []


def test_three_starts_side_by_side(bootseer: Path, cache: Path, tmp_path: Path) -> None:
    argv = [str(bootseer), "demo", "--cache", str(cache)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=800, check=False, env=bare(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told = re.findall(r"^==> (\w+): first step after [0-9.]+ s, ([0-9]+) MB over the link$", done.stderr, re.M)
    assert [variant for variant, _ in told] == ["ordinary", "first", "again"]
    ordinary, first, again = (int(size) for _, size in told)
    assert 0 < again < first < ordinary
    events = (cache / "last/events/demo-again/attempt-0/node.jsonl").read_text()
    assert '"restored-mount"' in events
    assert int(re.findall(r'"hot_total":([0-9]+)', events)[-1]) > 0
    assert '"ran-and-publishing"' in (cache / "last/events/demo-first/attempt-0/node.jsonl").read_text()
    assert "The losses were the same in all starts" in done.stdout
    next_ones = [line.split() for line in done.stdout.splitlines() if line.startswith(f"  {bootseer} ")]
    assert len(next_ones) == 2
    for words in next_ones:
        shown = subprocess.run(words, capture_output=True, text=True, timeout=60, env=bare())
        assert shown.returncode == 0, shown.stderr
        assert "demo" in shown.stdout or "opt/job-env" in shown.stdout, shown.stdout
    assert left_over(cache) == []


STRAIGHT = """
import sys
from bootseer.cli.main import main
from bootseer.demo.comparison import Comparison

start = Comparison._start

def straight(run, site, variant, work):
    if variant == "first":
        start(run, site, variant, work)

Comparison._start = straight
sys.exit(main())
"""
"""The demo without the starts that come before the first one with bootseer."""


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.soak)])
def test_ended_in_the_middle(bootseer: Path, cache: Path, tmp_path: Path, number: int) -> None:
    process = subprocess.Popen(
        [str(bootseer.with_name("python")), "-c", STRAIGHT, "demo", "--cache", str(cache)],
        stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=bare(),
    )  # fmt: skip
    assert process.stderr is not None
    seen = ""
    try:
        for line in process.stderr:
            seen += line
            if line.startswith("==> first: lazy"):
                break
        workplace_of = next(cache.glob("run-*"))
        process.send_signal(number)
        process.wait(90)
        seen += process.stderr.read()  # ends with the last process that has it open
    finally:
        process.kill()
        process.stderr.close()
    assert process.returncode == (130 if number == signal.SIGINT else -number), seen
    assert "Traceback" not in seen
    workplace.await_end(workplace_of, 30.0)
    if number == signal.SIGINT:
        assert left_over(cache) == []
    else:  # its folder is the next demo's to remove
        assert left_over(cache) == [str(workplace_of)]
        workplace.sweep(cache)


def test_without_root_is_one_line(bootseer: Path) -> None:
    argv = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", str(bootseer), "demo"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, env=bare(), cwd="/")
    assert done.returncode == 77
    assert done.stderr.count("\n") == 1
    assert "sudo" in done.stderr


def test_what_is_missing_is_one_line(bootseer: Path, tmp_path: Path) -> None:
    """Runtimes that are no programs, in mounts of this test alone."""
    argv = [str(bootseer), "demo", "--cache", str(tmp_path)]
    script = [
        "unshare",
        "--mount",
        "sh",
        "-c",
        'for f in "$@"; do mount --bind /dev/null "$f"; done; exec ' + " ".join(argv),
    ]
    programs = [path for name in ("runc", "crun") if (path := shutil.which(name, path=bare()["PATH"]))]
    done = subprocess.run([*script, "sh", *programs], capture_output=True, text=True, timeout=120, env=bare())
    assert done.returncode == 71, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert "apt install runc" in done.stderr
    assert list(tmp_path.iterdir()) == []
