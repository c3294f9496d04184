"""Ranks of a job that read together: processes with a real gloo group, over a folder and over real HDFS."""

from __future__ import annotations

import os
import signal
import uuid

import pytest

from bootseer.errors import DataError
from bootseer.profile import events
from bootseer.stripefs import open_fs
from bootseer.stripefs.store import StripeFS
from support import hadoop

pytest.importorskip("torch")

from bootseer.torch import shared_read
from bootseer.torch.destination import Destination
from bootseer.torch.shared_plan import FileId, Span
from support import ranks
from support.ranks import Job, Task

pytestmark = pytest.mark.torch

UNIT = 65536
SIZE = 24 * UNIT + 777
ALL = [("a", 0, SIZE), ("plain", 0, 3 << 20)]
TOTAL = SIZE + (3 << 20)
OPTIONS = {"bucket": 3 * UNIT, "deadline": 20.0}
RANKS = 4


def fill(url: str) -> StripeFS:
    fs = open_fs(url)
    for name in ("a", "b"):
        with fs.create(name, striped=True, unit=UNIT) as out:
            out.write(os.urandom(SIZE))
    with fs.create("plain") as out:
        out.write(os.urandom(3 << 20))
    return fs


@pytest.fixture(scope="module")
def url(tmp_path_factory) -> str:
    made = str(tmp_path_factory.mktemp("shared") / "store")
    fill(made)
    return made


def task(url: str, wanted=ALL, **fields) -> Task:
    return Task(url=url, wanted=wanted, **{"options": OPTIONS, **fields})


def read(found) -> int:
    return sum(result.report.read for result in found.values())


def all_right(found) -> bool:
    return all(result.right and result.report is not None and not result.threads for result in found.values())


@pytest.mark.parametrize("store", ["folder", pytest.param("hdfs", marks=pytest.mark.hdfs)])
def test_each_byte_is_read_once(store, tmp_path):
    where = str(tmp_path / "store") if store == "folder" else f"{hadoop.shared().url}/{uuid.uuid4().hex}"
    fill(where)
    found = ranks.run([task(where)] * RANKS)
    assert len(found) == RANKS
    assert all_right(found)
    assert read(found) == TOTAL  # bytes_vs_unique: 1
    for result in found.values():
        assert result.report.ranks == RANKS
        assert result.report.needed == result.report.read + result.report.received == TOTAL
        assert not result.report.read_again
        assert not result.report.late
        assert abs(result.report.read - TOTAL / RANKS) <= 1 << 20


NEEDS = {
    "disjoint": [[("a", rank * 6 * UNIT, 6 * UNIT)] for rank in range(RANKS)],
    "overlapping": [[("a", rank * 4 * UNIT, 12 * UNIT), ("b", 0, SIZE)] for rank in range(RANKS)],
    "other-order": [
        [("a", 0, SIZE), ("b", 0, SIZE)],
        [("b", 0, SIZE), ("a", 5 * UNIT, 9 * UNIT), ("a", 0, 5 * UNIT)],
        [("b", 10 * UNIT, 3), ("b", 0, 10 * UNIT)],
        [("a", SIZE - 1, 1), ("a", 0, 1)],
    ],
    "nothing-for-some": [[], [("a", 0, SIZE)], [("a", 0, 0)], [("a", 0, SIZE), ("b", 7, 0)]],
    "many-small": [[("a", n, 900) for n in range(rank, SIZE - 1000, 1000)] for rank in range(RANKS)],
    "the-same-bytes-twice": [[("a", 0, 9 * UNIT), ("a", 100, UNIT), ("plain", 5, 100), ("plain", 5, 100)]] * RANKS,
    "parts-of-chunks": [[("a", rank * 5000, 3 * UNIT), ("plain", rank * 1000, 2_000_000)] for rank in range(RANKS)],
}


