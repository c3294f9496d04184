"""What recorded starts say, on an image small enough to count by hand."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import msgspec
import pytest

from bootseer import erofs
from bootseer.blocks import tree
from bootseer.blocks.formats.trace import UNIT, Process, Touch, Trace
from bootseer.blocks.offline import OpenTree, look
from bootseer.blocks.profiles import explain, library
from bootseer.blocks.profiles.compare import Side, compare
from bootseer.blocks.profiles.explain import explain as judge
from bootseer.blocks.profiles.library import ProfileKey
from bootseer.errors import NotFoundError
from bootseer.objects.folder import FolderStore

BLOCK = 64 << 10


class Site:
    """Files ``bin/a``, ``bin/b`` and ``lib/c`` of two blocks each, and ``small`` of five bytes."""

    def __init__(self, folder: Path, seed: int = 0) -> None:
        self.folder = folder
        source = folder / "tree"
        (source / "bin").mkdir(parents=True)
        (source / "lib").mkdir()
        for number, name in enumerate(("bin/a", "bin/b", "lib/c")):
            content = os.urandom(2 * BLOCK) if seed and name == "lib/c" else bytes([65 + number]) * 2 * BLOCK
            (source / name).write_bytes(content)
        (source / "small").write_bytes(b"small")
        erofs.build(source, folder / "meta", folder / "data")
        self.store = FolderStore(folder / "store")
        self.digest = tree.publish(self.store, folder / "meta", folder / "data", block_size=BLOCK).digest
        self.open: OpenTree = look(self.store, self.digest, folder / "cache")
        self.index = self.open.reader.owner_index()
        self.map = self.open.map

    def touch(self, ms: int, pid: int, path: bytes, offset: int = 0, units: int = 1) -> Touch:
        (extent, *_) = self.open.reader.extents(self.open.reader.stat(path))
        return Touch(ms, pid, (extent.data_offset + offset) // UNIT, units)

    def trace(self, *touches: Touch, began: int = 0, processes: tuple[Process, ...] = ()) -> Trace:
        return Trace(self.digest, self.map.size, began, True, touches, processes)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return Site(tmp_path_factory.mktemp("insight"))


def test_usage_by_file_folder_process_and_time(site: Site) -> None:
    trace = site.trace(
        site.touch(0, 7, b"bin/a", 0, 2),
        site.touch(500, 8, b"lib/c", 0, 16),
        site.touch(1000, 7, b"bin/a", BLOCK, 1),
        site.touch(2000, 9, b"small"),
        processes=(Process(7, "python", 3, "/job"), Process(9, "sh")),
    )
    found = explain.usage(trace, site.index)
    assert [(one.path, one.size, one.touched, one.seconds) for one in found.files] == [
        ("/lib/c", 2 * BLOCK, 16 * UNIT, 0.5),
        ("/bin/a", 2 * BLOCK, 3 * UNIT, 0.0),
        ("/small", 5, 5, 2.0),
    ]
    folders = {one.path: (one.files, one.touched) for one in found.folders}
    assert folders == {"/": (3, 19 * UNIT + 5), "/lib": (1, 16 * UNIT), "/bin": (1, 3 * UNIT)}
    assert found.folders[0].path == "/"
    processes = {one.pid: (one.comm, one.rank, one.cgroup, one.touched, one.first, one.last) for one in found.processes}
    assert processes == {
        8: ("", None, "", 16 * UNIT, 0.5, 0.5),
        7: ("python", 3, "/job", 3 * UNIT, 0.0, 1.0),
        9: ("sh", None, "", min(UNIT, site.map.size % UNIT or UNIT), 2.0, 2.0),
    }
    assert found.touched == sum(one.touched for one in found.processes)
    assert found.touched - found.unowned == sum(one.touched for one in found.files)
    assert found.timeline[-1].touched == found.touched
    assert len(found.timeline) <= 60
    assert [point.touched for point in found.timeline] == sorted(point.touched for point in found.timeline)


def test_usage_of_nothing(site: Site) -> None:
    found = explain.usage(site.trace(), site.index)
    assert (found.files, found.folders, found.processes, found.timeline) == ([], [], [], [])


def test_starts_are_found_by_job_and_by_digest(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    ones = site.trace(site.touch(0, 1, b"bin/a"), began=5)
    other = site.trace(site.touch(0, 1, b"lib/c"), began=3)
    for job, trace in (("one", ones), ("two words", other)):
        assert library.publish(site.store, ProfileKey(job), trace, site.map) == "published"
    site.store.put(f"profiles/{site.digest}/one/{'0' * 64}.trace", b"rubbish")
    with caplog.at_level(logging.WARNING):
        starts = explain.recorded(site.store, site.digest, site.map.size)
    assert "ignoring trace" in caplog.text
    assert [one.trace.began for one in starts] == [3, 5]
    assert [one.trace.began for one in explain.choose(starts, "one")] == [5]
    assert [one.trace.began for one in explain.choose(starts, "two words")] == [3]
    assert explain.choose(starts, starts[0].digest[:8]) == starts[:1]
    assert explain.choose(starts, "") == starts
    with pytest.raises(NotFoundError, match="recorded are"):
        explain.choose(starts, "three")


def test_two_runs_of_one_image(site: Site) -> None:
    a = site.trace(site.touch(0, 1, b"bin/a", 0, 4), site.touch(1, 1, b"bin/b"), site.touch(2, 1, b"lib/c"))
    b = site.trace(site.touch(0, 1, b"lib/c"), site.touch(1, 1, b"bin/b"), site.touch(2, 1, b"bin/a", UNIT, 5))
    found = compare(Side([a], site.index, site.map), Side([b], site.index, site.map))
    assert found.same_tree
    assert (found.only_a, found.only_b, found.both) == (UNIT, 2 * UNIT, 5 * UNIT)
    assert [(one.path, one.only_a, one.only_b, one.both) for one in found.files] == [
        ("/bin/a", UNIT, 2 * UNIT, 3 * UNIT),
        ("/bin/b", 0, 0, UNIT),
        ("/lib/c", 0, 0, UNIT),
    ]
    assert found.order == -1
    alike = compare(Side([a], site.index, site.map), Side([a], site.index, site.map))
    assert (alike.only_a, alike.only_b, alike.order) == (0, 0, 1)


def test_orders_that_are_partly_alike(site: Site) -> None:
    a = site.trace(*(site.touch(ms, 1, path) for ms, path in enumerate((b"bin/a", b"bin/b", b"lib/c"))))
    b = site.trace(*(site.touch(ms, 1, path) for ms, path in enumerate((b"lib/c", b"bin/a", b"bin/b"))))
    assert compare(Side([a], site.index, site.map), Side([b], site.index, site.map)).order == -0.5
    one = site.trace(site.touch(0, 1, b"bin/a"))
    assert compare(Side([a], site.index, site.map), Side([one], site.index, site.map)).order is None


def test_two_images(site: Site, tmp_path: Path) -> None:
    other = Site(tmp_path, seed=1)
    a = site.trace(site.touch(0, 1, b"bin/a", 0, 4), site.touch(1, 1, b"lib/c"))
    b = other.trace(other.touch(0, 1, b"bin/a", 0, 6), other.touch(1, 1, b"lib/c"))
    found = compare(Side([a], site.index, site.map), Side([b], other.index, other.map))
    assert not found.same_tree
    assert (found.only_a, found.only_b, found.both) == (0, 2 * UNIT, 5 * UNIT)
    # The block of bin/a is the same in both, that of lib/c is not.
    assert found.shared_blocks == BLOCK


def test_waste_and_misses(site: Site) -> None:
    before = site.trace(site.touch(0, 1, b"bin/a", 0, 2), site.touch(1, 1, b"bin/b"))
    run = site.trace(site.touch(0, 1, b"bin/a", UNIT, 1), site.touch(1, 1, b"lib/c", 0, 3), site.touch(2, 1, b"small"))
    found = judge(run, [before], site.map, site.index)
    assert found.runs == 1
    assert (found.hot, found.waste, found.waste_share) == (2 * BLOCK, BLOCK, 0.5)
    assert [(one.path, one.bytes, one.share) for one in found.wasted_files] == [("/bin/b", BLOCK, 1.0)]
    assert [(one.path, one.bytes) for one in found.missed_files] == [("/lib/c", 3 * UNIT), ("/small", 5)]
    assert found.misses == BLOCK + site.map.length_of(site.map.count - 1)
    assert 0 < found.waste_stored < BLOCK
    nothing = judge(run, [], site.map, site.index)
    assert (nothing.hot, nothing.waste, nothing.misses_share) == (0, 0, 1.0)


def test_who_was_left_out_of_a_recording_is_named(site: Site) -> None:
    run = msgspec.structs.replace(
        site.trace(site.touch(0, 1, b"bin/b")), processes=(Process(1, "python"), Process(2, "cat"))
    )
    assert judge(run, [], site.map, site.index).left_out == [Process(2, "cat")]
