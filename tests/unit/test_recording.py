"""From the touch log of a front to a trace, with the readers asked from /proc."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.blocks.formats.trace import UNIT, Process, Touch, Trace
from bootseer.blocks.profiles import library
from bootseer.blocks.profiles.layout import Part
from bootseer.blocks.profiles.recording import Readers, Recording
from bootseer.blocks.serving.shared_memory import Count, SharedMemory

TREE = "ab" * 32


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    env = {"RANK": "17", "SLURM_PROCID": "4", "PATH": os.environ["PATH"]}
    code = "import sys; print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as one:
        assert one.stdout is not None
        one.stdout.readline()
        yield one
        one.kill()


def ask(pid: int, touched: float | None = None, **settings: Path) -> tuple[Process, ...]:
    readers = Readers(**settings)
    readers.note(pid, time.monotonic() if touched is None else touched)
    return readers.table()


def test_a_process_tells_its_name_and_rank(child: subprocess.Popen[bytes]) -> None:
    (found,) = ask(child.pid)
    assert found.pid == child.pid
    assert found.rank == 17
    assert found.comm == Path(f"/proc/{child.pid}/comm").read_text().strip()


def test_a_thread_is_its_process() -> None:
    ids: list[int] = []
    end = threading.Event()

    def run() -> None:
        ids.append(threading.get_native_id())
        end.wait(10)

    thread = threading.Thread(target=run)
    thread.start()
    while not ids:
        time.sleep(0.001)
    (found,) = ask(ids[0])
    end.set()
    thread.join()
    assert found.pid == ids[0] != os.getpid()
    assert found.comm == Path("/proc/self/comm").read_text().strip()


def test_a_number_used_again_is_not_believed(child: subprocess.Popen[bytes]) -> None:
    assert ask(child.pid, time.monotonic() - 3600) == ()


def test_who_is_gone_is_unknown_and_asked_once(tmp_path: Path) -> None:
    done = subprocess.Popen(["true"])
    done.wait()
    assert ask(done.pid) == ()
    readers = Readers(tmp_path)
    readers.note(5, 0.0)
    folder = fake(tmp_path, 5)
    readers.note(5, 1e9)
    assert readers.table() == ()
    assert ask(5, 1e9, proc=tmp_path) == (Process(5, "x", 3),)
    (folder / "environ").unlink()
    assert ask(5, 1e9, proc=tmp_path) == (Process(5, "x", -1),)


def fake(proc: Path, pid: int, **files: bytes) -> Path:
    folder = proc / str(pid)
    folder.mkdir(exist_ok=True)
    content = {
        "status": b"Name:\tx\nTgid:\t%d\n" % pid,
        "stat": b"5 (a ) (b) S " + b"0 " * 40,
        "comm": b"x\n",
        "environ": b"RANK=3\0",
        **files,
    }
    for name, data in content.items():
        (folder / name).write_bytes(data)
    return folder


@pytest.mark.parametrize("name", ["status", "stat", "comm", "environ"])
@pytest.mark.parametrize("data", [b"", b"\0", b"\xff" * 100_000, b"Tgid:\n", b"(:)" * 30, b"RANK=99999999999\0RANK=-1"])
def test_noise_in_proc_never_raises(tmp_path: Path, name: str, data: bytes) -> None:
    fake(tmp_path, 5, **{name: data})
    for found in ask(5, 1e9, proc=tmp_path):
        trace = Trace(TREE, UNIT, 0, True, (), (found,))
        assert Trace.decode(trace.encode()) == trace


@pytest.mark.parametrize(
    ("environ", "rank"),
    [
        (b"SLURM_PROCID=4\0OMPI_COMM_WORLD_RANK=5\0", 4),
        (b"BOOTSEER_RANK=1\0RANK=2\0", 1),
        (b"RANK=\0SLURM_PROCID=6\0", 6),
        (b"XRANK=2\0noise\0", -1),
    ],
)
def test_ranks(tmp_path: Path, environ: bytes, rank: int) -> None:
    fake(tmp_path, 5, environ=environ)
    assert ask(5, 1e9, proc=tmp_path)[0].rank == rank


def test_the_table_is_bounded(tmp_path: Path) -> None:
    readers = Readers(tmp_path, limit=3)
    for pid in range(1, 9):
        fake(tmp_path, pid)
        readers.note(pid, 1e9)
    assert [found.pid for found in readers.table()] == [1, 2, 3]


def test_a_recording_follows_the_access_trace(child: subprocess.Popen[bytes]) -> None:
    shared = SharedMemory(4, size=64 * UNIT, block_size=16 * UNIT)
    shared.counts[Count.RECORDING] = 1
    shared.counts[Count.BEGAN_NS] = time.monotonic_ns()
    recording = Recording(shared.trace.since, TREE, 64 * UNIT, began=1700000000, clock=time.monotonic(), layout=list)
    shared.trace.touch(0, 2 * UNIT, child.pid)
    assert recording.poll() == 1
    child.kill()
    child.wait()
    shared.trace.touch(0, 3 * UNIT, child.pid)
    shared.trace.touch(9 * UNIT, 1, 1 << 21)
    trace = recording.trace()
    assert [(t.pid, t.unit, t.count) for t in trace.touches] == [
        (child.pid, 0, 2),
        (child.pid, 2, 1),
        (1 << 21, 9, 1),
    ]
    assert [found.rank for found in trace.processes] == [17]
    assert trace.complete
    assert not recording.trace(complete=False).complete
    assert Trace.decode(trace.encode()) == trace


MIB = (1 << 20) // UNIT


def recorded(rows: list[tuple[int, int, int, int]], size: int, tmp_path: Path) -> Trace:
    """The trace of ``rows``, of a tree with files of 1 MiB."""

    class Log:
        def since(self, start: int) -> list[tuple[int, int, int, int]]:
            return rows[start:]

    fake(tmp_path, 2, comm=b"cat\n")
    fake(tmp_path, 3, comm=b"python\n", status=b"Tgid:\t3\n")
    parts = [Part(at, MIB, b"%d" % at, 0) for at in range(0, size // UNIT, MIB)]
    return Recording(
        Log().since, TREE, size, began=0, clock=1e9, layout=lambda: parts, readers=Readers(tmp_path)
    ).trace()


def test_a_process_that_reads_nearly_all_files_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    rows = [(1, 2, 0, 20 * MIB), (2, 3, 20 * MIB, MIB), (3, 2, 21 * MIB, 79 * MIB)]
    trace = recorded(rows, 100 << 20, tmp_path)
    assert trace.touches == (Touch(2, 3, 20 * MIB, MIB),)
    assert "left out of the recording: process cat, 103 MB" in caplog.text
    assert [(found.pid, found.comm) for found in trace.processes] == [(2, ""), (3, "")], "names are nobody else's"
    assert trace.complete
    assert Trace.decode(trace.encode()) == trace


def test_one_that_reads_much_of_fewer_files_is_a_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    for much in (26, 60, 90):
        trace = recorded([(1, 3, 10 * MIB, much * MIB)], 100 << 20, tmp_path)
        assert trace.touches == (Touch(1, 3, 10 * MIB, much * MIB),)
    assert "left out" not in caplog.text


def test_many_processes_that_scan_together_are_left_out(tmp_path: Path) -> None:
    rows = [(pid, pid, pid * 5 * MIB, 5 * MIB) for pid in range(20)]
    trace = recorded(rows, 100 << 20, tmp_path)
    assert trace.touches == ()
    assert [process.pid for process in library.left_out(trace)] == list(range(20))
    rows[3:6] = []
    assert len(recorded(rows, 100 << 20, tmp_path).touches) == 17, "not nearly all files"


def test_one_that_had_ended_before_it_could_be_asked_is_named_by_its_number(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    trace = recorded([(1, 9, 0, 95 * MIB), (2, 3, 96 * MIB, 1)], 100 << 20, tmp_path)
    assert "left out of the recording: process 9, 99 MB" in caplog.text
    assert [(found.pid, found.comm) for found in trace.processes] == [(3, ""), (9, "")]
    assert trace.touches == (Touch(2, 3, 96 * MIB, 1),)


def test_in_a_small_tree_nobody_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    trace = recorded([(1, 2, 0, 64 * MIB)], 64 << 20, tmp_path)
    assert trace.touches == (Touch(1, 2, 0, 64 * MIB),)
    assert "left out" not in caplog.text
