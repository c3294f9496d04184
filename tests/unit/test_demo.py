"""Parts of the demo, each without a start."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bootseer.config import Config
from bootseer.demo import image, ingredients, programs, site, starts, workplace
from bootseer.env import cachekey
from bootseer.errors import BootseerError, ConfigError, UnsupportedError
from bootseer.kernel.fuse import ROOT, Context
from support.trees import differences
from support.waits import until

WHO = Context(1, 1, 0)


def test_all_readers_share_the_rate_of_the_link() -> None:
    link = site.Link(8)  # 1 MB a second
    began = time.monotonic()
    readers = [threading.Thread(target=link.carry, args=(100_000,)) for _ in range(3)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert time.monotonic() - began >= 0.29
    assert link.bytes == 300_000


def test_a_link_that_was_idle_gives_no_credit() -> None:
    link = site.Link(8)
    time.sleep(0.2)
    began = time.monotonic()
    link.carry(100_000)
    assert time.monotonic() - began >= 0.09


@pytest.mark.parametrize(
    "run",
    [
        lambda work: programs.run([*programs.BOOTSEER, "--version"]),
        lambda work: image.pip(work),
        lambda work: image.compile_bytecode(image.PYTHON, work, "/x"),
        lambda work: cachekey.imported([sys.executable, "x.py"], {}, Config()),
    ],
    ids=["bootseer", "pip", "compileall", "facts"],
)
def test_what_lies_in_the_working_folder_is_no_module_of_ours(
    run: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red before: root that stood in /tmp ran a neighbour's pip.py."""
    hostile, work = tmp_path / "hostile", tmp_path / "work"
    hostile.mkdir()
    work.mkdir()
    for name in ("bootseer", "pip", "venv", "compileall", "csv", "msgspec"):
        (hostile / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'x')\n")
    monkeypatch.chdir(hostile)
    with contextlib.suppress(UnsupportedError):  # of a Python without pip
        run(work)
    assert not (tmp_path / "ran").exists()


