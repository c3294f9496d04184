"""What the snapshotter keeps of snapshots, and what a configuration of containerd lacks."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer import oci
from bootseer.config import Config
from bootseer.containerd import settings, uninstall
from bootseer.containerd.images import Images, Match
from bootseer.containerd.snapshots import ExistsError, Kind, Layer, MissingError, Snapshot, Snapshots, StateError
from bootseer.errors import ConfigError, DataError, NotFoundError, UnavailableError
from bootseer.image import record as records
from bootseer.image.record import ImageRecord
from bootseer.kernel.parts import Part
from bootseer.objects import open_store

LAYER = Layer("sha256:chain", "sha256:manifest", "registry:5000/name:1")
ROOT = Path("/var/lib/bootseer")
SOCKET = Path("/run/bootseer/containerd.sock")


@pytest.fixture
def snapshots(tmp_path: Path) -> Iterator[Snapshots]:
    with contextlib.closing(Snapshots(tmp_path)) as made:
        yield made


def test_a_life(snapshots: Snapshots, tmp_path: Path) -> None:
    snapshots.create("ns/1/extract", "", Kind.ACTIVE, {"a": "1", "b": "2"}, None)
    snapshots.commit("ns/1/extract", "ns/2/layer", {"b": "3"})
    (like := tmp_path / "like").mkdir()
    like.chmod(0o710)
    top = snapshots.create("ns/3/container", "ns/2/layer", Kind.ACTIVE, {}, like)
    assert [item.name for item in snapshots.below("ns/3/container")] == ["ns/3/container", "ns/2/layer"]
    assert snapshots.files(top).stat().st_mode & 0o777 == 0o710
    (snapshots.files(top) / "file").write_bytes(b"x" * 10_000)
    size, inodes = snapshots.usage(top)
    assert size >= 10_000
    assert inodes == 2
    assert snapshots.get("ns/2/layer").labels == {"a": "1", "b": "3"}
    assert snapshots.relabel("ns/2/layer", {"b": "", "c": "4"}, ["labels.b", "labels.c"]).labels == {"a": "1", "c": "4"}
    assert snapshots.relabel("ns/2/layer", {"d": "5"}, []).labels == {"d": "5"}
    with contextlib.closing(Snapshots(tmp_path)) as again:
        assert [item.kind for item in again.listing()] == [Kind.COMMITTED, Kind.ACTIVE]


def test_what_cannot_be_done(snapshots: Snapshots) -> None:
    snapshots.create("active", "", Kind.ACTIVE, {}, None)
    with pytest.raises(ExistsError):
        snapshots.create("active", "", Kind.ACTIVE, {}, None)
    with pytest.raises(StateError):
        snapshots.create("on top", "active", Kind.ACTIVE, {}, None)
    with pytest.raises(MissingError):
        snapshots.create("on nothing", "nothing", Kind.VIEW, {}, None)
    snapshots.commit("active", "layer", {})
    with pytest.raises(StateError):
        snapshots.commit("layer", "again", {})
    snapshots.create("view", "layer", Kind.VIEW, {}, None)
    with pytest.raises(StateError):
        snapshots.remove("layer")
    with pytest.raises(StateError):
        snapshots.relabel("layer", {}, ["kind"])


def test_a_folder_of_a_snapshot_that_failed_is_nobody_elses(snapshots: Snapshots, tmp_path: Path) -> None:
    """What is left of one that failed goes, and takes nothing of a later one with it."""
    with pytest.raises(NotFoundError):
        snapshots.create("failed", "", Kind.ACTIVE, {}, tmp_path / "missing")
    (left,) = (tmp_path / "snapshots").iterdir()
    made = snapshots.create("made", "", Kind.ACTIVE, {}, None)
    assert made.folder != left.name
    snapshots.collect()
    assert [path.name for path in (tmp_path / "snapshots").iterdir()] == [made.folder]
    snapshots.remove("made")
    assert snapshots.files(made).exists()
    snapshots.collect()
    assert not snapshots.files(made).exists()


def test_collect_follows_no_link(snapshots: Snapshots, tmp_path: Path) -> None:
    (mine := tmp_path / "mine").mkdir()
    (mine / "file").touch()
    made = snapshots.create("made", "", Kind.ACTIVE, {}, None)
    os.symlink(mine, snapshots.files(made) / "link")
    snapshots.remove("made")
    snapshots.collect()
    assert (mine / "file").exists()


def test_a_lazy_snapshot_has_what_is_below_it(snapshots: Snapshots, tmp_path: Path) -> None:
    snapshots.create("one", "", Kind.ACTIVE, {}, None)
    snapshots.commit("one", "layer", {})
    lazy = snapshots.create_lazy("lazy", "layer", {}, LAYER)
    assert snapshots.create_lazy("other", "layer", {}, LAYER) == lazy
    snapshots.create("container", "lazy", Kind.ACTIVE, {}, None)
    assert [item.name for item in snapshots.below("container")] == ["container", "lazy"]
    assert snapshots.usage(lazy) == (0, 0)
    (made := tmp_path / "made").mkdir()
    (made / "file").touch()
    assert (snapshots.adopt(lazy, made) / "file").exists()
    assert snapshots.files(snapshots.get("lazy")) != made


def test_an_overlay_of_all_layers_that_an_image_can_have(snapshots: Snapshots) -> None:
    """containerd mounts it from the folder that the layers share; its options must fit into one page."""
    layers = [snapshots.create(f"{number}", "", Kind.ACTIVE, {}, None) for number in range(127)]
    top = layers.pop()
    usual = Path("/var/lib/bootseer/containerd")
    work, upper = (usual / path.relative_to(snapshots.root) for path in (snapshots.work(top), snapshots.files(top)))
    lower = ":".join(f"{snapshots.files(one).relative_to(snapshots.root)}" for one in layers)
    assert len(f"index=off,workdir={work},upperdir={upper},lowerdir={lower}") < 4096


def test_layers_that_are_asked_for_while_they_are_unpacked_are_unpacked_once(
    snapshots: Snapshots, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose answer comes late has an old view of the snapshot; the folder that containers use must stay."""
    images = Images(snapshots, Config(store=str(tmp_path / "store")), Part())

    def unpacked(snapshot: Snapshot, _: Layer) -> Path:
        (made := tmp_path / "made").mkdir()
        return snapshots.adopt(snapshot, made)

    monkeypatch.setattr(images, "_unpacked", unpacked)
    lazy = snapshots.create_lazy("lazy", "", {}, LAYER)
    first = images.files(lazy)
    assert images.files(lazy) == first
    snapshots.collect()
    assert first.exists()


