"""Striped files in the node cache: what is kept, believed, evicted and shared; what a crash or a full disk leaves."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from bootseer.chunks import check, eviction, inventory
from bootseer.chunks.chunklist import ChunkList
from bootseer.chunks.eviction import Limits
from bootseer.chunks.inventory import Part
from bootseer.errors import DataError
from bootseer.stripefs import nodecache
from bootseer.stripefs.files.readahead import ReadAhead
from bootseer.stripefs.files.reader import ChunkFile
from bootseer.stripefs.nodecache import NodeCache, NodeFile
from bootseer.stripefs.store import StripeFS, open_fs
from support import forked
from support.forgery import forge
from support.waits import until

UNIT = 12288
"""A multiple of 4096 and no power of two."""
DATA = os.urandom(40 * UNIT + 11)
GOLDEN = Path(__file__).parents[1] / "golden" / "blocks"


@pytest.fixture
def fs(fs) -> StripeFS:
    with fs.create("f", striped=True, unit=UNIT, width=3) as out:
        out.write(DATA)
    return fs


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "cache"


class Reader:
    """A mount's way to the bytes of one file. ``fetched``: chunks that came from the store, by number."""

    def __init__(self, cache: NodeCache, file: ChunkFile, cached: NodeFile | None) -> None:
        self.cache, self.file, self.cached = cache, file, cached
        self.ahead = ReadAhead(memory=8 << 20)
        self.fetched: list[int] = []
        if cached is None:
            return
        real = cached.fill

        def fill(wanted: Mapping[int, memoryview]) -> Mapping[int, memoryview]:
            missing = real(wanted)
            self.fetched += missing
            return missing

        cached.fill = fill  # type: ignore[method-assign]
        file.attach(cached)

    def read(self, offset: int = 0, size: int = 0) -> bytes:
        size = size or self.file.size - offset
        found = self.ahead.read(self.file, offset, size)
        return os.pread(found[0], size, found[1]) if isinstance(found, tuple) else bytes(found)

    def kept(self) -> None:
        """Wait until what was read is in the cache."""
        until(lambda: self.cache._pending == 0, 20, "the write of what was read", step=0.01)
        self.cache.sync()

    @property
    def sound(self) -> list[int]:
        assert self.cached is not None
        return [chunk for chunk in range(self.file.geometry.chunks) if self.cached.fd_of(chunk, chunk + 1) is not None]


@contextlib.contextmanager
def reader(fs: StripeFS, folder: Path, name: str = "f", limits: Limits | None = None) -> Iterator[Reader]:
    cache = NodeCache(folder, limits)
    with fs.open(name) as file:
        made = Reader(cache, file, cache.open(file, f"store/{name}"))
        try:
            yield made
        finally:
            made.ahead.close()
            cache.close()


def warm(fs: StripeFS, folder: Path, name: str = "f") -> None:
    with reader(fs, folder, name) as one:
        one.ahead.prefetch(one.file, 0, one.file.geometry.chunks)


def part(folder: Path) -> Part:
    (found,) = inventory.parts(folder)
    return found


def data_of(folder: Path) -> Path:
    return folder / "blocks" / part(folder).map / "data"


def damage(folder: Path, chunk: int) -> None:
    with open(data_of(folder), "r+b") as file:
        file.seek(chunk * UNIT + 5)
        file.write(b"damage")


# -- what is kept ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["prefetched", "read"])
def test_a_later_mount_reads_what_an_earlier_one_fetched_from_the_disk(fs, folder, how):
    with reader(fs, folder) as one:
        if how == "read":
            for offset in range(0, len(DATA), 5000):
                assert one.read(offset, min(5000, len(DATA) - offset)) == DATA[offset : offset + 5000]
        else:
            one.ahead.prefetch(one.file, 0, one.file.geometry.chunks)
    with reader(fs, folder) as two:
        assert two.cached is not None
        assert two.cached.fd_of_all(60) is not None
        assert two.read() == DATA
        assert two.fetched == []
    assert part(folder).blocks_ready == part(folder).blocks_total == 41


