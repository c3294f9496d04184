"""The fanotify canary on the real kernel: what it finds, what it must be able to see, and what it remembers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.kernel import canary, fanotify, mount

pytestmark = pytest.mark.root

IMPORTS = "from pathlib import Path; from bootseer.kernel import canary"


@pytest.fixture
def place() -> Iterator[Path]:
    path = Path("/var/tmp") / f"bootseer-canary-{os.getpid()}"  # tmp_path may lie on tmpfs
    (path / "cache").mkdir(parents=True)
    yield path
    shutil.rmtree(path)


def _works(place: Path) -> canary.Verdict:
    return canary.fanotify_works(place / "cache", place / "state")


def _supported(place: Path) -> None:
    probe = place / "probe"
    probe.write_bytes(b"x")
    try:
        fanotify.try_pre_content(probe)
    except Exception as exc:
        pytest.skip(str(exc))


def test_it_passes_quickly_leaves_nothing_and_is_remembered(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _supported(place)
    before = list(mount.entries())
    started = time.monotonic()
    verdict = _works(place)
    assert verdict.works, verdict
    assert "right bytes" in verdict.reason
    assert time.monotonic() - started < 5  # 0.1 s on an idle machine
    assert os.listdir(place / "cache") == []
    assert list(mount.entries()) == before
    monkeypatch.setattr(canary, "_ask", lambda cache_dir: pytest.fail("asked again"))
    assert _works(place) == verdict


@pytest.mark.parametrize("spoil", ["other boot", "no json", "other shape"])
def test_records_that_do_not_hold_are_not_believed(place: Path, monkeypatch: pytest.MonkeyPatch, spoil: str) -> None:
    asked: list[Path] = []

    def ask(cache_dir: Path) -> tuple[canary.Verdict, bool]:
        asked.append(cache_dir)
        return canary.Verdict(False, "because"), True

    monkeypatch.setattr(canary, "_ask", ask)
    assert _works(place) == _works(place) == (False, "because")
    assert len(asked) == 1
    (record,) = (place / "state").iterdir()
    if spoil == "other boot":
        record.write_text(json.dumps({**json.loads(record.read_text()), "key": "another"}))
    else:
        record.write_text("{" if spoil == "no json" else "[]")
    _works(place)
    assert len(asked) == 2


def test_what_may_change_is_not_remembered(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canary, "_ask", lambda cache_dir: (canary.Verdict(False, "no space"), False))
    assert not _works(place).works
    assert not (place / "state").exists()
    assert not canary.fanotify_works(place / "nowhere", place / "state").works


def test_a_fresh_trial_corrects_a_record_but_makes_none(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    works = True
    monkeypatch.setattr(canary, "_ask", lambda cache_dir: (canary.Verdict(works, "tried"), True))
    assert canary.fanotify_works(place / "cache", place / "state", fresh=True).works
    assert not (place / "state").exists()
    assert _works(place).works
    works = False
    assert _works(place).works
    assert not canary.fanotify_works(place / "cache", place / "state", fresh=True).works
    assert not _works(place).works


def test_a_state_folder_that_cannot_be_written_to(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "state").write_text("a file")
    monkeypatch.setattr(canary, "_ask", lambda cache_dir: (canary.Verdict(True, "fine"), True))
    assert _works(place).works


def _attempt(place: Path, arguments: str) -> str:
    code = f"{IMPORTS}; canary.attempt(Path({str(place)!r}){arguments})"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False).stderr


def test_it_sees_zeros(place: Path) -> None:
    """The control: a keeper that dies as the only holder of its group hands out zeros, and the trial must say so."""
    _supported(place)
    assert "a read gave zeros" in _attempt(place, ", holder=False").splitlines()[-1]


def test_a_keeper_that_dies_at_once(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _supported(place)
    monkeypatch.setattr(canary, "_DEADLINE", 2.0)
    monkeypatch.setenv("BOOTSEER_FAULTS", "canary.keeper.event=kill")
    verdict = _works(place)
    assert not verdict.works
    assert "hung for 2 s" in verdict.reason
    assert os.listdir(place / "cache") == []
    monkeypatch.delenv("BOOTSEER_FAULTS")
    assert _works(place).works


def test_a_file_system_without_events(tmp_path: Path) -> None:
    folder = tmp_path / "memory"
    folder.mkdir()
    mount.mount("none", folder, "tmpfs")
    try:
        verdict = canary.fanotify_works(folder, tmp_path / "state")
    finally:
        mount.unmount(folder)
    assert not verdict.works
    assert "no pre-content events" in verdict.reason
    assert len(list((tmp_path / "state").iterdir())) == 1


def test_without_privileges(place: Path) -> None:
    folders = f"Path({str(place / 'cache')!r}), Path({str(place / 'state')!r})"
    code = f"{IMPORTS}; print(canary.fanotify_works({folders}))"
    command = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    assert "works=False" in done.stdout
    assert "CAP_SYS_ADMIN" in done.stdout
    assert not (place / "state").exists()
