"""What a start read of its checkpoint: noted, kept in a store, and used for the next one."""

from __future__ import annotations

import itertools
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.objects import open_store
from bootseer.stripefs.checkpoint import access
from bootseer.stripefs.checkpoint.access import (
    MAX_FILES,
    UNIT,
    AccessLog,
    AccessRecord,
    FileAccess,
    Lineage,
    counterparts,
    load,
    save,
)

RECORD = AccessRecord((FileAccess("a/b", 3 * UNIT + 5, ((0, UNIT), (2 * UNIT, 3 * UNIT + 5))),))


@given(st.integers(1, 40 * UNIT), st.lists(st.tuples(st.integers(0, 50 * UNIT), st.integers(1, 3 * UNIT))))
def test_a_record_covers_each_read_and_less_than_a_unit_more(size: int, reads: list[tuple[int, int]]) -> None:
    log = AccessLog()
    units = set()
    for offset, length in reads:
        if offset < size:
            length = min(length, size - offset)
            log.add("f", size, offset, length)
            units |= set(range(offset // UNIT, (offset + length - 1) // UNIT + 1))
    found = [pair for file in log.record().files for pair in file.ranges]
    assert {unit for first, last in found for unit in range(first // UNIT, -(-last // UNIT))} == units
    assert all(first < last <= size for first, last in found)
    assert all(before[1] < after[0] for before, after in itertools.pairwise(found))


def test_files_come_in_the_order_of_their_first_read() -> None:
    log = AccessLog()
    for path in ("b", "a", "b"):
        log.add(path, 10, 0, 10)
    assert [file.path for file in log.record().files] == ["b", "a"]
    log.add("b", 12, 0, 1)  # replaced by a longer one meanwhile
    assert [(file.path, file.size) for file in log.record().files] == [("b", 12), ("a", 10)]


def test_two_first_reads_of_a_file_at_once_are_both_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(size: int) -> bytearray:
        monkeypatch.delattr(access, "bytearray")
        log.add("f", 3 * UNIT, 2 * UNIT, UNIT)
        return bytearray(size)

    log = AccessLog()
    monkeypatch.setattr(access, "bytearray", made, raising=False)
    log.add("f", 3 * UNIT, 0, UNIT)
    assert log.record().files[0].ranges == ((0, UNIT), (2 * UNIT, 3 * UNIT))


def test_a_record_does_not_grow_without_bound() -> None:
    log = AccessLog()
    for number in range(MAX_FILES + 5):
        log.add(f"sample-{number}", 10, 0, 10)
    changes = log.changes
    log.add("one more", 10, 0, 10)
    assert (len(log.record().files), log.changes) == (MAX_FILES, changes)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (3 * UNIT + 5, ((0, UNIT), (2 * UNIT, 3 * UNIT + 5))),
        (3 * UNIT + 9, ((0, UNIT), (2 * UNIT, 3 * UNIT + 9))),
        (3 * UNIT, ((0, UNIT), (2 * UNIT, 3 * UNIT))),
        (2 * UNIT, ()),
        (4 * UNIT, ()),
    ],
)
def test_the_next_checkpoint_may_be_a_little_longer_or_shorter(size: int, expected: object) -> None:
    assert RECORD.files[0].of(size) == expected


@pytest.mark.parametrize(
    ("read", "there", "expected"),
    [
        (["state-200.pt"], ["state-1000.pt", "note.txt"], ["state-1000.pt"]),
        (["state-0200.pt"], ["state-1000.pt"], ["state-1000.pt"]),
        (["epoch=3-step=450.ckpt"], ["epoch=4-step=600.ckpt"], ["epoch=4-step=600.ckpt"]),
        (["s9-rank1.pt", "s9-rank0.pt"], ["s10-rank0.pt", "s10-rank1.pt"], ["s10-rank1.pt", "s10-rank0.pt"]),
        (["s9-rank1.pt"], ["s10-rank0.pt", "s10-rank1.pt", "s10-rank2.pt"], ["s10-rank1.pt"]),
        (["s9-rank2.pt"], ["s10-rank0.pt", "s10-rank1.pt"], []),  # fewer ranks: nobody knows who reads what
        (["rank0.pt", "rank1.pt"], ["rank0.pt"], ["rank0.pt"]),  # no step in them
        (["7/s7.pt"], ["8/s8.pt", "9/s9.pt", "9/s8.pt"], ["9/s9.pt"]),
        (["a-" + "1" * 40], ["a-" + "2" * 40], []),  # a hash
        (["a.pt"], ["b.pt"], []),
    ],
)
def test_a_step_in_the_names_of_files_does_not_count(read, there, expected) -> None:
    files = [FileAccess(path, 3 * UNIT, ((0, UNIT),)) for path in read]
    found = counterparts(files, dict.fromkeys(there, 3 * UNIT))
    assert found == [(path, ((0, UNIT),)) for path in expected]
    assert counterparts(files, dict.fromkeys(there, 4 * UNIT)) == []


def test_the_next_start_of_the_same_node_finds_it(tmp_path) -> None:
    store = open_store(str(tmp_path))
    mine = Lineage("job", "hdfs://nn:8020/run/step-200", 1, 4)
    assert load(store, mine) is None
    assert save(store, mine, RECORD)
    assert not save(store, mine, RECORD)  # known
    assert not save(store, mine, AccessRecord())  # a start that read nothing
    assert load(store, mine._replace(url="hdfs://nn:8020/run/step-300/")) == RECORD
    for other in (
        mine._replace(job="other"),
        mine._replace(node=2),
        mine._replace(nodes=2),
        mine._replace(url="hdfs://nn:8020/elsewhere/step-200"),
    ):
        assert load(store, other) is None


def test_records_of_version_1_are_read_for_ever(tmp_path) -> None:
    store, mine = open_store(str(tmp_path)), Lineage("job", "/run/step-1")
    store.put(mine.key, (Path(__file__).parents[1] / "golden/stripe/access-1.json").read_bytes())
    assert load(store, mine) == AccessRecord(
        (
            FileAccess("state.pt", 3 * UNIT + 5, ((0, UNIT), (2 * UNIT, 3 * UNIT + 5))),
            FileAccess("rank-0/optim.bin", UNIT, ((0, UNIT),)),
        )
    )


def test_a_login_in_the_url_does_not_reach_the_store(tmp_path) -> None:
    save(open_store(str(tmp_path)), Lineage("job", "s3://me:geheim@host/run/step-1"), RECORD)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files
    assert not any("geheim" in f"{path} {path.read_text()}" for path in files)


@pytest.mark.parametrize(
    "planted",
    [
        b"",
        b"{",
        b"[]",
        b'{"files":[],"version":2}',
        b'{"files":[["x"]]}',
        *(
            msgspec.json.encode(AccessRecord((FileAccess(path, 10, ranges),)))
            for path, ranges in (
                ("../../etc/passwd", ((0, 10),)),
                ("a/", ((0, 10),)),
                ("f", ((0, 11),)),
                ("f", ((5, 3),)),
                ("f", ((-1, 3),)),
                ("f", ((0, 5), (3, 8))),
            )
        ),
        b" " * ((16 << 20) + 1),
    ],
    ids=[
        "empty", "torn", "list", "version", "shape", "above", "slash", "past-the-end", "backwards", "negative",
        "overlapping", "huge",
    ],
)  # fmt: skip
def test_what_is_no_record_is_a_log_line(tmp_path, caplog, planted: bytes) -> None:
    store, mine = open_store(str(tmp_path)), Lineage("job", "/run/step-1")
    store.put(mine.key, planted)
    assert load(store, mine) is None
    assert len(caplog.records) == 1
    assert save(store, mine, RECORD)  # and is replaced
    assert load(store, mine) == RECORD
