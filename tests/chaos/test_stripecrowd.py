"""Controls of the crowd that reads and writes striped files: wrong bytes, errors and hangs would be seen."""

import contextlib
import os
import signal
import time

import pytest

from bootseer.errors import NotWritableError, UnavailableError
from bootseer.stripefs import open_fs
from support.stripecrowd import Sample, StripeCrowd, Task, content

SAMPLES = [Sample("a", 700_001), Sample("b", 5_000)]


@pytest.fixture
def url(tmp_path):
    fs = open_fs(str(tmp_path / "store"))
    for sample in SAMPLES:
        with fs.create(sample.path, unit=65536, striped=True) as out:
            out.write(content(sample.path, 0, sample.size))
    return fs.url


def crowd(url, tmp_path, kind="read", **options):
    task = Task(kind=kind, url=url, samples=SAMPLES, seed=3, unit=65536)
    return StripeCrowd([task], tmp_path / "log", **options)


def test_control_a_wrong_byte_is_seen(url, tmp_path):
    data = bytearray(content("b", 0, 5_000))
    data[-1] ^= 1
    with open_fs(url).create("b") as out:
        out.write(data)
    with crowd(url, tmp_path) as readers:
        readers.wait(20)
        assert readers.tally().wrong > 0
        assert "read b" in readers.findings()


def test_control_an_error_is_seen(url, tmp_path):
    open_fs(url).remove("b")
    with crowd(url, tmp_path) as readers:
        readers.wait(20)
        assert readers.tally().errors > 0
        assert "NotFoundError" in readers.findings()


def test_control_a_hang_is_seen(url, tmp_path):
    with crowd(url, tmp_path, limit=0.3) as readers:
        readers.wait(3)
        worker = readers._workers[0].process
        os.kill(worker.pid, signal.SIGSTOP)
        with pytest.raises(UnavailableError, match="stuck"):
            readers.wait(1, deadline=1)
        assert readers.tally().hangs == 1


def test_writers_die_and_others_take_their_place(url, tmp_path):
    with crowd(url, tmp_path, "write") as writers:
        for _ in range(3):
            writers.wait(2)
            writers.kill("write")
        writers.wait(2)
        tally = writers.tally()
        assert (tally.wrong, tally.errors, tally.hangs) == (0, 0, 0), writers.findings()
        assert tally.done >= 8


def test_control_a_write_that_changes_nothing_is_seen(url, tmp_path):
    """Another file under the writer's name, again and again: what it reads back is not what it wrote."""
    fs = open_fs(url)
    with crowd(url, tmp_path, "write") as writers:
        until = time.monotonic() + 40  # it must fall between a write and its reading back: seconds, as a rule
        while time.monotonic() < until:
            with contextlib.suppress(NotWritableError), fs.create("a") as out:  # who is overtaken gives up
                out.write(b"other" * 10)
            if writers.tally().wrong or writers.tally().errors:
                break
        assert writers.tally().wrong or writers.tally().errors, writers.findings()