def test_only_what_was_read_is_kept_and_only_once_fetched(fs, folder, monkeypatch):
    with reader(fs, folder) as one:
        monkeypatch.setattr(one.ahead, "_plan", lambda *args: None)
        one.read(20 * UNIT + 5, 10)
        one.kept()
        assert one.sound == [20]
        assert one.cached.fd_of_all(60) is None
        assert isinstance(one.ahead.read(one.file, 20 * UNIT, UNIT), tuple), "the kernel copies it from the file"
        assert one.fetched == [20]


def test_a_reader_does_not_wait_for_the_disk(fs, folder, monkeypatch, tmp_path):
    monkeypatch.setattr(nodecache, "_PENDING", 4 * UNIT)
    gate = threading.Event()
    real = NodeFile.store

    def slow(self: NodeFile, chunk: int, data: memoryview) -> bool:
        assert gate.wait(20)
        return real(self, chunk, data)

    monkeypatch.setattr(NodeFile, "store", slow)
    with reader(fs, folder) as one:
        assert one.read() == DATA
        waiting = one.cache._pending
        gate.set()
        assert waiting <= 4 * UNIT
    with reader(fs, folder) as two:
        assert two.read() == DATA
        assert len(two.fetched) == 41 - 4, "what came while the disk was busy is not kept"


def test_a_plain_file_is_not_kept(fs, folder):
    (Path(fs.url) / "plain").write_bytes(DATA)
    with reader(fs, folder, "plain") as one:
        assert one.cached is None
        assert one.read() == DATA
    assert inventory.parts(folder) == []


def test_files_that_nobody_uses_are_closed(fs, folder):
    with reader(fs, folder) as one:
        one.cache.sync()
        again = one.cache.open(one.file)
        assert again is one.cached
        again.close()
        one.cached.close()
        assert part(folder).in_use
        one.cache.sync()
        assert not part(folder).in_use
        assert one.cache.find(one.file.identity) is None
        assert one.read(7, 100) == DATA[7:107], "what comes late is read past the cache"


# -- what is believed ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ask", ["whole", "read"])
def test_damage_on_the_nodes_disk_is_fetched_again(fs, folder, ask, caplog):
    warm(fs, folder)
    damage(folder, 5)
    with reader(fs, folder) as one:
        if ask == "whole":
            assert one.cached.fd_of_all(60) is None, "the kernel would read it"
        assert one.read() == DATA
        assert one.fetched == [5]
        one.kept()
        assert one.cached.fd_of_all(60) is not None
    assert caplog.text.count("chunk 5 in the node cache is damaged") == 1
    with reader(fs, folder) as two:
        assert two.read() == DATA
        assert two.fetched == []


@pytest.mark.parametrize("since", ["nothing", "start of the machine", "check", "kill"])
def test_what_was_compared_since_the_machine_started_is_not_compared_again(fs, folder, since, monkeypatch):
    """A disk that lies changes no time of the file: `check` reads it past the page cache, and finds that."""
    if since == "kill":
        with reader(fs, folder) as one:
            one.ahead.prefetch(one.file, 0, one.file.geometry.chunks)
            one.cache.sync()
            assert data_of(folder).with_name("compared").exists(), "at once: it may be killed now"
    warm(fs, folder)
    if since == "check":
        damage(folder, 9)
        monkeypatch.setattr(NodeFile, "_state", lambda file: b"the same")
        data_of(folder).with_name("compared").write_text("the same")
        assert check.check(folder, part(folder)).bad == [9]
    if since == "start of the machine":
        monkeypatch.setattr(nodecache, "boot_id", lambda: "another")
    compared: list[int] = []
    matches = ChunkList.matches
    monkeypatch.setattr(ChunkList, "matches", lambda *args: compared.append(args[1]) or matches(*args))  # type: ignore[func-returns-value]
    with reader(fs, folder) as two, reader(fs, folder) as beside:
        whole = [one.cached and one.cached.fd_of_all(60) is not None for one in (two, beside)]
        assert whole == [since != "check"] * 2
        assert two.read() == beside.read() == DATA
    beside_a_hole = {40}  # behind it the data file ends
    assert set(compared) <= beside_a_hole if since in ("nothing", "kill") else set(compared) == set(range(41))


