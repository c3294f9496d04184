"""Sectors: of a chunk of which little is wanted, that much is read and checked, and no more."""

import contextlib
import os
import random
from pathlib import Path

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from bootseer.errors import DataError
from bootseer.fsspecfs.filesystem import StripeFileSystem
from bootseer.stripefs import layout, open_fs
from bootseer.stripefs.files.readahead import ReadAhead
from bootseer.stripefs.layout import SECTOR
from bootseer.stripefs.nodecache import NodeCache
from bootseer.stripefs.store import StripeFS
from support.stripes import flip

GOLDEN = Path(__file__).parent.parent / "golden" / "stripe"
UNIT, WIDTH = 1 << 20, 2
DATA = random.Random(1).randbytes(17 * UNIT + 3 * SECTOR + 11)


@pytest.fixture(scope="module")
def fs(tmp_path_factory) -> StripeFS:
    fs = open_fs(str(tmp_path_factory.mktemp("sectors")))
    put(fs, "f")
    return fs


def put(fs: StripeFS, path: str, data: bytes = DATA, unit: int = UNIT, width: int = WIDTH) -> None:
    with fs.create(path, striped=True, unit=unit, width=width) as out:
        for start in range(0, len(data), 100_001):
            out.write(data[start : start + 100_001])


def stripe(fs: StripeFS, path: str, index: int) -> Path:
    with fs.open(path) as file:
        return Path(fs.url, file.pointer.stripe_path(path, index))


@given(st.lists(st.integers(0, 2 * SECTOR), max_size=6))
def test_the_checksum_of_a_chunk_follows_from_those_of_its_sectors(lengths):
    pieces = [memoryview(DATA)[index * SECTOR :][:length] for index, length in enumerate(lengths)]
    data = b"".join(pieces)
    found = layout.sector_crcs(pieces)
    assert found == [crc32c(data[at : at + SECTOR]) for at in range(0, len(data), SECTOR)]
    assert layout.joined(found, len(data)) == crc32c(data)


def test_the_table_is_that_of_the_format(tmp_path):
    fs = open_fs(str(tmp_path))
    put(fs, "f", bytes(i * 7 % 251 for i in range(9 * SECTOR + 1)), unit=2 * SECTOR)
    geometry = layout.Geometry(9 * SECTOR + 1, 2 * SECTOR, WIDTH)
    found = b""
    for index in range(WIDTH):
        begin, end = geometry.table_offset(index), geometry.footer_offset(index)
        found += stripe(fs, "f", index).read_bytes()[begin:end]
    assert found == (GOLDEN / "sectors-1").read_bytes()
    assert len(found) == 4 * 10


@given(st.data())
def test_any_ranges_are_as_written(tmp_path, data):
    unit = data.draw(st.sampled_from([SECTOR, SECTOR + 4096, 2 * SECTOR, 3 * SECTOR, 8 * SECTOR]))
    size = data.draw(st.integers(0, 20 * SECTOR))
    fs = open_fs(str(tmp_path / "store"))
    put(fs, "a", DATA[:size], unit, data.draw(st.integers(1, 3)))
    with fs.open("a") as file:
        ranges = []
        for _ in range(data.draw(st.integers(1, 4))):
            start = data.draw(st.integers(0, size))
            ranges.append((start, data.draw(st.integers(0, min(size - start, data.draw(st.sampled_from([9, size])))))))
        buffers = [bytearray(length) for _, length in ranges]
        file.readinto_many([(start, memoryview(to)) for (start, _), to in zip(ranges, buffers, strict=True)])
        assert buffers == [DATA[start : start + length] for start, length in ranges]
    assert fs.verify("a")[0].size == size


def test_a_small_read_fetches_one_sector(fs):
    with fs.open("f") as file:
        assert file.read(5 * UNIT + SECTOR + 4096, 4096) == DATA[5 * UNIT + SECTOR + 4096 :][:4096]
        assert file.fetched <= SECTOR + 4096  # and the checksums of some chunks, once
        before = file.fetched
        assert file.read(7 * UNIT + 2 * SECTOR - 1, 2) == DATA[7 * UNIT + 2 * SECTOR - 1 :][:2]
        assert file.fetched - before == 2 * SECTOR
        assert file.read(len(DATA) - 3, 3) == DATA[-3:]


