"""The work folder of a conversion: space, locks, and what dead conversions left."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest

from bootseer import folders, image
from bootseer.blocks.publish import spool
from bootseer.errors import ConfigError, FullError
from bootseer.image import conversion
from bootseer.image.conversion import work_folder
from bootseer.oci import pipeline
from support.images import Member, write_image


def test_too_little_space_is_one_clear_error(tmp_path: Path) -> None:
    stat = os.statvfs(tmp_path)
    pipeline.check_space(tmp_path, stat.f_bavail * stat.f_frsize // 2, "x")
    with pytest.raises(FullError, match=r"no space for x: .* GB free") as caught:
        pipeline.check_space(tmp_path, 2 * stat.f_blocks * stat.f_frsize, "x")
    assert "--work-dir" in (caught.value.hint or "")


@pytest.mark.parametrize("limit", [1000, spool.FOLDER_BYTES])
def test_packs_count_when_space_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    write_image(tmp_path / "layout", [[Member("a", data=os.urandom(50_000))]], tag="v1")
    asked: list[int] = []
    monkeypatch.setattr(conversion, "FOLDER_BYTES", limit)
    monkeypatch.setattr(pipeline, "check_space", lambda folder, wanted, what: asked.append(wanted))
    record = image.ensure(f"oci:{tmp_path}/layout:v1", str(tmp_path / "store"), work_dir=tmp_path / "work").record
    assert asked == [min(limit, record.layer_bytes)], "a layout's layers are read where they are"


def test_a_folder_in_use_is_left_alone_and_a_dead_one_is_not(tmp_path: Path) -> None:
    dead = tmp_path / "bootseer-convert-dead"
    dead.mkdir()
    (dead / "lock").touch()
    (dead / "pack-0").write_bytes(b"x" * 1000)
    with work_folder(tmp_path) as one, work_folder(tmp_path) as two:
        assert sorted(tmp_path.iterdir()) == sorted([one, two])
    assert list(tmp_path.iterdir()) == []


def test_many_conversions_at_once_never_share_or_lose_a_folder(tmp_path: Path) -> None:
    def use(number: int) -> None:
        for _ in range(20):
            with work_folder(tmp_path) as folder:
                (folder / "pack").write_bytes(b"%d" % number)
                time.sleep(0.001)
                assert (folder / "pack").read_bytes() == b"%d" % number

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(use, range(8)))
    assert list(tmp_path.glob("bootseer-convert-*")) == []


def test_links_are_not_followed(tmp_path: Path) -> None:
    outside, work = tmp_path / "outside", tmp_path / "work"
    outside.mkdir()
    (work / "bootseer-convert-mine").mkdir(parents=True)
    (work / "bootseer-convert-mine/lock").symlink_to(outside / "made")
    (work / "bootseer-convert-link").symlink_to(outside)
    (work / "bootseer-convert-pipe").mkdir()
    os.mkfifo(work / "bootseer-convert-pipe/lock")
    (outside / "lock").touch()
    with work_folder(work) as folder:
        assert folder.is_dir()
    assert list(outside.iterdir()) == [outside / "lock"]


@pytest.mark.root
@pytest.mark.parametrize(("mode", "owner", "left"), [(0o777, 0, 1), (0o755, 65534, 1), (0o1777, 0, 0), (0o755, 0, 0)])
def test_nothing_is_written_or_removed_where_others_could_put_links(
    tmp_path: Path, mode: int, owner: int, left: int
) -> None:
    (tmp_path / "bootseer-convert-dead").mkdir()
    (tmp_path / "bootseer-convert-dead/lock").touch()
    tmp_path.chmod(mode)
    os.chown(tmp_path, owner, owner)
    with pytest.raises(ConfigError, match="others can replace") if left else nullcontext(), work_folder(tmp_path):
        assert not left
    assert len(list(tmp_path.iterdir())) == left


@pytest.mark.root
def test_a_user_may_work_in_a_folder_of_a_group_and_nothing_is_removed_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (left := tmp_path / "bootseer-convert-dead").mkdir()
    (left / "lock").touch()
    for path in (left, tmp_path):
        os.chown(path, 65534, 100)
    tmp_path.chmod(0o2775)
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    with work_folder(tmp_path) as work:
        (work / "x").touch()
    assert list(tmp_path.iterdir()) == [left]
    assert (left / "lock").exists()


def test_a_cache_that_is_made_for_a_conversion_is_one_that_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a user shares the group, and all that is made belongs to it."""
    monkeypatch.setattr(folders, "_others_write", lambda found: bool(found.st_mode & 0o022))
    before = os.umask(0o002)
    try:
        write_image(tmp_path / "layout", [[Member("a", data=b"a")]], tag="v1")
        image.ensure(f"oci:{tmp_path}/layout:v1", f"{tmp_path}/store", work_dir=tmp_path / ".cache/own/work")
        folders.trusted(tmp_path / ".cache/own")
        folders.private_folder(tmp_path / ".state/own")
    finally:
        os.umask(before)


def test_folders_of_others_are_left_alone_whatever_their_names(tmp_path: Path) -> None:
    for name in ("convert-photos", "dead-project", "bootseer-convert-without-a-lock"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("mine")
    with work_folder(tmp_path):
        pass
    assert {path.read_text() for path in tmp_path.glob("*/file")} == {"mine"}
    assert len(list(tmp_path.iterdir())) == 3
