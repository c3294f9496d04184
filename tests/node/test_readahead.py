"""Readahead: what starts of the job read is in the page cache of the mount before the job asks, and nothing else is
opened, noted or kept in use by it."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer import erofs
from bootseer.blocks.formats import pagelist
from bootseer.blocks.formats.pagelist import PageList, PageRange
from bootseer.blocks.formats.trace import UNIT
from bootseer.blocks.tree import ProfileKey, TreeMount
from support.treesite import TreeSite, publish_tree
from support.waits import until

pytestmark = pytest.mark.root

FILES = ("big", "d/one", "d/two")


class Site(TreeSite):
    def start(self, cache: str = "empty", job: str = "job", **set: object) -> TreeMount:
        return self.mount(cache=cache, profile=ProfileKey(job), demand_deadline=20.0, **set)  # type: ignore[arg-type]

    def keys(self, ending: str) -> list[str]:
        return [info.key for info in self.store.list("profiles") if info.key.endswith(ending)]

    def pages(self) -> PageList:
        (key,) = self.keys(".pages")
        assert key.endswith(".fuse.pages")
        return PageList.decode(
            self.store.get(key, most=1 << 30), self.digest, (self.source.parent / "data").stat().st_size
        )

    def replace(self, pages: PageList) -> None:
        (key,) = self.keys(".pages")
        self.store.put(key, pages.encode(), overwrite=True)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A published tree, and one recorded start that read `FILES`."""
    folder = tmp_path_factory.mktemp("base")
    source = folder / "tree"
    (source / "d").mkdir(parents=True)
    (source / "big").write_bytes(os.urandom(3 << 20))
    for name in ("one", "two", "other"):
        (source / "d" / name).write_bytes(os.urandom(20_000))
    (source / "cold").write_bytes(os.urandom(1 << 20))
    os.mkfifo(source / "d" / "pipe")
    (source / "link").symlink_to("d")
    publish_tree(folder)
    site = Site(folder, folder / "recorded")
    made = site.start("cache")
    for name in FILES:
        (made.target / name).read_bytes()
    made.ready()
    until(lambda: made.status().hot_pack in ("published", "not needed"), 20, "the hot pack")
    made.unmount()
    shutil.rmtree(folder / "store")
    (folder / "recorded/store").rename(folder / "store")
    return folder


@pytest.fixture
def site(base: Path, tmp_path: Path) -> Iterator[Site]:
    site = Site(base, tmp_path)
    yield site
    site.close()


def settled(made: TreeMount, size: int) -> int:
    """How many requests of the kernel there were when ``size`` bytes have been read ahead, and all have arrived."""
    until(lambda: made.status().read_ahead_bytes == size, 20, "the readahead")
    reads = -1
    while reads != (reads := made.status().reads):
        time.sleep(0.3)
    return reads


@pytest.mark.file_mounts
def test_the_second_start_finds_everything_read(site: Site) -> None:
    assert len(site.keys(".trace")) == 1
    assert {one.path.decode() for one in site.pages().ranges} == set(FILES)
    made = site.start()
    before = settled(made, site.pages().size)
    for name in FILES:
        assert (made.target / name).read_bytes() == site.want(name)
    status = made.status()
    # not all: Linux may take any of the pages back, and with DAMON's reclaim it takes a few within a second
    assert status.reads - before < len(site.pages().ranges) / 2, "the job asked for pages that were there"
    assert (made.target / "d/other").read_bytes() == site.want("d/other")
    assert made.status().reads > status.reads
    made.ready()
    until(lambda: made.status().recording not in ("recording", "publishing"), 20, "the end of the recording")
    assert made.status().recording == "read ahead"
    assert made.status().hot_unused_bytes == 0
    made.unmount()
    assert len(site.keys(".trace")) == 1


def test_without_the_setting_nothing_is_read_ahead(site: Site) -> None:
    made = site.start(readahead=False)
    until(lambda: 0 < made.status().hot_total == made.status().hot_ready, 20, "the hot blocks")
    before = made.status().reads
    (made.target / "big").read_bytes()
    assert made.status().reads > before
    assert made.status().read_ahead_bytes == 0


def decisions(site: Site) -> int:
    """Whether starts were read ahead of, or recorded instead: how many so far. The log is that of all mounts."""
    return sum(site.log.count(text) for text in ("read ahead in", "recorded in full"))


def test_of_a_day_old_list_some_starts_are_recorded_in_full_and_renew_it(site: Site) -> None:
    pages = site.pages()
    old = pages.created - int(pagelist.FRESH * 1e9)
    site.replace(PageList(pages.tree, old, pages.ranges))
    ahead = []
    for number in range(30):
        made = site.start(f"empty{number}")
        until(lambda number=number: decisions(site) > number, 20, "a decision")
        for name in FILES:
            (made.target / name).read_bytes()
        made.ready()
        ahead.append(made.status().read_ahead_bytes > 0)
        until(lambda made=made: made.status().recording not in ("recording", "publishing"), 20, "the end of it")
        if not ahead[-1]:
            until(lambda made=made: made.status().hot_pack in ("published", "not needed"), 20, "the hot pack")
            made.unmount()
            break
        made.unmount()
    assert not ahead[-1]
    assert site.pages().fresh


