"""The work folder of a conversion: space, locks, and what dead conversions left."""

from __future__ import annotations

import fcntl
import importlib
import os
import shutil
import threading
from pathlib import Path

import pytest

from bootseer import image
from bootseer.blocks.publish import spool
from bootseer.errors import FullError, UnavailableError
from bootseer.image import _work
from bootseer.image._work import check_space, work_folder
from bootseer.testing.images import Member, write_image


def test_too_little_space_is_one_clear_error(tmp_path: Path) -> None:
    stat = os.statvfs(tmp_path)
    check_space(tmp_path, stat.f_bavail * stat.f_frsize // 2, "convert x")
    with pytest.raises(FullError, match=r"cannot convert x: .* GB free") as caught:
        check_space(tmp_path, 2 * stat.f_blocks * stat.f_frsize, "convert x")
    assert "--work-dir" in (caught.value.hint or "")


@pytest.mark.parametrize("limit", [1000, spool.FOLDER_BYTES])
def test_packs_count_when_space_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    write_image(tmp_path / "layout", [[Member("a", data=os.urandom(50_000))]], tag="v1")
    asked: list[int] = []
    module = importlib.import_module("bootseer.image.convert")  # `image.convert` is the function
    monkeypatch.setattr(module, "FOLDER_BYTES", limit)
    monkeypatch.setattr(module, "check_space", lambda folder, wanted, doing: asked.append(wanted))
    record = image.convert(f"oci:{tmp_path}/layout:v1", str(tmp_path / "store"), work_dir=tmp_path / "work")
    assert asked == [min(limit, record.layer_bytes)], "a layout's layers are read where they are"


def test_a_folder_in_use_is_left_alone_and_a_dead_one_is_not(tmp_path: Path) -> None:
    dead = tmp_path / "convert-dead"
    dead.mkdir()
    (dead / "lock").touch()
    (dead / "pack-0").write_bytes(b"x" * 1000)
    (tmp_path / "dead-convert-half-removed").mkdir()
    with work_folder(tmp_path) as one, work_folder(tmp_path) as two:
        assert sorted(tmp_path.iterdir()) == sorted([one, two])
    assert list(tmp_path.iterdir()) == []


def test_removing_gigabytes_keeps_nobody_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "convert-dead").mkdir()
    removing, go = threading.Event(), threading.Event()
    rmtree = shutil.rmtree

    def slowly(path: Path, ignore_errors: bool = False) -> None:
        if path.name.startswith("dead-"):
            removing.set()
            assert go.wait(20)
        rmtree(path, ignore_errors=ignore_errors)

    def first() -> None:
        with work_folder(tmp_path):
            pass

    monkeypatch.setattr(_work.shutil, "rmtree", slowly)
    thread = threading.Thread(target=first)
    thread.start()
    try:
        assert removing.wait(20)
        fd = os.open(tmp_path, os.O_RDONLY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(fd)
    finally:
        go.set()
        thread.join(20)
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_is_never_free_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_work, "_LOCK_SECONDS", 0.1)
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        with pytest.raises(UnavailableError, match="locked"), work_folder(tmp_path):
            pass
    finally:
        os.close(fd)