def test_small_reads_of_fsspec_fetch_no_more(fs, monkeypatch):
    fetched = []
    real = fs.backend.read_many
    monkeypatch.setattr(
        type(fs.backend),
        "read_many",
        lambda self, pieces: fetched.append(sum(len(part) for piece in pieces for part in piece.parts)) or real(pieces),
    )
    client = StripeFileSystem(fs.url, skip_instance_cache=True)
    assert client.cat_file("f", 3 * UNIT + 5, 3 * UNIT + 10) == DATA[3 * UNIT + 5 : 3 * UNIT + 10]
    assert sum(fetched) <= SECTOR + 8192  # with the footers
    fetched.clear()
    assert client.cat_ranges(["f"] * 3, [9 * UNIT, 3, 11 * UNIT], [9 * UNIT + 9, 5, 11 * UNIT + 1]) == [
        DATA[9 * UNIT : 9 * UNIT + 9],
        DATA[3:5],
        DATA[11 * UNIT : 11 * UNIT + 1],
    ]
    assert sum(fetched) <= 3 * SECTOR + 8192
    fetched.clear()
    with client.open("f") as file:
        for at in (12, 4, 15, 8):
            file.seek(at * UNIT + 77)
            assert file.read(10) == DATA[at * UNIT + 77 :][:10]
    assert sum(fetched) <= 4 * 2 * SECTOR + 8192


@pytest.mark.parametrize("at", [0, 5 * UNIT + 3 * SECTOR + 9, len(DATA) - 5])
def test_a_flipped_bit_is_found_by_who_reads_its_sector(tmp_path, at):
    fs = open_fs(str(tmp_path))
    put(fs, "f")
    chunk, rest = divmod(at, UNIT)
    flip(stripe(fs, "f", chunk % WIDTH), layout.HEADER_SIZE + chunk // WIDTH * UNIT + rest)
    with fs.open("f") as file:
        with pytest.raises(DataError, match=f"chunk {chunk} of f is damaged"):
            file.read(at // SECTOR * SECTOR, 5)
        other = chunk * UNIT + (SECTOR if rest < SECTOR else 0)
        assert file.read(other, 9) == DATA[other : other + 9]
        with pytest.raises(DataError, match=f"chunk {chunk} of f is damaged"):
            file.read(chunk * UNIT, min(UNIT, len(DATA) - chunk * UNIT))
        ahead, sound = ReadAhead(memory=8 << 20), []
        for start in range(chunk * UNIT, min((chunk + 1) * UNIT, len(DATA)), SECTOR):  # in order
            with contextlib.suppress(DataError):
                size = min(SECTOR, len(DATA) - start)
                assert ahead.read(file, start, size) == DATA[start : start + size]
                ahead.readinto(file, start, memoryview(into := bytearray(size)))
                assert into == DATA[start : start + size]
                sound.append(start)
        ahead.close()
    assert at // SECTOR * SECTOR not in sound
    assert len(sound) == min(UNIT, len(DATA) - chunk * UNIT) // SECTOR - (len(DATA) - at > SECTOR)


def test_damaged_checksums_of_sectors_cost_no_byte_and_are_found_by_verify(tmp_path, caplog):
    fs = open_fs(str(tmp_path))
    put(fs, "f")
    flip(stripe(fs, "f", 0), layout.Geometry(len(DATA), UNIT, WIDTH).table_offset(0) + 9)
    with fs.open("f") as file:
        for at in (0, 2 * UNIT, 4 * UNIT + 5):
            assert file.read(at, 7) == DATA[at : at + 7]
        assert file.read(0, len(DATA)) == DATA
    assert caplog.text.count("chunks of this file are read whole") == 1
    with pytest.raises(DataError, match="checksums of the sectors of chunk 0 are damaged"):
        fs.verify("f")


@pytest.mark.parametrize("disk", [False, True])
def test_who_reads_much_of_a_chunk_in_small_parts_has_all_of_it(tmp_path, fs, disk):
    cache = NodeCache(tmp_path / "cache") if disk else None
    ahead, order = ReadAhead(memory=8 << 20), random.Random(2)
    with fs.open("f") as file:
        if cache is not None:
            file.attach(cache.open(file))
        for _ in range(200):
            at = 6 * UNIT + order.randrange(UNIT // 4096) * 4096
            ahead.read(file, 0, 4096)  # elsewhere
            found = ahead.read(file, at, 4096)
            data = os.pread(found[0], 4096, found[1]) if isinstance(found, tuple) else bytes(found)
            assert data == DATA[at : at + 4096]
        assert ahead.demand <= 2 * 2 * UNIT + 2 * 4096
        ahead.close()
    if cache is not None:
        cache.close()


@pytest.mark.parametrize("begin", [0, 6 * UNIT - 2 * SECTOR])
def test_what_is_read_on_after_a_jump_is_whole_on_the_node(tmp_path, fs, begin):
    cache, ahead = NodeCache(tmp_path / "cache"), ReadAhead(memory=16 << 20)
    with fs.open("f") as file:
        file.attach(cache.open(file))
        # the end first, as programs do that read an archive; then from the start, or the end of a chunk, on
        for at in (len(DATA) - 99, *range(begin, len(DATA), 2 * SECTOR)):
            size = min(2 * SECTOR, len(DATA) - at)
            found = ahead.read(file, at, size)
            data = os.pread(found[0], size, found[1]) if isinstance(found, tuple) else bytes(found)
            assert data == DATA[at : at + size]
        ahead.close()
        cache.close()
        assert [file.local.has(chunk) for chunk in range(begin // UNIT, 18)] == [True] * (18 - begin // UNIT)
