"""Writing and reading striped files over a folder: exact, atomic, and never other bytes than were written."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.backends import pool
from bootseer.errors import ConfigError, DataError, FullError, NotFoundError, NotWritableError, UnavailableError
from bootseer.stripefs import layout, open_fs
from bootseer.stripefs.layout import POINTER_LINE
from bootseer.stripefs.store import StripeFS
from support.stripes import content, flip
from support.waits import together

UNIT = 4096


def pattern(length: int, seed: int = 1) -> bytes:
    return (bytes((i * seed) % 251 for i in range(251 * 256)) * (length // (251 * 256) + 1))[:length]


def store(fs: StripeFS, path: str, data: bytes, **options: int) -> None:
    with fs.create(path, striped=True, **{"unit": UNIT, "width": 3, **options}) as out:
        out.write(data)


def stripes(fs: StripeFS) -> list[Path]:
    return sorted(path for path in Path(fs.url).rglob("*") if ".bsx" in path.parts and path.is_file())


def leftovers(fs: StripeFS) -> list[str]:
    return [path.name for path in Path(fs.url).rglob("*") if path.name.startswith(".tmp-")]


@given(
    size=st.one_of(st.integers(0, 3 * UNIT), st.integers(0, 60 * UNIT), st.sampled_from([n * UNIT for n in range(9)])),
    width=st.integers(1, 7),
    pieces=st.integers(1, 20000),
    data=st.data(),
)
def test_any_range_reads_as_written(tmp_path, size, width, pieces, data):
    fs = open_fs(str(tmp_path / "store"))
    wanted = pattern(size)
    with fs.create("a/b", width=width, unit=UNIT, striped=True) as out:
        for offset in range(0, size, pieces):
            out.write(memoryview(wanted)[offset : offset + pieces])
    with fs.open("a/b") as file:
        assert file.size == size
        assert file.read(0, size) == wanted
        for _ in range(3):
            offset = data.draw(st.integers(0, size))
            length = data.draw(st.integers(0, size - offset))
            assert file.read(offset, length) == wanted[offset : offset + length]
    assert fs.verify("a/b")[0].size == size


def test_runs_longer_than_one_read_are_cut(fs, monkeypatch):
    monkeypatch.setattr(pool, "RUN", 2 * UNIT)
    data = pattern(100 * UNIT + 17)
    store(fs, "f", data)
    assert content(fs, "f") == data


def test_small_files_stay_plain(fs, tmp_path):
    (tmp_path / "small").write_bytes(b"x" * 100)
    assert fs.put(tmp_path / "small", "d/small").uuid == ""
    assert (Path(fs.url) / "d/small").read_bytes() == b"x" * 100
    assert not fs.stat("d/small").striped
    assert content(fs, "d/small") == b"x" * 100
    assert stripes(fs) == []


def test_large_files_are_striped_and_their_parts_are_where_the_format_says(fs, tmp_path):
    data = os.urandom(layout.PLAIN_BELOW + 5)
    (tmp_path / "large").write_bytes(data)
    fs.put(tmp_path / "large", "d/large", width=2)
    stat = fs.stat("d/large")
    assert (stat.size, stat.width, stat.unit, stat.striped) == (len(data), 2, 1 << 20, True)
    first, second = (path.read_bytes() for path in stripes(fs))
    assert first[4096 : 4096 + (1 << 20)] == data[: 1 << 20]
    assert second[4096 : 4096 + (1 << 20)] == data[1 << 20 : 2 << 20]
    fs.get("d/large", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == data


def test_content_that_looks_like_a_pointer_is_striped(fs, tmp_path):
    (tmp_path / "odd").write_bytes(POINTER_LINE + b"rest")
    fs.put(tmp_path / "odd", "odd")
    assert fs.stat("odd").striped
    assert content(fs, "odd") == POINTER_LINE + b"rest"


def test_a_copied_pointer_is_no_second_file(fs):
    store(fs, "f", pattern(9 * UNIT))
    pointer = (Path(fs.url) / "f").read_bytes()
    (Path(fs.url) / "elsewhere").mkdir()
    (Path(fs.url) / "elsewhere" / "f").write_bytes(pointer)
    with pytest.raises(DataError, match=r"missing.*\.bsx"):
        fs.open("elsewhere/f")


@pytest.mark.parametrize("how", ["replace", "replace-plain", "remove"])
def test_a_copy_of_a_pointer_goes_without_the_stripes_of_its_file(fs, how, caplog):
    store(fs, "d/f", pattern(9 * UNIT))
    (Path(fs.url) / "d/copy").write_bytes((Path(fs.url) / "d/f").read_bytes())
    assert content(fs, "d/copy") == pattern(9 * UNIT)
    if how == "remove":
        fs.remove("d/copy")
    else:
        with fs.create("d/copy", striped=how == "replace", unit=UNIT, width=3) as out:
            out.write(b"other")
        assert content(fs, "d/copy") == b"other"
    assert content(fs, "d/f") == pattern(9 * UNIT)
    assert "stripes of d/copy are left in place: another file may name them" in caplog.text
    if how != "remove":
        fs.remove("d/copy")
    fs.remove("d/f")
    assert stripes(fs) == []


def test_a_renamed_folder_stays_whole(fs):
    store(fs, "a/f", pattern(9 * UNIT))
    os.rename(Path(fs.url) / "a", Path(fs.url) / "b")
    assert content(fs, "b/f") == pattern(9 * UNIT)
    fs.remove("b/f")
    assert stripes(fs) == []


def test_a_file_replaced_while_open_is_an_error_not_other_bytes(fs):
    store(fs, "f", pattern(9 * UNIT))
    file = fs.open("f")
    file._sources.clear()  # as after a lost connection
    store(fs, "f", pattern(9 * UNIT, 3))
    with file, pytest.raises(DataError, match="replaced while it was read"):
        file.read(0, 10)


def test_every_damaged_chunk_is_seen_and_named(fs, caplog):
    data = pattern(10 * UNIT)
    store(fs, "f", data)
    flip(stripes(fs)[1], 4096 + UNIT + 7)  # second chunk of stripe 1: chunk 4
    with fs.open("f") as file:
        assert file.read(0, 4 * UNIT) == data[: 4 * UNIT]
        with pytest.raises(DataError, match="chunk 4 of f is damaged"):
            file.read(4 * UNIT + 100, 1)
        with pytest.raises(DataError, match="chunk 4"):
            file.read(0, file.size)
    with pytest.raises(DataError, match="chunk 4"):
        fs.verify("")
    assert "reading f again" in caplog.text


def test_a_damaged_header_is_seen_by_verify(fs):
    store(fs, "f", pattern(10 * UNIT))
    flip(stripes(fs)[2], 20)
    with pytest.raises(DataError, match="header"):
        fs.verify("f")


@pytest.mark.parametrize("how", ["footer", "short", "missing", "swapped", "pointer", "other-write"])
def test_damage_that_opening_sees(fs, how):
    store(fs, "f", pattern(10 * UNIT))
    parts = stripes(fs)
    if how == "footer":
        flip(parts[0], parts[0].stat().st_size - 3)
    elif how == "short":  # a writer killed with -9 leaves a shorter file that reads cleanly
        os.truncate(parts[1], 4096 + UNIT)
    elif how == "missing":
        parts[2].unlink()
    elif how == "swapped":
        data = [part.read_bytes() for part in parts]
        parts[1].write_bytes(data[2])
        parts[2].write_bytes(data[1])
    elif how == "other-write":
        old = [part.read_bytes() for part in parts]
        store(fs, "f", pattern(10 * UNIT, 7))
        stripes(fs)[0].write_bytes(old[0])
    else:
        flip(Path(fs.url) / "f", 40)
    with pytest.raises(DataError):
        fs.open("f")


def test_a_damaged_file_can_be_replaced(fs, caplog):
    store(fs, "f", pattern(10 * UNIT))
    flip(Path(fs.url) / "f", 40)
    store(fs, "f", pattern(3 * UNIT))
    assert content(fs, "f") == pattern(3 * UNIT)
    assert "replacing f" in caplog.text


def test_reads_outside_of_the_file(fs):
    store(fs, "f", b"12345")
    with fs.open("f") as file:
        for offset, length in ((0, 6), (5, 1), (-1, 1)):
            with pytest.raises(DataError, match="ends at 5"):
                file.read(offset, length)
        assert file.read(5, 0) == b""


def test_missing_and_wrong_paths(fs, tmp_path):
    with pytest.raises(NotFoundError, match="no folder"):
        fs.ls("")
    with pytest.raises(ConfigError, match="bad path"):
        fs.open("../x")
    with pytest.raises(NotFoundError, match="cannot read"):
        fs.put(tmp_path / "none", "x")
    with pytest.raises(NotWritableError):
        fs.create("")


def test_one_bad_read_is_tried_again(fs, monkeypatch, caplog):
    data = pattern(10 * UNIT)
    store(fs, "f", data)
    file = fs.open("f")
    failures = iter([True])
    source = file._source(0)

    def flaky(offset, parts):
        if next(failures, False):
            raise UnavailableError("no answer")
        real_readinto(offset, parts)

    real_readinto = source.readinto
    monkeypatch.setattr(source, "readinto", flaky)
    with file:
        assert file.read(0, len(data)) == data
    assert "no answer" in caplog.text


def test_many_threads_read_one_file(fs):
    data = pattern(200 * UNIT)
    store(fs, "f", data)

    def reader(seed: int) -> None:
        for step in range(30):
            offset = (seed * 7919 + step * 104729) % (len(data) - 9000)
            assert file.read(offset, 9000) == data[offset : offset + 9000]

    with fs.open("f") as file:
        together(reader, range(12))


@pytest.mark.parametrize("point", ["write.stripe", "write.close", "write.verify", "write.pointer", "write.rename"])
def test_a_full_store_is_one_line_and_leaves_the_old_version(fs, monkeypatch, point):
    store(fs, "f", pattern(9 * UNIT))
    monkeypatch.setenv("BOOTSEER_FAULTS", f"stripefs.{point}=enospc")
    with pytest.raises(FullError, match="No space left"):
        store(fs, "f", pattern(9 * UNIT, 3))
    monkeypatch.delenv("BOOTSEER_FAULTS")
    assert content(fs, "f") == pattern(9 * UNIT)
    assert len(stripes(fs)) == 3
    assert leftovers(fs) == []