def test_what_somebody_changes_while_it_is_compared_is_found_later(fs, folder):
    warm(fs, folder)
    data_of(folder).with_name("compared").unlink()
    with reader(fs, folder) as one:
        assert one.cached.fd_of_all(60) is not None
        time.sleep(0.02)  # longer than a tick of a file's times
        damage(folder, 9)
    with reader(fs, folder) as two:
        assert two.read() == DATA
        assert two.fetched == [9]


def test_damage_in_a_cache_that_can_only_be_read_is_reported(fs, folder, monkeypatch):
    warm(fs, folder)
    damage(folder, 9)

    def unlink(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "unlink", unlink)
    assert check.check(folder, part(folder)).bad == [9]


def test_a_note_of_what_was_compared_may_be_damaged_itself(fs, folder, caplog):
    warm(fs, folder)
    data_of(folder).with_name("compared").write_bytes(b"\xff\xfe")
    with reader(fs, folder) as two:
        assert two.read() == DATA
    assert "is damaged" not in caplog.text


def test_a_page_that_is_lost_before_the_disk_confirmed_it_is_never_read(fs, folder):
    with reader(fs, folder) as one:
        one.ahead.prefetch(one.file, 0, 4)
        os.pwrite(one.cached.fd, bytes(UNIT), 2 * UNIT)
        assert one.sound == []
        assert one.read(0, 4 * UNIT) == DATA[: 4 * UNIT]


def test_after_a_failed_sync_only_what_was_synced_before_is_believed(fs, folder, monkeypatch, caplog):
    with reader(fs, folder) as one:
        one.ahead.prefetch(one.file, 0, 4)
        one.cache.sync()
        one.ahead.prefetch(one.file, 0, 10)
        monkeypatch.setenv("BOOTSEER_FAULTS", "chunks.fdatasync=eio")
        one.cache.sync()
        monkeypatch.delenv("BOOTSEER_FAULTS")
        for chunk in range(4, 10):  # as a kernel does that forgets what it could not write
            os.pwrite(one.cached.fd, bytes(UNIT), chunk * UNIT)
        one.cache.sync()
        assert one.sound == [0, 1, 2, 3]
        assert one.read() == DATA
        assert not one.cached.store(5, memoryview(DATA)[5 * UNIT : 6 * UNIT])
    assert caplog.text.count("lost data") == 1
    with reader(fs, folder) as two:
        assert two.read() == DATA
        assert len(two.fetched) == 41, "the bitmap is gone: nothing is believed"


KILLS = [
    "stripefs.cache.chunks.before-rename",
    "stripefs.cache.origin.write",
    "chunks.write@7",
    "chunks.fdatasync",
    "chunks.bitmap",
    "chunks.bitmap.fsync",
    "chunks.bitmap.before-rename",
]


@pytest.mark.parametrize("point", KILLS)
def test_a_writer_that_is_killed_leaves_right_bytes(fs, folder, point):
    name, _, visit = point.partition("@")
    fault = f"{name}=kill" + (f"@{visit}" if visit else "")
    code = (
        "import sys; from pathlib import Path; from bootseer.stripefs import open_fs\n"
        "from bootseer.stripefs.nodecache import NodeCache\n"
        "cache = NodeCache(Path(sys.argv[2])); file = open_fs(sys.argv[1]).open('f'); cached = cache.open(file)\n"
        "for chunk in range(41):\n"
        "    cached.store(chunk, memoryview(file.read(chunk * file.unit, file.geometry.chunk_length(chunk))))\n"
        "cache.sync()\n"
    )
    assert forked.run("-c", code, fs.url, folder, env={**os.environ, "BOOTSEER_FAULTS": fault}).returncode == -9
    with reader(fs, folder) as one:
        assert one.read() == DATA
        one.kept()
        assert one.cached.fd_of_all(60) is not None
    assert check.check(folder, part(folder)).checked == 41


# -- limits, eviction, checks ----------------------------------------------------------------------------------------


