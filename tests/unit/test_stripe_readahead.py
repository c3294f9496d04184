"""Chunks on their way to a mount's readers: single flight, read-ahead, budgets."""

import os
import random
import threading
import time
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.errors import DataError, UnavailableError
from bootseer.stripefs import layout, open_fs
from bootseer.stripefs.files import flight
from bootseer.stripefs.files import readahead as loader_module
from bootseer.stripefs.files.readahead import ReadAhead, in_order
from bootseer.stripefs.nodecache import NodeCache
from bootseer.stripefs.store import StripeFS
from support.waits import together

UNIT = 65536
DATA = os.urandom(40 * UNIT + 11)


@pytest.fixture
def fs(tmp_path) -> StripeFS:
    fs = open_fs(str(tmp_path / "store"))
    with fs.create("f", striped=True, unit=UNIT, width=3) as out:
        out.write(DATA)
    return fs


def get(loader: ReadAhead, file, offset: int, size: int) -> bytes:
    found = loader.read(file, offset, size)
    return os.pread(found[0], size, found[1]) if isinstance(found, tuple) else bytes(found)


def counted(file, monkeypatch) -> list[tuple[int, int]]:
    calls: list[tuple[int, int]] = []
    real = file.read_chunks

    def read_chunks(first, parts, **more):
        calls.append((first * file.unit, sum(map(len, parts))))
        return real(first, parts, **more)

    monkeypatch.setattr(file, "read_chunks", read_chunks)
    return calls


@pytest.fixture
def loader():
    made = ReadAhead(memory=8 << 20)
    yield made
    made.close()


@pytest.fixture(params=["memory", "disk"])
def file(request, tmp_path, fs, loader):
    """It, open, perhaps with a node cache."""
    cache = NodeCache(tmp_path / "cache") if request.param == "disk" else None
    with fs.open("f") as opened:
        if cache:
            opened.attach(cache.open(opened))
        yield opened
        loader.close()
    if cache:
        cache.close()


def test_any_range_is_right(file, loader):
    for step in range(200):
        offset = (step * 104729) % len(DATA)
        size = min((step * 7919) % (3 * UNIT) + 1, len(DATA) - offset)
        assert get(loader, file, offset, size) == DATA[offset : offset + size]


def test_a_file_read_in_order_is_fetched_once_and_ahead(file, loader, monkeypatch):
    calls = counted(file, monkeypatch)
    for offset in range(0, len(DATA), 16384):
        size = min(16384, len(DATA) - offset)
        assert get(loader, file, offset, size) == DATA[offset : offset + size]
    assert sum(length for _, length in calls) == len(DATA)
    assert loader.ahead > len(DATA) // 2
    loader.close()


def test_readers_of_one_chunk_share_one_fetch(file, loader, monkeypatch):
    calls: list[int] = []
    real = file.read_chunks

    def slow(first, parts, **more):
        calls.append(first)
        time.sleep(0.1)
        return real(first, parts, **more)

    monkeypatch.setattr(file, "read_chunks", slow)
    monkeypatch.setattr(loader, "_plan", lambda *args: None)
    assert together(lambda number: get(loader, file, 100, 50), range(8)) == [DATA[100:150]] * 8
    assert calls == [0]


def test_an_error_reaches_every_reader_and_the_next_read_tries_again(file, loader, monkeypatch):
    real, broken = file.read_chunks, threading.Event()
    broken.set()

    def read_chunks(first, parts, **more):
        if broken.is_set():
            time.sleep(0.05)
            raise DataError("chunk 0 of f is damaged")
        return real(first, parts, **more)

    monkeypatch.setattr(file, "read_chunks", read_chunks)
    monkeypatch.setattr(loader, "_plan", lambda *args: None)

    def reader(number: int) -> None:
        with pytest.raises(DataError):
            get(loader, file, 0, 10)

    together(reader, range(4))
    broken.clear()
    assert get(loader, file, 0, 10) == DATA[:10]


@pytest.mark.parametrize("jumps", [False, True], ids=["in order", "jumps"])
def test_no_reader_waits_twice_for_a_storage_that_does_not_answer(fs, loader, monkeypatch, jumps):
    """Neither one who waits for another's fetch, nor the kernel, which asks for a page once more after an error."""
    monkeypatch.setattr(flight, "_LONG", 0.2, raising=False)
    monkeypatch.setattr(flight, "_REFUSED", 1.0, raising=False)
    frozen, calls = threading.Event(), []
    frozen.set()
    with fs.open("f") as file:

        def silent(real, *args, **more):
            if frozen.is_set():
                calls.append(args)
                time.sleep(0.5)
                raise UnavailableError("no part of f has come", hint="look at the DataNodes")
            return real(*args, **more)

        monkeypatch.setattr(file, "read_chunks", partial(silent, file.read_chunks))
        monkeypatch.setattr(file, "readinto_many", partial(silent, file.readinto_many))
        monkeypatch.setattr(file, "apart", lambda offset, size: jumps)
        monkeypatch.setattr(loader, "_plan", lambda *args: jumps)

        def reader(number: int) -> None:
            began = time.monotonic()
            with pytest.raises(UnavailableError, match="no part of f has come; look at"):
                get(loader, file, 0, 10)
            assert time.monotonic() - began < 0.9

        together(reader, range(1 if jumps else 4))
        reader(0)
        assert len(calls) == 1
        frozen.clear()
        assert get(loader, file, 2 * UNIT, 10) == DATA[2 * UNIT :][:10]  # others are asked for
        time.sleep(1.0)
        assert get(loader, file, 0, 10) == DATA[:10]