def test_a_container_that_is_refused_leaves_nothing_to_wait_for(snapshots: Snapshots, tmp_path: Path) -> None:
    part = Part(draining=True)
    images = Images(snapshots, Config(store=str(tmp_path / "store")), part)
    lazy = snapshots.create_lazy("lazy", "", {}, LAYER)
    with pytest.raises(UnavailableError, match="drained"):
        images._mounted(lazy, "a" * 64)
    assert not list((tmp_path / "trees").iterdir())
    assert snapshots.trees() == set()
    assert part.mounts == 0


@pytest.mark.parametrize(
    ("converted", "pulled", "match"),
    [
        ("private.example/team/a:1", "private.example/team/a:1", Match.WHOLE),
        ("private.example/team/a:1", "private.example/team/a:2", Match.WHOLE),  # the digest is what was converted
        ("private.example/team/a:1", "evil.example/team/a:1", Match.NONE),
        ("private.example/team/a:1", "private.example/evil/a:1", Match.NONE),
        ("private.example/team/a:1", "private.example:444/team/a:1", Match.NONE),
        ("private.example/team/a:1", "mirror.example/team/a:1", Match.WHOLE),
        ("private.example/team/a:1", "mirror.example:5000/private/team/a:1", Match.WHOLE),
        ("private.example/team/a:1", "mirror.example:5000/team/a:1", Match.NONE),
        ("other.example/team/a:1", "mirror.example/team/a:1", Match.NONE),
        ("ubuntu:24.04", "docker.io/library/ubuntu:24.04", Match.WHOLE),
        ("oci:/srv/images/a", "private.example/team/a:1", Match.NONE),
        ("oci:/srv/images/a", "oci:/srv/images/a", Match.NONE),
        ("private.example/team/a:1", "no name of an image", Match.NONE),
    ],
)
def test_who_has_a_copy_of_its_manifest_gets_no_converted_image(
    snapshots: Snapshots, tmp_path: Path, converted: str, pulled: str, match: Match
) -> None:
    """A registry of anybody's can serve it. The one that the image is from said who may have that image."""
    config = oci.ImageConfig(architecture="amd64", os="linux", rootfs=oci.RootFS(diff_ids=("sha256:" + "01" * 32,)))
    store, platform = open_store(str(tmp_path / "store")), oci.host_platform()
    found = ImageRecord(
        image="sha256:" + "ab" * 32, platform=platform, reference=converted, tree="cd" * 32, config=config,
        layer_bytes=1, tree_bytes=1, stored_bytes=1, shared_bytes=0, packs=1, members=1, converted=1, seconds={},
    )  # fmt: skip
    records.save(store, found)
    mirrors = {"private.example": ("https://mirror.example", "http://mirror.example:5000/private/")}
    images = Images(snapshots, Config(store=str(tmp_path / "store"), registry_mirrors=mirrors), Part())
    assert images.match(Layer(config.rootfs.chain_ids[-1], found.image, pulled)) is match


