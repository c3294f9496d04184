"""What an ordinary user of the node can do with an image that somebody prepared: nothing that is root's."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer import config as settings
from bootseer import image, oci
from bootseer.errors import ConfigError
from bootseer.image import runtime
from support.images import Member, folder, programs, write_image

pytestmark = [pytest.mark.root, pytest.mark.runtime]

NOBODY = 65534
# setpriv itself keeps capabilities until it has started a program, which is `env` therefore.
AS_USER = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--", "env"]


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A folder that everybody can enter, with a converted image in it whose ``id`` is set-uid root."""
    with tempfile.TemporaryDirectory(prefix="bootseer-users-", dir="/var/tmp") as path:
        os.chmod(path, 0o755)
        base = Path(path)
        files = [
            member if member.name != "bin/id" else Member("bin/id", data=member.data, mode=0o4755)
            for member in programs("sh", "id")
        ]
        user = oci.ContainerConfig(env=("PATH=/bin",), user=str(NOBODY))
        write_image(base / "layout", [files, [folder("etc")]], config=user)
        image.ensure(f"oci:{base}/layout:v1", str(base / "store"), work_dir=base / "work")
        yield base


@pytest.fixture
def config(place: Path) -> settings.Config:
    return settings.Config(cache_dir=str(place / "cache"), state_dir=str(place / "state"))


def uid_of(program: Path) -> str:
    """The effective user of a program that an ordinary user runs."""
    done = subprocess.run([*AS_USER, str(program), "-u"], capture_output=True, text=True, timeout=10, check=False)
    return done.stdout.strip() or done.stderr


@pytest.mark.parametrize("writable", [True, False])
def test_set_uid_programs_of_a_mounted_image_do_nothing(place: Path, config: settings.Config, writable: bool) -> None:
    mounted = image.mount(
        f"oci:{place}/layout:v1", place / "mnt", store_url=str(place / "store"), config=config, writable=writable
    )
    try:
        assert os.stat(place / "mnt/bin/id").st_mode & 0o4000
        assert uid_of(place / "mnt/bin/id") == str(NOBODY)
        lower = Path(mounted.record.lower)
        if writable:
            assert "Permission denied" in uid_of(lower / "bin/id")
            assert "Permission denied" in uid_of(Path(mounted.record.overlay) / "upper/bin/id")
        for flag in (os.ST_NOSUID, os.ST_NODEV):
            assert os.statvfs(lower).f_flag & flag
            assert os.statvfs(place / "mnt").f_flag & flag
    finally:
        mounted.unmount()


def test_a_target_that_is_a_link_is_unmounted_before_its_overlay_goes(place: Path, config: settings.Config) -> None:
    (place / "real").mkdir()
    (place / "link").symlink_to("real")
    mounted = image.mount(f"oci:{place}/layout:v1", place / "link", store_url=str(place / "store"), config=config)
    assert mounted.rootfs == place / "real"
    assert image.attach(place / "link", place / "state").record == mounted.record
    mounted.unmount()
    assert list((place / "real").iterdir()) == []


def test_they_work_in_a_container_whose_root_nobody_else_reaches(place: Path, config: settings.Config) -> None:
    with pytest.raises(ConfigError, match="other users can reach it"):
        image.mount(
            f"oci:{place}/layout:v1", place / "mnt", store_url=str(place / "store"), config=config, privileged=True
        )
    hidden = place / "hidden"
    hidden.mkdir(mode=0o700)
    mounted = image.mount(
        f"oci:{place}/layout:v1", hidden / "root", store_url=str(place / "store"), config=config, privileged=True
    )
    try:
        assert "Permission denied" in uid_of(mounted.rootfs / "bin/id")
        command = ["sh", "-c", f"test $(id -u) = 0 && test $(id -ru) = {NOBODY}"]
        assert runtime.run(mounted.rootfs, mounted.config, command, state_dir=place / "state") == 0
    finally:
        mounted.unmount()


def test_a_state_folder_that_a_user_planted_is_refused(place: Path, config: settings.Config) -> None:
    planted = place / "planted"
    planted.mkdir(mode=0o755)
    os.chown(planted, NOBODY, NOBODY)
    bad = settings.Config(cache_dir=config.cache_dir, state_dir=str(planted))
    with pytest.raises(ConfigError, match=f"belongs to user {NOBODY}"):
        image.mount(f"oci:{place}/layout:v1", place / "mnt", store_url=str(place / "store"), config=bad)
    assert not list(planted.iterdir())
