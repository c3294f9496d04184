"""What `image.mount` does before anything is mounted."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from bootseer import image, oci
from bootseer.blocks import tree
from bootseer.config import Config
from bootseer.errors import ConfigError, NotFoundError, PrivilegeError
from bootseer.image import inventory
from bootseer.image.mount import MountRecord
from support.waits import until

_REF = "registry.example/x:v1"


@pytest.fixture(autouse=True)
def as_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)


def start(tmp_path: Path, target: str = "mnt") -> None:
    config = Config(cache_dir=str(tmp_path / "cache"), state_dir=str(tmp_path / "state"))
    image.mount(_REF, tmp_path / target, store_url=str(tmp_path / "store"), config=config, server=("true",))


def test_who_may_not_read_the_image_gets_no_mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def preflight(*_: object, **__: object) -> None:
        raise PrivilegeError("no access")

    monkeypatch.setattr(oci, "preflight", preflight)
    monkeypatch.setattr(sys.modules[image.mount.__module__], "resolve", lambda *_, **__: None)
    with pytest.raises(PrivilegeError, match="no access"):
        start(tmp_path)


def test_an_image_that_is_not_converted_waits_for_no_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(*_: object, **__: object) -> None:
        raise NotFoundError("not converted")

    monkeypatch.setattr(oci, "preflight", lambda *_, **__: pytest.fail("the registry is asked"))
    monkeypatch.setattr(sys.modules[image.mount.__module__], "resolve", resolve)
    with pytest.raises(NotFoundError, match="not converted"):
        start(tmp_path)


@pytest.mark.root
def test_where_somebody_else_leads_the_name_nothing_is_mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mount would lie on any folder of the machine."""
    monkeypatch.setattr(oci, "preflight", lambda *_, **__: None)
    monkeypatch.setattr(sys.modules[image.mount.__module__], "resolve", lambda *_, **__: None)
    home = tmp_path / "home"
    home.mkdir()
    (home / "mnt").symlink_to(tmp_path / "etc")
    for path in (home / "mnt", home):
        os.chown(path, 65534, 65534, follow_symlinks=False)
    with pytest.raises(ConfigError, match=r"others can replace .*/home/mnt"):
        start(tmp_path, "home/mnt")


def left(state: Path, name: str) -> Path:
    """What a killed ``image run`` leaves: its folder, and the record of the mount in it."""
    folder, ident = state / "run" / name, f"id-{name}"
    for path in (folder / "rootfs", state / "images" / ident):
        path.mkdir(parents=True, mode=0o700)
    (folder / "lock").touch()
    record = MountRecord(
        id=ident, target=str(folder / "rootfs"), reference=_REF, image="sha256:0", tree=f"{name:0>64}",
        lower=str(state / "images" / ident / "lower"), overlay="", config=oci.ImageConfig(
            architecture="", os="linux", rootfs=oci.RootFS(diff_ids=())),
    )  # fmt: skip
    (state / "images" / ident / "mount.json").write_bytes(msgspec.json.encode(record))
    return folder


def test_a_server_that_is_stuck_does_not_keep_others_from_being_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [left(tmp_path, name) for name in ("aaa", "bbb", "ccc")]
    answer, ended = threading.Event(), set()

    def unmount(self: image.ImageMount) -> None:
        if len(ended) + len(asked) == 0:
            asked.append(self)
            answer.wait(60)
        ended.add(self.rootfs.parent)

    asked: list[image.ImageMount] = []
    monkeypatch.setattr(image.ImageMount, "unmount", unmount)
    sweeping = threading.Thread(target=image.sweep, args=(tmp_path,))
    sweeping.start()
    until(lambda: sum(folder.exists() for folder in folders) <= 1, 30, "what the others, not the stuck one, remove")
    answer.set()
    sweeping.join(60)
    assert ended == set(folders)


def test_the_servers_of_other_images_are_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left(tmp_path, "aaa")
    asked: list[str] = []
    monkeypatch.setattr(tree.client, "ask", lambda folder, *_, **__: asked.append(folder.name))
    damaged = tmp_path / "images/damaged/mount.json"
    damaged.parent.mkdir()
    damaged.write_bytes(b'{"target":"\xff"}')
    for name in ("a" * 16, "b" * 16, f"{'aaa':0>64}"[:16]):
        (tmp_path / "trees" / name).mkdir(parents=True)
    (mounted,) = image.mounts(tmp_path)
    mounted.status()
    assert asked == [f"{'aaa':0>64}"[:16]]


def test_a_file_or_folder_called_lock_beside_a_mount_is_somebody_elses(tmp_path: Path) -> None:
    """As /run/lock, beside a mount on /run/image."""
    state, cache = tmp_path / "state", tmp_path / "cache"
    left(state, "one")
    cache.mkdir(mode=0o700)
    (kept,) = (state / "images").iterdir()
    record = kept / "mount.json"
    for number, make in enumerate((Path.mkdir, Path.touch)):
        other = tmp_path / f"other{number}"
        other.mkdir()
        make(other / "lock")
        found = msgspec.structs.replace(msgspec.json.decode(record.read_bytes(), type=MountRecord), target=f"{other}/m")
        record.write_bytes(msgspec.json.encode(found))
        assert [item.state for item in inventory.listing(state, cache) if item.kind == "mount"] == ["mounted"]
    record.write_bytes(msgspec.json.encode(msgspec.structs.replace(found, boot="an earlier one")))
    assert [item.state for item in inventory.listing(state, cache) if item.kind == "mount"] == [inventory.DEAD]
