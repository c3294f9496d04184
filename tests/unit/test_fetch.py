"""The fetcher over a store that fails: verification, retries, deadlines, a full cache, single flight."""

from __future__ import annotations

import contextlib
import errno
import random
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

import pytest

from bootseer.blocks.fetch.fetcher import Fetcher
from bootseer.blocks.fetch.figures import Fetched, LinkRate
from bootseer.blocks.fetch.source import StoreSource
from bootseer.chunks.cachefile import CacheFile
from bootseer.errors import BootseerError, DataError, NotFoundError, PrivilegeError, UnavailableError
from support import lazy
from support.lazy import LazyBlob
from support.stores import FlakyStore, RateLimitedStore
from support.waits import together, until

COUNT = 64


class Rig:
    """A blob behind a flaky store, its cache, and fetchers that are closed at the end."""

    def __init__(self, folder: Path) -> None:
        self.blob: LazyBlob = lazy.make(folder / "blob", lazy.content(COUNT * 4096 - 50))
        self.store = FlakyStore(self.blob.store)
        self.cache: CacheFile = self.blob.open_cache(folder / "cache")
        self.real = [block for block in range(COUNT) if not self.blob.map.is_zero(block)]
        self.zeros = COUNT - len(self.real)
        self._fetchers: list[Fetcher] = []

    def fetcher(self, source: StoreSource | None = None, **settings: object) -> Fetcher:
        options = {"streams": 3, "window": 4096, "deadline": 10.0, "quiet": 0.0, **settings}
        source = source or StoreSource(self.store, self.blob.key)
        self._fetchers.append(Fetcher(self.cache, source, **options))  # type: ignore[arg-type]
        return self._fetchers[-1]

    def right(self, block: int) -> bool:
        want = self.blob.content[block * 4096 : (block + 1) * 4096]
        return self.cache.is_ready(block, block) and self.cache.read(block * 4096, len(want)) == want

    def offset(self, block: int) -> int:
        return self.blob.map.offsets[block]

    def flip(self, block: int, *, times: float = float("inf")) -> None:
        """Flip a bit in the middle of an incompressible block: zstd stores it raw and sees nothing wrong."""
        assert self.blob.map.lengths[block] > 4096
        self.store.flip(self.blob.key, self.offset(block) + 2000, times=times)

    @property
    def raw(self) -> list[int]:
        """Incompressible blocks."""
        return [block for block in self.real if self.blob.map.lengths[block] > 4096]

    def close(self) -> None:
        self.store.release()
        for fetcher in self._fetchers:
            fetcher.close()
        self.cache.close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.close()


def test_demand_brings_right_bytes(rig: Rig) -> None:
    fetcher = rig.fetcher()
    assert fetcher.demand(0, 9) == {}
    assert all(rig.right(block) for block in range(10))
    assert fetcher.stats[Fetched.BYTES_DEMAND] == sum(rig.blob.map.lengths[:10])