def test_the_inventory_the_check_and_the_repair_know_it(fs, folder):
    warm(fs, folder)
    found = part(folder)
    assert (found.file, found.trees, found.blocks_ready) == ("store/f", [], 41)
    assert found.disk_bytes >= len(DATA)
    clean = check.check(folder, found)
    assert (clean.checked, clean.bad, clean.trouble) == (41, [], "")
    damage(folder, 9)
    assert check.check(folder, found).bad == [9]
    mended = check.check(folder, found, repair=True)
    assert (mended.bad, mended.dropped, mended.damaged) == ([9], 1, False)
    with reader(fs, folder) as one:
        beside = check.check(folder, part(folder))
        assert (beside.in_use, beside.checked) == (True, 40)
        assert one.read() == DATA
        assert one.fetched == [9]


def test_a_damaged_chunk_list_is_written_anew(fs, folder):
    warm(fs, folder)
    path = folder / "blocks" / part(folder).map / "chunks"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert "no intact" in check.check(folder, part(folder)).trouble
    with reader(fs, folder) as one:
        assert one.read() == DATA
        assert one.fetched == []
    assert check.check(folder, part(folder)).checked == 41


def test_what_is_used_is_not_evicted_and_what_is_not_goes_longest_unused_first(fs, folder):
    for name in "gh":
        with fs.create(name, striped=True, unit=UNIT, width=2) as out:
            out.write(DATA)
        warm(fs, folder, name)
    for found in inventory.parts(folder):
        when = 1000 if found.file == "store/h" else 2000
        os.utime(folder / "blocks" / found.map / "lock", (when, when))
    with reader(fs, folder, "g") as one:
        done = eviction.collect(folder, 1 << 40)
        assert [(gone.file, gone.whole) for gone in done.gone] == [("store/h", True)]
        assert one.read() == DATA
        assert one.fetched == []
    warm(fs, folder, "h")
    for found in inventory.parts(folder):
        when = 1000 if found.file == "store/h" else 2000
        os.utime(folder / "blocks" / found.map / "lock", (when, when))
    dry = eviction.collect(folder, 1 << 40, dry_run=True)
    assert [(gone.file, gone.bytes > 0) for gone in dry.gone] == [("store/h", True), ("store/g", True)]
    assert [gone.file for gone in eviction.collect(folder, 1).gone] == ["store/h"]
    assert [found.file for found in inventory.parts(folder)] == ["store/g"]


def test_the_limits_hold_and_the_rest_is_read_past_the_cache(fs, folder, caplog):
    with fs.create("old", striped=True, unit=UNIT) as out:
        out.write(DATA)
    warm(fs, folder, "old")
    with reader(fs, folder, limits=Limits(10 * UNIT, 0)) as one:
        for _ in range(2):
            assert one.read() == DATA
            one.kept()
        assert inventory.used(folder) <= 10 * UNIT
        assert 0 < len(one.sound) < 10
    assert [found.file for found in inventory.parts(folder)] == ["store/f"], "the older one went first"
    assert caplog.text.count("not kept in the node cache any more") == 1


def test_a_full_disk_means_no_cache_and_one_line(fs, folder, monkeypatch, caplog):
    monkeypatch.setenv("BOOTSEER_FAULTS", "chunks.write=enospc")
    with reader(fs, folder) as one:
        assert one.read() == DATA
        one.kept()
        assert one.read() == DATA
        assert one.sound == []
    assert caplog.text.count("not kept in the node cache any more: No space left") == 1


def test_a_disk_that_takes_no_folder_means_no_cache_and_one_line(fs, folder, caplog):
    folder.mkdir()
    (folder / "blocks").write_bytes(b"")
    with reader(fs, folder) as one:
        assert one.cached is None
        assert one.read() == DATA
    assert caplog.text.count("is not kept in the node cache") == 1


# -- two mounts ------------------------------------------------------------------------------------------------------


def test_two_mounts_share_what_the_first_has_synced(fs, folder, caplog):
    caplog.set_level(logging.INFO)
    with reader(fs, folder) as one, reader(fs, folder) as two:
        assert one.read(0, 10 * UNIT) == DATA[: 10 * UNIT]
        one.kept()
        two.cache.sync()
        assert two.read() == DATA
        assert not set(two.fetched) & set(one.sound)
        assert one.read() == DATA
        one.kept()
        two.cache.sync()
        assert two.cached.fd_of_all(60) is not None
        assert "is in use by process" in caplog.text
        one.cached.close()
        one.cache.sync()  # closed there
        assert eviction.collect(folder, 1 << 40).gone == [], "the other still reads it"
        assert two.read() == DATA
    assert part(folder).blocks_ready == 41