def test_a_refusal_that_comes_soon_is_tried_again_by_who_waited(fs, loader, monkeypatch):
    calls = []
    with fs.open("f") as file:
        real = file.read_chunks

        def once(first, parts, **more):
            calls.append(first)
            time.sleep(0.1)
            if len(calls) == 1:
                raise UnavailableError("connection refused")
            return real(first, parts, **more)

        monkeypatch.setattr(file, "read_chunks", once)
        with pytest.raises(UnavailableError):
            loader.prefetch(file, 0, 1)
        assert get(loader, file, 0, 10) == DATA[:10]


def test_the_end_of_a_mount_does_not_wait_for_a_storage_that_does_not_answer(fs, monkeypatch):
    loader, release, begun = ReadAhead(), threading.Event(), threading.Event()
    with fs.open("f") as file:
        monkeypatch.setattr(file, "read_chunks", lambda *args, **more: begun.set() or (release.wait(20) and 0))
        loader._pool.submit(loader._ahead_of, file, range(4))
        assert begun.wait(20)
        began = time.monotonic()
        assert not loader.close(0.2)
        assert time.monotonic() - began < 5
        release.set()
        assert loader.close()


def test_memory_stays_below_its_budget(fs, monkeypatch):
    monkeypatch.setattr(loader_module, "_STEP", 4 * UNIT)
    loader = ReadAhead(memory=6 * UNIT)
    with fs.open("f") as file:
        for offset in range(0, len(DATA) - UNIT, UNIT):
            assert get(loader, file, offset, UNIT) == DATA[offset : offset + UNIT]
            # read-ahead may be under way: its bytes count before they are held
            assert sum(map(len, loader._held.values())) <= loader._budget.used <= 6 * UNIT
        loader.close()
    assert loader._budget.used == 0


def test_what_is_dropped_is_free(fs):
    """Chunks that came together do not keep each other's memory."""
    loader = ReadAhead(memory=3 * UNIT)
    with fs.open("f") as file:
        loader.prefetch(file, 0, 3)
        assert len({id(view.obj) for view in loader._held.values()}) == 3
        assert all(len(view.obj) == UNIT for view in loader._held.values())
        loader.prefetch(file, 5, 7)
        assert [chunk for _, chunk in loader._held] == [2, 5, 6]
    loader.close()


def test_a_waiting_reader_has_a_deadline(fs, monkeypatch):
    monkeypatch.setattr(flight, "_WAIT", 0.2)
    monkeypatch.setattr(flight, "SLOWEST", 1 << 40)
    loader, release = ReadAhead(), threading.Event()
    with fs.open("f") as file:
        real = file.read_chunks

        def stuck(first, parts, **more):
            release.wait(10)
            return real(first, parts, **more)

        monkeypatch.setattr(file, "read_chunks", stuck)
        monkeypatch.setattr(loader, "_plan", lambda *args: None)
        first = threading.Thread(target=lambda: loader.read(file, 0, 10))
        first.start()
        time.sleep(0.1)
        with pytest.raises(UnavailableError, match="has not got on"):
            loader.read(file, 0, 10)
        release.set()
        first.join()
    loader.close()


@pytest.mark.parametrize("held", [False, True], ids=["one run", "two runs"])
def test_a_reader_waits_as_long_as_the_fetch_gets_on(fs, monkeypatch, held):
    """A large unit over a slow link is no failure; nor is a run that is behind another one of its flight."""
    monkeypatch.setattr(flight, "_WAIT", 0.3)
    loader = ReadAhead()
    with fs.open("f") as file:
        monkeypatch.setattr(flight, "SLOWEST", file.unit if not held else 1 << 40)
        monkeypatch.setattr(loader, "_plan", lambda *args: None)
        if held:
            get(loader, file, file.unit, 10)  # chunk 1 is there: 0 and 2 are two runs
        real, began = file.read_chunks, threading.Event()

        def slow(first, parts, **more):
            began.set()
            time.sleep(0.25 if held else 0.6)
            return real(first, parts, **more)

        monkeypatch.setattr(file, "read_chunks", slow)
        first = threading.Thread(target=lambda: loader.read(file, 0, 3 * file.unit))
        first.start()
        assert began.wait(10)
        offset = 2 * file.unit if held else 0
        assert get(loader, file, offset, 10) == DATA[offset : offset + 10]
        first.join()
    loader.close()


