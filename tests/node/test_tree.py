"""Lazy trees with real mounts, over a store that lies, dies or is slow."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer import erofs
from bootseer.blocks import tree
from bootseer.blocks.publish.dedup import KnownBlocks
from bootseer.blocks.publish.tree import TreeWriter
from bootseer.blocks.tree import ProfileKey
from bootseer.chunks.blockmap import BlockMap
from bootseer.chunks.manifest import TreeManifest
from bootseer.config import Config
from bootseer.errors import BootseerError, NotFoundError, UnavailableError
from bootseer.kernel import mount as mounts
from bootseer.objects.folder import FolderStore
from support.node import alive
from support.treesite import TreeSite, publish_tree
from support.waits import until

pytestmark = pytest.mark.root

KEY = ProfileKey("test")


def fill(root: Path) -> None:
    """About 12 MB: many small files, some large ones, a sparse one, links, an odd name."""
    rand = random.Random(1)
    root.mkdir()
    for index in range(120):
        path = root / f"d{index % 7}" / f"f{index}"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(rand.randbytes(rand.randrange(1, 30000)))
    for index in range(4):
        (root / f"big{index}").write_bytes(rand.randbytes(2 << 20) + b"text " * 100000)
    (root / "empty").touch()
    (root / "zeros").write_bytes(bytes(1 << 20))
    (root / "link").symlink_to("d1/f1")
    os.link(root / "big0", root / "hard")
    (root / os.fsdecode(b"odd \xff\n")).write_text("odd")


def fingerprint(root: Path) -> str:
    state = hashlib.sha256()
    for folder, folders, files in os.walk(root):
        folders.sort()
        for name in sorted(files):
            path = Path(folder, name)
            state.update(os.fsencode(path.relative_to(root)) + b"\0")
            state.update(os.fsencode(os.readlink(path)) if path.is_symlink() else path.read_bytes())
    return state.hexdigest()


class Site(TreeSite):
    def __init__(self, base: Path, folder: Path) -> None:
        super().__init__(base, folder, profile=KEY, demand_deadline=10.0, fill_quiet=0.2)
        self.fingerprint = fingerprint(self.source)

    @property
    def manifest(self) -> TreeManifest:
        return TreeManifest.decode(self.store.get(f"trees/{self.digest}.json", most=1 << 30), self.digest)

    @property
    def blob(self) -> Path:
        """The only pack."""
        (pack,) = BlockMap.decode(self.store.get(self.manifest.map.key, most=1 << 30)).packs
        return self.store.root / pack.key

    @property
    def profile(self) -> set[str]:
        """Which kinds of objects its profiles have."""
        return {info.key.rpartition(".")[2] for info in self.store.list("profiles")}

    def await_pack(self) -> None:
        """After an unmount: it is finished behind that."""
        until(lambda: {"trace", "pack"} <= self.profile)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    fill(folder / "tree")
    publish_tree(folder)
    return folder


@pytest.fixture
def site(base: Path, tmp_path: Path) -> Iterator[Site]:
    site = Site(base, tmp_path)
    yield site
    site.close()


def test_the_tree_is_the_same_and_nothing_is_left(site: Site) -> None:
    made = site.mount()
    assert mounts.is_mounted(made.target)
    assert fingerprint(made.target) == site.fingerprint
    status = made.status()
    assert status.blocks_ready == status.blocks_total
    assert status.slow_faults > 0
    assert 0 < status.waited_seconds <= status.stall_seconds
    assert status.link_rate > 0
    stored = site.blob.stat().st_size
    assert stored <= status.bytes_demand <= 1.1 * stored  # a block that is late is fetched twice
    assert status.driver == "fuse"
    assert (status.bytes_hot, status.bytes_background, status.failed_reads) == (0, 0, 0)
    assert status.recording == "recording"
    made.unmount()
    assert site.clean()
    made.unmount()


def test_of_the_next_build_only_what_changed_comes_over_the_network(site: Site) -> None:
    made = site.mount(background_fill=True)
    until(lambda: made.status().complete)
    made.unmount()
    first = site.mount()
    build = site.folder / "build"
    shutil.copytree(site.source, build / "tree", symlinks=True)
    (build / "tree" / "big1").write_bytes(os.urandom(300_000))
    erofs.build(build / "tree", build / "meta", build / "data")
    known = KnownBlocks.of_trees(site.store, [site.digest], 64 << 10)
    with TreeWriter(site.store, build, known=known) as out:
        out.packs.write((build / "data").read_bytes())
        new = out.seal((build / "meta").read_bytes())
    again = tree.mount(
        site.store.url, new.digest, site.folder / "mnt-2", cache_dir=site.folder / "cache", state_dir=site.state,
        profile=KEY, config=Config(background_fill=False),
    )  # fmt: skip
    site.mounted.append(again)
    assert fingerprint(again.target) == fingerprint(build / "tree")
    status = again.status()
    came = status.bytes_demand + status.bytes_hot + status.bytes_background
    assert 300_000 <= came <= 2 * new.stored
    assert status.bytes_copied >= 10 * came
    assert fingerprint(first.target) == site.fingerprint


@pytest.mark.file_mounts
def test_a_complete_tree_is_read_ahead_further(site: Site) -> None:
    made = site.mount()
    (note,) = (site.state / "trees" / site.digest[:16]).glob("erofs-*.readahead")
    window = Path("/sys/class/bdi", note.stem, "read_ahead_kb")
    time.sleep(0.5)  # longer than the fetcher waits between two looks
    assert window.read_text() == "128\n"
    fingerprint(made.target)
    until(lambda: window.read_text() == "512\n")
    assert not note.exists()
    made.unmount()
    assert site.clean()
    assert not window.exists()


def test_nobody_waits_for_the_hot_pack(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOOTSEER_FAULTS", "blocks.hotpack.block=sleep:0.05")
    made = site.mount()
    monkeypatch.delenv("BOOTSEER_FAULTS")
    (made.target / "big1").read_bytes()
    made.unmount()
    assert site.clean()
    assert "pack" not in site.profile
    assert "finishes its hot pack" in site.log
    made = site.mount()
    assert fingerprint(made.target) == site.fingerprint
    site.await_pack()
    assert all(info.key.startswith(f"profiles/{site.digest}/test/") for info in site.store.list("profiles"))


@pytest.mark.file_mounts
def test_the_second_start_reads_the_hot_pack_alone(site: Site) -> None:
    first = site.mount(cache="one")
    for name in ("big1", "d3/f3"):
        (first.target / name).read_bytes()
    first.unmount()
    site.await_pack()
    assert [info for info in site.store.list("profiles") if info.key.endswith(".trace")]
    second = site.mount(cache="two", readahead=False)
    until(lambda: second.status().bytes_hot)
    assert second.status().hot_total, "also for a start of less than half a second"
    until(lambda: 0 < second.status().hot_total == second.status().hot_ready)
    until(lambda: second.status().hot_pack.endswith(".pack"))
    for name in ("big1", "d3/f3"):
        assert (second.target / name).read_bytes() == site.want(name)
    second.ready()
    until(lambda: second.status().hot_pack == "not needed")
    status = second.status()
    assert (status.slow_faults, status.bytes_demand, status.waited_seconds) == (0, 0, 0)
    assert (status.hot_unused_bytes, status.hot_missed_bytes) == (0, 0)


def test_no_profile_means_no_recording(site: Site) -> None:
    made = site.mount(profile=None)
    (made.target / "big1").read_bytes()
    assert made.status().recording == "off"
    made.unmount()
    assert list(site.store.list("profiles")) == []


def test_recording_ends_by_itself(site: Site) -> None:
    made = site.mount(record_seconds=0.3)
    (made.target / "big1").read_bytes()
    until(lambda: made.status().recording == "published")


def test_another_state_folder_cannot_take_the_cache(site: Site, tmp_path: Path) -> None:
    site.mount()
    with pytest.raises(UnavailableError, match="in use by process"):
        tree.mount(
            site.store.url,
            site.digest,
            tmp_path / "other",
            cache_dir=site.folder / "cache",
            state_dir=tmp_path / "state2",
        )
    assert not list((tmp_path / "state2" / "trees").glob("*/"))


def test_a_mount_is_found_by_its_target_id_and_digest(site: Site) -> None:
    made = site.mount()
    for what in (made.target, made.id, made.digest):
        assert tree.attach(what, site.state).target == made.target
    tree.attach(made.id, site.state).unmount()
    with pytest.raises(NotFoundError):
        tree.attach(made.target, site.state)


def test_an_unknown_tree_mounts_nothing(site: Site) -> None:
    site.digest = "0" * 64
    with pytest.raises(NotFoundError):
        site.mount()
    assert site.clean()


def test_a_failed_mount_is_undone(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise BootseerError("no")

    monkeypatch.setattr(mounts, "mount_erofs", refuse)
    with pytest.raises(BootseerError, match=r"^no$"):
        site.mount()
    assert site.clean()


def test_a_target_that_is_a_file_is_a_clear_error(site: Site) -> None:
    (site.folder / "mnt").write_text("in the way")
    with pytest.raises(BootseerError):
        site.mount()
    assert site.clean()
    assert (site.folder / "mnt").read_text() == "in the way"


def test_a_server_that_cannot_start_says_why(site: Site) -> None:
    with pytest.raises(UnavailableError, match="did not start"):
        tree.mount(
            site.store.url,
            site.digest,
            site.folder / "mnt",
            cache_dir=site.folder / "cache",
            state_dir=site.state,
            server=["/bin/false"],
        )
    assert site.clean()


def test_the_server_ends_with_its_fuse_mount(site: Site) -> None:
    made = site.mount()
    pid = made.status().pid
    mounts.unmount(made.target)
    mounts.unmount(site.state / "trees" / made.id / "fuse")
    until(lambda: not alive(pid))


def test_sigterm_ends_it_in_order(site: Site) -> None:
    made = site.mount()
    (made.target / "big1").read_bytes()
    status = made.status()
    mounts.unmount(made.target)
    os.kill(status.pid, signal.SIGTERM)
    until(lambda: not alive(status.pid))
    assert "trace" in site.profile
    site.await_pack()


def test_prefetch_warms_the_cache(site: Site) -> None:
    first = site.mount(cache="one")
    (first.target / "big1").read_bytes()
    with pytest.raises(UnavailableError, match="in use by process"):
        tree.prefetch(site.store.url, site.digest, cache_dir=site.folder / "one", profile=KEY)
    first.unmount()
    ready = tree.prefetch(site.store.url, site.digest, cache_dir=site.folder / "two", profile=KEY)
    assert ready > 0
    second = site.mount(cache="two")
    assert (second.target / "big1").read_bytes() == site.want("big1")
    assert (second.status().slow_faults, second.status().bytes_demand) == (0, 0)


def test_prefetch_without_a_profile_takes_all(site: Site) -> None:
    ready = tree.prefetch(site.store.url, site.digest, cache_dir=site.folder / "cache")
    made = site.mount()
    assert made.status().complete
    assert ready == made.status().blocks_total


def test_a_tree_without_any_data(tmp_path: Path) -> None:
    (tmp_path / "tree" / "sub").mkdir(parents=True)
    (tmp_path / "tree" / "link").symlink_to("sub")
    erofs.build(tmp_path / "tree", tmp_path / "meta", tmp_path / "data")
    store = FolderStore(tmp_path / "store")
    ref = tree.publish(store, tmp_path / "meta", tmp_path / "data")
    made = tree.mount(
        store.url, ref.digest, tmp_path / "mnt", cache_dir=tmp_path / "cache", state_dir=tmp_path / "state", profile=KEY
    )
    try:
        assert sorted(os.listdir(made.target)) == ["link", "sub"]
    finally:
        made.unmount()
    tree.extract(store, ref.digest, tmp_path / "plain")
    assert sorted(os.listdir(tmp_path / "plain")) == ["link", "sub"]