def test_damage_that_a_second_mount_meets_is_fetched_past_the_cache(fs, folder):
    warm(fs, folder)
    damage(folder, 3)
    with reader(fs, folder) as one, reader(fs, folder) as two:
        assert two.read() == DATA
        assert two.fetched == [3]
        assert one.read() == DATA
        assert one.fetched == [3]


# -- what others make ------------------------------------------------------------------------------------------------


def forged_store(fs: StripeFS, tmp_path: Path) -> StripeFS:
    """Of somebody who may read ``fs``: the same pointers and footers, other bytes."""
    forge(fs, "f", tmp_path / "other" / "f")
    return open_fs(str(tmp_path / "other"))


def test_a_forged_file_of_another_store_gives_nobody_its_bytes(fs, folder, tmp_path):
    other = forged_store(fs, tmp_path)
    warm(other, folder)
    with reader(other, folder) as one:
        assert one.read().startswith(b"FORGED"), "checksums do not tell it"
    with reader(fs, folder) as one:
        assert one.read() == DATA
        one.kept()
    with reader(fs, folder) as one:
        assert one.read() == DATA
        assert one.fetched == [], "its own bytes are kept as ever"


def test_a_forged_file_of_another_folder_is_not_taken_for_the_original_in_one_process(fs, folder):
    """Neither in memory nor in the node cache nor while it is being fetched."""
    forge(fs, "f", Path(fs.url, "other", "f"))
    with reader(fs, folder, "other/f") as one, fs.open("f") as file:
        assert one.read().startswith(b"FORGED")
        one.kept()
        assert bytes(memoryview(one.ahead.read(file, 0, len(DATA)))) == DATA
        file.attach(one.cache.open(file))
        assert file.read(0, len(DATA)) == DATA


@pytest.mark.parametrize("how", ["replaced", pytest.param("given", marks=pytest.mark.root)])
def test_a_forged_file_that_the_original_takes_the_place_of_gives_it_nothing(fs, folder, tmp_path, how):
    other = forged_store(fs, tmp_path)
    place = Path(other.url)
    before = (place / "f").stat()
    warm(other, folder)
    with reader(other, folder) as one:
        assert one.read().startswith(b"FORGED")
    shutil.copytree(Path(fs.url, ".bsx"), place / ".bsx", dirs_exist_ok=True)
    if how == "replaced":
        shutil.copy2(Path(fs.url, "f"), place / "f.new")
        (place / "f.new").replace(place / "f")
    else:  # inode numbers come back, and times can be chosen: here the pointer of the owner after has both
        os.chown(place / "f", 65534, -1)
        now = (place / "f").stat()
        assert (now.st_ino, now.st_mtime_ns, now.st_size) == (before.st_ino, before.st_mtime_ns, before.st_size)
    with reader(other, folder) as one:
        assert one.read() == DATA


def test_the_same_file_by_the_url_of_a_folder_above_is_kept_once(fs, folder):
    warm(fs, folder)
    above = open_fs(str(Path(fs.url).parent))
    with reader(above, folder, f"{Path(fs.url).name}/f") as one:
        assert one.read() == DATA
        assert one.fetched == []


# -- the chunk list --------------------------------------------------------------------------------------------------


def test_the_golden_chunk_list():
    raw = (GOLDEN / "chunks-v2.bin").read_bytes()
    found = ChunkList.decode(raw)
    assert (found.name, found.size, found.block_size) == (bytes(range(32)), 3 * 12288 + 7, 12288)
    assert list(found.crcs) == [1, 2, 0xFFFFFFFE, 4]
    assert found.length_of(3) == 7
    assert found.encode() == raw


def test_a_newer_chunk_list_is_refused():
    raw = bytearray((GOLDEN / "chunks-v2.bin").read_bytes())
    raw[8] = 3
    with pytest.raises(DataError, match="version 3 is not known, the newest is 2"):
        ChunkList.decode(bytes(raw))