def test_a_reader_does_not_wait_for_chunks_behind_its_own(fs, monkeypatch):
    loader, release = ReadAhead(), threading.Event()
    with fs.open("f") as file:
        monkeypatch.setattr(loader, "_plan", lambda *args: None)
        get(loader, file, file.unit, 10)
        real, began = file.read_chunks, threading.Event()

        def stuck(first, parts, **more):
            began.set()
            if first == 0:
                time.sleep(0.3)  # so that the reader below waits for this run
            else:
                assert release.wait(10)
            return real(first, parts, **more)

        monkeypatch.setattr(file, "read_chunks", stuck)
        first = threading.Thread(target=lambda: loader.read(file, 0, 3 * file.unit))
        first.start()
        assert began.wait(10)
        began_at = time.monotonic()
        assert get(loader, file, 0, 10) == DATA[:10]
        assert time.monotonic() - began_at < 5
        release.set()
        first.join()
    loader.close()


def test_files_read_long_ago_are_forgotten(fs, monkeypatch):
    monkeypatch.setattr(loader_module, "_FILES", 4)
    loader = ReadAhead(memory=8 << 20)
    try:
        for number in range(20):
            with fs.create(f"g{number}") as out:
                out.write(bytes([number]) * 100)
            with fs.open(f"g{number}") as file:
                assert get(loader, file, 0, 100) == bytes([number]) * 100
        assert len(loader._orders) <= 4
    finally:
        loader.close()


# -- whole files in order ------------------------------------------------------------------------------------------

SMALL = 4096


@given(size=st.integers(0, 12 * SMALL))
def test_all_bytes_in_order(tmp_path, size):
    fs, data = open_fs(str(tmp_path)), os.urandom(size)
    with fs.create("f", striped=True, unit=SMALL, width=3) as out:
        out.write(data)
    with fs.open("f") as file:
        assert b"".join(bytes(view) for view in in_order(file)) == data


def test_an_error_comes_after_the_pieces_before_it_and_no_thread_stays(tmp_path):
    fs, data = open_fs(str(tmp_path)), os.urandom(9 * SMALL)
    with fs.create("f", striped=True, unit=SMALL, width=1) as out:
        out.write(data)
    (stripe,) = (tmp_path / ".bsx").iterdir()
    content = bytearray(stripe.read_bytes())
    content[4096 + 5 * SMALL] ^= 1
    stripe.write_bytes(content)
    seen = []
    with fs.open("f") as file, pytest.raises(DataError, match="chunk 5"):
        seen.extend(bytes(view) for view in in_order(file))
    with fs.open("f") as file:
        pieces = in_order(file)
        assert bytes(next(pieces)) == data[:SMALL]
        pieces.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("bootseer-ahead")]


def test_small_reads_at_random_fetch_no_more_than_they_need(tmp_path, monkeypatch):
    """160 times what was asked: a jump of less than 8 MiB counted as in order, and files were read in chunks."""
    fs, size = open_fs(str(tmp_path / "store")), 32 << 20
    data = os.urandom(1 << 20) * 32
    fs.backend.make_folder("")
    (tmp_path / "store" / "plain").write_bytes(data)
    for name, unit in (("small-units", UNIT), ("striped", layout.UNIT)):
        with fs.create(name, striped=True, unit=unit, width=2) as out:
            out.write(data)
    order = random.Random(1)
    for name, reads in (("plain", 500), ("small-units", 500), ("striped", 200)):
        loader = ReadAhead(memory=8 << 20)
        with fs.open(name) as file:
            for _ in range(reads):
                offset = order.randrange(size // 4096) * 4096
                assert get(loader, file, offset, 4096) == data[offset : offset + 4096]
            loader.close()
        assert (loader.demand + loader.ahead) / (reads * 4096) <= 20


@pytest.mark.parametrize("kind", ["striped", "plain"])
@pytest.mark.parametrize("streams", [2, 4])
def test_readers_in_order_of_one_file_need_no_more_requests_beside_each_other(tmp_path, monkeypatch, streams, kind):
    """Each read counted as a jump, and was read by itself: 454 requests for 64 chunks."""
    fs, size, step = open_fs(str(tmp_path / "store")), 32 << 20, 128 << 10
    data = os.urandom(1 << 20) * 32
    with fs.create("f", striped=kind == "striped", width=2) as out:
        out.write(data)
    loader, requests = ReadAhead(memory=64 << 20), []
    real = type(fs.backend).read_many
    with fs.open("f") as file:
        monkeypatch.setattr(
            type(fs.backend), "read_many", lambda self, pieces: requests.append(1) or real(self, pieces)
        )
        for at in range(0, size // streams, step):
            for offset in range(at, size, size // streams):
                assert get(loader, file, offset, step) == data[offset : offset + step]
        loader.close()
    assert len(requests) <= 1.2 * size / file.unit
