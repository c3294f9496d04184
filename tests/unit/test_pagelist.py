"""The format of page lists, and how traces become one."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import msgspec
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from bootseer import erofs
from bootseer.blocks.fetch.prefetch import fetch_all
from bootseer.blocks.formats import pagelist
from bootseer.blocks.formats.pagelist import LONGEST, PageList, PageRange
from bootseer.blocks.formats.trace import UNIT, Touch, Trace
from bootseer.blocks.metadata import localize
from bootseer.blocks.profiles import hotpack_builder, library
from bootseer.blocks.profiles.hotpack_builder import build_pages, joined
from bootseer.blocks.profiles.layout import Part
from bootseer.blocks.profiles.library import ProfileKey, Target
from bootseer.blocks.publish.tree import publish
from bootseer.chunks import hashing
from bootseer.chunks.cachefile import CacheFile
from bootseer.errors import DataError
from bootseer.objects.folder import FolderStore

GOLDEN = Path(__file__).parents[1] / "golden" / "blocks" / "pagelist-v1.bin"
TREE = "ab" * 32
SIZE = 1 << 40


def sample() -> PageList:
    ranges = [
        PageRange(b"usr/bin/python3", 0, 7 * UNIT, 2 * UNIT),
        PageRange(b"odd \xff\n/name", 5 * UNIT, 0, UNIT),
        PageRange(b"usr/bin/python3", 9 * UNIT, 40 * UNIT, LONGEST * UNIT),
    ]
    return PageList(TREE, 1_700_000_000_000_000_000, ranges)


def test_golden_file() -> None:
    """What it unpacks to is fixed for ever; how well zstd packs it is not."""
    raw = zstandard.decompress(GOLDEN.read_bytes())
    assert zstandard.decompress(sample().encode()) == raw
    assert PageList.decode(GOLDEN.read_bytes(), TREE, SIZE) == sample()


PATHS = st.lists(st.binary(min_size=1, max_size=9).filter(lambda part: not {0, 47} & {*part} and part.strip(b".")),
                 min_size=1, max_size=3).map(b"/".join)  # fmt: skip
UNITS = st.integers(0, 2**28 - 1).map(lambda units: units * UNIT)


@given(st.lists(st.builds(PageRange, PATHS, UNITS, UNITS, st.integers(1, LONGEST).map(lambda units: units * UNIT))))
def test_round_trip(ranges: list[PageRange]) -> None:
    pages = PageList(TREE, 5, ranges)
    assert PageList.decode(pages.encode(), TREE, SIZE) == pages


@pytest.mark.parametrize(
    "path", [b"", b"/etc/shadow", b"..", b"a/../../etc", b"a//b", b"./a", b"a/", b"a\0b"], ids=repr
)
def test_names_that_lead_elsewhere_are_refused(path: bytes) -> None:
    pages = PageList(TREE, 5, [PageRange(path, 0, 0, UNIT)])
    with pytest.raises(DataError, match="a name that no file"):
        PageList.decode(pages.encode(), TREE, SIZE)


@pytest.mark.parametrize("size", [1, UNIT])
def test_ranges_behind_the_data_are_refused(size: int) -> None:
    with pytest.raises(DataError, match="a range that no file"):
        PageList.decode(sample().encode(), TREE, size)


def test_absurd_ones_are_refused_before_they_cost_anything(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pagelist, "MAX_RANGES", 2)
    with pytest.raises(DataError, match="too many"):
        PageList.decode(sample().encode(), TREE, SIZE)
    with pytest.raises(DataError, match="bytes"):
        PageList.decode(zstandard.compress(bytes(17 << 20)), TREE, SIZE)
    store = FolderStore(tmp_path)
    store.put("a.pages", bytes(pagelist.MAX_STORED + 1))
    with pytest.raises(DataError, match="bytes"):
        library.load_pages(store, "a.pages", TREE, SIZE)
    large = Trace(TREE, SIZE, 1, True, (Touch(0, 9, 0, hotpack_builder.MAX_UNITS + 1),))
    with pytest.raises(DataError, match="GiB"):
        build_pages([large], TREE, tmp_path / "no meta", 5)


def test_another_tree_or_a_newer_version_is_refused() -> None:
    with pytest.raises(DataError, match="another tree"):
        PageList.decode(sample().encode(), "cd" * 32, SIZE)
    raw = bytearray(zstandard.decompress(sample().encode()))[:-32]
    raw[8] = 2
    with pytest.raises(DataError, match="the newest that is known"):
        PageList.decode(zstandard.compress(bytes(raw) + hashing.digest(raw)), TREE, SIZE)


def test_what_half_of_the_starts_touched_in_their_order(tmp_path: Path) -> None:
    root = tmp_path / "tree"
    root.mkdir()
    for name, size in (("a", 3 * UNIT), ("b", 400 * UNIT), ("c", UNIT)):
        (root / name).write_bytes(name.encode() * size)
    (root / "pipe").mkdir()
    erofs.build(root, tmp_path / "meta", tmp_path / "data")
    data = (tmp_path / "data").read_bytes()
    reader = erofs.Reader((tmp_path / "meta").read_bytes())
    at = {name: next(iter(reader.extents(reader.stat(name)))).data_offset // UNIT for name in (b"a", b"b", b"c")}

    def trace(*touches: tuple[int, int, int]) -> Trace:
        return Trace(TREE, len(data), 1, True, tuple(Touch(ms, 9, unit, count) for ms, unit, count in touches))

    often = trace((0, at[b"b"], 2), (3, at[b"a"], 1), (4, at[b"b"] + 2, 200), (9, at[b"a"] + 1, 1))
    once = trace((0, at[b"b"], 2), (1, at[b"c"], 1))
    pages = build_pages([often, once, often], TREE, tmp_path / "meta", 5)
    found = [(one.path, one.offset // UNIT, one.length // UNIT) for one in pages.ranges]
    assert found == [*((b"b", at, min(LONGEST, 202 - at)) for at in range(0, 202, LONGEST)), (b"a", 0, 2)]
    for one in pages.ranges:
        assert data[one.data : one.data + 1] == one.path
    assert pages.size == 204 * UNIT
    assert msgspec.structs.asdict(pages)["created"] == 5


def test_neighbours_are_joined_where_they_are_touched_at_about_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hotpack_builder, "_WINDOW", 4)
    parts = [Part(0, 100, b"x", 0), Part(200, 100, b"y", 50)]
    units = [210, 9, 8, 211, 10, 150, 209, 7]
    found = [(one.path, one.offset // UNIT, one.data // UNIT, one.length // UNIT) for one in joined(units, parts)]
    assert found == [(b"y", 60, 210, 2), (b"x", 8, 8, 2), (b"x", 10, 10, 1), (b"y", 59, 209, 1), (b"x", 7, 7, 1)]


@given(st.permutations(range(60)), st.integers(1, 80))
def test_each_unit_of_a_file_is_in_one_range(units: list[int], window: int) -> None:
    parts = [Part(0, 20, b"x", 3), Part(20, 7, b"y", 0), Part(30, 20, b"x", 40)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hotpack_builder, "_WINDOW", window)
        ranges = list(joined(units, parts))
    covered = [one.data // UNIT + at for one in ranges for at in range(one.length // UNIT)]
    assert sorted(covered) == [*range(27), *range(30, 50)]
    for one in ranges:
        data, _, path, first = next(part for part in reversed(parts) if part.unit * UNIT <= one.data)
        assert (one.path, one.offset) == (path, first * UNIT + one.data - data * UNIT)


def test_the_first_start_makes_a_list_and_news_renew_it(tmp_path: Path) -> None:
    root = tmp_path / "tree"
    root.mkdir()
    (root / "f").write_bytes(bytes(range(256)) * 16 * 400)
    erofs.build(root, tmp_path / "meta", tmp_path / "data")
    store, key = FolderStore(tmp_path / "store"), ProfileKey("train")
    local = localize(store, publish(store, tmp_path / "meta", tmp_path / "data").digest, tmp_path / "cache")
    target = Target(local.digest, local.map_digest.hex(), local.map)

    def start(first: int, count: int) -> Trace:
        return Trace(local.digest, local.map.size, first, True, (Touch(0, 9, first, count),))

    def renew() -> tuple[str, str]:
        with contextlib.closing(cache.blocks_now()) as ready:
            never = threading.Event()
            return hotpack_builder.renew(
                store, key, target, ready, meta=local.meta, work=tmp_path, stop=never, hurry=never
            )

    def listed() -> int:
        (name,) = (info.key for info in store.list("profiles") if info.key.endswith(".fuse.pages"))
        return library.load_pages(store, name, local.digest, local.map.size).size

    with CacheFile.open(local.cache, local.map, local.map_digest) as cache:
        assert fetch_all(store, cache, [*range(local.map.count)], streams=2)
        assert renew() == ("no traces", "no traces")
        assert library.publish(store, key, start(0, 100), local.map) == "published"
        assert renew() == ("published", "published")
        assert listed() == 100 * UNIT
        assert renew() == ("not needed", "not needed")
        assert library.publish(store, key, start(60, 44), local.map) == "published"
        assert renew() == ("not needed", "published"), "the pack has these blocks; the list lacks some of their pages"
        assert listed() == 104 * UNIT
        assert renew() == ("not needed", "not needed")