def test_threads_without_work_sleep_while_others_fetch(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    fetcher = rig.fetcher(streams=12)
    rig.store.hold()
    fetcher.submit(rig.real[0], rig.real[0], lambda *_: None)
    until(lambda: fetcher._watch.flights)
    fetcher.eager()  # which wakes all
    time.sleep(0.3)
    looks, take = [], fetcher._order.take
    monkeypatch.setattr(fetcher._order, "take", lambda *now: looks.append(now) or take(*now))
    time.sleep(1.0)
    assert len(looks) <= 12, "one each 0.1 s, for what a pause has held back, not one of each thread"


def test_the_rate_of_a_link_is_that_of_requests_side_by_side() -> None:
    link = LinkRate()
    link.begin(10.0)
    assert [link.came(1000, 10.5), link.came(1000, 10.5), link.came(1000, 12.0)] == [2000, 4000, 1500]
    link.begin(20.0)
    assert link.came(300, 20.5) == 600


def test_the_best_rate_stays_and_what_a_left_request_brings_late_does_not_count(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LinkRate, "came", lambda self, length, now: rates.pop(0))
    rates = [7000, 9000, 8000]
    fetcher = rig.fetcher(streams=1, deadline=0.3)
    for block in rig.real[:3]:
        fetcher.demand(block, block)
    assert fetcher.stats[Fetched.LINK_RATE] == 9000
    rates.append(10**9)
    rig.store.hold()
    with pytest.raises(UnavailableError):
        fetcher.demand(rig.real[5], rig.real[5])
    until(lambda: not fetcher._watch.flights)
    had = fetcher.stats[Fetched.BYTES_DEMAND]
    rig.store.release()
    until(lambda: fetcher.stats[Fetched.BYTES_DEMAND] > had)
    assert (fetcher.stats[Fetched.LINK_RATE], rates) == (9000, [10**9])


def test_without_a_profile_a_miss_brings_its_window(rig: Rig) -> None:
    fetcher = rig.fetcher(window=8 * 4096)
    fetcher.demand(rig.real[0], rig.real[0])
    until(lambda: rig.cache.is_ready(0, 7))
    assert bytes(rig.cache.ready[:]).count(1) == 8 + sum(rig.blob.map.is_zero(block) for block in range(8, COUNT))


def test_windows_of_misses_grow_where_answers_take_long_to_begin(tmp_path: Path) -> None:
    blob = lazy.make(tmp_path / "blob", random.Random(1).randbytes(COUNT * 4096))
    far = StoreSource(RateLimitedStore(blob.store, rate=1e9, latency=0.02), blob.key)
    with (
        contextlib.closing(blob.open_cache(tmp_path / "cache")) as cache,
        contextlib.closing(Fetcher(cache, far, window=4 * 4096)) as fetcher,
    ):
        fetcher.demand(9, 9)
        until(lambda: not fetcher._watch.flights)
        assert [block for block in range(COUNT) if cache.is_ready(block, block)] == [*range(8, 12)]
        fetcher.demand(17, 17)
        until(lambda: cache.is_ready(16, 31))


def test_with_a_profile_a_miss_brings_its_block_only(rig: Rig) -> None:
    fetcher = rig.fetcher(window=8 * 4096)
    fetcher.hot([])
    fetcher.demand(rig.real[0], rig.real[0])
    assert bytes(rig.cache.ready[:]).count(1) == rig.zeros + 1


@pytest.mark.parametrize("failures", [0, 4])
def test_background_completes_the_file(rig: Rig, failures: int) -> None:
    fetcher = rig.fetcher()
    rig.store.fail_next(failures)
    fetcher.background()
    assert fetcher.wait(20)
    assert rig.cache.complete
    assert all(rig.right(block) for block in range(COUNT))
    assert fetcher.stats[Fetched.BYTES_BACKGROUND] == sum(pack.size for pack in rig.blob.map.packs)
    assert len(rig.store.reads) < 5 + failures, "neighbours must come in one request"


def test_background_waits_for_a_quiet_moment_and_eager_lifts_that(rig: Rig) -> None:
    fetcher = rig.fetcher(quiet=3600.0)
    fetcher.demand(rig.real[0], rig.real[0])
    fetcher.background()
    assert not fetcher.wait(0.3)
    assert not rig.cache.complete
    fetcher.eager()
    assert fetcher.wait(20)
    assert rig.cache.complete


class Answers:
    """The callback of `Fetcher.submit`: what came, how often."""

    def __init__(self) -> None:
        self.all: list[tuple[BootseerError | None, dict[int, bytes]]] = []

    def __call__(self, error: BootseerError | None, memory: dict[int, bytes]) -> None:
        self.all.append((error, memory))

    def one(self) -> BootseerError | None:
        until(lambda: bool(self.all))
        time.sleep(0.05)
        assert len(self.all) == 1
        return self.all[0][0]


def test_submit_answers_once(rig: Rig) -> None:
    fetcher = rig.fetcher()
    answers = [Answers() for _ in range(COUNT)]
    for block in range(COUNT):
        fetcher.submit(block, min(block + 3, COUNT - 1), answers[block])
    assert all(answer.one() is None for answer in answers[:20])
    until(lambda: all(len(answer.all) == 1 for answer in answers))
    assert all(rig.right(block) for block in range(COUNT))


def test_what_is_ready_is_answered_too(rig: Rig) -> None:
    fetcher = rig.fetcher()
    fetcher.demand(0, 9)
    rig.store.down = True
    answer = Answers()
    fetcher.submit(0, 9, answer)
    assert answer.one() is None


@pytest.mark.parametrize("closed", [False, True])
def test_every_submit_is_answered_when_nothing_comes(rig: Rig, closed: bool) -> None:
    fetcher = rig.fetcher(streams=2, deadline=10.0 if closed else 0.3)
    rig.store.hold()
    answers = [Answers() for _ in range(20)]
    for block, answer in zip(rig.real, answers, strict=False):
        fetcher.submit(block, block, answer)
    if closed:
        fetcher.close(0.1)
    assert all(isinstance(answer.one(), UnavailableError) for answer in answers)
    with pytest.raises(UnavailableError):
        fetcher.demand(rig.real[1], rig.real[1])


def test_a_failed_block_fails_its_range_once(rig: Rig) -> None:
    rig.flip(rig.raw[1])
    rig.flip(rig.raw[2])
    answer = Answers()
    rig.fetcher().submit(rig.raw[0], rig.raw[3], answer)
    assert isinstance(answer.one(), DataError)


def test_a_callback_that_fails_harms_nobody(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    fetcher = rig.fetcher()

    def bad(error: BootseerError | None, memory: dict[int, bytes]) -> None:
        raise ValueError("on purpose")

    fetcher.submit(rig.real[0], rig.real[0], bad)
    fetcher.demand(rig.real[0], rig.real[0])
    until(lambda: "on purpose" in caplog.text)
    fetcher.demand(rig.real[1], rig.real[1])


def test_a_reader_does_not_wait_for_a_slow_prefetch(rig: Rig) -> None:
    """Its block is in a range that hangs: it is fetched a second time, alone."""
    fetcher = rig.fetcher()
    rig.store.hold()
    fetcher.hot(rig.real[:8])
    until(lambda: len(rig.store.reads) == 1)
    answer = Answers()
    fetcher.submit(rig.real[2], rig.real[2], answer)
    until(lambda: len(rig.store.reads) == 2)
    assert rig.store.reads[1][1:] == (rig.offset(rig.real[2]), rig.blob.map.lengths[rig.real[2]])
    time.sleep(0.4)
    assert len(rig.store.reads) == 2, "it is on its way alone"
    rig.store.release()
    assert answer.one() is None
    assert fetcher.stats[Fetched.HEDGES] == 1
    assert fetcher.wait(20)


def test_a_reader_overtakes_the_hot_queue(rig: Rig) -> None:
    fetcher = rig.fetcher(streams=2)
    rig.store.hold()
    # Every second block, so that they are not merged.
    fetcher.hot(rig.real[::2])
    until(lambda: len(rig.store.reads) == 1)
    last = rig.real[::2][-1]
    thread = threading.Thread(target=fetcher.demand, args=(last, last))
    thread.start()
    until(lambda: len(rig.store.reads) == 2)
    assert rig.store.reads[1][1] == rig.offset(last)
    rig.store.release()
    thread.join(20)
    assert fetcher.wait(20)
    assert len({offset for _, offset, _ in rig.store.reads}) == len(rig.store.reads), "a block came twice"


@pytest.mark.parametrize("times", [1, 2])
def test_a_bad_block_is_fetched_again(rig: Rig, caplog: pytest.LogCaptureFixture, times: int) -> None:
    """Also when it was bad again, for the next reader."""
    fetcher = rig.fetcher()
    block = rig.raw[3]
    rig.flip(block, times=times)
    with pytest.raises(DataError) if times > 1 else contextlib.nullcontext():
        fetcher.demand(block, block)
    fetcher.demand(block, block)
    assert rig.right(block)
    assert fetcher.stats[Fetched.BAD_BLOCKS] == 1
    assert "fetching it again" in caplog.text


def test_a_block_bad_everywhere_is_an_error_for_its_reader_only(rig: Rig) -> None:
    block = rig.raw[3]
    rig.flip(block)
    fetcher = rig.fetcher(window=1 << 20)
    with pytest.raises(DataError, match="is damaged in"):
        fetcher.demand(block, block)
    assert not rig.cache.is_ready(block, block)
    fetcher.background()
    assert fetcher.wait(20)
    assert all(rig.right(other) for other in range(COUNT) if other != block)
    assert not rig.cache.is_ready(block, block)


def test_frames_that_changed_places_are_not_served(rig: Rig) -> None:
    """Each is a good zstd frame of the right length; only the hash tells."""
    one, two = rig.raw[0], rig.raw[1]
    path = rig.blob.store.root / rig.blob.key
    blob = bytearray(path.read_bytes())
    lengths = rig.blob.map.lengths
    assert lengths[one] == lengths[two]
    a = slice(rig.offset(one), rig.offset(one) + lengths[one])
    b = slice(rig.offset(two), rig.offset(two) + lengths[two])
    blob[a], blob[b] = blob[b], blob[a]
    path.write_bytes(blob)
    fetcher = rig.fetcher()
    for block in (one, two):
        with pytest.raises(DataError, match="hash differs"):
            fetcher.demand(block, block)
        assert not rig.cache.is_ready(block, block)


def test_a_truncated_blob_serves_what_it_has(rig: Rig) -> None:
    path = rig.blob.store.root / rig.blob.key
    cut = rig.offset(rig.real[-1]) + 1
    path.write_bytes(path.read_bytes()[:cut])
    fetcher = rig.fetcher()
    fetcher.background()
    assert fetcher.wait(20)
    assert all(rig.right(block) for block in range(COUNT) if block != rig.real[-1])
    with pytest.raises(DataError):
        fetcher.demand(rig.real[-1], rig.real[-1])


def test_a_missing_blob_is_an_error_at_once(rig: Rig) -> None:
    rig.blob.store.delete(rig.blob.key)
    with pytest.raises(NotFoundError):
        rig.fetcher().demand(rig.real[0], rig.real[0])


def test_an_outage_shorter_than_the_deadline_is_only_a_wait(rig: Rig) -> None:
    fetcher = rig.fetcher()
    rig.store.fail_next(3)
    fetcher.demand(rig.real[0], rig.real[0])
    assert rig.right(rig.real[0])
    assert fetcher.stats[Fetched.RETRIES] == 3


def test_a_block_that_does_not_come_holds_up_no_other(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    fetcher = rig.fetcher()
    first, *others = rig.real[::3]
    pieces = StoreSource.pieces

    def picky(self: StoreSource, pack: int, offset: int, lengths: Sequence[int]) -> Iterator[bytes]:
        if offset == rig.offset(first):
            raise UnavailableError("not today")
        return pieces(self, pack, offset, lengths)

    monkeypatch.setattr(StoreSource, "pieces", picky)
    answer = Answers()
    fetcher.submit(first, first, answer)
    until(lambda: fetcher.stats[Fetched.RETRIES] > 1)
    began = time.monotonic()
    for block in others:
        fetcher.demand(block, block)
    assert time.monotonic() - began < 0.1 * len(others)
    assert not answer.all
    monkeypatch.undo()
    assert answer.one() is None


def test_a_longer_outage_ends_at_the_deadline(rig: Rig) -> None:
    fetcher = rig.fetcher(deadline=0.4)
    rig.store.down = True
    began = time.monotonic()
    with pytest.raises(UnavailableError, match=r"within 0\.4 s"):
        fetcher.demand(rig.real[0], rig.real[0])
    assert 0.3 < time.monotonic() - began < 2
    assert 2 <= fetcher.stats[Fetched.RETRIES] <= 8, "after growing pauses"
    rig.store.down = False
    fetcher.demand(rig.real[0], rig.real[0])
    assert rig.right(rig.real[0])


def test_a_request_that_never_returns_is_left_behind(rig: Rig) -> None:
    fetcher = rig.fetcher(streams=1, deadline=0.3)
    rig.store.hold()
    with pytest.raises(UnavailableError):
        fetcher.demand(rig.real[0], rig.real[0])
    stuck = len(rig.store.reads)
    with pytest.raises(UnavailableError):
        fetcher.demand(rig.real[0], rig.real[0])
    assert len(rig.store.reads) > stuck, "the next reader must get a request of its own"
    rig.store.release()
    fetcher.demand(rig.real[0], rig.real[0])
    assert rig.right(rig.real[0])


def test_a_reader_does_not_wait_for_a_pause_of_prefetch(rig: Rig) -> None:
    fetcher = rig.fetcher(deadline=5.0)
    rig.store.down = True
    fetcher.hot(rig.real)
    until(lambda: fetcher.stats[Fetched.RETRIES] >= 4)
    rig.store.down = False
    fetcher._pauses.prefetch_from = time.monotonic() + 3600
    fetcher.demand(rig.real[0], rig.real[0])
    assert rig.right(rig.real[0])


def test_a_full_cache_serves_from_memory(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("BOOTSEER_FAULTS", "chunks.write=enospc")
    fetcher = rig.fetcher()
    fetcher.background()
    until(lambda: fetcher.full)
    assert fetcher.wait(20)
    for _ in range(2):
        got = fetcher.demand(0, COUNT - 1)
        assert sorted(got) == rig.real
        assert all(got[block] == rig.blob.content[block * 4096 : (block + 1) * 4096] for block in rig.real)
    assert caplog.text.count("is full") == 1
    monkeypatch.delenv("BOOTSEER_FAULTS")
    assert fetcher.demand(0, COUNT - 1) == {}
    assert rig.cache.complete


def test_an_unforeseen_failure_reaches_the_reader(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    fetcher = rig.fetcher()
    monkeypatch.setattr(rig.blob.map.__class__, "matches", lambda *_: 1 // 0)
    with pytest.raises(UnavailableError, match="ZeroDivisionError"):
        fetcher.demand(rig.real[0], rig.real[0])
    monkeypatch.undo()
    fetcher.demand(rig.real[0], rig.real[0])
    assert rig.right(rig.real[0])


def test_many_readers_under_trouble(rig: Rig) -> None:
    """Threads read everything while requests fail and bits flip; every answer is right or an error."""
    fetcher = rig.fetcher(streams=4, window=4 * 4096)
    rig.store.fail_next(10)
    for block in rig.raw[::3]:
        rig.flip(block, times=1)
    fetcher.hot(rig.real[::3])
    fetcher.background()

    def run(start: int) -> None:
        for step in range(COUNT):
            block = (start + step * 7) % COUNT
            fetcher.demand(block, block)
            assert rig.right(block)

    together(run, range(0, COUNT, 8))
    assert fetcher.wait(20)
    assert rig.cache.complete


def outage(fetcher: Fetcher, rig: Rig, count: int) -> None:
    for index in range(count):
        block = rig.real[index % len(rig.real)]
        with pytest.raises(UnavailableError):
            fetcher.demand(block, block)


@pytest.mark.parametrize("kind", ["refusing", "silent"])
def test_after_a_long_outage_everything_works_again(rig: Rig, kind: str) -> None:
    fetcher = rig.fetcher(streams=6, deadline=0.06)
    if kind == "silent":
        rig.store.hold()
    rig.store.down = kind == "refusing"
    outage(fetcher, rig, 40)
    rig.store.down = False
    rig.store.release()
    fetcher._watch.deadline = 10.0
    fetcher.demand(rig.real[0], rig.real[0])
    assert rig.right(rig.real[0])
    fetcher.background()
    assert fetcher.wait(10), "threads for prefetch must be left, too"
    assert rig.cache.complete
    until(lambda: sum(thread.is_alive() for thread in fetcher._threads.all) == 6)


def test_a_flight_that_tries_again_is_not_left_behind(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    fetcher = rig.fetcher(deadline=1.5)
    rig.store.down = True
    outage(fetcher, rig, 1)
    assert "does not return" not in caplog.text


def test_a_cache_that_loses_data_is_not_believed(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    fetcher = rig.fetcher()
    fetcher.demand(0, 20)
    monkeypatch.setattr("os.fdatasync", _input_output_error)
    with pytest.raises(OSError, match="Input/output"):
        rig.cache.sync()
    got = fetcher.demand(0, 20)
    wanted = [block for block in rig.real if block <= 20]
    assert {block: got[block] for block in wanted} == {
        block: rig.blob.content[block * 4096 : (block + 1) * 4096] for block in wanted
    }
    assert fetcher.full


def _input_output_error(fd: int) -> None:
    raise OSError(errno.EIO, "Input/output error")


def test_without_threads_to_be_had_readers_still_get_their_answers(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    fetcher = rig.fetcher(streams=1, deadline=0.3)
    rig.store.hold()
    first, second, third = Answers(), Answers(), Answers()
    fetcher.submit(rig.real[0], rig.real[0], first)
    monkeypatch.setattr(threading.Thread, "start", _no_thread)
    until(lambda: bool(first.all))
    fetcher.submit(rig.real[1], rig.real[1], second)
    until(lambda: bool(second.all))
    assert isinstance(first.one(), UnavailableError)
    assert isinstance(second.one(), UnavailableError)
    monkeypatch.undo()
    until(lambda: len([thread for thread in fetcher._threads.all if thread.is_alive()]) == 2)
    rig.store.release()
    fetcher.submit(rig.real[2], rig.real[2], third)
    until(lambda: bool(third.all))
    assert third.one() is None
    assert rig.right(rig.real[2])


def test_a_fetcher_without_any_thread_is_an_error(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", _no_thread)
    with pytest.raises(UnavailableError, match="thread"):
        rig.fetcher()


def _no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_an_alarm_that_fails_stops_no_clock(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    fetcher = rig.fetcher(deadline=0.2)
    rig.store.hold()
    monkeypatch.setattr(fetcher, "_abandon", _unforeseen)
    for block in rig.real[:2]:
        answers = Answers()
        fetcher.submit(block, block, answers)
        assert isinstance(answers.one(), UnavailableError)


def _unforeseen(*_: object) -> None:
    raise ValueError("unforeseen")


def test_a_reader_whose_deadline_passes_unnoticed_looks_for_itself(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bootseer.blocks.fetch.fetcher._GRACE", 0.1)
    fetcher = rig.fetcher(deadline=0.2)
    monkeypatch.setattr(fetcher, "submit", lambda first, last, done: None)
    with pytest.raises(UnavailableError, match="unnoticed"):
        fetcher.demand(0, 0)


class Says:
    """A source that raises what ``trouble`` holds, and counts."""

    name = "a source"

    def __init__(self, rig: Rig, trouble: BootseerError | None) -> None:
        self.trouble = trouble
        self.asked = 0
        self._inner = StoreSource(rig.blob.store, rig.blob.key)

    def read(self, pack: int, offset: int, length: int) -> bytes:
        return b"".join(self.pieces(pack, offset, [length]))

    def pieces(self, pack: int, offset: int, lengths: Sequence[int]) -> Generator[bytes, None, None]:
        self.asked += 1
        if self.trouble is not None:
            raise self.trouble
        yield from self._inner.pieces(pack, offset, lengths)

    def original(self, pack: int, offset: int, length: int) -> bytes | None:
        return None

    def close(self) -> None:
        self._inner.close()


def busy(seconds: float) -> UnavailableError:
    trouble = UnavailableError("429")
    trouble.retry_after = seconds
    return trouble


def test_a_source_that_says_when_to_come_again_is_left_alone_until_then(rig: Rig) -> None:
    source = Says(rig, busy(0.6))
    fetcher = rig.fetcher(source, deadline=5.0)
    began = time.monotonic()
    answers = [Answers() for _ in range(30)]
    for block, one in zip(rig.real, answers, strict=False):
        fetcher.submit(block, block, one)
        time.sleep(0.01)
    source.trouble = None
    assert source.asked <= 3, "what was on its way when the first was told so"
    assert [one.one() for one in answers] == [None] * 30
    assert time.monotonic() - began >= 0.6


def test_rest_does_not_outlast_the_deadline_of_a_reader(rig: Rig) -> None:
    source = Says(rig, busy(3600.0))
    fetcher = rig.fetcher(source, deadline=0.4)
    began = time.monotonic()
    with pytest.raises(UnavailableError):
        fetcher.demand(rig.real[0], rig.real[0])
    assert time.monotonic() - began < 2
    assert source.asked == 1
    fetcher.close()
    assert time.monotonic() - began < 4


@pytest.mark.parametrize("kind", ["background", "hot"])
def test_who_is_refused_does_not_march_on(rig: Rig, kind: str) -> None:
    source = Says(rig, PrivilegeError("403"))
    fetcher = rig.fetcher(source)
    if kind == "hot":
        fetcher.hot(rig.real[::3])
    else:
        fetcher.background()
    time.sleep(0.5)
    assert source.asked <= 8
    reader = Answers()
    fetcher.submit(rig.real[0], rig.real[0], reader)
    time.sleep(0.5)
    assert not reader.all, "somebody may log in again, or mend a permission"
    source.trouble = None
    assert reader.one() is None
    fetcher._pauses.prefetch_from = 0.0
    assert fetcher.wait(20)
    assert rig.cache.complete or kind == "hot"
    assert all(rig.right(block) for block in rig.real[::3])


class Halting(Says):
    """A source that gives nothing behind ``end`` of its pack until ``gate`` is open."""

    def __init__(self, rig: Rig, end: int) -> None:
        super().__init__(rig, None)
        self.gate, self.end = threading.Event(), end

    def pieces(self, pack: int, offset: int, lengths: Sequence[int]) -> Generator[bytes, None, None]:
        for piece in super().pieces(pack, offset, lengths):
            offset += len(piece)
            assert offset <= self.end or self.gate.wait(20)
            yield piece


def test_no_reader_waits_for_what_is_behind_his_blocks_in_a_range(rig: Rig) -> None:
    block = next(one for one in range(8, COUNT) if not {one, one + 1, one + 2} & set(rig.blob.map.zeros))
    source = Halting(rig, rig.offset(block + 2))
    fetcher = rig.fetcher(source, window=1 << 20)
    fetcher.demand(block, block + 1)
    assert rig.right(block)
    assert rig.right(block + 1)
    later = Answers()
    fetcher.submit(block + 2, block + 2, later)
    assert not later.all, "it comes with the range"
    source.gate.set()
    assert later.one() is None
    assert fetcher.wait(20)
    assert source.asked == 1


def test_who_waits_for_blocks_goes_on_before_the_rest_of_their_range_has_come(rig: Rig) -> None:
    source = Halting(rig, rig.offset(2))
    fetcher = rig.fetcher(source, window=1 << 20, streams=1)
    fetcher.submit(0, 0, Answers())
    assert fetcher.until(lambda: bool(rig.cache.ready[0]), 5.0)
    assert not fetcher.until(lambda: bool(rig.cache.ready[rig.real[-1]]), 0.1)
    source.gate.set()


@pytest.mark.parametrize("trouble", [UnavailableError("cut"), DataError("short")])
def test_what_a_cut_range_has_brought_stays_and_only_its_rest_is_asked_for(rig: Rig, trouble: BootseerError) -> None:
    asked: list[int] = []

    class Cut(Says):
        def pieces(self, pack: int, offset: int, lengths: Sequence[int]) -> Generator[bytes, None, None]:
            asked.append(offset)
            for number, piece in enumerate(super().pieces(pack, offset, lengths)):
                if number and len(asked) == 1:
                    raise trouble
                yield piece

    fetcher = rig.fetcher(Cut(rig, None), streams=1, window=1 << 20)
    block, behind, answers = rig.raw[0], rig.raw[5], Answers()
    fetcher.submit(block, block, lambda error, memory: fetcher.submit(behind, behind, answers))
    assert answers.one() is None
    assert rig.right(block)
    assert rig.right(behind)
    assert asked[0] <= rig.offset(block) < min(asked[1:])


class Mirror(Says):
    """A source that has every block wrong; its origin does not answer while there is ``trouble``. All reads but
    the first wait for ``gate``."""

    def __init__(self, rig: Rig, trouble: BootseerError | None = None) -> None:
        super().__init__(rig, trouble)
        self.gate = threading.Event()
        self.gate.set()
        self.origin_asked = 0

    def pieces(self, pack: int, offset: int, lengths: Sequence[int]) -> Generator[bytes, None, None]:
        self.asked += 1
        assert self.asked == 1 or self.gate.wait(20)
        yield from map(bytes, lengths)

    def original(self, pack: int, offset: int, length: int) -> bytes:
        self.origin_asked += 1
        if self.trouble is not None:
            raise self.trouble
        return self._inner.read(pack, offset, length)


@pytest.mark.parametrize("kind", ["background", "hot"])
def test_a_block_that_a_mirror_has_wrong_while_the_origin_is_away_is_left_to_readers(rig: Rig, kind: str) -> None:
    source = Mirror(rig, UnavailableError("the origin is away"))
    fetcher = rig.fetcher(source)
    if kind == "hot":
        fetcher.hot(rig.real)
    else:
        fetcher.background()
    assert fetcher.wait(10), "prefetch never ends"
    assert source.origin_asked == len(rig.real)
    answers = Answers()
    fetcher.submit(rig.real[3], rig.real[3], answers)
    until(lambda: source.origin_asked > len(rig.real))
    source.trouble = None
    assert answers.one() is None
    assert rig.right(rig.real[3])


def test_a_request_that_was_left_behind_does_not_go_on(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    source = Mirror(rig)
    fetcher = rig.fetcher(source, streams=1, window=1 << 20, deadline=0.3)
    source.gate.clear()
    answers = Answers()
    fetcher.submit(rig.real[0], rig.real[0], answers)
    assert isinstance(answers.one(), UnavailableError)
    until(lambda: "does not return" in caplog.text)
    assert source.asked == 2, "a range, and the first of its blocks"
    source.gate.set()
    until(lambda: sum(thread.is_alive() for thread in fetcher._threads.all) <= 1)
    assert source.asked == 2


def test_readers_wait_while_room_is_made_once(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    asked = threading.Event()
    go_on = threading.Event()
    full = threading.Event()
    full.set()
    write = rig.cache.write

    def tight(block: int, data: bytes) -> None:
        if full.is_set():
            raise OSError(errno.ENOSPC, "No space left on device")
        write(block, data)

    def make() -> bool:
        nonlocal calls
        calls += 1
        asked.set()
        assert go_on.wait(10)
        full.clear()
        return True

    monkeypatch.setattr(rig.cache, "write", tight)
    fetcher = rig.fetcher(streams=2, make_room=make)
    answers = [Answers() for _ in range(6)]
    for block, one in zip(rig.real[::5], answers, strict=False):
        fetcher.submit(block, block, one)
    assert asked.wait(20)
    until(lambda: len(rig.store.reads) == 2)
    assert not any(one.all for one in answers)
    assert not fetcher.wait(0.1)
    go_on.set()
    assert [one.one() for one in answers] == [None] * 6
    assert all(rig.right(block) for block in rig.real[:30:5])
    assert fetcher.wait(20)
    assert not fetcher.full
    assert calls == 1


@pytest.mark.parametrize("how", ["in vain", "fails"])
def test_where_no_room_can_be_made_readers_are_served_from_memory(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    calls = 0

    def make() -> bool:
        nonlocal calls
        calls += 1
        if how == "fails":
            raise ValueError("unforeseen")
        return False

    def full(block: int, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(rig.cache, "write", full)
    fetcher = rig.fetcher(streams=2, make_room=make)
    for block in rig.real[:3]:
        assert fetcher.demand(block, block) == {block: rig.blob.content[block * 4096 : (block + 1) * 4096]}
    assert calls == 1
    assert fetcher.full


def test_pauses_of_prefetch_double_until_an_answer_and_readers_cause_none(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    fetcher = rig.fetcher(streams=1, deadline=0.3)
    rig.store.down = True
    with pytest.raises(UnavailableError):
        fetcher.demand(rig.real[0], rig.real[0])
    assert "prefetch pauses" not in caplog.text
    fetcher.hot(rig.real[3:8])
    until(lambda: caplog.text.count("prefetch pauses") == 3)
    assert all(f"prefetch pauses for {pause} s:" in caplog.text for pause in (0.05, 0.1, 0.2))
    assert "pauses for 0.4 s" not in caplog.text
    rig.store.down = False
    until(lambda: rig.right(rig.real[3]))
    rig.store.down = True
    fetcher.hot(rig.real[20:28])
    until(lambda: caplog.text.count("pauses for 0.05 s") == 2)