def whole_chunks(wanted) -> int:
    """Bytes of the chunks that ``wanted`` touches, each counted once."""
    chunks = set()
    for path, offset, length in wanted:
        unit = (1 << 20) if path == "plain" else UNIT
        chunks |= {(path, n) for n in range(offset // unit, -(-(offset + length) // unit) if length else 0)}
    size = {"plain": 3 << 20}
    return sum(
        min((1 << 20) if path == "plain" else UNIT, size.get(path, SIZE) - n * ((1 << 20) if path == "plain" else UNIT))
        for path, n in chunks
    )


@pytest.mark.parametrize("kind", sorted(NEEDS))
def test_needs_of_all_kinds(url, kind):
    wanted = NEEDS[kind]
    found = ranks.run([task(url, one) for one in wanted])
    assert len(found) == RANKS
    assert all_right(found)
    assert read(found) <= whole_chunks([one for part in wanted for one in part])
    assert not any(result.report.read_again or result.report.alone for result in found.values())


def test_a_group_of_some_ranks(url):
    found = ranks.run([task(url, members=[1, 3, 2]) for _ in range(RANKS)])
    assert all_right(found)
    assert [found[rank].report.ranks for rank in range(RANKS)] == [1, 3, 3, 3]
    assert read(found) == 2 * TOTAL
    assert found[0].report.alone == "it is the only rank of its group"


def test_the_backend_of_the_job_does_not_matter(url):
    """As with NCCL, which cannot send what is in the host's memory."""
    found = ranks.run([task(url, backend="fake") for _ in range(RANKS)])
    assert all_right(found)
    assert read(found) == TOTAL


FIRST = ["arrived", "collected", "joined", "planned", "read", "sent", "received"]
LAST = ["arrived", "joined", "planned", "read@2", "sent@3", "received@4"]


@pytest.mark.parametrize(("first", "point"), [(True, point) for point in FIRST] + [(False, point) for point in LAST])
def test_a_rank_that_is_killed_costs_the_others_nothing_but_reads(url, first, point):
    """It comes first, so that the others meet where it is, or last."""
    rank = 2
    name, at, visit = point.partition("@")
    fault = f"stripefs.shared.{name}=kill{at}{visit}"
    delay = [0.6 * ((r == rank) != first) for r in range(RANKS)]
    options = {**OPTIONS, "deadline": 2.0}
    found = ranks.run(
        [task(url, faults=fault if r == rank else "", delay=delay[r], options=options) for r in range(RANKS)]
    )
    assert set(found) == set(range(RANKS)) - {rank}
    assert all_right(found)


@pytest.mark.parametrize("point", ["arrived@1", "joined@1", "planned@1", "read@1", "sent@2", "received@2"])
def test_a_rank_that_freezes_is_late(url, point):
    name, at, visit = point.partition("@")
    deadline = 3.0
    options = {**OPTIONS, "deadline": deadline}
    delay = [0.0, 0.0, 0.6, 0.0]
    fault = f"stripefs.shared.{name}=stop{at}{visit}"
    job = Job([task(url, faults=fault if r == 2 else "", delay=delay[r], options=options) for r in range(RANKS)])
    woken = job.processes[2].pid
    try:
        found = job.results(expected=[0, 1, 3], keep=True)
        assert all_right(found)
        assert max(result.seconds for result in found.values()) < 3 * deadline + 5
        os.kill(woken, signal.SIGCONT)  # its late bytes find nobody; it gets its own
        found = job.results(expected=[2])
        assert found[2].right
    finally:
        job.close()


@pytest.mark.parametrize("wanted", [[("a", 0, SIZE)], [("plain", 0, 3 << 20)]], ids=["striped", "plain"])
def test_what_is_damaged_on_the_way_is_read_again(url, wanted):
    found = ranks.run([task(url, wanted, damage=0 if rank == 1 else None) for rank in range(3)])  # each reads something
    assert len(found) == 3
    assert all_right(found)
    again = [result.report for result in found.values() if result.report.read_again]
    assert len(again) == 1
    assert again[0].late == (1,)
    assert again[0].read_again == (UNIT if wanted[0][0] == "a" else 1 << 20)


def test_a_damaged_message_costs_reads_alone(url):
    """What ranks tell each other before they read is damaged, whoever comes first."""
    options = {**OPTIONS, "deadline": 2.0}
    found = ranks.run([task(url, damage=-1 if rank == 1 else None, options=options) for rank in range(RANKS)])
    assert len(found) == RANKS
    assert all_right(found)
    assert any(result.report.alone for result in found.values())


def test_who_comes_too_late_reads_by_itself(url):
    options = {**OPTIONS, "deadline": 1.5}
    found = ranks.run([task(url, delay=4.0 if rank == 1 else 0.0, options=options) for rank in range(RANKS)])
    assert all_right(found)
    assert [found[rank].report.ranks for rank in range(RANKS)] == [3, 1, 3, 3]
    assert read({rank: found[rank] for rank in (0, 2, 3)}) == TOTAL
    assert found[1].report.read == TOTAL
    assert found[1].report.alone


def test_who_never_comes_is_not_waited_for_beyond_the_deadline(url):
    options = {**OPTIONS, "deadline": 1.5}
    found = ranks.run([task(url, calls=rank != 3, delay=20.0, options=options) if rank == 3 else
                       task(url, options=options) for rank in range(RANKS)], expected=[0, 1, 2])  # fmt: skip
    assert all_right(found)
    assert read(found) == TOTAL
    assert max(result.seconds for result in found.values()) < 8


def test_two_ranks_of_which_one_never_comes(url):
    options = {**OPTIONS, "deadline": 1.0}
    found = ranks.run([task(url, options=options), task(url, calls=False, delay=20.0)], expected=[0])
    assert all_right(found)
    assert found[0].report.read == TOTAL


def test_a_rank_that_cannot_open_a_file_harms_nobody(url):
    """It raises before it calls, as a job does that then ends."""
    tasks = [
        task(url, [("missing", 0, 1)] if rank == 0 else ALL, options={**OPTIONS, "deadline": 2.0}) for rank in range(3)
    ]
    found = ranks.run(tasks)
    assert "no file missing" in found.pop(0).error
    assert all_right(found)


def test_a_rank_whose_store_fails_raises_and_the_others_read_for_themselves(url):
    fault = "stripefs.shared.read=eio"
    found = ranks.run([task(url, faults=fault if rank == 1 else "") for rank in range(RANKS)])
    assert found.pop(1).report is None
    assert all_right(found)
    assert all(result.report.late == (1,) for result in found.values())


def test_memory_beside_the_callers_is_bounded(url):
    """Chunks of which ranks want a part only are read, sent and received in scratch memory."""
    wanted = [[("a", n * UNIT + rank * 100, 50) for n in range(24)] for rank in range(RANKS)]
    found = ranks.run([task(url, one, options={**OPTIONS, "bucket": UNIT}) for one in wanted])
    assert all_right(found)
    assert read(found) == 24 * UNIT
    most = shared_read.READS * UNIT + (RANKS - 1) * shared_read.AHEAD * UNIT
    assert all(0 < result.scratch <= most for result in found.values())


@pytest.mark.parametrize("store", ["folder", pytest.param("hdfs", marks=pytest.mark.hdfs)])
def test_load_with_a_group_reads_once_and_the_next_one_on_the_node_nothing(store, tmp_path, monkeypatch):
    """`bootseer.torch.load`: each rank has the whole state, and the store was read once."""
    import torch

    from bootseer import torch as checkpoints

    state = {"w": torch.randn(1000, 2000), "b": torch.arange(7)}
    url = str(tmp_path / "run") if store == "folder" else f"{hadoop.shared().url}/{uuid.uuid4().hex}"
    checkpoints.save(state, f"{url}/step-1/")
    size = open_fs(url).stat("step-1/state.pt").size
    for expected in (size, 0):
        found = ranks.run([task(url, load="step-1") for _ in range(RANKS)])
        assert all_right(found)
        assert (read(found), sum(result.report.cached for result in found.values())) == (expected, size - expected)
        assert [result.loaded for result in found.values()] == [float(state["w"].double().sum())] * RANKS
    monkeypatch.setenv("BOOTSEER_EVENTS", str(tmp_path / "events.jsonl"))
    assert torch.equal(checkpoints.load(f"{url}/step-1")["w"], state["w"])
    (said,) = events.read([tmp_path / "events.jsonl"]).spans.attrs
    assert (said["fetched"], said["cached"]) == (0, size)


def test_a_group_of_one_and_no_group(url):
    import torch.distributed as dist

    from bootseer.torch.shared_read import read_shared

    assert not dist.is_initialized()
    with open_fs(url).open("a") as file:
        data = bytearray(SIZE)
        report = read_shared([(file, 0, memoryview(data))], None)
        assert (report.read, report.received, report.alone) == (SIZE, 0, "no group")
        assert data == file.read(0, SIZE)
        few = bytearray(10)
        assert read_shared([(file, 5, memoryview(few))], None).read == UNIT
        with pytest.raises(DataError, match="ends at"):
            read_shared([(file, SIZE - 1, memoryview(few))], None)
    with open_fs(url).open("plain") as file:
        assert read_shared([(file, 5, memoryview(few))], None).read == 10  # nothing to check: no need for more
        assert few == file.read(5, 10)
    alone = ranks.run([task(url)])
    assert all_right(alone)
    assert alone[0].report.alone == "it is the only rank of its group"


def test_a_piece_of_a_plain_file_is_not_taken_for_another_one(url):
    with open_fs(url).open("plain") as file:
        memory = bytearray(3 << 20)
        to = Destination([(file, 0, memoryview(memory))])
        one, other = (Span(FileId(file.identity, file.unit, file.size), first, 1, 0b11) for first in (0, 1))
        sent, place = to.read([one])[0], to.place(other)
        place.data[:] = sent.data
        assert to.received(place) == [other]
        assert to.received(sent) == []