def test_the_shared_folder_counts_what_is_there_and_no_more(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/file").write_bytes(b"0123456789")
    link = site.Link(1000)
    shared = site.SharedFolder(tmp_path, link)
    (entry,) = shared.readdir(ROOT, WHO)
    assert entry.node == shared.lookup(ROOT, "sub", WHO).node
    found = shared.lookup(entry.node, "file", WHO)
    fh = shared.open(found.node, os.O_RDONLY, WHO)
    assert shared.read(fh, 4, 4096, WHO) == (fh, 4)
    assert link.bytes == 6
    assert shared.size(fh) == found.attr.size == 10
    shared.release(fh, WHO)
    with pytest.raises(FileNotFoundError):
        shared.lookup(ROOT, "nothing", WHO)


@pytest.mark.root
def test_why_a_start_failed_is_said_while_something_uses_the_store(place: Path) -> None:
    (place / "site/store").mkdir(parents=True)
    (place / "wheels").mkdir()
    users = []

    def fail() -> None:
        with seen.reached(site.Link(math.inf)):
            users.append(subprocess.Popen(["sleep", "60"], cwd=seen.store))
            raise BootseerError("the reason")

    with site.SharedSite(place / "site", place / "wheels", place) as seen:
        with pytest.raises(BootseerError, match="the reason"):
            fail()
        users[0].kill()
        users[0].wait()


def test_a_part_is_made_once_for_each_key_and_again_after_a_failure(tmp_path: Path) -> None:
    stamp, made = tmp_path / "stamp", []

    def make(key: str, *, fail: bool = False) -> None:
        def build() -> None:
            made.append(key)
            if fail:
                raise KeyboardInterrupt

        ingredients.make("part", stamp, key, build, lambda line: None)

    make("a")
    make("a")
    with pytest.raises(KeyboardInterrupt):
        make("b", fail=True)
    make("a")
    assert made == ["a", "b", "a"]


def test_a_library_comes_with_the_links_to_it(tmp_path: Path) -> None:
    here, root = tmp_path / "here", tmp_path / "root"
    here.mkdir()
    (here / "lib.so.1.2").write_bytes(b"code")
    (here / "lib.so.1").symlink_to("lib.so.1.2")
    (here / "lib.so").symlink_to("lib.so.1")
    (tmp_path / "link").symlink_to("here")
    image.copy_in(str(tmp_path / "link/lib.so"), root)
    there = root / str(here)[1:]
    assert os.readlink(there / "lib.so") == "lib.so.1"
    assert (there / "lib.so").read_bytes() == b"code"
    assert not (root / str(tmp_path)[1:] / "link").exists()


@pytest.mark.parametrize(
    ("found", "same"),
    [({3: 2.0, 4: 1.9}, True), ({3: 2.0001, 4: 1.9}, True), ({3: 2.1, 4: 1.9}, False), ({3: 2.0}, False)],
)
def test_losses_continue_or_not(found: dict[int, float], same: bool) -> None:
    assert starts.same_losses({3: 2.0, 4: 1.9}, found) is same
    assert not starts.same_losses({}, {})


def test_a_folder_with_files_of_others_is_not_the_demos(place: Path) -> None:
    cache = workplace.claim(place / "new")
    with workplace.only_one(cache):
        (cache / "run-0").mkdir()
    assert workplace.claim(cache) == cache
    (place / "run-001").mkdir()
    with pytest.raises(ConfigError, match="not the demo's"):
        workplace.claim(place)
    cache.chmod(0o777)
    with pytest.raises(ConfigError, match="others can write"):
        workplace.claim(cache)


def test_every_project_of_the_index_has_the_wheels(tmp_path):
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for name in ("Typing_Ext-1.0-py3-none-any.whl", "numpy-2.0+a-cp311-x.whl", "numpy-2.1-cp311-x.whl"):
        (wheels / name).touch()
    ingredients.link_projects(wheels, tmp_path / "simple")
    assert sorted(p.name for p in (tmp_path / "simple").iterdir()) == ["numpy", "typing-ext"]
    assert (tmp_path / "simple/numpy/numpy-2.0+a-cp311-x.whl").exists()


def test_losses_are_read_from_a_noisy_log():
    assert starts.losses('warning: x\n{"step": 3, "loss": 1.5}\n{"other": 1}\n{"step": 4, "loss": 1}\n') == {
        3: 1.5,
        4: 1.0,
    }


def _fill(root):
    (root / "d").mkdir(parents=True)
    (root / "d/f").write_bytes(b"one")
    (root / "g").write_bytes(b"two")
    os.symlink("d/f", root / "l")
    for path in ("d/f", "g", "d", "l"):
        os.utime(root / path, ns=(1, 1_000_000_001), follow_symlinks=False)


def test_equal_trees_have_no_differences(tmp_path):
    _fill(tmp_path / "a")
    _fill(tmp_path / "b")
    assert differences(tmp_path / "a", tmp_path / "b") == (4, [])


def test_every_kind_of_difference_is_seen(tmp_path):
    changes = {
        "content": lambda r: ((r / "g").write_bytes(b"twO"), os.utime(r / "g", ns=(1, 1_000_000_001))),
        "mtime": lambda r: os.utime(r / "g", ns=(1, 1_000_000_002)),
        "mode": lambda r: (r / "g").chmod(0o400),
        "missing": lambda r: (r / "g").unlink(),
        "extra": lambda r: (r / "new").touch(),
        "link": lambda r: ((r / "l").unlink(), os.symlink("g", r / "l"), os.utime(r / "l", ns=(1, 1_000_000_001),
                           follow_symlinks=False)),
        "xattr": lambda r: os.setxattr(r / "g", "user.x", b"1"),
    }  # fmt: skip
    _fill(tmp_path / "a")
    for name, change in changes.items():
        other = tmp_path / name
        _fill(other)
        change(other)
        os.utime(other / "d", ns=(1, 1_000_000_001))
        assert differences(tmp_path / "a", other)[1], name


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_program_that_is_interrupted_may_tidy_up(tmp_path: Path, number: int) -> None:
    """Red before: it was killed a quarter of a second later, and what it had started and mounted stayed."""
    ends = "import signal, sys, time; signal.signal(signal.SIGTERM, signal.default_int_handler)\n"
    child = f"{ends}try:\n open(sys.argv[1], 'w').close()\n time.sleep(60)\n"
    child += "except KeyboardInterrupt:\n time.sleep(1)\n open(sys.argv[2], 'w')"
    here = f"{ends}from bootseer.demo.programs import run; run([sys.executable, '-c', {child!r}, *sys.argv[1:]])"
    begun, tidied = tmp_path / "begun", tmp_path / "tidied"
    quiet = "trap '' INT; " if number == signal.SIGTERM else ""  # as in the background of a script
    argv = ["sh", "-c", f'{quiet}exec "$@"', "sh", sys.executable, "-c", here, str(begun), str(tidied)]
    process = subprocess.Popen(argv, stderr=subprocess.DEVNULL)
    until(begun.exists, 20, "the program")
    time.sleep(0.5)  # on a busy machine the program is there before its caller waits for it
    process.send_signal(number)
    process.wait(30)
    assert tidied.exists()