@pytest.mark.parametrize(("extra", "much"), [("d/other", False), ("cold", True)])
def test_the_start_after_one_that_missed_much_is_recorded_in_full(site: Site, extra: str, much: bool) -> None:
    """A job whose command changes would else miss the same for a day."""

    def start(cache: str) -> tuple[str, bool]:
        made = site.start(cache)
        until(lambda: made.status().hot_ready and (made.status().read_ahead_bytes or not site.keys(".pages")), 20, "it")
        for name in (*FILES, extra):
            assert (made.target / name).read_bytes() == site.want(name)
        made.ready()
        until(lambda: made.status().recording not in ("recording", "publishing"), 20, "the end of the recording")
        said, ahead = made.status().recording, made.status().read_ahead_bytes > 0
        if not ahead:
            until(lambda: made.status().hot_pack in ("published", "not needed"), 20, "the hot pack")
        made.unmount()
        return said, ahead

    assert start("second") == ("read ahead", True)
    assert start("third") == (("published", False) if much else ("read ahead", True))
    assert start("fourth") == ("read ahead", True)
    assert ({one.path.decode() for one in site.pages().ranges} == {*FILES, extra}) is much


def test_another_job_goes_without_and_is_recorded(site: Site) -> None:
    """It takes the first one's hot pack; but a start that was read ahead of would leave it a profile of leftovers."""
    made = site.start(job="another")
    until(lambda: 0 < made.status().hot_total == made.status().hot_ready, 20, "the hot blocks")
    for name in (*FILES, "cold"):
        (made.target / name).read_bytes()
    made.ready()
    until(lambda: made.status().hot_pack in ("published", "not needed"), 20, "the hot pack")
    assert made.status().read_ahead_bytes == 0
    assert [key for key in site.keys(".trace") if "/another/" in key]


def test_a_list_that_lies_opens_no_pipe_and_follows_no_link(site: Site) -> None:
    """Opening a pipe or a device is no reading; and where it says that blocks lie elsewhere, none is fetched for it."""
    lies = [
        PageRange(b"d/pipe", 0, 0, UNIT),
        PageRange(b"link/one", 0, 0, UNIT),
        PageRange(b"gone/one", 0, 0, UNIT),
        PageRange(b"d", 0, 0, UNIT),
        PageRange(b"big", 1 << 30, 0, UNIT),
        PageRange(b"cold", 0, 0, 16 * UNIT),
    ]
    pages = site.pages()
    site.replace(PageList(pages.tree, pages.created, [*lies, *pages.ranges]))
    made = site.start()
    until(lambda: made.status().read_ahead_bytes == pages.size + 17 * UNIT, 20, "the readahead")
    assert made.status().bytes_demand == 0
    for name in ("big", "cold"):
        assert (made.target / name).read_bytes() == site.want(name)


@pytest.mark.file_mounts
def test_what_is_read_ahead_late_is_not_the_jobs_either(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy FUSE server sees a request after the readahead has passed its last range."""
    monkeypatch.setenv("BOOTSEER_FAULTS", "blocks.readahead.open=sleep:0.5")  # the server is stopped before
    pages = site.pages()
    site.replace(PageList(pages.tree, pages.created, [*pages.ranges, PageRange(b"cold", 0, 0, 16 * UNIT)]))
    made = site.start()
    server = made.status().server_pid
    os.kill(server, signal.SIGSTOP)
    try:
        until(lambda: "bytes read ahead in" in site.log, 20, "the end of the readahead")
    finally:
        os.kill(server, signal.SIGCONT)
    settled(made, pages.size + 16 * UNIT)
    assert made.status().bytes_demand == 0


@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_a_damaged_list_is_survived(site: Site, damage: str) -> None:
    (key,) = site.keys(".pages")
    raw = bytearray(site.store.get(key, most=1 << 30))
    raw[len(raw) // 2] ^= 1
    if damage == "gone":
        site.store.delete(key)
    else:
        site.store.put(key, bytes(raw) if damage == "flip" else bytes(raw[:20]), overwrite=True)
    made = site.start()
    assert (made.target / "big").read_bytes() == site.want("big")
    assert made.status().read_ahead_bytes == 0
    if damage != "gone":
        until(lambda: "no readahead" in site.log, 10, "the line in the log")


def test_an_unmount_in_the_middle_does_not_wait(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("BOOTSEER_FAULTS", "blocks.readahead.open=sleep:0.3")
    made = site.start()
    until(lambda: made.status().read_ahead_bytes > 0, 20, "the readahead")
    assert made.status().read_ahead_bytes < site.pages().size
    began = time.monotonic()
    made.unmount()
    assert time.monotonic() - began < 4.0
    assert "is in use" not in caplog.text


@pytest.mark.file_mounts
def test_blocks_that_do_not_come_are_left_to_the_job(site: Site) -> None:
    """The list names a file that no hot block is of: nobody fetches for the readahead."""
    reader = erofs.Reader((site.source.parent / "meta").read_bytes())
    at = next(iter(reader.extents(reader.stat(b"cold")))).data_offset
    pages = site.pages()
    site.replace(PageList(pages.tree, pages.created, [*pages.ranges, PageRange(b"cold", 0, at, UNIT)]))
    made = site.start()
    until(lambda: made.status().read_ahead_bytes == pages.size, 20, "the readahead")
    time.sleep(0.2)
    assert (made.status().read_ahead_bytes, made.status().direct_misses) == (pages.size, 0)
