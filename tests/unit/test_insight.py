"""What recorded starts touched, on an image small enough to count by hand."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from bootseer import erofs
from bootseer.blocks import tree
from bootseer.blocks.formats.trace import UNIT, Touch, Trace
from bootseer.blocks.profiles import library, usage
from bootseer.blocks.profiles.library import ProfileKey
from bootseer.blocks.profiles.usage import Side, compare
from bootseer.blocks.without_mount import OpenTree, look
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

    def trace(self, *touches: Touch, began: int = 0) -> Trace:
        return Trace(self.digest, self.map.size, began, True, touches)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return Site(tmp_path_factory.mktemp("insight"))


def test_usage_by_file_and_folder(site: Site) -> None:
    trace = site.trace(
        site.touch(0, 7, b"bin/a", 0, 2),
        site.touch(500, 8, b"lib/c", 0, 16),
        site.touch(1000, 7, b"bin/a", BLOCK, 1),
        site.touch(2000, 9, b"small"),
    )
    found = usage.usage(trace, site.index)
    assert [(one.path, one.size, one.touched, one.seconds) for one in found.files] == [
        ("/lib/c", 2 * BLOCK, 16 * UNIT, 0.5),
        ("/bin/a", 2 * BLOCK, 3 * UNIT, 0.0),
        ("/small", 5, 5, 2.0),
    ]
    folders = {one.path: (one.files, one.touched) for one in found.folders}
    assert folders == {"/": (3, 19 * UNIT + 5), "/lib": (1, 16 * UNIT), "/bin": (1, 3 * UNIT)}
    assert found.folders[0].path == "/"
    assert found.touched == 19 * UNIT + min(UNIT, site.map.size % UNIT or UNIT)
    assert found.touched - found.unowned == sum(one.touched for one in found.files)


def test_usage_of_nothing(site: Site) -> None:
    found = usage.usage(site.trace(), site.index)
    assert (found.files, found.folders, found.touched) == ([], [], 0)


def test_starts_are_found_by_job_and_by_digest(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    ones = site.trace(site.touch(0, 1, b"bin/a"), began=5)
    other = site.trace(site.touch(0, 1, b"lib/c"), began=3)
    for job, trace in (("one", ones), ("two words", other)):
        assert library.publish(site.store, ProfileKey(job), trace, site.map) == "published"
    site.store.put(f"profiles/{site.digest}/one/{'0' * 64}.trace", b"rubbish")
    with caplog.at_level(logging.WARNING):
        starts = usage.recorded(site.store, site.digest, site.map.size)
    assert "ignoring trace" in caplog.text
    assert [one.trace.began for one in starts] == [3, 5]
    assert [one.trace.began for one in usage.choose(starts, "one")] == [5]
    assert [one.trace.began for one in usage.choose(starts, "two words")] == [3]
    assert usage.choose(starts, starts[0].digest[:8]) == starts[:1]
    assert usage.choose(starts, "") == starts
    with pytest.raises(NotFoundError, match="recorded are"):
        usage.choose(starts, "three")


def test_two_runs_of_one_image(site: Site) -> None:
    a = site.trace(site.touch(0, 1, b"bin/a", 0, 4), site.touch(1, 1, b"bin/b"), site.touch(2, 1, b"lib/c"))
    b = site.trace(site.touch(0, 1, b"lib/c"), site.touch(1, 1, b"bin/b"), site.touch(2, 1, b"bin/a", UNIT, 5))
    found = compare(Side([a], site.index, site.map), Side([b], site.index, site.map))
    assert found.same_tree
    assert (found.only_here, found.only_there, found.both) == (UNIT, 2 * UNIT, 5 * UNIT)
    assert [(one.path, one.only_here, one.only_there, one.both) for one in found.files] == [
        ("/bin/a", UNIT, 2 * UNIT, 3 * UNIT),
        ("/bin/b", 0, 0, UNIT),
        ("/lib/c", 0, 0, UNIT),
    ]
    alike = compare(Side([a], site.index, site.map), Side([a], site.index, site.map))
    assert (alike.only_here, alike.only_there) == (0, 0)


def test_two_images(site: Site, tmp_path: Path) -> None:
    other = Site(tmp_path, seed=1)
    a = site.trace(site.touch(0, 1, b"bin/a", 0, 4), site.touch(1, 1, b"lib/c"))
    b = other.trace(other.touch(0, 1, b"bin/a", 0, 6), other.touch(1, 1, b"lib/c"))
    found = compare(Side([a], site.index, site.map), Side([b], other.index, other.map))
    assert not found.same_tree
    assert (found.only_here, found.only_there, found.both) == (0, 2 * UNIT, 5 * UNIT)
    # The block of bin/a is the same in both, that of lib/c is not.
    assert found.shared_blocks == BLOCK