def test_only_the_folder_of_a_snapshotter_is_removed(tmp_path: Path) -> None:
    (other := tmp_path / "other").mkdir(mode=0o700)
    (other / "file").touch()
    with pytest.raises(ConfigError, match="is no folder of the snapshotter"):
        uninstall.remove(other, tmp_path / "a.sock", Config())
    assert [path.name for path in other.iterdir()] == ["file"]
    (root := tmp_path / "root").mkdir(mode=0o700)
    Snapshots(root).close()
    with socket.socket(socket.AF_UNIX) as theirs:
        theirs.bind(str(tmp_path / "a.sock"))
        theirs.listen()
        with pytest.raises(ConfigError, match="is not free"):
            uninstall.remove(root, tmp_path / "a.sock", Config())
    assert (root / "state.db").exists()
    uninstall.remove(root, tmp_path / "a.sock", Config())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other"]


def test_records_and_trees_are_kept_while_a_snapshot_needs_them(snapshots: Snapshots) -> None:
    lazy = snapshots.create_lazy("lazy", "", {}, LAYER)
    snapshots.keep_record(LAYER.manifest, b"record")
    snapshots.use_tree(lazy, "tree")
    snapshots.collect()
    assert snapshots.record(LAYER.manifest) == b"record"
    assert snapshots.trees() == {"tree"}
    snapshots.remove("lazy")
    snapshots.collect()
    assert snapshots.record(LAYER.manifest) is None
    assert snapshots.trees() == set()
    with pytest.raises(MissingError):
        snapshots.use_tree(lazy, "tree")


@pytest.mark.parametrize("content", [b"no database" * 100, None])
def test_a_database_that_cannot_be_read(tmp_path: Path, content: bytes | None) -> None:
    made = Snapshots(tmp_path)
    if content is None:
        made._db.execute("pragma user_version = 2")
    made.close()
    if content is not None:
        (tmp_path / "state.db").write_bytes(content)
    with pytest.raises(DataError):
        Snapshots(tmp_path)


def missing(content: str) -> list[str]:
    return settings.missing(content, ROOT, SOCKET, "linux/amd64", "config")


@pytest.mark.parametrize("version", ["1.6", "1.7", "2", "2.1"])
def test_what_is_printed_lacks_nothing(version: str) -> None:
    printed = settings.text(version, ROOT, SOCKET, "linux/amd64")
    assert missing(printed) == []
    assert len(settings.missing(printed, ROOT, Path("/other.sock"), "linux/amd64", "config")) == 1
    two = version.startswith("2")
    assert len(settings.missing(printed, Path("/other"), SOCKET, "linux/arm64", "config")) == (2 if two else 0)
    assert len(missing(printed.replace("only-remap-ids", "else"))) == (1 if two else 0)


def test_what_a_configuration_lacks() -> None:
    assert missing("") == ["version is 1: set version = 2 (containerd 1.6, 1.7) or 3 (containerd 2)"]
    assert missing('version = 2\ndisabled_plugins = ["cri"]') == [
        'disabled_plugins has "cri", without which no pod runs: take it out of the list',
        '[proxy_plugins.bootseer] is missing: add it, with type = "snapshot" and '
        'address = "/run/bootseer/containerd.sock"',
        '[plugins."io.containerd.grpc.v1.cri".containerd] has no snapshotter: add snapshotter = "bootseer"',
        '[plugins."io.containerd.grpc.v1.cri".containerd] has no disable_snapshot_annotations: '
        "add disable_snapshot_annotations = false",
    ]
    assert len(missing("version = 3\nplugins = 5")) == 6
    for bad in ("[", "version = "):
        with pytest.raises(ConfigError, match="config is no TOML"):
            missing(bad)
    with pytest.raises(ConfigError, match="not known"):
        settings.text("1.5", ROOT, SOCKET, "linux/amd64")
